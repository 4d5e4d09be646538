"""Prefix cache in host memory: the step is the same, and two layers at a time are on the device."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_models import frozen_below, lora
from scenarios import CHAIN
from steps import ACROSS, clear_gradients, forked_batch, relative_distance, small_model, step_error
from steps import gradients as gradients_of
from torch import Tensor, nn

from forkpoint import Policy, losses, wrap
from forkpoint.engine.host_cache import HostCache
from forkpoint.engine.staging import OffloadStats, PlainTransfers, Staging
from forkpoint.testing import tiny_model
from hybrids import MIXED, tiny_hybrid
from lanes import slow_besides
from open_files import open_files

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample", "without_lists")

HOSTED = replace(ACROSS, prefix_cache="host")
WAYS = (("keep", "none"), ("recompute", "selective"), ("offload", "full"))
SMALL_CHUNK = 1 << 14
"""Bytes of host memory: a layer's tensors take several blocks."""


def in_small_chunks(policy: Policy) -> Staging:
    """Let a policy's host memory be taken in small chunks; returns it."""
    transfers = PlainTransfers(torch.device("cpu"), chunk_bytes=SMALL_CHUNK)
    policy.model_state.staging = Staging(transfers)
    return policy.model_state.staging


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": lambda: frozen_below(tiny_model("qwen3")),
    "lora": lambda: lora(small_model("qwen3")),
    "delta rule": lambda: tiny_hybrid("qwen3_5_text", kinds=MIXED + MIXED),
    "mamba": lambda: tiny_hybrid("granitemoehybrid", kinds=MIXED + MIXED),
    "experts": lambda: small_model(
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        experts_implementation="eager",
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", slow_besides(["frozen"], MODELS))
def test_models(name: str) -> None:
    for activations, checkpointing in WAYS:
        config = replace(HOSTED, activations=activations, checkpointing=checkpointing)
        config = replace(config, max_microbatch_tokens=CHAIN)
        assert step_error(MODELS[name](), forked_batch(), losses.GRPO(), config) < 1e-10


def test_a_pass_of_scores_and_log_probs_with_a_graph() -> None:
    model, batch = small_model("llama", dtype=torch.float32).train(), forked_batch()
    found = []
    for place in ("device", "host"):
        policy = wrap(model, replace(ACROSS, prefix_cache=place))
        clear_gradients(model)
        logprobs = policy.logprobs(batch)
        logprobs.square().sum().backward()
        scores = policy.score(batch)
        assert (policy.model_state.staging is not None) == (place == "host")
        found.append((logprobs.detach(), scores.logprobs, gradients_of(model)))
    (first, second, gradients), (other, another, wanted) = found
    assert torch.equal(first, other) and torch.equal(second, another)
    assert relative_distance(gradients, wanted) == 0


# What is moved ------------------------------------------------------------------------------------


class Short(PlainTransfers):
    """Copies of a CPU that has no memory left for what is fetched ahead."""

    def headroom_bytes(self) -> int | None:
        return 0


def hosted_step(
    transfers: PlainTransfers | None = None, **options: Any
) -> tuple[Any, Staging, float]:
    """A step in float64 of a model of three layers: statistics, host memory, distance to dense."""
    model = tiny_model("llama")
    policy = wrap(model, replace(HOSTED, **options))
    staging = Staging(transfers or PlainTransfers(torch.device("cpu"), chunk_bytes=SMALL_CHUNK))
    policy.model_state.staging = staging
    error = step_error(model, forked_batch(), losses.GRPO(), policy=policy)
    clear_gradients(model)
    stats = policy.forward_backward(forked_batch(), losses.GRPO())
    assert staging.used_bytes == 0, "host memory is in use after the step"
    return stats, staging, error


def test_two_layers_are_on_the_device_and_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    fetch = HostCache._fetch

    def watched(self: HostCache, layer: Any) -> Any:
        found = fetch(self, layer)
        most.append(len(self._fetched))
        return found

    monkeypatch.setattr(HostCache, "_fetch", watched)
    stats, _, error = hosted_step()
    assert error < 1e-10
    assert max(most) == 2 and stats.plan.host_layers == 3
    assert stats.offload.on_demand == 0 and stats.offload.prefetched > 0
    assert 0 < stats.offload.cache_bytes == stats.offload.out_bytes + stats.offload.back_bytes


@pytest.mark.slow
def test_without_room_nothing_is_fetched_ahead() -> None:
    stats, _, error = hosted_step(Short(torch.device("cpu"), chunk_bytes=SMALL_CHUNK))
    assert error < 1e-10
    assert stats.offload.prefetched == 0 and stats.offload.held_back > 0
    assert stats.offload.on_demand > 0


@pytest.mark.slow
def test_beyond_the_host_s_limit_layers_stay() -> None:
    # The planner counts bytes, and host memory is taken in chunks: a layer more may not fit.
    whole, staging, _ = hosted_step()
    limit = whole.plan.host_cache_bytes
    stats, staging, error = hosted_step(host_memory=limit)
    assert error < 1e-10 and staging.held_bytes <= limit
    assert stats.plan.host_layers == 3 and stats.offload.left_bytes > 0
    stats, staging, error = hosted_step(host_memory=limit * 2 // 3)
    assert error < 1e-10 and stats.plan.host_layers == 2
    assert 0 < staging.held_bytes <= limit * 2 // 3


@pytest.mark.parametrize("limit", slow_besides([1], [1, 3 * SMALL_CHUNK]))
def test_beyond_the_host_s_limit_there_are_files(limit: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"activations": "offload", "checkpointing": "full"}
    changes |= {"max_microbatch_tokens": CHAIN}
    whole, _, _ = hosted_step(**changes)
    stats, staging, error = hosted_step(**changes, host_memory=limit, offload_folder=tmp_path)
    assert error < 1e-10
    assert stats.plan.host_layers == 3 and stats.offload.left_bytes == 0
    moved = stats.offload.out_bytes, stats.offload.back_bytes
    assert moved == (whole.offload.out_bytes, whole.offload.back_bytes)
    assert staging.held_bytes <= limit and staging.file_bytes == stats.offload.file_bytes > 0
    files = staging.file_bytes // SMALL_CHUNK
    assert len(open_files(tmp_path)) == files and not list(tmp_path.iterdir())
    del staging, stats
    gc.collect()
    assert not open_files(tmp_path)


@pytest.mark.slow
def test_300_steps_take_no_more_than_one(tmp_path: Path) -> None:
    model = tiny_hybrid("qwen3_5_text", kinds=MIXED, dtype=torch.float32)
    config = replace(HOSTED, activations="offload", checkpointing="full", host_memory=SMALL_CHUNK)
    policy = wrap(frozen_below(model), replace(config, offload_folder=tmp_path))
    staging, found = in_small_chunks(policy), []
    for number in range(303):
        clear_gradients(model)
        policy.forward_backward(forked_batch(), losses.GRPO())
        if number in (2, 302):
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(issubclass(type(entry), Tensor) for entry in objects)
            held = staging.held_bytes, staging.file_bytes, len(open_files(tmp_path))
            found.append((tensors, *held, len(objects)))
    *before, objects_before = found[0]
    *after, objects_after = found[1]
    assert before == after and before[2] > 0
    # A growth of one object a step would be 300.
    assert objects_after - objects_before < 100


def test_copies_are_as_predicted() -> None:
    """But for sums that are zero, which are not fetched."""
    stats, _, _ = hosted_step(max_microbatch_tokens=CHAIN)
    moved = [stats.plan.copied_bytes(i) for i in stats.plan.program.training]
    out, back = (sum(way) for way in zip(*moved, strict=True))
    assert stats.offload.out_bytes == out
    assert 0.5 * back < stats.offload.back_bytes <= back


def test_copies_of_both_passes_are_counted() -> None:
    stats = wrap(small_model("llama"), HOSTED).forward_backward(forked_batch(), losses.GSPO())
    moved = [stats.plan.copied_bytes(i) for i in stats.plan.program.instructions]
    assert stats.plan.program.scores and stats.offload is not None
    assert stats.offload.out_bytes == sum(out for out, _ in moved)
    assert stats.offload.allocation_ms > 0


def test_hosted_layers_are_spread() -> None:
    staging = Staging(PlainTransfers(torch.device("cpu"), chunk_bytes=SMALL_CHUNK))
    cache = HostCache(staging, OffloadStats(), hosted=3, layers=8)
    like = torch.zeros(1, 2)
    hosted = [cache.takes(layer, "k", like, 4, False) for layer in range(8)]
    assert sum(hosted) == 3 and np.diff(np.flatnonzero(hosted)).tolist() == [3, 2]
