"""Checks for transformers' models that refuse causes of wrong results that the self-check cannot
find.

These are missing gradients, effects beyond the sample's length, placeholder tokens of images, and
unknown modules.
"""

import functools
import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GenericForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.code_provenance import Definition, describe_function
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.refusals import check_code
from forkpoint.hosts.transformers.calls import configurations
from forkpoint.hosts.transformers.families import Family, known_classes, known_family
from forkpoint.hosts.transformers.linear_attention import recurrent_modules
from forkpoint.hosts.transformers.multimodal import decoder_of, idle_modules, within_peft
from forkpoint.hosts.transformers.routers import adds_load_balancing
from forkpoint.hosts.transformers.tensor_parallel import parallel_forward
from forkpoint.rollouts.batch import RolloutBatch, short

TOKENWISE_CODE = (
    "torch.nn.modules.",
    "forkpoint.hosts.transformers.stages",
    "transformers.activations",
    # Base class of families' token classifiers; `supported_model` checks the class.
    "transformers.modeling_layers",
    # The gated norm of Qwen3-Next and Qwen3.5 in older versions, if the package is installed.
    "fla.modules.fused_norm_gate",
    "peft.peft_model",
    "peft.utils.other",
    "peft.tuners._buffer_dict",
    "peft.tuners.lora.",
    "peft.tuners.trainable_tokens.",
    "peft.tuners.tuners_utils",
)
"""Python modules, in addition to the family's own, that may define a model's modules."""
ATTENTION_PACKAGES = ("transformers", "forkpoint")
"""Packages whose attention functions compute causal softmax attention."""

KNOWN_HOOKS: tuple[Definition, ...] = (
    # These make inputs require gradients, for checkpointing with frozen embeddings.
    (
        "transformers.modeling_utils",
        "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads",
    ),
    (
        "peft.peft_model",
        "PeftModel._prepare_model_for_gradient_checkpointing.<locals>.make_inputs_require_grad",
    ),
    ("peft.utils.other", "prepare_model_for_kbit_training.<locals>.make_inputs_require_grad"),
    # It collects hidden states on request. Microbatches do not request them.
    (
        "transformers.utils.output_capturing",
        "install_output_capuring_hook.<locals>.output_capturing_hook",
    ),
    # It casts embeddings to the model's dtype if TRL has made their weights float32.
    (
        "trl.trainer.grpo_trainer",
        "GRPOTrainer.__init__.<locals>._cast_lm_head_to_fp32.<locals>.cast_outputs_to_original_dtype",
    ),
)
"""Hooks of transformers, peft and TRL that do not change the values of a microbatch."""


RECOMPUTE = (
    'Leave it out. To recompute activations, use Config(checkpointing="full") or '
    "model.gradient_checkpointing_enable()."
)
"""Remedy for torch's CheckpointWrapper."""
OTHER_ADAPTERS = (
    "Of peft's adapters, LoRA, DoRA and trainable tokens have been shown exact. Use one of these, "
    "or merge the adapter into the weights if its kind has merge_and_unload()."
)
"""Remedy for other adapters of peft."""


def check_modules(
    model: nn.Module, packages: tuple[str, ...], idle: Collection[nn.Module] = ()
) -> None:
    """Refuse modules that are not of the family, of torch, or LoRA adapters.

    packages: packages of transformers.models that define the family's modules. idle: modules that
        are not run.
    """
    own = [f"transformers.models.{package}" for package in packages]
    allowed = (*(f"{package}." for package in own), *TOKENWISE_CODE)
    remedy = (
        f"Use unmodified modules of {' and '.join(own)}: wrap the model before it is quantized "
        "or patched."
    )
    for name, module in every_module(model):
        if module in idle:
            continue
        kind, advice = plain_class(module), remedy
        if kind.__name__ == "CheckpointWrapper":
            advice = RECOMPUTE
        elif kind.__module__.startswith("peft."):
            advice = OTHER_ADAPTERS
        check_code(name, module, allowed, advice, parallel_forward)
        for adapter, variant in vars(module).get("lora_variant", {}).items():
            if not type(variant).__name__.startswith("Dora"):
                raise UnsupportedError(
                    f"adapter {adapter!r} of {name} is the LoRA variant {type(variant).__name__}; "
                    "plain LoRA and DoRA have been shown exact, so use one of these."
                )


