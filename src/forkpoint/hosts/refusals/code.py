"""Modules and functions whose code is not the model family's own."""

import functools
import sys
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.coverings import has_accelerate_hook, is_device_warning, set_forward
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.origins import (
    defined_functions,
    foreign_code,
    is_defined_as,
    is_of_compiler,
    name_of,
    place_of,
)
from forkpoint.hosts.parallel_forwards import parallel_forward

# Where the code of modules may come from besides the family's own, each computing token by token.
TOKENWISE_CODE = (
    "torch.nn.modules.activation",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "torch.nn.modules.module",
    "torch.nn.modules.normalization",
    "torch.nn.modules.sparse",
    "transformers.activations",
    # What families' token classifiers inherit; `check_critic` looks at which class it is.
    "transformers.modeling_layers",
    # The gated norm of Qwen3-Next and Qwen3.5 in older versions, where the package is installed.
    "fla.modules.fused_norm_gate",
    "peft.peft_model",
    "peft.utils.other",
    "peft.tuners._buffer_dict",
    "peft.tuners.lora.",
    "peft.tuners.trainable_tokens.",
    "peft.tuners.tuners_utils",
)

# Of these modules, what does or may compute over other dimensions than a token's own.
OVER_TOKENS = (
    nn.CrossMapLRN2d,
    nn.EmbeddingBag,
    nn.GLU,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.LogSoftmax,
    nn.MultiheadAttention,
    nn.Softmax,
    nn.Softmax2d,
    nn.Softmin,
)


CHECKED_ELSEWHERE = ("forward", "_gradient_checkpointing_func", "_old_forward", "_original_forward")
"""Attributes of modules that are called, and that checks of their own look at. The last two are
accelerate's, for putting a forward back."""


def check_modules(
    model: nn.Module, family: str, replaced: Collection[nn.Module] = frozenset()
) -> None:
    """Every module is the family's own, a plain one of torch, or a LoRA adapter around one.

    replaced: modules whose forwards do not run, since the host computes what they stand for.
    """
    allowed = (f"transformers.models.{family}.", *TOKENWISE_CODE)
    kinds: dict[type, str] = {}
    for name, module in every_module(model):
        kinds.setdefault(plain_class(module), name or "the model")
        if module not in replaced:
            _check_module(name or "the model", module, allowed, family)
    checked: set[type] = set()  # all kinds derive from nn.Module, which has the most functions
    for kind, where in kinds.items():
        for base in kind.__mro__:
            if base not in checked:
                checked.add(base)
                _check_class(where, base)


def _check_module(where: str, module: nn.Module, allowed: tuple[str, ...], family: str) -> None:
    kind = plain_class(module)
    for part, code in ((kind, kind.__module__), (kind.forward, kind.forward.__module__)):
        if not code.startswith(allowed) or isinstance(module, OVER_TOKENS):
            raise UnsupportedError(
                f"{where} runs {code}.{part.__qualname__}, which has not been shown exact; use "
                f"the modules of transformers.models.{family} as they are (wrap the model "
                "before quantizing or patching it)."
            )
    attributes = vars(module)
    if (
        "forward" in attributes
        and set_forward(module) is None
        and parallel_forward(where, module) is None
    ):
        raise UnsupportedError(_about_forward(where, module))
    for adapter, variant in attributes.get("lora_variant", {}).items():
        if not type(variant).__name__.startswith("Dora"):
            raise UnsupportedError(
                f"adapter {adapter!r} of {where} is the LoRA variant {type(variant).__name__}; "
                "plain LoRA and DoRA have been shown exact, so use one of these."
            )
    for name, value in attributes.items():
        if name in CHECKED_ELSEWHERE or not callable(value):
            continue
        if not is_device_warning(value):
            _check_callable(f"{where}.{name}", kind, value)


def _check_callable(where: str, kind: type, value: Any) -> None:
    """An attribute that a forward may call, as activations are, is the family's or torch's."""
    if isinstance(value, nn.Module | type):
        return
    found = foreign_code(value)
    # Arguments of a partial may make any function one over tokens, such as softmax over dim 1.
    if isinstance(value, functools.partial) and kind.__module__ != "transformers.activations":
        found = place_of(value)
    if found is not None:
        raise UnsupportedError(
            f"{where} is {found}, which is no module and no function that the family defines: it "
            "may compute a token from others, and has not been shown exact. Set it back to what "
            "the model was built with, or to a module of torch.nn."
        )


def _about_forward(where: str, module: nn.Module) -> str:
    """The message about a forward that is set on a module and not known."""
    if has_accelerate_hook(module):
        hook = vars(module)["_hf_hook"]
        return (
            f"{where} has a hook of accelerate that does more than align devices or is not "
            f"accelerate's own ({type(hook).__module__}.{type(hook).__qualname__}), which has not "
            "been shown exact. Remove it: accelerate.hooks.remove_hook_from_module(model, "
            "recurse=True), with the model on one device."
        )
    return (
        f"{where} has a forward of its own, set on the instance "
        f"({name_of(vars(module)['forward'])}), which forkpoint cannot look into. Remove it while "
        "the model trains here (del module.forward), and put torch.autocast around the step where "
        "it was for mixed precision."
    )


