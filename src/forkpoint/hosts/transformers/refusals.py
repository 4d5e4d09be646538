"""Refusals, by name, of what has not been shown exact of a model of transformers.

Rollouts may share a token only if the model computes for it what depends on the tokens before it
alone, and gradients arrive only where the code that runs is the family's own. These checks run
before a step: on code, positions and media, routers and checkpointing. They refuse what they do not
know.
"""

import functools
import sys
from collections.abc import Collection
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import (
    foreign_code,
    is_of_compiler,
    name_of,
)
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.routers import adds_load_balancing
from forkpoint.hosts.transformers.families import FAMILIES, Family
from forkpoint.hosts.transformers.tensor_parallel import parallel_forward
from forkpoint.hosts.wrappers import has_accelerate_hook, is_device_warning, set_forward
from forkpoint.rollouts.batch import RolloutBatch, short

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
            _check_callable(f"{where}.{name}", value)


def _check_callable(where: str, value: Any) -> None:
    """An attribute that a forward may call, as activations are, is the family's or torch's."""
    if isinstance(value, nn.Module | type):
        return
    found = foreign_code(value)
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
        if found is not None:
            raise UnsupportedError(
                f"{where} is a {kind.__qualname__}, whose {name} has been replaced by {found}; "
                "what that computes has not been shown exact. Undo the patch: use "
                f"{kind.__module__}.{kind.__qualname__} as its package defines it."
            )


def _is_function(value: Any) -> bool:
    return isinstance(value, property) or (callable(value) and not isinstance(value, type))


def check_functions(model: nn.Module) -> None:
    """The functions of the family's source files are those that the files define."""
    modules = {plain_class(m).__module__ for _, m in every_module(model)}
    for module in sorted(m for m in modules if m.startswith("transformers.models.")):
        for name, value in vars(sys.modules[module]).items():
            if not callable(value) or isinstance(value, type) or is_of_compiler(name):
                continue
            found = foreign_code(value)
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


def plain_head(causal: PreTrainedModel) -> nn.Linear:
    """The output head, whose weights log-probs are computed from."""
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or plain_class(head) is not nn.Linear:
        raise UnsupportedError(
            f"the output head is a {type(head).__module__}.{type(head).__name__}; forkpoint "
            "computes log-probs from a plain torch.nn.Linear. Leave lm_head out of adapters and "
            "quantization."
        )
    return head


# Rotary embeddings whose frequencies depend on positions alone. Dynamic and longrope change them
# beyond a length, and are refused for longer rollouts; so are unknown ones.
LENGTH_FREE_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


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
    if causal.config.return_dict is False:
        raise UnsupportedError(
            "the configuration has return_dict=False, with which the forward of transformers fails "
            "by itself ('tuple' object has no attribute 'last_hidden_state'). Set it to True; a "
            "call of the model may still ask for a tuple."
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


_FULL = "an expert that is full leaves tokens out by what else is in the batch"
_BALANCED = "tokens are assigned by what else is in the batch"
COUPLED_ROUTING = {
    **dict.fromkeys(
        ("capacity_factor", "moe_capacity_factor", "expert_capacity_factor", "expert_capacity"),
        _FULL,
    ),
    **dict.fromkeys(("drop_tokens", "moe_token_drop_policy", "token_drop_policy"), _FULL),
    **dict.fromkeys(("expert_choice", "use_expert_choice", "sinkhorn"), _BALANCED),
    **dict.fromkeys(("router_type", "routing_type", "moe_router_load_balancing_type"), _BALANCED),
}
"""Settings under which a token's experts depend on other tokens, and how."""
# Values of router types that route each token by itself.
LETS_ALL_THROUGH = (
    *("topk", "top_k", "top-k", "greedy", "noaux_tc", "group_limited_greedy"),
    *("aux_loss", "seq_aux_loss", "none"),
)


def check_routers(causal: PreTrainedModel, *, routed: bool) -> None:
    """Mixtures of experts route every token by itself, and no loss is left out.

    routed: whether the step has a router loss.
    """
    if not routed and adds_load_balancing(causal):
        raise UnsupportedError(
            "the configuration has output_router_logits=True, so that ordinary training adds a "
            "load-balancing loss, and the step has none. Give "
            "router=forkpoint.losses.RouterLoss(), or set output_router_logits to False."
        )
    for name, reason in COUPLED_ROUTING.items():
        value = getattr(causal.config, name, None)
        if value and value not in LETS_ALL_THROUGH:
            raise UnsupportedError(
                f"the configuration has {name}={value!r}: {reason}, so that copies of a shared "
                "token may be routed differently, and one copy cannot stand for them. Train "
                "without it."
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
                f"{name} is checkpointed by {name_of(function)}, which has not been shown "
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


def supported_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model within, or a refusal that names what was found."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{short(model)} of type {type(model).__name__} is no model; wrap takes one in memory, "
            "as AutoModelForCausalLM.from_pretrained makes it, and downloads nothing."
        )
    inner: Any = model
    if plain_class(model).__module__.split(".")[0] == "peft":
        check_adapters(model)
        inner = model.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"{type(inner).__module__}.{type(inner).__name__} is not a transformers model; wrap "
            "the model itself, which fully_shard or DistributedDataParallel may hold."
        )
    family = FAMILIES.get(inner.config.model_type)
    kind = plain_class(inner)
    stock = kind.__module__.startswith("transformers.models.")
    name = kind.__name__
    if family is not None and stock and name == family.critic_class:
        check_critic(inner)
    elif family is None or not stock or name != family.model_class:
        raise UnsupportedError(
            f"{kind.__module__}.{name} (model_type "
            f"{inner.config.model_type!r}) has not been shown exact; supported are "
            f"{', '.join(f.model_class for f in FAMILIES.values())} of transformers, not "
            "subclasses of them, and as critics their ForTokenClassification with one label."
            f"{_text_model_of(inner) if stock else ''}"
        )
    return inner


def _text_model_of(model: PreTrainedModel) -> str:
    """For a model that sees images as well, how to load the part that has been shown exact, where
    that class reads the whole model's weights (of most families it does not)."""
    text = getattr(model.config, "text_config", None)
    family = FAMILIES.get(getattr(text, "model_type", ""))
    if family is None or not family.media or family.package != model.config.model_type:
        return ""
    return (
        f" Load its text model alone, as {family.model_class}.from_pretrained does from the same "
        "folder."
    )
