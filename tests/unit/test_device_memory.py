"""Memory of a device that is planned for, and what it is compared with."""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forkpoint.plan.device_memory import DeviceMemory, margin_bytes, total_parameters
from forkpoint.plan.models import MODELS
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.units import GIB

GB = 10**9
KINDS = {
    "qwen3-0.6b": "qwen3",
    "qwen3-8b": "qwen3",
    "llama3.2-1b": "llama",
    "llama3-8b": "llama",
    "qwen2.5-7b": "qwen2",
    "qwen3-30b-a3b": "qwen3_moe",
    "mistral-7b": "mistral",
    "deepseek-v3": "deepseek_v3",
}


@pytest.mark.parametrize("name", KINDS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = MODELS[name]
    given = {"tie_word_embeddings": False, **config}
    if name == "deepseek-v3":
        given["n_routed_experts"] = given.pop("num_experts")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(KINDS[name], **given))
    wanted = sum(p.numel() for p in model.parameters())
    found = total_parameters(config, ModelShape.from_config(config))
    assert found == pytest.approx(wanted, rel=0.01)


def test_a_device_has_left_what_nothing_else_takes() -> None:
    device = DeviceMemory(80 * GB, 8 * 10**9, 2)
    assert (device.weights_bytes, device.gradients_bytes) == (16 * GB, 16 * GB)
    assert device.optimizer_bytes == 64 * GB
    assert device.left_bytes < 0 and device.budget_bytes is None and not device.fits(0)
    small = replace(device, optimizer_bytes_per_parameter=2)
    left = 80 * GB - 48 * GB - margin_bytes(80 * GB) - GIB // 2
    assert small.left_bytes == left and small.budget_bytes == left // GIB * GIB
    assert small.fits(left) and not small.fits(left + 1)
    adapters = replace(device, trained_share=0.01)
    assert adapters.fixed_bytes == int(16 * GB + 0.01 * 8 * 10**9 * 10)
