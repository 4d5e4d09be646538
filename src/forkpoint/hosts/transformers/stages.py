"""Pipeline stages of transformers' models. A stage is the model without parameters of other stages.

Modules keep their places, so names of parameters and indices of layers stay the same. Layers of
other stages, and the final norm before the last stage, return their input. Embeddings and the head
of other stages have a weight of zeros without memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.entry import HeldStage
from forkpoint.hosts.transformers.families import family_of
from forkpoint.hosts.transformers.multimodal import decoder_of, deep_layers, idle_modules
from forkpoint.hosts.transformers.refusals import check_undivided
from forkpoint.plan.stages import Stage

FINAL_NORMS = ("norm", "final_layernorm")
"""Names of the norm after the last block of a decoder."""
IDENTITY = ("transformers.distributed.pipeline_parallel", "PipelineIdentityLayer")
"""Class of transformers' substitute for modules of other stages (pp_size)."""


class Gate:
    """State shared by all `PassedLayer` of a stage."""

    def __init__(self) -> None:
        self.open: bool = False
        """Whether a step runs the model. Other calls are refused."""
        self.hidden: Tensor | None = None
        """Input of the stage's first layer; None if that reads embeddings."""
        self.tied: bool = False
        """Whether the head's weight is that of the embeddings."""


class PassedLayer(nn.Module):
    """Substitute for a module of another stage. It returns its input."""

    def __init__(self, gate: Gate, *, is_entrance: bool = False) -> None:
        """`is_entrance`: whether the stage's first layer is next. Then it returns `Gate.hidden`."""
        super().__init__()
        self.gate: Gate = gate
        self.is_entrance: bool = is_entrance

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if not self.gate.open:
            raise UnsupportedError(
                "the model was called by itself, and this rank holds a stage of it: its outputs "
                "would be wrong. Use forward_backward, score and logprobs of its policy."
            )
        if not self.is_entrance:
            return hidden_states
        assert self.gate.hidden is not None, "the stage before has sent nothing"
        return self.gate.hidden


def held_layers(layers: nn.ModuleList) -> list[nn.Module]:
    """The layers of a decoder that this rank holds."""
    return [layer for layer in layers if not _is_passed(layer)]


def final_norms(decoder: nn.Module) -> list[nn.Module]:
    """The norms of a decoder after its last block, or their substitutes."""
    found = (getattr(decoder, name, None) for name in FINAL_NORMS)
    return [norm for norm in found if isinstance(norm, nn.Module)]


def layers_of_stage(layers: nn.ModuleList) -> range:
    """Indices of the layers of a decoder that this rank holds."""
    held = [n for n, layer in enumerate(layers) if not _is_passed(layer)]
    return range(held[0], held[-1] + 1)


def _gate_of(layers: nn.ModuleList) -> Gate:
    """The gate of a decoder that holds a stage."""
    return next(layer.gate for layer in layers if isinstance(layer, PassedLayer))


def _is_passed(layer: nn.Module) -> bool:
    return isinstance(layer, PassedLayer) or _is_identity(layer)


