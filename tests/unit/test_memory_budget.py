"""Budgets that are measured: what they leave room for, and what plans do with them."""

import logging
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forkpoint import Config, losses, wrap
from forkpoint.engine.memory import host_memory_share, measured_budget
from forkpoint.errors import ConfigError, PlanError
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.builder import MOST_MICROBATCHES, Builder, peak_of
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.device_memory import LEAST_BYTES, margin_bytes
from forkpoint.plan.models import MODELS
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.testing import tiny_model
from forkpoint.units import GIB
from forkpoint.verify.memory import has_room
from made_calibrations import group

SHAPE = ModelShape.from_config(MODELS["qwen3-8b"], dtype_bytes=2)
TOTAL = 80 * 10**9


BATCH = group(3000, 2000, 8)


def planned(budget_gib: float | None, config: Config | None = None, **given: Any) -> Plan:
    budget = None if budget_gib is None else int(budget_gib * GIB)
    return make_plan(BATCH, SHAPE, config or Config(), budget_bytes=budget, **given)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A CUDA device of 80 GB of which 50 GB are free, 4 GB are cached and 2 GB of these used."""
    found = {"free": 50 * 10**9, "reserved": 4 * 10**9, "allocated": 2 * 10**9}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (found["free"], TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: found["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: found["allocated"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return found


def test_a_process_has_a_fraction_of_the_device(
    device: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, model = torch.device("cuda"), nn.Linear(1, 10**9, bias=False, device="meta")
    assert has_room(model, torch.float32, gpu)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.1)
    assert not has_room(model, torch.float32, gpu)


def room(device: dict[str, int], besides: int) -> int:
    free = device["free"] + device["reserved"] - device["allocated"]
    return (free - besides - margin_bytes(TOTAL)) // GIB * GIB


@pytest.mark.parametrize(
    ("limit", "processes", "share_gib"),
    [("max", "", 128), ("max", "8", 16), (str(96 * GIB), "", 48), (str(GIB), "2", 1)],
)
def test_processes_share_half_of_the_hosts_memory(
    limit: str, processes: str, share_gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_PHYS_PAGES": 256 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    files = (str(tmp_path / "memory.max"), str(tmp_path / "none"))
    monkeypatch.setattr("forkpoint.host_memory.GROUP_LIMITS", files)
    assert host_memory_share() == share_gib * GIB


def weights() -> list[nn.Parameter]:
    """2 and 1 GiB of bfloat16 that are trained, and 4 that are not; nothing is allocated."""
    made = [torch.empty(n * GIB // 2, dtype=torch.bfloat16, device="meta") for n in (2, 1, 4)]
    return [nn.Parameter(x, requires_grad=n < 2) for n, x in enumerate(made)]


TRAINED = 3 * GIB // 2
"""Elements that are trained."""


def measured(parameters: list[nn.Parameter], **options: Any) -> int:
    return measured_budget(torch.device("meta"), parameters, Config(**options))


def test_a_budget_leaves_room_for_what_a_step_allocates_besides(device: dict[str, int]) -> None:
    """Gradients of two bytes each and as many of the optimizer as asked for, in whole GiB."""
    for options, each in (
        ({}, 2 + 4),
        ({"optimizer_bytes_per_parameter": 2}, 2 + 2),
        ({"grad_accumulation_dtype": "float32"}, 2 + 8),
        ({"restore_grads": True}, 2 * 2 + 4),
    ):
        assert measured(weights(), **options) == room(device, each * TRAINED)


def test_what_exists_does_not_count_again(device: dict[str, int]) -> None:
    trained = weights()
    for parameter in trained[:2]:
        parameter.grad = torch.empty_like(parameter)
    assert measured(trained) == room(device, 4 * TRAINED)


def test_a_device_without_room_has_the_least_budget(device: dict[str, int]) -> None:
    device["free"] = 0
    assert measured(weights()) == LEAST_BYTES


def test_microbatches_are_as_long_as_memory_allows() -> None:
    free, roomy = planned(None), planned(500)
    assert [m.tokens for m in roomy.microbatches] == [2999 + 8 * 2000]
    assert len(free.microbatches) > 1
    assert roomy.fits and roomy.memory_budget_bytes == 500 * GIB


@pytest.mark.parametrize("budget_gib", [20, 3])
def test_a_plan_keeps_to_what_was_measured(budget_gib: float) -> None:
    plan = planned(budget_gib)
    assert peak_of(plan) <= budget_gib * GIB and plan.fits
    assert budget_gib > 4 or {m.checkpointing for m in plan.microbatches} <= {"selective", "full"}
    assert peak_of(plan) < peak_of(planned(None))
    # It costs about as much at most as recomputing all blocks does, without a limit.
    full = planned(None, Config(checkpointing="full"))
    assert plan.cost <= full.cost * 1.15 or budget_gib < 4


@pytest.mark.parametrize("soft", [False, True])
def test_a_larger_budget_does_not_cost_more(soft: bool) -> None:
    """Within microbatches that are too short for a group, the prompt is computed again for each
    part of it, which costs more than a forward that is repeated."""
    batch = group(5000, 2000, 3)
    config = Config(boundary="within")
    needed = peak_of(make_plan(batch, SHAPE, config))
    costs = []
    for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0):
        budget = int(needed * share)
        if not soft:
            config = Config(boundary="within", memory_budget=budget)
        plan = make_plan(batch, SHAPE, config, budget_bytes=budget if soft else None)
        assert plan.sharing == "group" and plan.fits
        costs.append(plan.cost)
    for less, more in pairwise(costs):
        assert more <= less * 1.11, costs


def test_checkpointing_is_what_the_host_is_able_to() -> None:
    ways = {
        kind: {m.checkpointing for m in planned(3, capabilities=able).microbatches}
        for kind, able in {
            "full": Capabilities(checkpoints=("none", "full")),
            "none": Capabilities(checkpoints=("none",)),
        }.items()
    }
    assert ways == {"full": {"full"}, "none": {"none"}}
    asked = planned(3, Config(checkpointing="none"))
    assert {m.checkpointing for m in asked.microbatches} == {"none"}


def test_the_least_budget_is_named() -> None:
    """It fits, and much less does not; a batch of one rollout needs about as much."""
    needed = []
    for prompt, response, count in ((1000, 100, 3), (1000, 100, 1), (20, 10, 1)):
        batch = group(prompt, response, count)
        with pytest.raises(PlanError) as refused:
            make_plan(batch, SHAPE, Config(memory_budget=1000))
        message = str(refused.value)
        assert message.startswith("no plan fits this batch: ") and "\n" not in message
        found = re.search(r"raise it to at least (\d+), or use shorter rollouts\.$", message)
        assert found is not None, message
        needed.append(int(found[1]))
        assert make_plan(batch, SHAPE, Config(memory_budget=needed[-1])).fits
        with pytest.raises(PlanError):
            make_plan(batch, SHAPE, Config(memory_budget=needed[-1] * 9 // 10))
    assert needed[1] <= needed[0] <= 1.1 * needed[1]
    remedies: list[tuple[dict[str, Any], str]] = [
        ({"boundary": "within"}, "use boundary='across'"),
        ({"prefix_cache": "device"}, "leave prefix_cache to the planner"),
        ({"head_logits": "keep"}, "leave head_logits to the planner"),
        ({"host_memory": 1000}, "raise host_memory"),
    ]
    for options, remedy in remedies:
        with pytest.raises(PlanError, match=rf"to at least \d+, or {remedy}"):
            make_plan(group(1000, 100, 1), SHAPE, Config(memory_budget=1000, **options))


def test_the_named_budget_is_enough_although_it_changes_the_lengths_that_are_tried() -> None:
    batch, config = group(666, 613, 5), Config(prefix_cache="device")
    with pytest.raises(PlanError) as refused:
        make_plan(batch, SHAPE, replace(config, memory_budget=522_510_336))
    found = re.search(r"raise it to at least (\d+)", str(refused.value))
    assert found is not None
    assert make_plan(batch, SHAPE, replace(config, memory_budget=int(found[1]))).fits


def test_naming_a_budget_packs_no_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal takes about twice as long as the search, which has packed the shortest ones."""
    lengths: dict[int | None, list[int]] = {}
    packing = Builder._packing

    def counted(builder: Builder, sharing: str, boundary: str, tokens: int) -> Any:
        lengths.setdefault(builder.budget_bytes, []).append(tokens)
        return packing(builder, sharing, boundary, tokens)

    monkeypatch.setattr(Builder, "_packing", counted)
    with pytest.raises(PlanError, match="to at least"):
        make_plan(BATCH, SHAPE, Config(memory_budget=1000, sharing="group", boundary="mixed"))
    search, check = lengths.values()
    assert set(check) == {min(search)}


