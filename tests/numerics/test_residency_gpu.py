"""Host memory with streams and pinned buffers, for activations and prefix caches.

Gradients are the same as on the device, and less device memory is taken.
"""

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.engine.staging import StreamTransfers
from forkpoint.testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1000,
}
WAYS: dict[str, dict[str, Any]] = {
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute"},
    "cache": {"prefix_cache": "host"},
    "files": {
        "prefix_cache": "host",
        "activations": "offload",
        "host_memory": "64MiB",
        "offload_folder": tempfile.gettempdir(),
    },
    "all": {"prefix_cache": "host", "activations": "offload", "checkpointing": "full"},
}
GROUP = Config(sharing="group", boundary="across", max_microbatch_tokens=4096)


def make_model() -> torch.nn.Module:
    """Spread as trained weights are, so that no sum of 1,024 terms overflows bfloat16."""
    model = tiny_model("qwen3", dtype=torch.float32, **SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.1)
    return model.to("cuda", torch.bfloat16).train()


def make_batch() -> RolloutBatch:
    prompt, response = 4096, 1024
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, prompt).tolist()
    mask = [0] * prompt + [1] * response
    return RolloutBatch(
        Rollout(shared + rng.integers(0, 1000, response).tolist(), mask, 1.0 - n, group_id="g")
        for n in range(4)
    )


def step(model: torch.nn.Module, config: Config) -> tuple[dict[str, Tensor], int, object]:
    """Gradients, the peak of the second of two steps above what the model holds, and its stats."""
    policy, batch = wrap(model, config), make_batch()
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stats = policy.forward_backward(batch, losses.GRPO())
        torch.cuda.synchronize()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return gradients, torch.cuda.max_memory_allocated() - before, stats


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_gradients_as_kept(way: str, compiled: bool) -> None:
    model = make_model()
    config = replace(GROUP, compile_blocks=compiled, attention_kernel="fa2")
    kept, kept_peak, _ = step(model, config)
    # Kernels add with atomics, so that two runs of one plan differ as well: by so much.
    again, _, _ = step(model, config)
    found, peak, stats = step(model, replace(config, **WAYS[way]))
    for name, gradient in kept.items():
        norm = float(gradient.float().norm())
        noise = float((again[name] - gradient).float().norm()) / norm
        difference = float((found[name] - gradient).float().norm()) / norm
        assert difference <= 2 * noise + 1e-3, name
    assert peak <= kept_peak
    if way != "recompute":
        assert stats.offload.out_bytes > 0 and stats.offload.left_bytes == 0
        assert stats.offload.prefetched > stats.offload.on_demand
        assert (stats.offload.file_bytes > 0) == (way == "files")


@pytest.mark.parametrize("way", ["offload", "cache", "files", "all"])
def test_many_steps_with_reused_host_memory(way: str) -> None:
    """Host memory is written again and again while copies from it may be under way."""
    model = make_model()
    config = replace(GROUP, max_microbatch_tokens=1024, attention_kernel="fa2")
    config = replace(config, **WAYS[way])
    policy, batch = wrap(model, config), make_batch()
    norms = []
    for _ in range(6):
        model.zero_grad()
        policy.forward_backward(batch, losses.GRPO())
        squares = [p.grad.float().square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
    kept = wrap(model, replace(config, activations="keep", prefix_cache="device"))
    model.zero_grad()
    kept.forward_backward(batch, losses.GRPO())
    squares = [p.grad.float().square().sum() for p in model.parameters() if p.grad is not None]
    assert norms == pytest.approx([float(torch.stack(squares).sum().sqrt())] * 6, rel=1e-3)


def test_a_margin_larger_than_the_device_leaves_every_fetch_to_demand() -> None:
    model = make_model()
    policy = wrap(model, replace(GROUP, **WAYS["all"], attention_kernel="fa2"))
    batch = make_batch()
    policy.forward_backward(batch, losses.GRPO())
    assert policy.model_state.staging is not None
    assert isinstance(policy.model_state.staging.transfers, StreamTransfers)
    policy.model_state.staging.transfers.margin_bytes = 1 << 50
    stats = policy.forward_backward(batch, losses.GRPO())
    assert stats.offload.prefetched == 0 and stats.offload.on_demand > 0
