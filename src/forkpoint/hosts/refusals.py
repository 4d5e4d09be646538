"""Checks for models of any library that refuse known causes of wrong results.

The self-check compares log-probs of a sample. It cannot find wrong gradients, dropout, or hooks
that act later. These checks run before every step.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import Definition, describe_function, is_defined_as
from forkpoint.hosts.modules import HOOKS, every_module, every_parameter, plain_class
from forkpoint.hosts.wrappers import is_compiled_class, set_forward

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KNOWN_HOOKS: tuple[Definition, ...] = (
    # fully_shard's hooks gather and free parameters.
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._pre_forward"),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState._post_forward"),
)
"""Hooks that do not change the values of a microbatch. Libraries have more
(`Entry.known_hooks`)."""


class ReadOnlyHook:
    """A hook that passes its arguments to a function and discards the result.

    `Module.register_forward_hook(ReadOnlyHook(function))` and similar methods call `function` with
    the arguments of a hook. Every other hook on a wrapped model is refused, because it may change
    values. A forward hook gets the tensors of microbatches, in which a shared token occurs once.
    The function must not write to them.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function: Callable[..., object] = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)


def check_code(
    name: str,
    module: nn.Module,
    allowed: tuple[str, ...],
    remedy: str,
    known: Callable[[str, nn.Module], object] = lambda *_: None,
) -> None:
    """Refuse a module whose class or forward has not been shown exact.

    Args:
        allowed: prefixes of the names of Python modules that define known classes.
        remedy: advice for other classes.
        known: whether the library itself has set the module's forward.
    """
    where, kind = name or "the model", plain_class(module)
    if is_compiled_class(kind):  # the checks run without those that can be removed
        raise UnsupportedError(
            f"{where} was compiled by torch.compile before fully_shard, which has not been shown "
            "exact. Leave the compilation out (torchtitan's compile.enable), because forkpoint "
            "compiles blocks itself, or compile in place with module.compile()."
        )
    if not f"{kind.__module__}.".startswith(allowed):
        raise UnsupportedError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which has not been shown exact. "
            f"{remedy}"
        )
    forward = vars(module).get("forward")
    if forward is not None and set_forward(module) is None and not known(where, module):
        raise UnsupportedError(
            f"{where} has a custom forward ({describe_function(forward)}), whose effect is not "
            "known. Wrap the model before it is set, or remove it with del module.forward (for a "
            "hook of accelerate: accelerate.hooks.remove_hook_from_module(model, recurse=True))."
        )


def check_hooks(model: nn.Module, known: tuple[Definition, ...] = ()) -> None:
    """Refuse hooks of modules and global module hooks that are not `known`."""
    known = (*KNOWN_HOOKS, *known)
    for name, module in every_module(model):
        for kind in HOOKS:
            _check_hooks(name or "the model", vars(module)[kind], kind, known)
    for kind in HOOKS:
        _check_hooks("torch.nn.Module", vars(torch_module)[f"_global{kind}"], kind, known)


def _check_hooks(
    where: str, hooks: dict[int, Any], kind: str, known: tuple[Definition, ...]
) -> None:
    for hook in hooks.values():
        if not isinstance(hook, ReadOnlyHook) and not is_defined_as(hook, *known):
            raise UnsupportedError(
                f"{where} has a hook in {kind} ({describe_function(hook)}), which sees other "
                "values than in ordinary training, because a shared token runs once. Remove it, or "
                "wrap a hook that only reads values in forkpoint.testing.ReadOnlyHook."
            )


def check_parameter_hooks(model: nn.Module, known: tuple[Definition, ...] = ()) -> None:
    """Refuse hooks on gradients of parameters, except `known` ones. They would see parts of a
    gradient."""
    for name, parameter in every_parameter(model):
        before: Any = parameter._backward_hooks
        after: Any = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
        for hook in (*(before or {}).values(), *(after or {}).values()):
            if not is_defined_as(hook, *known):
                raise UnsupportedError(
                    f"parameter {name} has a hook on its gradient ({describe_function(hook)}). A "
                    "step has several backwards, so the hook would see parts of the gradient. "
                    "Remove it, and do its work after the step."
                )