def test_what_fits_nowhere_is_planned_with_the_least_memory() -> None:
    plan = planned(0.01)
    assert not plan.fits and "no plan fits the budget" in plan.reason
    assert "DOES NOT FIT" in plan.explain()
    # Prefix cache of a chain, which one rollout of 5,000 tokens takes.
    assert peak_of(plan) < 1.25 * 2.2 * GIB
    assert all("budget" in (c.refused or "") for c in plan.candidates)


def test_no_batch_is_too_long_for_a_chain() -> None:
    """One rollout of 60,000 tokens: whole, and with all activations, it takes 480 GiB."""
    long = group(100, 60_000, 1)
    free = make_plan(long, SHAPE, Config(boundary="within"))
    assert peak_of(free) > 200 * GIB
    assert make_plan(long, SHAPE, Config(), budget_bytes=30 * GIB).fits


@pytest.mark.slow
def test_microbatches_of_a_long_batch_are_not_tried_at_every_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of 120,000 tokens took a minute, most of it for plans of 1,000 microbatches."""
    counts: list[int] = []
    build = Builder._plan_of

    def counted(*given: Any, **named: Any) -> Plan:
        plan = build(*given, **named)
        counts.append(len(plan.microbatches))
        return plan

    monkeypatch.setattr(Builder, "_plan_of", counted)
    long = group(120_000, 500, 2)
    for budget in (3 * GIB, 20 * GIB):
        make_plan(long, SHAPE, Config(checkpointing="auto"), budget_bytes=budget)
    assert max(counts) <= len(long) * (MOST_MICROBATCHES + 1) and len(counts) < 400


@pytest.mark.parametrize("value", [-1, True, "8", float("nan")])
def test_bytes_of_optimizers_are_a_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="optimizer_bytes_per_parameter is"):
        Config(optimizer_bytes_per_parameter=value)


# Steps
# ------------------------------------------------------------


class OnCuda:
    """A policy's host that says that it is on CUDA where budgets ask."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @property
    def device(self) -> torch.device:
        self.asked += 1
        return torch.device("cuda")