def check_attention_function(model: nn.Module) -> None:
    """Refuse attention and mask functions that users have registered.

    They may differ only beyond the length of a sample, as a window does.
    """
    for config in configurations(model):
        name = config._attn_implementation
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            function: Any = functions.get(name) if isinstance(name, str) else None
            while isinstance(function, functools.partial):
                function = function.func
            package = getattr(function, "__module__", "transformers").split(".")[0]
            if package not in ATTENTION_PACKAGES:
                raise UnsupportedError(
                    f"the configuration has attn_implementation={name!r}, which calls "
                    f"{describe_function(function)}, and forkpoint computes causal softmax "
                    "attention instead. Use 'eager', 'sdpa' or a kernel of transformers."
                )


MASKED = ("eager", "sdpa", "flex_attention")
"""Implementations of attention with masks that transformers makes from the configuration. Others
take the window of the layer, as steps do."""


def check_windows(core: PreTrainedModel) -> None:
    """Refuse layers whose window is not that of the configuration.

    A sample is shorter than most windows.
    """
    decoder = decoder_of(core)
    config = decoder.config
    if config._attn_implementation not in MASKED:
        return
    kinds = getattr(config, "layer_types", None) or itertools.repeat("sliding_attention")
    for number, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=False)):
        attention = vars(layer)["_modules"].get("self_attn")
        own = {} if attention is None else vars(attention)
        if "sliding_window" not in own:
            continue
        window = own["sliding_window"] if own.get("is_sliding", True) else None
        mask = config.sliding_window if kind == "sliding_attention" else None
        if window != mask:
            raise UnsupportedError(
                f"self_attn of layer {number} has sliding_window={window}, and its mask has {mask} "
                "(sliding_window and layer_types of the configuration). Set both, or make the "
                "model from the changed configuration."
            )


def plain_head(causal: PreTrainedModel) -> nn.Linear:
    """The output head, from whose weight log-probs are computed. Refuses other modules."""
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or plain_class(head) is not nn.Linear:
        raise UnsupportedError(
            f"the output head is a {type(head).__module__}.{type(head).__name__}; forkpoint "
            "computes log-probs from a plain torch.nn.Linear. Leave lm_head out of adapters and "
            "quantization. peft also wraps it for embeddings that are tied to it "
            "(tie_word_embeddings): leave out trainable_token_indices and ensure_weight_tying."
        )
    return head


