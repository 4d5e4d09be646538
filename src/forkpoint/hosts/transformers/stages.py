"""A stage of transformers' models: the model without the parameters of other stages.

Modules stay where they are, so names of parameters and the numbers of layers do. Layers of other
stages, and the final norm on stages before the last, pass on what they are given. Embeddings and
the head have a weight of zeros without memory where they are another stage's.
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
"""Names of the norm that decoders of transformers apply after their last block."""
IDENTITY = ("transformers.distributed.pipeline_parallel", "PipelineIdentityLayer")
"""Class of what transformers puts in place of modules of other stages (pp_size)."""


class Gate:
    """State shared by the modules of one stage that stand for those of others."""

    def __init__(self) -> None:
        self.open: bool = False
        """Whether a step runs the model, which goes on at the next stage."""
        self.hidden: Tensor | None = None
        """Hidden states that the first layer here reads; None if that reads embeddings."""
        self.tied: bool = False
        """Whether the head's weight is that of the embeddings."""


class PassedLayer(nn.Module):
    """In place of a module of another stage: passes on hidden states."""

    def __init__(self, gate: Gate, *, is_entrance: bool = False) -> None:
        """`is_entrance`: whether the first layer here comes next."""
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
    """Those of a decoder's layers that this rank holds."""
    return [layer for layer in layers if not _is_passed(layer)]


def final_norms(decoder: nn.Module) -> list[nn.Module]:
    """The norms of a decoder after its last block, here or on another stage."""
    found = (getattr(decoder, name, None) for name in FINAL_NORMS)
    return [norm for norm in found if isinstance(norm, nn.Module)]


def layers_of_stage(layers: nn.ModuleList) -> range:
    """The numbers of a decoder's layers that this rank holds."""
    held = [n for n, layer in enumerate(layers) if not _is_passed(layer)]
    return range(held[0], held[-1] + 1)


def _gate_of(layers: nn.ModuleList) -> Gate:
    """The gate of a decoder that holds a stage."""
    return next(layer.gate for layer in layers if isinstance(layer, PassedLayer))


def _is_passed(layer: nn.Module) -> bool:
    return isinstance(layer, PassedLayer) or _is_identity(layer)


def _is_identity(module: nn.Module) -> bool:
    """Whether transformers has put it in place of a module of another stage (pp_size)."""
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
        """Raise UnsupportedError where transformers alone has cut the decoder (pp_size)."""
        if any(map(_is_identity, self.decoder.layers)):
            raise UnsupportedError(
                "transformers has cut the model into pipeline stages (pp_size), and wrap was given "
                "no mesh with the dimension 'pp'. Give it one with the same ranks: "
                "forkpoint.wrap(model, mesh=mesh)."
            )

    def hold(self, stage: Stage) -> None:
        """Drop what other stages hold.

        The model is whole, or has modules that are split over ranks. It may hold this stage
        already. Where transformers has cut it (pp_size), its layers stay where they are.

        Raises UnsupportedError where the model holds another stage.
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
        if not stage.is_last:
            for name in FINAL_NORMS:
                if isinstance(getattr(decoder, name, None), nn.Module):
                    setattr(decoder, name, PassedLayer(gate))
            _drop_weight(head, device)
        if not stage.is_first and not (gate.tied and stage.is_last):
            _drop_weight(embeddings, device)
        if not stage.is_first:
            for module in idle:  # encoders of images
                _drop_weight(module, device)

    def _undo_layout(self, stage: Stage) -> None:
        """Replace the substitutes that transformers has put in place of modules, except of layers.

        Raises UnsupportedError where the ranks of the mesh are others than those of the layout.
        """
        core, layout = self.core, self.core._pp_stage
        if (layout.pp_rank, layout.pp_size) != (stage.index, stage.stages):
            raise UnsupportedError(
                f"the mesh makes this rank stage {stage.index} of {stage.stages}, and transformers "
                f"has loaded stage {layout.pp_rank} of {layout.pp_size} (pp_size). Give wrap a "
                "mesh with the same ranks in the dimension 'pp'."
            )
        vars(core).pop("forward", None)  # it sends and receives hidden states by itself
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
        """Give a copy of a stage, which no ranks split, the modules of all other stages.

        Collective.
        """
        core, decoder, idle = self.core, self.decoder, idle_modules(self.core)
        tied, device = _gate_of(decoder.layers).tied, next(core.parameters()).device
        found = [*held_layers(decoder.layers), *final_norms(decoder), *idle]
        found += core.get_input_embeddings(), _head(core)
        held = {module for module in found if list(module.parameters())}
        own = {name: module.cpu() for name, module in core.named_modules() if module in held}
        own = {name: module for name, module in own.items() if name.rpartition(".")[0] not in own}
        # What the first and the last stage both have is the first one's.
        for parts in reversed(exchange(own)):
            for name, module in parts.items():
                core.set_submodule(name, module.to(device))
        if tied:
            _head(core).weight = core.get_input_embeddings().weight


def _head(core: Any) -> nn.Module:
    """The output layer of a language model, or a critic's."""
    return core.score if hasattr(core, "score") else core.get_output_embeddings()


def _drop_weight(module: nn.Module, device: torch.device) -> None:
    """Give a module zeros without memory in place of each parameter, which no ranks split."""
    vars(module).pop("forward", None)  # of tensor parallelism
    for name, parameter in list(module.named_parameters(recurse=False)):
        zero = torch.zeros((), dtype=parameter.dtype, device=device)
        del module._parameters[name]
        module.register_buffer(name, zero.expand(parameter.shape), persistent=False)
