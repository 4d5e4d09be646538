"""What of a transformers model has not been shown exact, found and refused by name.

Rollouts may share a token only if what the model computes for it depends on nothing but the tokens
before it. These checks look for whatever could break that, or keep gradients from arriving, before
anything runs: modules that are not the family's own, dropout, adapters of other kinds, rotary
embeddings that depend on the total length, reentrant checkpointing, parameters that are no plain
tensors. What is unknown is refused.
"""

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.families import Family
from forkpoint.hosts.modules import every_module, every_parameter
from forkpoint.rollouts import RolloutBatch

# Rotary embeddings whose frequencies depend on positions alone. Dynamic and longrope change them
# beyond a length, and are refused for longer rollouts; so are unknown ones.
LENGTH_FREE_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

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

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_modules(
    model: nn.Module, family: str, replaced: Collection[nn.Module] = frozenset()
) -> None:
    """Every module is the family's own, a plain one of torch, or a LoRA adapter around one.

    replaced: modules whose forwards do not run, since the host computes what they stand for.
    """
    allowed = (f"transformers.models.{family}.", *TOKENWISE_CODE)
    for name, module in every_module(model):
        if module in replaced:
            continue
        where = name or "the model"
        kind = type(module)
        for part, code in ((kind, kind.__module__), (kind.forward, kind.forward.__module__)):
            if not code.startswith(allowed) or isinstance(module, OVER_TOKENS):
                raise UnsupportedError(
                    f"{where} runs {code}.{part.__qualname__}, which has not been shown exact; use "
                    f"the modules of transformers.models.{family} as they are (wrap the model "
                    "before compiling, quantizing or patching it)."
                )
        attributes = vars(module)
        if "forward" in attributes and not _is_its_class_s(attributes["forward"], kind):
            raise UnsupportedError(
                f"{where} has a forward of its own, set on the instance (as accelerate's mixed "
                "precision and offloading do), which forkpoint cannot look into. Undo it "
                "(accelerate: unwrap_model with keep_fp32_wrapper=False), and put torch.autocast "
                "around the step instead."
            )
        if attributes.get("_compiled_call_impl") is not None:
            raise UnsupportedError(
                f"{where} was compiled in place by Module.compile(), which has not been shown "
                "exact here. Wrap the model without compiling it."
            )
        for adapter, variant in attributes.get("lora_variant", {}).items():
            if not type(variant).__name__.startswith("Dora"):
                raise UnsupportedError(
                    f"adapter {adapter!r} of {where} is the LoRA variant {type(variant).__name__}; "
                    "plain LoRA and DoRA have been shown exact, so use one of these."
                )


