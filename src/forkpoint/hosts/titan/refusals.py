"""Checks for torchtitan's models that refuse causes of wrong results that the self-check cannot
find."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
)

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.refusals import check_code
from forkpoint.hosts.titan.families import Family, blocks_of, family_of, head_of, sizes_of
from forkpoint.hosts.titan.splits import Split, redistributes, splits_hidden

INNER = "attention.inner_attention"
"""Name of the inner attention in a block."""
CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def check_model(model: Any, family: Family) -> None:
    """Refuse a model whose modules have not been shown exact."""
    allowed = (family.package, *family.version.packages, "torch.nn.modules.", f"{CHECKPOINT}.")
    tied = getattr(sizes_of(model), "enable_weight_tying", False)
    if tied and model.tok_embeddings.weight is not head_of(model).weight:
        raise UnsupportedError(
            "the model's arguments have enable_weight_tying, and its embeddings and its head have "
            "separate weights: torchtitan's tensor parallelism unties them. Set "
            "tensor_parallel_degree to 1, or train a model whose weights are not tied."
        )
    for name, module in every_module(model):
        where, kind = name or "the model", plain_class(module)
        refused = family.version.refused(module)
        if refused is not None:
            raise UnsupportedError(f"{where} {refused}")
        remedy = "Use torchtitan's model without converters (model.converters = [])."
        check_code(name, module, allowed, remedy, lambda _, module: redistributes(module))
        if vars(module).get("_debug_force_load_balance"):
            raise UnsupportedError(
                f"{where} sends tokens to experts by their positions in a batch, and a shared "
                "token has several positions. Set debug.moe_force_load_balance to false."
            )
        module_of_inner, inner = family.version.inner
        if kind.__module__ == module_of_inner and name.endswith(INNER) and kind.__name__ != inner:
            raise UnsupportedError(
                f"{where} is a {kind.__name__}, which has not been shown exact; supported is "
                f"{inner}. Steps run forkpoint's kernels with either. {family.version.remedy}"
            )


def check_split_stage(model: Any, splits: Sequence[Split]) -> None:
    """Refuse stages of a pipeline that are tensor parallel without sequence parallelism."""
    tensor = any(redistributes(m) and s.tensor is not None for _, m, s in splits)
    if not tensor or len(model.layers) == sizes_of(model).n_layers:
        return
    if not all(map(splits_hidden, blocks_of(model))):
        raise UnsupportedError(
            "the model is a stage of a pipeline, and split over ranks without sequence "
            "parallelism, which has not been shown exact. Set "
            "parallelism.enable_sequence_parallel."
        )


def check_checkpointing(model: nn.Module) -> None:
    """Refuse recomputation of kinds that have not been shown exact."""
    for name, module in every_module(model):
        if not isinstance(module, CheckpointWrapper):
            continue
        if module.checkpoint_impl is not CheckpointImpl.NO_REENTRANT:
            raise UnsupportedError(
                f"{name} is checkpointed by {module.checkpoint_impl}, which loses gradients of "
                "shared tokens. Use torchtitan's activation_checkpoint.mode."
            )


def check_head(model: Any) -> nn.Linear:
    """The output head, whose weights log-probs are computed from. Refuses other modules."""
    head, version = head_of(model), family_of(model).version
    kind = plain_class(head)
    if (kind.__module__, kind.__qualname__) != version.linear:
        raise UnsupportedError(
            f"{version.head} is a {kind.__qualname__}; forkpoint computes log-probs from a plain "
            f"{'.'.join(version.linear)}. Leave it out of converters."
        )
    return head


def check_rope(model: nn.Module, family: Family, longest: int) -> None:
    """Refuse rollouts with more tokens than the model has rotary embeddings."""
    known = family.version.positions(model, family.rope)
    if longest > known:
        raise UnsupportedError(
            f"the longest rollout has {longest} tokens, and the model has rotary embeddings of "
            f"{known} positions. Set training.seq_len (max_seq_len of the model's arguments) to at "
            f"least {longest}."
        )