def _check_class(where: str, kind: type) -> None:
    """The functions of a module's class, or of one it derives from, are those of its package."""
    for name, function in vars(kind).items():
        found = foreign_code(function) if _is_function(function) else None
        # A forward of another class of the same packages is told by its name.
        moved = (
            name in ("forward", "__call__")
            and _is_function(function)
            and not is_defined_as(function, _defined_name(kind, name), kind.__module__)
        )
        if found is not None or moved:
            raise UnsupportedError(
                f"{where} is a {kind.__qualname__}, whose {name} has been replaced by "
                f"{found or place_of(function)}; what that computes has not been shown exact. "
                f"Undo the patch: use {kind.__module__}.{kind.__qualname__} as its package "
                "defines it."
            )


def _is_function(value: Any) -> bool:
    return isinstance(value, property) or (callable(value) and not isinstance(value, type))


def _defined_name(base: type, name: str) -> str:
    """The name by which a class's source defines one of its functions."""
    if base is nn.Module:
        own = {"forward": "_forward_unimplemented", "__call__": "Module._wrapped_call_impl"}
        return own[name]
    return f"{base.__qualname__}.{name}"


def check_functions(model: nn.Module) -> None:
    """The functions of the family's source files are those that the files define."""
    modules = {plain_class(m).__module__ for _, m in every_module(model)}
    for module in sorted(m for m in modules if m.startswith("transformers.models.")):
        defined = defined_functions(module)
        for name, value in vars(sys.modules[module]).items():
            if not callable(value) or isinstance(value, type) or is_of_compiler(name):
                continue
            found = foreign_code(value)
            if found is None and name in defined and hasattr(value, "__code__"):
                found = None if is_defined_as(value, name, module) else place_of(value)
            if found is not None:
                raise UnsupportedError(
                    f"{module}.{name} has been replaced by {found}; what that computes has not "
                    "been shown exact. Undo the patch before the model is wrapped and while it "
                    "trains."
                )


def check_attention_function(model: nn.Module) -> None:
    """The attention that the configuration names is causal softmax attention of transformers."""
    for _, module in every_module(model):
        config = getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if not isinstance(name, str):
            continue
        softcap = getattr(config, "attn_logit_softcapping", None)
        if name == "sdpa" and softcap is not None:
            raise UnsupportedError(
                "the configuration has attn_implementation='sdpa' and "
                f"attn_logit_softcapping={softcap}, which sdpa leaves out: the model by itself "
                "computes no softcap, and forkpoint does. Use 'eager': "
                "model.set_attn_implementation('eager')."
            )
        for kind, functions in (
            ("attention function", ALL_ATTENTION_FUNCTIONS),
            ("mask function", ALL_MASK_ATTENTION_FUNCTIONS),
        ):
            function = functions.get(name)
            found = None if function is None else foreign_code(function)
            if found is not None:
                raise UnsupportedError(
                    f"the configuration has attn_implementation={name!r}, whose {kind} is {found}; "
                    "forkpoint computes causal softmax attention in its place, and whether that is "
                    "the same is not known. Use 'eager', 'sdpa' or a kernel of transformers."
                )


def check_adapters(model: nn.Module) -> None:
    """Adapters that peft has put around the model or into it are LoRA."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = getattr(config, "peft_type", None)
        if str(getattr(kind, "value", kind)) != "LORA":
            raise UnsupportedError(
                f"the peft adapter {name!r} is {getattr(kind, 'value', kind)}; only LORA has been "
                "shown exact. Use LoRA, or DoRA."
            )


def check_critic(critic: PreTrainedModel) -> None:
    """A token classifier that adds to its decoder dropout and `score`, a linear layer, alone."""
    if type(critic).forward is not GenericForTokenClassification.forward:
        raise UnsupportedError(
            f"{type(critic).__name__} of this transformers has a forward of its own, which has not "
            "been shown exact; critics are shown exact where the family uses transformers' "
            "GenericForTokenClassification."
        )


def check_blocks(blocks: nn.ModuleList) -> None:
    """No attention or recurrence of the decoder is part of two of its blocks.

    Each keeps one prefix cache. The stock model tells them apart by `layer_idx`, which a copied or
    repeated layer may have wrong; here the module itself is what tells them apart.
    """
    seen: dict[nn.Module, str] = {}
    for index, block in enumerate(blocks):
        for name, module in block.named_modules():
            if "layer_idx" not in vars(module):
                continue
            here = f"layers.{index}.{name}".rstrip(".")
            if module in seen:
                raise UnsupportedError(
                    f"{here} is the same module as {seen[module]}: it runs twice for every token, "
                    "and forkpoint keeps what later tokens read of it once. Give each layer "
                    "modules of its own (copy.deepcopy); their weights may still be tied."
                )
            seen[module] = here
