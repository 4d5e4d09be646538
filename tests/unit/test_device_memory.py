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
    "llama3-8b": "llama",
    "qwen2.5-7b": "qwen2",
    "qwen3-30b-a3b": "qwen3_moe",
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
    device = DeviceMemory(total_bytes=80 * GB, parameters=8 * 10**9, dtype_bytes=2)
    assert (device.weights_bytes, device.gradients_bytes) == (16 * GB, 16 * GB)
    assert device.optimizer_bytes == 32 * GB
    whole = replace(device, dtype_bytes=4)
    assert whole.optimizer_bytes == 64 * GB
    assert whole.left_bytes < 0 and whole.budget_bytes == GIB and not whole.fits(0)
    small = replace(device, optimizer_bytes_per_parameter=2)
    left = 80 * GB - 48 * GB - margin_bytes(80 * GB) - GIB // 2
    assert small.left_bytes == left and small.budget_bytes == left // GIB * GIB
    assert small.fits(left) and not small.fits(left + 1)
    summed = replace(device, step_bytes_per_parameter=4)
    assert summed.gradients_bytes == 48 * GB and replace(summed, ranks=2).fixed_bytes == (
        replace(device, ranks=2).fixed_bytes + 16 * GB
    )
    adapters = replace(device, trained_share=0.01)
    assert adapters.fixed_bytes == int(16 * GB + 0.01 * 8 * 10**9 * 6)


def test_ranks_divide_what_a_device_holds() -> None:
    """Blocks at work and the gradients of a step are whole on every rank."""
    one = DeviceMemory(
        total_bytes=80 * GB, parameters=10**10, dtype_bytes=2, embeddings=10**9, layers=9
    )
    four = replace(one, ranks=4)
    assert four.weights_bytes == 5 * GB + 2 * (1 + 3) * GB
    assert four.gradients_bytes == 20 * GB + 5 * GB and four.optimizer_bytes == 10 * GB
    replicated = replace(four, sharded=False)
    assert replicated.weights_bytes == 20 * GB and replicated.optimizer_bytes == 40 * GB
    assert replicated.gradients_bytes == 40 * GB, "with the buckets that DDP has besides"
    assert not one.fits(6 * GB) and one.least_ranks(6 * GB) == 2
    assert replicated.least_ranks(6 * GB) == 4, "no fewer than there are"
    assert replace(one, parameters=10**11).least_ranks(0) is None
    # The planner on these ranks keeps to whole GiB.
    two = replace(one, ranks=2)
    assert two.budget_bytes < two.left_bytes
    assert two.has_plan(two.budget_bytes) and two.fits(two.left_bytes)
    assert not two.has_plan(two.left_bytes) and one.least_ranks(two.left_bytes) == 4
