"""States of a wrapped model, and surroundings, in which a step is refused before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from steps import ACROSS, forked_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bad_inputs.kind import Kind
from forkpoint import Policy, losses, wrap
from forkpoint.testing import ReadOnlyHook, tiny_model
from versions import checkpoint_blocks

BATCH = forked_batch()


@dataclass(frozen=True, kw_only=True)
class StateKind(Kind):
    """A state that `change` puts a tiny Llama into; test_refusals.py provokes it."""

    change: Callable[[Any], Any]
    training_only: bool = False
    """Whether scores are still possible."""


def step(policy: Policy) -> None:
    policy.forward_backward(BATCH, losses.GRPO())


def reentrant_checkpointing(model: nn.Module) -> None:
    checkpoint_blocks(model.train(), use_reentrant=True)


def unknown_checkpointing(model: nn.Module) -> None:
    checkpoint_blocks(model.train(), use_reentrant=False)
    model.get_submodule("model.layers.1")._gradient_checkpointing_func = checkpoint  # type: ignore


def attention_dropout(model: nn.Module) -> None:
    model.train().get_submodule("model.layers.2.self_attn").attention_dropout = 0.1  # type: ignore


def dropout_module(model: nn.Module) -> None:
    mlp = model.train().get_submodule("model.layers.0.mlp")
    mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.25))


def unknown_rope(model: Any) -> None:
    model.config.rope_parameters["rope_type"] = "spiral"


def optimizer_in_backward(model: nn.Module) -> None:
    weight: Any = model.get_submodule("model.norm").weight
    weight.register_post_accumulate_grad_hook(print)


def router_noise(model: nn.Module) -> None:
    model.train().get_submodule("model.layers.1.mlp").jitter_noise = 0.1  # type: ignore


def argument_of_attention(name: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        # A hook that observes may write to what it is given all the same.
        add = ReadOnlyHook(lambda module, args, kwargs: kwargs.update({name: value}))
        attention = model.get_submodule("model.layers.1.self_attn")
        attention.register_forward_pre_hook(add, with_kwargs=True)

    return change


def inference_mode() -> None:
    policy = wrap(tiny_model("llama"), ACROSS)
    with torch.inference_mode():
        step(policy)


STATES: tuple[Kind, ...] = (
    StateKind(
        change=reentrant_checkpointing,
        message="model is checkpointed by a partial of torch.utils.checkpoint.checkpoint, and not",
        training_only=True,
    ),
    StateKind(
        change=unknown_checkpointing,
        message="model.layers.1 is checkpointed by torch.utils.checkpoint.checkpoint, and not with "
        "use_reentrant=False, so that gradients of shared tokens may be lost. Enable "
        'checkpointing with gradient_checkpointing_kwargs={"use_reentrant": False}.',
        training_only=True,
    ),
    StateKind(
        change=attention_dropout,
        message="model.layers.2.self_attn has dropout 0.1 in training mode: dense training would "
        "draw new numbers for every copy of a shared token. Set it to 0, or call "
        "model.eval().",
    ),
    StateKind(
        change=dropout_module,
        message="model.layers.0.mlp.act_fn.1 has dropout 0.25 in training mode:",
    ),
    StateKind(
        change=unknown_rope,
        message="rope_type is 'spiral', and it is not known whether its frequencies depend on the",
    ),
    StateKind(
        change=lambda m: m.requires_grad_(False),
        message="no parameter of the model requires a gradient;",
        training_only=True,
    ),
    StateKind(
        change=optimizer_in_backward,
        message="parameter model.norm.weight has a hook on its gradient (builtins.print).",
        training_only=True,
    ),
    StateKind(
        change=router_noise, message="model.layers.1.mlp has router jitter 0.1 in training mode:"
    ),
    StateKind(
        change=argument_of_attention("attention_mask", torch.zeros(1)),
        message="LlamaAttention asks for a mask in attention; forkpoint knows causal attention",
    ),
    StateKind(
        change=argument_of_attention("attn_bias", torch.zeros(1)),
        message="LlamaAttention passes attn_bias to its attention function, whose effect",
    ),
    Kind(
        call=inference_mode,
        message="forward_backward was called under torch.inference_mode, where nothing has "
        "gradients; leave it, or use policy.score for log-probs alone.",
    ),
)