def _is_its_class_s(forward: Any, kind: type[nn.Module]) -> bool:
    """Whether an instance's forward is one of its class: accelerate's unwrap_model leaves such."""
    function: Any = kind.forward
    while function is not None:
        if getattr(forward, "__func__", None) is function:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def check_adapters(model: nn.Module) -> None:
    """Adapters that peft has put around the model or into it are LoRA."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = getattr(config, "peft_type", None)
        if str(getattr(kind, "value", kind)) != "LORA":
            raise UnsupportedError(
                f"the peft adapter {name!r} is {getattr(kind, 'value', kind)}; only LORA has been "
                "shown exact. Use LoRA, or DoRA."
            )


def check_parameters(model: nn.Module) -> None:
    """Plain floating-point tensors, in memory, all on one device."""
    devices: dict[torch.device, str] = {}
    for name, parameter in every_parameter(model):
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            raise UnsupportedError(
                f"parameter {name} is a {type(parameter).__name__}; sharded and quantized "
                "parameters have not been shown exact. Wrap a model of plain tensors."
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


def check_rotary_buffers(causal: PreTrainedModel) -> None:
    """Frequencies of rotary embeddings are finite.

    They are buffers of no checkpoint. Where a model was made on the meta device and its parameters
    alone were filled they hold what lay in memory before, and then all gradients may be NaN.
    """
    for name, buffer in causal.named_buffers():
        if name.endswith("inv_freq") and not bool(buffer.isfinite().all()):
            raise UnsupportedError(
                f"buffer {name} is not finite, so no gradient would be, in ordinary training as "
                "well: a model that is moved off the meta device by to_empty holds whatever lay in "
                "memory until its buffers are filled too. Make it with from_pretrained or "
                "from_config, or call its init_weights after to_empty."
            )


def check_critic(critic: PreTrainedModel) -> None:
    """A token classifier that adds to its decoder dropout and `score`, a linear layer, alone."""
    if type(critic).forward is not GenericForTokenClassification.forward:
        raise UnsupportedError(
            f"{type(critic).__name__} of this transformers has a forward of its own, which has not "
            "been shown exact; critics are shown exact where the family uses transformers' "
            "GenericForTokenClassification."
        )


def plain_head(causal: PreTrainedModel) -> nn.Linear:
    """The output head, whose weights log-probs are computed from."""
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedError(
            f"the output head is a {type(head).__module__}.{type(head).__name__}; forkpoint "
            "computes log-probs from a plain torch.nn.Linear. Leave lm_head out of adapters and "
            "quantization."
        )
    return head


def check_causal(causal: PreTrainedModel) -> None:
    """No token sees later ones, as models that embed texts let them by their configuration."""
    # Neither name is in every configuration: any family's masks and modules heed the first where
    # it is there, and Gemma's the second.
    for name, wanted in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(causal.config, name, None)
        if value is not None and value is not wanted:
            raise UnsupportedError(
                f"the configuration has {name}={value!r}, so that tokens see those after them: a "
                "shared token would depend on what follows it in each rollout. Set it to "
                f"{wanted} if the model is meant to be causal."
            )
    for name, module in every_module(causal):
        if vars(module).get("is_causal", True) is not True:
            raise UnsupportedError(
                f"{name} has is_causal={vars(module)['is_causal']!r}, so that tokens may see those "
                "after them; only causal attention can share tokens. Set it to True, or build the "
                "model from a configuration without use_bidirectional_attention."
            )


def check_rope(causal: PreTrainedModel, longest: int) -> None:
    """Frequencies that are the same for every rollout of at most `longest` tokens."""
    found: dict[str, Any] = getattr(causal.config, "rope_parameters", None) or {}
    # Families whose kinds of layers differ in it have one entry a kind; the others have one in all.
    for parameters in [found] if "rope_type" in found else list(found.values()) or [found]:
        _check_rope_parameters(causal, parameters, longest)


def _check_rope_parameters(
    causal: PreTrainedModel, parameters: dict[str, Any] | None, longest: int
) -> None:
    if parameters is None:
        return
    kind = parameters.get("rope_type")
    if kind in LENGTH_FREE_ROPE:
        return
    if kind not in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedError(
            f"rope_type is {kind!r}, and it is not known whether its frequencies depend on the "
            "length of a rollout; known are "
            f"{', '.join((*LENGTH_FREE_ROPE, *LENGTH_DEPENDENT_ROPE))}. Take one of these."
        )
    limit = causal.config.max_position_embeddings
    if kind == "longrope":
        limit = parameters["original_max_position_embeddings"]
    if longest > limit:
        raise UnsupportedError(
            f"rope_type is {kind!r} and the longest rollout has {longest} tokens: beyond {limit} "
            "tokens its frequencies depend on the total length, so rollouts would differ on tokens "
            f"they share. Use rollouts of at most {limit} tokens or another rope_type "
            f"({', '.join(LENGTH_FREE_ROPE)})."
        )


def check_media(causal: PreTrainedModel, family: Family, batch: RolloutBatch) -> None:
    """No token stands for an image or a video, whose features the rollout does not have."""
    for name, default in family.media:
        found = getattr(causal.config, name, default)
        (where,) = np.nonzero(batch.token_ids == found)
        if len(where):
            rollout = int(np.searchsorted(batch.offsets, where[0], side="right")) - 1
            raise UnsupportedError(
                f"token {found} ({name}) is at position {where[0] - batch.offsets[rollout]} of "
                f"rollout {rollout}, and {len(where)} in all: it stands for an image or a video, "
                "whose features are not part of a rollout here. Leave such rollouts out; text "
                "alone has been shown exact."
            )


def check_routers(causal: PreTrainedModel) -> None:
    """Mixtures of experts route every token by itself, and nothing but the loss is trained on."""
    if getattr(causal.config, "output_router_logits", False):
        raise UnsupportedError(
            "the configuration has output_router_logits=True: its load-balancing loss counts every "
            "copy of a shared token, which forkpoint does not add yet. Set it to False."
        )
    for name, module in every_module(causal):
        jitter = vars(module).get("jitter_noise") or 0
        if module.training and jitter:
            raise UnsupportedError(
                f"{name} has router jitter {jitter} in training mode: dense training would draw "
                "new noise for every copy of a shared token. Set it to 0, or call model.eval()."
            )


def checkpointed(causal: PreTrainedModel) -> bool:
    """Whether activations of some layer are recomputed in its backward."""
    return any(m.training and _flagged(m) for _, m in every_module(causal))


def _flagged(module: nn.Module) -> bool:
    # Not getattr: where it is missing, which is nearly everywhere, modules take long to say so.
    return vars(module).get("gradient_checkpointing", False)


def check_checkpointing(causal: PreTrainedModel) -> None:
    """Recomputation that keeps a graph of the forward."""
    for name, module in every_module(causal):
        if not (module.training and _flagged(module)):
            continue
        function = getattr(module, "_gradient_checkpointing_func", None)
        if not isinstance(function, functools.partial):
            raise UnsupportedError(
                f"{name} is checkpointed by {_name_of(function)}, which has not been shown "
                "exact. Enable checkpointing by the model's own method, with use_reentrant=False."
            )
        # Without the argument torch checkpoints reentrantly.
        reentrant = function.keywords.get("use_reentrant", True)
        if reentrant is not False:
            raise UnsupportedError(
                f"{name} is checkpointed with use_reentrant={reentrant}: such a forward keeps no "
                "graph, and gradients of shared tokens would be lost. Enable checkpointing with "
                'gradient_checkpointing_kwargs={"use_reentrant": False} (in newer transformers '
                "activation_checkpointing_kwargs)."
            )


def _name_of(function: Any) -> str:
    """Its module and name, without the address that its repr has."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{function.__module__}.{name}"


