"""Tiny random multimodal models, whose encoders are as small as they can be."""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import hybrids
from versions import eager_experts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    **hybrids.DELTA,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
GLM = {**MROPE, "partial_rotary_factor": 1.0}
INTERLEAVED = {"rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
QWEN2_VISION = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 16, "window_size": 16}
QWEN3_VISION = {**QWEN_VISION, "hidden_size": 16, "intermediate_size": 16}
DEEP = {**QWEN3_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**QWEN_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1},
    "qwen2_5_vl": QWEN2_VISION,
    "qwen3_vl": DEEP,
    "qwen3_vl_moe": DEEP,
    "qwen3_5": {**QWEN3_VISION, "num_position_embeddings": 16},
    "qwen3_5_moe": {**QWEN3_VISION, "num_position_embeddings": 16},
    "gemma3": SIGLIP,
    "gemma4": {**SIGLIP, "head_dim": 8, "pooling_kernel_size": 1, "position_embedding_size": 16},
    "llama4": {
        **SIGLIP,
        "intermediate_size": 64,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    },
    "mistral3": {**SIGLIP, "model_type": "pixtral", "head_dim": 8, "image_size": 32},
    "internvl": {**SIGLIP, "image_size": [16, 16], "patch_size": [4, 4]},
    "llava": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16},
    "smolvlm": SIGLIP,
    "glm4v": {**QWEN2_VISION, "image_size": 16},
    "glm4v_moe": {**QWEN2_VISION, "image_size": 16},
    "glm46v": {**QWEN2_VISION, "image_size": 16},
}
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": MROPE,
    "qwen2_5_vl": MROPE,
    "qwen3_vl": INTERLEAVED,
    "qwen3_vl_moe": {**INTERLEAVED, **MOE},
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**DELTA, **hybrids.EXPERTS},
    "gemma3": {"sliding_window": 7, "query_pre_attn_scalar": 8},
    "gemma4": {
        "sliding_window": 7,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 5.0,
    },
    "llama4": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 7,
        "floor_scale": 4,
        "attn_scale": 0.7,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 40,
    },
    "mistral3": {"model_type": "mistral", "sliding_window": 7},
    "internvl": {"model_type": "qwen2"},
    "llava": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "glm4v": GLM,
    "glm4v_moe": {
        **GLM,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "glm46v": {**GLM, "model_type": "glm4v_text"},
}
OUTER: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "internvl": {"image_seq_length": 4},
    "mistral3": {"spatial_merge_size": 1, "vision_feature_layer": -1},
    "llava": {"image_seq_length": 4, "vision_feature_layer": -1},
    "smolvlm": {"scale_factor": 2},
}
IMAGE, VIDEO = 62, 63
"""Placeholders of images and of video."""


def tiny_multimodal(
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    vision: Mapping[str, Any] = MappingProxyType({}),
    **text: Any,
) -> Any:
    """A random multimodal model of a family; `text` and `vision` change the configurations of its
    language model and of its encoder."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if family == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("the forward of this version fails")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # special tokens beyond the tiny vocabulary
        made: Any = CONFIG_MAPPING[family]
        config = made(
            text_config={**SIZES, **TEXT[family], **text},
            vision_config={**VISION[family], **vision},
            tie_word_embeddings=text.get("tie_word_embeddings", False),
            **OUTER.get(family, {}),
        )
        config.image_token_id = IMAGE
        if hasattr(config, "video_token_id"):
            config.video_token_id = VIDEO
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    torch.set_rng_state(state)
    eager_experts(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Llama 4's encoder, which text does not run, is complex
        return model.to(dtype).train()
