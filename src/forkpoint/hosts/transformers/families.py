"""Model families of transformers whose modules have been shown exact.

tests/numerics/test_families.py tests each family: loss, log-probs and every parameter's gradient
within 1e-10 of dense in float64, for all kinds of sharing. Their code is not changed. Entries
describe only what the causal model computes after the head, because forkpoint computes this itself.
"""

from dataclasses import dataclass
from typing import Any

from forkpoint.rollouts.media import MediaKind


@dataclass(frozen=True)
class Family:
    """Class name of a family's causal language model, and what it computes from its logits."""

    model_class: str
    package: str | None = None
    """The package below transformers.models, if it is not the model_type."""
    softcap: str | None = None
    """Key of the configuration with the softcap of the logits."""
    scale: str | None = None
    """Attribute of the model with a factor of the logits."""
    divisor: str | None = None
    """Key of the configuration with the divisor of the logits."""

    media: tuple[tuple[str, int], ...] = ()
    """Placeholder token ids of images and video, for multimodal models of the family."""
    decoders: tuple[str, ...] | None = None
    """For a multimodal family, the model types of its own language models. Empty if it uses any of
    `FAMILIES`."""
    kinds: tuple[MediaKind, ...] = ()
    """Kinds of media whose encoder has been shown exact."""
    axes: bool = False
    """Whether tokens of media have positions in time, height and width (get_rope_index)."""
    joined: int = 0
    """The dimension along which inputs of the media of one row are joined."""
    bidirectional: bool = False
    """Whether tokens of an image attend to each other in both directions."""
    undivided: bool = False
    """Whether tensor, context and pipeline parallelism have not been shown exact."""

    @property
    def critic_class(self) -> str:
        """Class name of the family's token classifier, which is a critic if it has one label. Some
        families have none."""
        if self.decoders is not None:
            return ""
        return self.model_class.replace("ForCausalLM", "ForTokenClassification")

    def head_options(self, causal: Any) -> dict[str, float | None]:
        """`logit_scale` and `softcap` of the head, read from where the stock forward reads them."""
        config, scale = causal.config.get_text_config(), None
        if self.scale is not None:
            scale = float(getattr(causal, self.scale))
        if self.divisor is not None:
            scale = 1.0 / float(getattr(config, self.divisor))
        softcap = getattr(config, self.softcap) if self.softcap is not None else None
        return {"logit_scale": scale, "softcap": softcap}


QWEN3_5_MEDIA = (
    ("image_token_id", 248056),
    ("video_token_id", 248057),
    ("vision_start_token_id", 248053),
    ("vision_end_token_id", 248054),
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "qwen3_next": Family("Qwen3NextForCausalLM"),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", package="qwen3_5", media=QWEN3_5_MEDIA),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", package="qwen3_5_moe", media=QWEN3_5_MEDIA),
    "llama4_text": Family("Llama4ForCausalLM", package="llama4", undivided=True),
    "mistral": Family("MistralForCausalLM"),
    "ministral": Family("MinistralForCausalLM"),
    "mixtral": Family("MixtralForCausalLM"),
    "gemma": Family("GemmaForCausalLM"),
    "gemma2": Family("Gemma2ForCausalLM", softcap="final_logit_softcapping"),
    "gemma3_text": Family("Gemma3ForCausalLM", package="gemma3", softcap="final_logit_softcapping"),
    "gemma4_text": Family(
        "Gemma4ForCausalLM", package="gemma4", softcap="final_logit_softcapping", undivided=True
    ),
    "olmo": Family("OlmoForCausalLM"),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmo3": Family("Olmo3ForCausalLM"),
    "glm": Family("GlmForCausalLM"),
    "glm4": Family("Glm4ForCausalLM"),
    "glm4_moe": Family("Glm4MoeForCausalLM"),
    "gpt_oss": Family("GptOssForCausalLM"),
    "phi": Family("PhiForCausalLM"),
    "phi3": Family("Phi3ForCausalLM"),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "granite": Family("GraniteForCausalLM", divisor="logits_scaling"),
    "granitemoe": Family("GraniteMoeForCausalLM", divisor="logits_scaling"),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", divisor="logits_scaling"),
    "cohere": Family("CohereForCausalLM", scale="logit_scale"),
    "deepseek_v3": Family("DeepseekV3ForCausalLM"),
    "exaone4": Family("Exaone4ForCausalLM"),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM"),
    "arcee": Family("ArceeForCausalLM"),
    "helium": Family("HeliumForCausalLM"),
    "seed_oss": Family("SeedOssForCausalLM"),
    "starcoder2": Family("Starcoder2ForCausalLM"),
}

PLACEHOLDERS = tuple((f"{kind}_token_id", -1) for kind in ("image", "video", "audio"))


IMAGES: tuple[MediaKind, ...] = ("image",)
IMAGES_AND_VIDEO: tuple[MediaKind, ...] = ("image", "video")


def _multimodal(name: str, *decoders: str, **fields: Any) -> Family:
    name = f"{name}ForConditionalGeneration"
    return Family(name, media=PLACEHOLDERS, decoders=decoders, **fields)


def _qwen(name: str, *decoders: str) -> Family:
    return _multimodal(name, *decoders, kinds=IMAGES_AND_VIDEO, axes=True)


MULTIMODAL = {
    "qwen2_vl": _qwen("Qwen2VL", "qwen2_vl_text"),
    "qwen2_5_vl": _qwen("Qwen2_5_VL", "qwen2_5_vl_text"),
    "qwen3_vl": _qwen("Qwen3VL", "qwen3_vl_text"),
    "qwen3_vl_moe": _qwen("Qwen3VLMoe", "qwen3_vl_moe_text"),
    "qwen3_5": _qwen("Qwen3_5", "qwen3_5_text"),
    "qwen3_5_moe": _qwen("Qwen3_5Moe", "qwen3_5_moe_text"),
    "gemma3": _multimodal("Gemma3", "gemma3_text", bidirectional=True),
    "gemma4": _multimodal(
        "Gemma4",
        "gemma4_text",
        softcap="final_logit_softcapping",
        bidirectional=True,
        undivided=True,
    ),
    "llama4": _multimodal("Llama4", "llama4_text", undivided=True),
    "mistral3": _multimodal("Mistral3", kinds=IMAGES),
    "internvl": _multimodal("InternVL", kinds=IMAGES),
    "llava": _multimodal("Llava", kinds=IMAGES),
    "smolvlm": _multimodal("SmolVLM", kinds=IMAGES, joined=1),
    "glm4v": _multimodal("Glm4v", "glm4v_text"),
    "glm4v_moe": _multimodal("Glm4vMoe", "glm4v_moe_text"),
    "glm46v": _multimodal("Glm46V", "glm4v_text", "glm4v_moe_text"),
}
"""Multimodal families. Only media in `kinds` are run.

tests/integration/test_multimodal.py tests text, and test_images.py tests media.
"""


def known_family(model_type: str) -> Family | None:
    """The family of a configuration's model_type; None if it is not known."""
    return FAMILIES.get(model_type) or MULTIMODAL.get(model_type)


def family_of(core: Any) -> Family:
    """The family of a supported model."""
    found = known_family(core.config.model_type)
    assert found is not None
    return found


def known_classes() -> list[str]:
    """Names of the classes of all families."""
    return [family.model_class for family in (*FAMILIES.values(), *MULTIMODAL.values())]
