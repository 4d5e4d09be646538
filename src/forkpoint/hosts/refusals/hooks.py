"""Hooks on modules and parameters: those that are known to change nothing pass."""

from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import every_module, every_parameter
from forkpoint.hosts.origins import innermost, is_defined_as, is_of_code, place_of
from forkpoint.hosts.parallel_forwards import sums_in_every_backward
from forkpoint.hosts.watching import Watching

KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""The attributes of a module that hold its hooks."""

REQUIRING_GRADIENTS = (
    (
        "transformers.modeling_utils",
        "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads",
    ),
    (
        "peft.peft_model",
        "PeftModel._prepare_model_for_gradient_checkpointing.<locals>.make_inputs_require_grad",
    ),
    (
        "peft.utils.other",
        "prepare_model_for_kbit_training.<locals>.make_inputs_require_grad",
    ),
)
"""Hooks by which inputs require gradients, for checkpointing above frozen embeddings."""

KNOWN = (
    *REQUIRING_GRADIENTS,
    # It collects hidden states for a forward that asks for them; microbatches do not.
    (
        "transformers.utils.output_capturing",
        "install_output_capuring_hook.<locals>.output_capturing_hook",
    ),
    # It gives embeddings in the model's dtype where TRL has made their weights float32.
    (
        "trl.trainer.grpo_trainer",
        "GRPOTrainer.__init__.<locals>._cast_lm_head_to_fp32.<locals>.cast_outputs_to_original_dtype",
    ),
    # They gather and free parameters.
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._pre_forward"),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._post_forward"),
    # It adds a window and sinks to the arguments of attention, in microbatches and in ordinary
    # training.
    ("forkpoint.testing", "force_windows_and_sinks.<locals>.add"),
)
"""Module and qualified name of the functions of hooks that leave a microbatch's values as they
are."""

REMEDIES = {
    "distribute_module": "transformers before 5.23 splits models over ranks by hooks, which has "
    "not been shown exact: update transformers.",
    "ReplicatedWithGradAllReduce": "transformers before 5.23 sums gradients of split models by "
    "this hook, which has not been shown exact: update transformers.",
    "neftune_post_forward_hook": "NEFTune draws noise for every copy of a shared token, so there "
    "is nothing to share: train without neftune_noise_alpha.",
    "WeightNorm": "Call torch.nn.utils.remove_weight_norm before wrapping.",
    "SpectralNorm": "Call torch.nn.utils.remove_spectral_norm before wrapping.",
}
"""By the name of a hook, what to do about it."""


def check_hooks(model: nn.Module) -> None:
    """No hook but those that are known runs in a step, or would run in ordinary training."""
    for name, module in every_module(model):
        attributes = vars(module)
        for attribute, kind in KINDS.items():
            for hook in attributes[attribute].values():
                if not _is_known(hook):
                    raise UnsupportedError(_message(name or "the model", kind, hook))
    for kind, hook in _global_hooks():
        if not _is_known(hook):
            raise UnsupportedError(_message("torch.nn.modules", f"global {kind}", hook))


def _global_hooks() -> Iterator[tuple[str, Any]]:
    for attribute, kind in KINDS.items():
        for hook in vars(torch_module)[f"_global{attribute}"].values():
            yield kind, hook


def _is_known(hook: Any) -> bool:
    if isinstance(hook, Watching):
        return True
    function = innermost(hook)
    return any(is_defined_as(function, qualname, module) for module, qualname in KNOWN)


def requires_gradients(hook: Any) -> bool:
    """Whether a hook only lets inputs require gradients. transformers may set it again and again:
    `gradient_checkpointing_enable` adds one each time, as do trainers that generate."""
    code = getattr(hook, "__code__", None)
    return code is not None and _requires_gradients(code)


@cache
def _requires_gradients(code: CodeType) -> bool:
    return any(is_of_code(code, qualname, module) for module, qualname in REQUIRING_GRADIENTS)


def _message(where: str, kind: str, hook: Any) -> str:
    place = place_of(hook)
    remedy = next(
        (text for name, text in REMEDIES.items() if name in place),
        "Remove it while the model trains here (handle.remove()); wrap one that only looks at "
        "values in forkpoint.testing.Watching.",
    )
    return (
        f"{where} has a {kind}, {place}. forkpoint runs each shared token once, in microbatches "
        "of its own and without calling the head or the causal model's forward, so the hook would "
        f"see and change other values than in ordinary training. {remedy}"
    )


def check_parameter_hooks(model: nn.Module) -> None:
    """No hook runs on a part of a parameter's gradient: a step has several backwards."""
    for name, parameter in every_parameter(model):
        before: Any = parameter._backward_hooks
        after: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
        if not before and not after:
            continue
        for hooks, call in (
            (before, "register_hook"),
            (after, "register_post_accumulate_grad_hook"),
        ):
            for hook in (hooks or {}).values():
                if sums_in_every_backward(hook):  # taken off while a step runs
                    continue
                raise UnsupportedError(
                    f"parameter {name} has a hook that runs whenever a gradient has been added "
                    f"({call}: {place_of(hook)}); a step has several backwards, so it would see "
                    "parts of the gradient. Remove it, and do its work after the step."
                )