@pytest.fixture
def policy(device: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    made = wrap(tiny_model("llama"), Config(self_check=False))
    budgets = made.model_state.budgets
    of: Any = budgets.of
    lower: Any = budgets.lower
    monkeypatch.setattr(budgets, "of", lambda host, config: of(OnCuda(host), config))
    monkeypatch.setattr(budgets, "lower", lambda host, config: lower(OnCuda(host), config))
    return made


def small() -> RolloutBatch:
    return RolloutBatch([Rollout([1, 2, 3, n], [0, 0, 1, 1], 1.0) for n in range(3)])


def test_a_budget_is_measured_once(policy: Any, device: dict[str, int]) -> None:
    before = policy.memory_budget_bytes
    device["free"] //= 2
    assert policy.memory_budget_bytes == before == policy.plan(small()).memory_budget_bytes
    assert policy.with_config(head_chunk_tokens=7).memory_budget_bytes == before
    assert policy.with_config(memory_budget=None).memory_budget_bytes is None
    assert policy.with_config(memory_budget="3GiB").memory_budget_bytes == 3 * GIB
    # With other options a step allocates other things.
    assert policy.with_config(optimizer_bytes_per_parameter=0).memory_budget_bytes < before


def test_a_budget_of_an_earlier_run_is_taken(policy: Any) -> None:
    policy.use_memory_budget(7 * GIB)
    assert policy.memory_budget_bytes == 7 * GIB
    for size in (0, None):
        with pytest.raises(ConfigError, match=f"memory budget is {size}"):
            policy.use_memory_budget(size)


@pytest.fixture
def failing(policy: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the next forwards run out of memory, counted down, and the budgets of all plans."""
    left = [1]
    forward = type(policy.host).forward

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory, made up")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(policy.host), "forward", run)
    return left


def test_a_step_out_of_memory_runs_once_more_with_less(
    policy: Any, failing: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = policy.memory_budget_bytes
    with caplog.at_level(logging.WARNING, "forkpoint"):
        stats = policy.forward_backward(small(), losses.GRPO())
    assert policy.last_step.gradients == "added"
    lowered = policy.memory_budget_bytes
    assert lowered < before and stats.plan.memory_budget_bytes == lowered
    assert f"Config(memory_budget='{lowered // GIB}GiB')" in caplog.text
    plain = wrap(tiny_model("llama"), Config(self_check=False))
    plain.forward_backward(small(), losses.GRPO())
    pairs = zip(policy.host.model.parameters(), plain.host.model.parameters(), strict=True)
    for a, b in pairs:
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("what", ["forward_backward", "score", "logprobs"])
def test_a_second_time_it_is_raised(what: str, policy: Any, failing: list[int]) -> None:
    failing[0] = 2
    arguments = (losses.GRPO(),) if what == "forward_backward" else ()
    with pytest.raises(torch.OutOfMemoryError):
        getattr(policy, what)(small(), *arguments)
    assert failing[0] == 0
    assert all(p.grad is None for p in policy.host.model.parameters())
    getattr(policy, what)(small(), *arguments)


def test_nothing_is_repeated_that_may_not_be(policy: Any, failing: list[int]) -> None:
    given = policy.plan(small())
    for other, arguments in (
        (policy, {"plan": given}),  # the caller's plan
        (policy.with_config(memory_budget="4GiB"), {}),  # the caller's budget
        (policy.with_config(memory_budget=None), {}),
    ):
        failing[0] = 1
        with pytest.raises(torch.OutOfMemoryError):
            other.forward_backward(small(), losses.GRPO(), **arguments)
        assert failing[0] == 0


def test_gradients_from_before_are_not_lost(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails in its second backward has added to `.grad` already."""
    policy = policy.with_config(sharing="none", boundary="within", max_microbatch_tokens=3)
    policy.forward_backward(small(), losses.GRPO())
    kept = {n: p.grad.clone() for n, p in policy.host.model.named_parameters()}
    backward, calls = type(policy.host).backward, []

    def fails(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory, made up")
        backward(self, *args, **kwargs)

    monkeypatch.setattr(type(policy.host), "backward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        policy.forward_backward(small(), losses.GRPO())
    assert policy.last_step.gradients == "cleared" and len(calls) == 2
    calls.clear()
    for name, parameter in policy.host.model.named_parameters():
        parameter.grad = kept[name].clone()
    copying = policy.with_config(restore_grads=True)
    copying.forward_backward(small(), losses.GRPO())
    for name, parameter in policy.host.model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * kept[name], rtol=1e-12, atol=1e-14)


def test_a_plan_that_does_not_fit_is_said_once(
    policy: Any,
    device: dict[str, int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = group(30, 20, 2)
    shape = replace(policy.host.shape, layers=10_000, hidden=2**22, windows=(0,) * 10_000)
    monkeypatch.setattr(type(policy.host), "shape", shape)
    with caplog.at_level(logging.WARNING, "forkpoint"):
        plan = policy.plan(batch)
        policy.plan(batch)
    assert not plan.fits
    assert caplog.text.count("no plan is predicted to fit") == 1