def _is_identity(module: nn.Module) -> bool:
    """Whether a module is transformers' substitute for one of another stage (pp_size)."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == IDENTITY


class TransformersStage(HeldStage):
    """The stage that a model of transformers holds."""

    def __init__(self, core: Any) -> None:
        """`core`: the causal model."""
        self.core: Any = core

    @property
    def decoder(self) -> Any:
        return decoder_of(self.core)

    @property
    def first_layers(self) -> int:
        return max(1, deep_layers(self.core))

    @property
    def layers(self) -> tuple[range, int]:
        return layers_of_stage(self.decoder.layers), len(self.decoder.layers)

    @property
    def tied(self) -> frozenset[nn.Parameter]:
        weight = self.core.get_input_embeddings().weight
        there = _gate_of(self.decoder.layers).tied and isinstance(weight, nn.Parameter)
        return frozenset({weight} if there else ())

    def set_hidden(self, hidden_1TC: Tensor | None, changes: Changes) -> None:
        gate = vars(_gate_of(self.decoder.layers))
        changes.set(gate, "open", True)
        changes.set(gate, "hidden", hidden_1TC)

    def check(self) -> None:
        """Raise UnsupportedError if transformers has cut the decoder (pp_size) and forkpoint has
        not."""
        if any(map(_is_identity, self.decoder.layers)):
            raise UnsupportedError(
                "transformers has cut the model into pipeline stages (pp_size), and wrap was given "
                "no mesh with the dimension 'pp'. Give it one with the same ranks: "
                "forkpoint.wrap(model, mesh=mesh)."
            )

    def hold(self, stage: Stage) -> None:
        """Drop the parameters of other stages.

        The model may be whole, be split over ranks, or hold this stage already. If transformers has
        cut it (pp_size), its layers do not change.

        Raises UnsupportedError if the model holds another stage.
        """
        check_undivided(self.core, family_of(self.core), "stages of a pipeline")
        core, decoder, idle = self.core, self.decoder, idle_modules(self.core)
        held, device = layers_of_stage(decoder.layers), next(core.parameters()).device
        wanted = range(stage.first_layer, stage.first_layer + stage.layers)
        if any(map(_is_identity, decoder.layers)):
            if idle:
                raise UnsupportedError(
                    "transformers has cut a model with an encoder of images into stages (pp_size), "
                    "which has not been shown exact. Load the whole model, and give wrap the mesh."
                )
            wanted = held
            self._undo_layout(stage)
        if held not in (wanted, range(len(decoder.layers))):
            raise UnsupportedError(
                f"the model holds layers {held[0]} to {held[-1]}, and stage {stage.index} of "
                f"{stage.stages} holds {wanted[0]} to {wanted[-1]}. Load the whole model again."
            )
        if any(isinstance(layer, PassedLayer) for layer in decoder.layers):
            return
        gate = Gate()
        head, embeddings = _head(core), core.get_input_embeddings()
        gate.tied = head.weight is embeddings.weight
        for n in range(len(decoder.layers)):
            if n not in wanted:
                decoder.layers[n] = PassedLayer(gate, is_entrance=n == wanted[0] - 1)
        # Adapters, and trained copies, are modules below embeddings and heads.
        dropped: list[nn.Module] = []
        if not stage.is_last:
            for name in FINAL_NORMS:
                if isinstance(getattr(decoder, name, None), nn.Module):
                    setattr(decoder, name, PassedLayer(gate))
            dropped += head.modules()
        if not stage.is_first:
            dropped += [*embeddings.modules(), *idle]  # encoders of images are idle
        # The head of the last stage may have the weight of the embeddings.
        kept = embeddings.weight if gate.tied and stage.is_last else None
        for module in dropped:
            _drop_weight(module, device, kept)

    def _undo_layout(self, stage: Stage) -> None:
        """Replace transformers' substitutes for the head and the embeddings.

        Raises UnsupportedError if the mesh and transformers disagree about this rank's stage.
        """
        core, layout = self.core, self.core._pp_stage
        if (layout.pp_rank, layout.pp_size) != (stage.index, stage.stages):
            raise UnsupportedError(
                f"the mesh makes this rank stage {stage.index} of {stage.stages}, and transformers "
                f"has loaded stage {layout.pp_rank} of {layout.pp_size} (pp_size). Give wrap a "
                "mesh with the same ranks in the dimension 'pp'."
            )
        vars(core).pop("forward", None)  # this forward sends and receives hidden states
        dtype, config = next(core.parameters()).dtype, core.config.get_text_config()
        # Their weights are dropped.
        tokens, hidden = config.vocab_size, config.hidden_size
        kind = {"device": "meta", "dtype": dtype}
        embeddings = core.get_input_embeddings()
        if _is_identity(embeddings):
            embeddings = nn.Embedding(tokens, hidden, **kind)
            core.set_input_embeddings(embeddings)
        if _is_identity(_head(core)):
            head = nn.Linear(hidden, tokens, bias=False, **kind)
            if config.tie_word_embeddings:
                head.weight = embeddings.weight
            core.set_output_embeddings(head)

    def complete(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Add the modules of all other stages to a copy of a stage. The copy is not split over
        ranks.

        Collective.
        """
        core, decoder, idle = self.core, self.decoder, idle_modules(self.core)
        tied, device = _gate_of(decoder.layers).tied, next(core.parameters()).device
        found = [*held_layers(decoder.layers), *final_norms(decoder), *idle]
        found += core.get_input_embeddings(), _head(core)
        held = {module for module in found if list(module.parameters())}
        own = {name: module.cpu() for name, module in core.named_modules() if module in held}
        own = {name: module for name, module in own.items() if name.rpartition(".")[0] not in own}
        # Modules that the first and the last stage both have are taken from the first.
        for parts in reversed(exchange(own)):
            for name, module in parts.items():
                core.set_submodule(name, module.to(device))
        if tied:
            _head(core).weight = core.get_input_embeddings().weight


def _head(core: Any) -> nn.Module:
    """The output layer of a language model, or a critic's."""
    return core.score if hasattr(core, "score") else core.get_output_embeddings()


def _drop_weight(module: nn.Module, device: torch.device, kept: Tensor | None = None) -> None:
    """Replace each parameter of a module, except `kept`, by zeros without memory that are not split
    over ranks. Submodules do not change."""
    dropped = [(n, p) for n, p in module.named_parameters(recurse=False) if p is not kept]
    if dropped:
        vars(module).pop("forward", None)  # of tensor parallelism
    for name, parameter in dropped:
        zero = torch.zeros((), dtype=parameter.dtype, device=device)
        del module._parameters[name]
        module.register_buffer(name, zero.expand(parameter.shape), persistent=False)
