"""Refusals, by name, of what has not been shown exact of any library's models.

These checks run before a step: hooks, parameters and embeddings, randomness, and gradients that
arrive nowhere. They refuse what they do not know. A library's own are beside its entry.
"""

from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import innermost, is_defined_as, is_of_code, place_of
from forkpoint.hosts.modules import every_module, every_parameter
from forkpoint.hosts.transformers.tensor_parallel import sums_in_every_backward

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
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


class ReadOnlyHook:
    """A hook for a module that passes its arguments to a function and discards the result.

    `Module.register_forward_hook(ReadOnlyHook(function))` and its siblings call `function` with
    what they give a hook. Every other hook on a wrapped model is refused, because it may change
    values. A forward hook sees the tensors of microbatches, in which a shared token is there once.
    The function must not write to them.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function: Callable[..., object] = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)


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
    if isinstance(hook, ReadOnlyHook):
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
        "values in forkpoint.testing.ReadOnlyHook.",
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


def check_parameters(model: nn.Module, *, sharded: bool = False) -> None:
    """Plain floating-point tensors, in memory, all on one device.

    sharded: whether torch's fully_shard holds the model, so that they are DTensors.
    """
    devices: dict[torch.device, str] = {}
    for name, parameter in every_parameter(model):
        if not _is_plain(parameter) and not (sharded and _is_sharded(parameter)):
            raise UnsupportedError(
                f"parameter {name} is a {type(parameter).__name__}; sharded and quantized "
                "parameters have not been shown exact, but for torch's fully_shard of the whole "
                "model. Wrap a model of plain tensors."
            )
        if parameter.dtype not in FLOATING:
            raise UnsupportedError(
                f"parameter {name} has dtype {parameter.dtype}; quantized parameters have not been "
                f"shown exact. Allowed are {', '.join(map(str, FLOATING))}."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        ordered = sorted((str(device), name) for device, name in devices.items())
        found = ", ".join(f"{name} on {device}" for device, name in ordered)
        raise UnsupportedError(
            f"the model's parameters lie on {len(devices)} devices ({found}); put them all on one."
        )
    if meta := devices.get(torch.device("meta")):
        raise UnsupportedError(
            f"the parameters ({meta} and all others) lie on the meta device, without "
            "values; initialise or load the model before wrapping it."
        )


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and type(parameter.data) is Tensor


def _is_sharded(parameter: nn.Parameter) -> bool:
    kind = type(parameter.data)
    return (kind.__module__, kind.__name__) == ("torch.distributed.tensor", "DTensor")


def check_embeddings(model: nn.Module) -> None:
    """Embeddings whose gradient is the sum over tokens, and whose forward changes no weight."""
    for name, module in every_module(model):
        if not isinstance(module, nn.Embedding):
            continue
        options = {
            "scale_grad_by_freq": (
                module.scale_grad_by_freq,
                "its gradient is divided by how often a token is in the tensor at hand, which is "
                "another number in a microbatch than in ordinary training",
            ),
            "sparse": (module.sparse, "its gradient is a sparse tensor"),
            "max_norm": (
                module.max_norm is not None,
                "its forward changes the weights of the tokens at hand",
            ),
        }
        for option, (given, why) in options.items():
            if given:
                raise UnsupportedError(
                    f"{name} has {option}={getattr(module, option)!r}: {why}, so gradients would "
                    f"not be those of ordinary training. Make the embedding without {option}."
                )


def check_derived_weights(model: nn.Module) -> None:
    """Weights are parameters, and not tensors that a hook computes from other parameters."""
    for name, module in every_module(model):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise UnsupportedError(
                    f"{name}.{key} is a tensor that is computed from other parameters (as weight "
                    "normalisation, spectral normalisation and pruning do), so that a gradient of "
                    "it would not arrive there. Remove the reparametrization before wrapping "
                    "(torch.nn.utils.remove_weight_norm, torch.nn.utils.prune.remove)."
                )


def check_random(model: nn.Module) -> None:
    """No module in training mode draws random numbers."""
    for name, module in every_module(model):
        # Some families call dropout as a function, with a rate that the module keeps.
        kept = (v for k, v in vars(module).items() if "dropout" in k and isinstance(v, float))
        rate = module.p if isinstance(module, _DropoutNd) else max(kept, default=0)
        if module.training and rate:
            raise UnsupportedError(
                f"{name} has dropout {rate} in training mode: dense training would draw a new mask "
                "for every copy of a shared token. Set it to 0, or call model.eval()."
            )
        if module.training and isinstance(module, nn.RReLU) and module.lower != module.upper:
            raise UnsupportedError(
                f"{name} is a torch.nn.RReLU in training mode: dense training would draw new "
                "slopes for every copy of a shared token. Use torch.nn.LeakyReLU, or call "
                "model.eval()."
            )


def check_trainable(model: nn.Module) -> None:
    """Some parameter gets a gradient."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "forward_backward was called under torch.inference_mode, where nothing has gradients; "
            "leave it, or use policy.score for log-probs alone."
        )
    if not any(p.requires_grad for _, p in every_parameter(model)):
        raise UnsupportedError(
            "no parameter of the model requires a gradient; unfreeze some, or use policy.score for "
            "log-probs alone."
        )
