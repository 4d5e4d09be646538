"""Stock models in the states that users have them in, and what steps of them are compared by."""

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from steps import ACROSS, forked_batch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forkpoint import Config, losses
from forkpoint.testing import ReadOnlyHook
from versions import checkpoint_blocks

BATCH = forked_batch()
LOSS = losses.GRPO(kl=0.1)
TREE_IN_ROW = Config(sharing="tree", boundary="within")
BARS = {torch.float64: 1e-10, torch.float32: 2e-5}

quiet_peft = pytest.mark.filterwarnings(
    # peft with newer transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
FAMILIES = ("llama", "qwen3")
CONFIGS = (ACROSS, TREE_IN_ROW)


def lora(model: nn.Module, **options: Any) -> PeftModel:
    """Adapters with weights as after some training: at first B is 0, and A gets no gradient."""
    chosen = {"target_modules": "all-linear", **options}
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=3, init_lora_weights=False, **chosen)
    torch.manual_seed(2)
    with warnings.catch_warnings():  # peft's, on merging and saving such adapters
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    assert isinstance(adapted, PeftModel)
    return adapted


def checkpointing(model: nn.Module, **options: Any) -> None:
    checkpoint_blocks(model, **options)
    model.train()


def count_calls(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(ReadOnlyHook(lambda *_: calls.append(1)))
    return calls


def frozen_below(model: nn.Module) -> nn.Module:
    model.get_submodule("model.embed_tokens").requires_grad_(False)
    for layer in ("model.layers.0", "model.layers.1"):
        model.get_submodule(layer).requires_grad_(False)
    return model


def resized(model: nn.Module) -> nn.Module:
    torch.manual_seed(4)
    model.resize_token_embeddings(67, mean_resizing=False)  # type: ignore[operator]
    return model


def real_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """Two layers of width 128, of the proportions of real models, as the family initialises
    them."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **{**sizes, "tie_word_embeddings": False, **changes})
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).to(dtype)
