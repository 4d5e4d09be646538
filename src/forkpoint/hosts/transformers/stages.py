"""A stage of transformers' models: the model without the parameters of other stages.

Modules stay where they are, so names of parameters and the numbers of layers do. Layers of other
stages, and the final norm on stages before the last, pass on what they are given. Embeddings and
the head have a weight of zeros without memory where they are another stage's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.plan.stages import Stage


class Gate:
    """State shared by the modules of one stage that stand for those of others."""

    def __init__(self) -> None:
        self.open: bool = False
        """Whether a step runs the model, which goes on at the next stage."""
        self.hidden: Tensor | None = None
        """Hidden states that the first layer here reads; None if that reads embeddings."""


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
    return [layer for layer in layers if not isinstance(layer, PassedLayer)]


def gate_of(layers: nn.ModuleList) -> Gate:
    """The gate of a decoder that holds a stage."""
    return next(layer.gate for layer in layers if isinstance(layer, PassedLayer))


def hold_stage(core: Any, stage: Stage, norms: tuple[str, ...]) -> frozenset[nn.Parameter]:
    """Drop what other stages hold; returns parameters that the first and last stage both have.

    Args:
        core: the causal model, whole; it may hold this stage already.
        stage: which layers to hold.
        norms: names of the decoder's final norms.

    Raises UnsupportedError for multimodal families, and where the model holds
    another stage.
    """
    family, decoder = core.config.model_type, core.base_model
    if family not in FAMILIES:
        raise UnsupportedError(
            f"stages of {family!r}, a multimodal family, have not been shown exact; those of "
            "language models have. Use a mesh without the dimension 'pp'."
        )
    wanted = range(stage.first_layer, stage.first_layer + stage.layers)
    held = [n for n, layer in enumerate(decoder.layers) if not isinstance(layer, PassedLayer)]
    if not set(wanted) <= set(held) or len(held) not in (len(wanted), len(decoder.layers)):
        raise UnsupportedError(
            f"the model holds layers {held[0]} to {held[-1]}, and stage {stage.index} of "
            f"{stage.stages} holds {wanted[0]} to {wanted[-1]}. Load the whole model again."
        )
    head, embeddings = _head(core), core.get_input_embeddings()
    tied = head.weight is embeddings.weight
    if len(held) == len(wanted):
        return _tied(core, stage)
    gate = Gate()
    for n in held:
        if n not in wanted:
            decoder.layers[n] = PassedLayer(gate, is_entrance=n == wanted[0] - 1)
    if not stage.is_last:
        for name in norms:
            if isinstance(getattr(decoder, name, None), nn.Module):
                setattr(decoder, name, PassedLayer(gate))
    keeps_both = tied and (stage.is_first or stage.is_last)
    if not stage.is_first and not keeps_both:
        _drop_weight(embeddings)
    if not stage.is_last and not keeps_both:
        _drop_weight(head)
    return _tied(core, stage)


def _tied(core: Any, stage: Stage) -> frozenset[nn.Parameter]:
    weight = core.get_input_embeddings().weight
    tied = weight is _head(core).weight
    return frozenset({weight} if tied and (stage.is_first or stage.is_last) else ())


def _head(core: Any) -> nn.Module:
    """The output layer of a language model, or a critic's."""
    return core.score if hasattr(core, "score") else core.get_output_embeddings()


def _drop_weight(module: nn.Module) -> None:
    """Give a module zeros without memory in place of each parameter."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        del module._parameters[name]
        module.register_buffer(name, zero.expand(parameter.shape), persistent=False)