LENGTH_FREE_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the length of a rollout."""
KNOWN_ROPE = (*LENGTH_FREE_ROPE, "dynamic", "longrope")
"""Known types. The last two change the frequencies of all positions if a rollout exceeds a
length."""


def check_rope(causal: PreTrainedModel, longest: int) -> None:
    """Refuse rotary frequencies that differ between rollouts of at most `longest` tokens."""
    config = decoder_of(causal).config
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Some families have one entry for each kind of layer. Versions of transformers differ in
    # whether settings beside such entries make the whole a single entry, so all are checked.
    for parameters in [found, *(entry for entry in found.values() if isinstance(entry, dict))]:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind in LENGTH_FREE_ROPE:
            continue
        if kind not in KNOWN_ROPE:
            raise UnsupportedError(
                f"rope_type is {kind!r}, and it is not known whether its frequencies depend on the "
                f"length of a rollout. Use one of {', '.join(KNOWN_ROPE)}."
            )
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = parameters["original_max_position_embeddings"]
        if longest > limit:
            raise UnsupportedError(
                f"rope_type is {kind!r} and the longest rollout has {longest} tokens: beyond "
                f"{limit} tokens frequencies depend on the length, so rollouts would differ on "
                f"tokens they share. Use rollouts of at most {limit} tokens or another rope_type."
            )


def check_placeholders(causal: PreTrainedModel, family: Family, batch: RolloutBatch) -> None:
    """Refuse placeholder tokens of images and video without media in their rollout, and media at
    other tokens.

    A batch without media whose media_types mark placeholders as text runs them as the model does.
    """
    if not batch.media and all(rollout.media_types is not None for rollout in batch):
        return
    text = np.ones(len(batch.token_ids), bool) if batch.media_of is None else batch.media_of < 0
    for name, default in family.media:
        found = getattr(causal.config, name, default)
        (where,) = np.nonzero((batch.token_ids == found) & text)
        if len(where):
            rollout = int(np.searchsorted(batch.offsets, where[0], side="right")) - 1
            raise UnsupportedError(
                f"token {found} ({name}) is at position {where[0] - batch.offsets[rollout]} of "
                f"rollout {rollout}, and {len(where)} in all: it stands for an image or a video "
                "that the rollout does not have. Leave such rollouts out."
            )
    if batch.media_of is None:
        return
    wanted = [getattr(causal.config, f"{medium.kind}_token_id") for medium in batch.media]
    (where,) = np.nonzero(~text & (batch.token_ids != np.array(wanted)[batch.media_of]))
    if len(where):
        rollout = int(np.searchsorted(batch.offsets, where[0], side="right")) - 1
        raise UnsupportedError(
            f"token {batch.token_ids[where[0]]} at position {where[0] - batch.offsets[rollout]} of "
            f"rollout {rollout} stands for a medium (media_types), and the model puts its features "
            f"at tokens {wanted[batch.media_of[where[0]]]}. Give the tokens of the processor."
        )


def check_router_loss(causal: PreTrainedModel) -> None:
    """Refuse a model that adds a load-balancing loss in ordinary training, in a step without
    one."""
    if adds_load_balancing(causal):
        raise UnsupportedError(
            "the configuration has output_router_logits=True, so that ordinary training adds a "
            "load-balancing loss, and the step has none. Give "
            "router=forkpoint.losses.RouterLoss(), or set output_router_logits to False."
        )


def checkpointed_modules(
    causal: PreTrainedModel, *, encodes: bool = False
) -> list[tuple[str, nn.Module]]:
    """Running modules, by name, that recompute their activations in backwards. `encodes`: whether
    the encoder runs."""
    # Not getattr, which is slow for modules without the attribute, that is nearly all.
    found = [
        (name, module)
        for name, module in every_module(causal)
        if module.training and vars(module).get("gradient_checkpointing", False)
    ]
    idle = idle_modules(causal) if found and not encodes else ()
    return [(name, module) for name, module in found if module not in idle]


def check_checkpointing(causal: PreTrainedModel, *, encodes: bool = False) -> None:
    """Refuse recomputation whose forward records no graph. `encodes`: whether the encoder runs."""
    for name, module in checkpointed_modules(causal, encodes=encodes):
        function = getattr(module, "_gradient_checkpointing_func", None)
        options = function.keywords if isinstance(function, functools.partial) else {}
        if options.get("use_reentrant", True) is not False:  # torch's default is True
            raise UnsupportedError(
                f"{name} is checkpointed by {describe_function(function)}, and not with "
                "use_reentrant=False, so that gradients of shared tokens may be lost. Enable "
                'checkpointing with gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )


def supported_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside adapters. Refuses classes that have not been shown exact."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{short(model)} of type {type(model).__name__} is no model; wrap takes one in memory, "
            "as AutoModelForCausalLM.from_pretrained makes it, and downloads nothing."
        )
    inner = within_peft(model)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"{type(inner).__module__}.{type(inner).__name__} is not a transformers model; wrap "
            "the model itself, which fully_shard or DistributedDataParallel may hold."
        )
    family, kind = known_family(inner.config.model_type), plain_class(inner)
    stock = kind.__module__.startswith("transformers.models.")
    critic = (
        family is not None
        and kind.__name__ == family.critic_class
        and kind.forward is GenericForTokenClassification.forward
    )
    if family is None or not stock or not (kind.__name__ == family.model_class or critic):
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__name__} (model_type {inner.config.model_type!r}) has not "
            f"been shown exact; supported are {', '.join(known_classes())} of transformers, not "
            "subclasses of them, and as critics their ForTokenClassification with one label."
        )
    return inner


def check_undivided(core: Any, family: Family, what: str) -> None:
    """Refuse a family whose model has not been shown exact when divided over ranks, such as
    multimodal ones by tp_plan. `what`: the kind of parallelism."""
    if family.undivided or (family.decoders is not None and what == "tp_plan"):
        raise UnsupportedError(
            f"{plain_class(core).__name__} is divided over ranks by {what}, which has not been "
            "shown exact for this family. Use fully_shard or DistributedDataParallel."
        )


def check_causal(core: Any) -> None:
    """Refuse models that are not causal, such as embedding models of Gemma 3 and 4."""
    found = getattr(decoder_of(core).config, "use_bidirectional_attention", None)
    if found in (True, "all"):
        raise UnsupportedError(
            f"the configuration has use_bidirectional_attention={found!r}: tokens attend to later "
            "ones, so that rollouts would differ on tokens they share. Use a causal model."
        )


def check_context_parallel(core: Any, query_heads: int, ranks: int) -> None:
    """Refuse layers that have not been shown exact with context parallelism over `ranks` ranks."""
    if query_heads % ranks:
        raise UnsupportedError(
            f"the model has {query_heads} query heads on a rank, and context parallelism splits "
            f"them over {ranks} ranks. Choose a size that divides the heads."
        )
    recurrent: dict[str, Any] = {**recurrent_modules(core)}
    for name, module in recurrent.items():
        heads = getattr(module, "num_v_heads", None) or module.num_heads
        if heads % ranks:
            raise UnsupportedError(
                f"{name} has {heads} heads, and context parallelism splits them over {ranks} "
                "ranks. Choose a size that divides the heads."
            )