def check_dropout(model: nn.Module) -> None:
    """No dropout in modules that are in training mode."""
    for name, module in every_module(model):
        # Some families call dropout as a function, with a rate that the module keeps.
        kept = (v for k, v in vars(module).items() if "dropout" in k and isinstance(v, float))
        rate = module.p if isinstance(module, _DropoutNd) else max(kept, default=0)
        if module.training and rate:
            raise UnsupportedError(
                f"{name} has dropout {rate} in training mode: dense training would draw a new mask "
                "for every copy of a shared token. Set it to 0, or call model.eval()."
            )


def check_trainable(model: nn.Module) -> None:
    """Some parameter gets a gradient, and nothing consumes gradients before the step is over."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "forward_backward was called under torch.inference_mode, where nothing has gradients; "
            "leave it, or use policy.score for log-probs alone."
        )
    trainable = [(name, p) for name, p in every_parameter(model) if p.requires_grad]
    if not trainable:
        raise UnsupportedError(
            "no parameter of the model requires a gradient; unfreeze some, or use policy.score for "
            "log-probs alone."
        )
    for name, parameter in trainable:
        if parameter._post_accumulate_grad_hooks:  # pyright: ignore[reportAttributeAccessIssue]
            raise UnsupportedError(
                f"parameter {name} has a hook that runs whenever a gradient has been added "
                "(register_post_accumulate_grad_hook); a step has several backwards, so it would "
                "see parts of the gradient. Remove it, and do its work after the step."
            )