def check_parameters(model: nn.Module, *, sharded: bool = False) -> None:
    """Refuse parameters that are not floating-point tensors with values, all on one device.

    sharded: whether torch's fully_shard holds the model, so that they are DTensors.
    """
    devices: dict[torch.device, str] = {}
    for name, parameter in every_parameter(model):
        kind = type(parameter.data)
        plain = type(parameter) is nn.Parameter and kind is Tensor
        if not plain and not (sharded and kind is DTensor):
            raise UnsupportedError(
                f"parameter {name} is a {type(parameter).__name__}; sharded and quantized "
                "parameters have not been shown exact, except for torch's fully_shard of the whole "
                "model. Wrap a model of plain tensors."
            )
        if parameter.dtype not in FLOATING:
            raise UnsupportedError(
                f"parameter {name} has dtype {parameter.dtype}; quantized parameters have not been "
                f"shown exact. Allowed are {', '.join(map(str, FLOATING))}."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1 or torch.device("meta") in devices:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UnsupportedError(
            f"the model's parameters are on several devices, or on the meta device ({found}). Load "
            "them, all on one device, before wrapping the model."
        )


def check_embeddings(model: nn.Module) -> None:
    """Refuse embeddings whose gradient is not a sum over tokens, or whose weights change in
    forwards."""
    for name, module in every_module(model):
        if not isinstance(module, nn.Embedding):
            continue
        for option in ("scale_grad_by_freq", "sparse", "max_norm"):
            value = getattr(module, option)
            if value is not None and value is not False:
                raise UnsupportedError(
                    f"{name} has {option}={value!r}, so that weights or gradients depend on how "
                    f"often a token runs, and a shared token runs once. Make it without {option}."
                )


def check_derived_weights(model: nn.Module) -> None:
    """Refuse weights that are computed from other parameters."""
    for name, module in every_module(model):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise UnsupportedError(
                    f"{name}.{key} is computed from other parameters (weight or spectral "
                    "normalisation, pruning), which would get no gradient. Remove the "
                    "reparametrization (torch.nn.utils.remove_weight_norm, prune.remove)."
                )


def check_random(model: nn.Module, idle: Collection[nn.Module] = ()) -> None:
    """Refuse modules in training mode that draw random numbers. `idle` ones are not run."""
    for name, module in every_module(model):
        if not module.training or module in idle:
            continue
        # Some families call dropout as a function, with a rate that is an attribute of the module.
        rates = {k: v for k, v in vars(module).items() if "drop" in k and isinstance(v, float)}
        if isinstance(module, _DropoutNd):
            rates["dropout"] = module.p
        jitter = vars(module).get("jitter_noise")
        found = f"router jitter {jitter}" if jitter else ""
        if any(rates.values()):
            key = max(rates, key=lambda key: rates[key])
            found = f"{'dropout' if 'dropout' in key else key} {rates[key]}"
        if isinstance(module, nn.RReLU) and module.lower != module.upper:
            found = "random slopes (RReLU)"
        if found:
            raise UnsupportedError(
                f"{name} has {found} in training mode: dense training would draw new numbers for "
                "every copy of a shared token. Set it to 0, or call model.eval()."
            )


def check_trainable(model: nn.Module, idle: Collection[nn.Module] = ()) -> None:
    """Refuse a model without trainable parameters. Parameters of `idle` modules do not count."""
    check_inference_mode()
    if not has_trainable(model, idle):
        part = "the language model (text runs nothing else)" if idle else "the model"
        raise UnsupportedError(
            f"no parameter of {part} requires a gradient; unfreeze some, or use policy.score for "
            "log-probs alone."
        )


def check_inference_mode() -> None:
    """Refuse a step with gradients under torch.inference_mode."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "forward_backward was called under torch.inference_mode, where nothing has gradients; "
            "leave it, or use policy.score for log-probs alone."
        )


def has_trainable(model: nn.Module, idle: Collection[nn.Module] = ()) -> bool:
    """Whether any parameter outside of `idle` modules requires a gradient."""
    trained = [p for _, p in every_parameter(model) if p.requires_grad]
    if trained and idle:
        run = (module for _, module in every_module(model) if module not in idle)
        held = {id(p) for module in run for p in module._parameters.values()}
        trained = [p for p in trained if id(p) in held]
    return bool(trained)
