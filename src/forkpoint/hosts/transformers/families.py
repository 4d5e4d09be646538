"""Model families of transformers whose modules have been shown exact.

Each stands here because tests/numerics/test_families.py holds for it: loss, log-probs and every
parameter's gradient within 1e-10 of dense in float64, for every way of sharing. Its code is used as
it is; what is written down is what its causal model does after the head, which is ours to compute.
"""

from dataclasses import dataclass
from typing import Any

from forkpoint.rollouts.media import MediaKind


@dataclass(frozen=True)
class Family:
    """How the causal language model of a family is told, and what it does to its logits."""

    model_class: str
    package: str | None = None
    """The package below transformers.models, where it is not the model_type."""
    softcap: str | None = None
    """The configuration's name for the bound of its logits, by tanh."""
    scale: str | None = None
    """The name of a factor of its logits, which the model keeps as an attribute."""
    divisor: str | None = None
    """The configuration's name for what its logits are divided by."""

    media: tuple[tuple[str, int], ...] = ()
    """Token ids that stand for images or video in models of the family that see them."""
    decoders: tuple[str, ...] | None = None
    """Of a multimodal family: model types of its own language models. Empty where it has any of
    `FAMILIES`."""
    kinds: tuple[MediaKind, ...] = ()
    """Media whose encoder has been shown exact."""
    axes: bool = False
    """Whether tokens of media have positions in time, height and width (get_rope_index)."""
    joined: int = 0
    """The dimension along which inputs of the media of one row are joined."""
    bidirectional: bool = False
    """Whether tokens of an image see each other both ways."""
    undivided: bool = False
    """Whether parts of the model on ranks (tensor and context parallelism, stages of a pipeline)
    have not been shown exact."""

    @property
    def critic_class(self) -> str:
        """The family's token classifier; one of a single label is a critic. Not all have one."""
        if self.decoders is not None:
            return ""
        return self.model_class.replace("ForCausalLM", "ForTokenClassification")

    def head_options(self, causal: Any) -> dict[str, float | None]:
        """`logit_scale` and `softcap` of the head, read where the stock forward reads them."""
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
"""Models with encoders of images; media of those that have `kinds` are run.

Evidence is in tests/integration/test_multimodal.py for text, and test_images.py for media.
"""


def known_family(model_type: str) -> Family | None:
    """The family of a configuration's model_type; None where it is not known."""
    return FAMILIES.get(model_type) or MULTIMODAL.get(model_type)


def family_of(core: Any) -> Family:
    """The family of a model that is supported."""
    found = known_family(core.config.model_type)
    assert found is not None
    return found


def known_classes() -> list[str]:
    """Names of the classes of all families."""
    return [family.model_class for family in (*FAMILIES.values(), *MULTIMODAL.values())]
