"""Plans whose prefix caches are in the host's memory: how many layers, their memory and time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forkpoint import Config
from forkpoint.errors import PlanError
from forkpoint.plan import Plan, builder, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.host_cache import LAYERS_HERE, layer_cache_bytes
from forkpoint.plan.models import MODELS
from forkpoint.plan.predict import cache_bytes, peak_bytes
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.tree import REPEATED_BYTES, Microbatch
from forkpoint.tree.forest import Forest
from forkpoint.units import GIB
from made_calibrations import SHAPE as SMALL
from made_calibrations import group, made_up

SHAPE = ModelShape.from_config(MODELS["llama3-8b"], dtype_bytes=2)
LAYERS = SHAPE.attention_layers
ACROSS = Config(sharing="group", boundary="across", max_microbatch_tokens=4096)


BATCH = group(30_000, 2000, 2)
SMALL_BATCH = group(3000, 200, 2)


def planned(config: Config = ACROSS, **options: Any) -> Plan:
    return make_plan(BATCH, SHAPE, replace(config, **options))


@pytest.fixture(scope="module")
def on_device() -> Plan:
    return planned(memory_budget="200GiB", checkpointing="full", head_logits="recompute")


def test_layers_move_where_nothing_fits(on_device: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few as it takes; the last one too many for the budget is said to be."""
    monkeypatch.setattr(builder, "LEAST_MICROBATCH_TOKENS", ACROSS.max_microbatch_tokens)
    assert on_device.host_layers == 0
    layer = layer_cache_bytes(on_device.cache_tokens, SHAPE)
    peak = on_device.predicted_peak_bytes or 0
    for moved in (1, 5, LAYERS - LAYERS_HERE):
        budget = peak - moved * layer
        options: dict[str, Any] = {"checkpointing": "full", "head_logits": "recompute"}
        options |= {"activations": "keep", "memory_budget": budget}
        plan = planned(**options)
        assert plan.host_layers == moved + LAYERS_HERE
        assert plan.predicted_peak_bytes == budget
        meter = meter_of(plan)
        fewer = replace(plan, host_layers=plan.host_layers - 1)
        assert moved == 1 or peak_bytes(fewer, meter) > budget
        with pytest.raises(PlanError, match="memory_budget"):
            planned(**options, prefix_cache="device")
    with pytest.raises(PlanError, match="memory_budget"):
        planned(**options | {"memory_budget": budget - layer})


def test_what_fits_on_the_device_stays(on_device: Plan) -> None:
    options: dict[str, Any] = {"checkpointing": "full", "memory_budget": "200GiB"}
    options["head_logits"] = "recompute"
    assert planned(**options).host_layers == 0
    always = planned(**options, prefix_cache="host")
    assert always.host_layers == LAYERS
    here, there = cache_bytes(on_device), cache_bytes(always)
    assert there == here * LAYERS_HERE // LAYERS
    assert always.host_cache_bytes == here


def test_layers_move_where_that_is_cheaper_than_repeating_forwards() -> None:
    """On the device caches fit if forwards are repeated; the measured rate of copies decides."""
    config = replace(ACROSS, max_microbatch_tokens=1000)
    whole = make_plan(SMALL_BATCH, SMALL, config, calibration=made_up())
    budget = int(0.8 * (whole.predicted_peak_bytes or 0))
    found: dict[tuple[float, str], Plan] = {}
    for rate in (1e3, 1e9):
        measured = made_up(out_bytes_per_ms=rate, back_bytes_per_ms=rate)
        for where in ("device", "auto"):
            asked = replace(config, memory_budget=budget, prefix_cache=where)
            found[rate, where] = make_plan(SMALL_BATCH, SMALL, asked, calibration=measured)
    for here in (found[1e3, "device"], found[1e9, "device"], found[1e3, "auto"]):
        assert here.host_layers == 0 and here.fits
        assert here.microbatches[0].checkpointing == "full"
    slow, fast = found[1e3, "auto"], found[1e9, "auto"]
    assert slow.cost == found[1e3, "device"].cost
    assert fast.host_layers == SMALL.attention_layers and fast.fits
    assert {(m.checkpointing, m.activations) for m in fast.microbatches} == {("none", "keep")}
    assert fast.cost == pytest.approx(whole.cost, rel=0.01)
    assert fast.cost < 0.75 * found[1e9, "device"].cost
    # Without a calibration copies have no price.
    nominal = make_plan(SMALL_BATCH, SMALL, config)
    tight = replace(config, memory_budget=int(0.7 * (nominal.predicted_peak_bytes or 0)))
    assert make_plan(SMALL_BATCH, SMALL, tight).host_layers == 0


def test_host_memory_is_kept_to() -> None:
    whole = planned(prefix_cache="host")
    layer = layer_cache_bytes(whole.cache_tokens, SHAPE)
    plan = planned(prefix_cache="host", host_memory=10 * layer + 1)
    assert plan.host_layers == 10 and plan.host_cache_bytes == 10 * layer
    assert planned(prefix_cache="host", host_memory=layer - 1).host_layers == 0


def test_activations_beyond_host_memory_stay_on_the_device() -> None:
    peaks = [
        planned(activations=way, host_memory=limit).predicted_peak_bytes or 0
        for way, limit in (("offload", None), ("offload", "8GiB"), ("offload", 1), ("keep", None))
    ]
    assert peaks[0] < peaks[1] == peaks[3] - 8 * GIB
    assert peaks[2] == peaks[3] - 1


def test_activations_are_offloaded_within_host_memory() -> None:
    """Those that do not fit run again."""
    measured, config = made_up(out_bytes_per_ms=1e9, back_bytes_per_ms=1e9), Config(sharing="group")
    config = replace(config, boundary="across", max_microbatch_tokens=512, prefix_cache="device")
    whole = make_plan(SMALL_BATCH, SMALL, config, calibration=measured)
    budget = int(0.9 * (whole.predicted_peak_bytes or 0))
    found: dict[int | None, Plan] = {}
    kept = max(meter_of(whole, measured).kept_bytes(m) for m in whole.microbatches)
    for limit in (None, 2 * kept, 1):
        limited = replace(config, host_memory=limit)
        plan = make_plan(SMALL_BATCH, SMALL, limited, calibration=measured, budget_bytes=budget)
        assert plan.fits
        found[limit] = plan
    ways = {
        limit: [m.activations for m in plan.microbatches if m.children]
        for limit, plan in found.items()
    }
    assert "offload" in ways[None] and "recompute" not in ways[None]
    assert ways[2 * kept].count("offload") == 2 and "recompute" in ways[2 * kept]
    assert "offload" not in ways[1]
    assert found[None].cost < found[2 * kept].cost < found[1].cost


def test_gradients_of_ancestors_keys_are_counted() -> None:
    """On GPUs: those of one layer, and repeated for the heads of queries up to a limit."""
    for prompt, limited in ((30_000, False), (300_000, True)):
        batch, config = group(prompt, 2000, 2), replace(ACROSS, max_microbatch_tokens=65_536)
        cpu = make_plan(batch, SHAPE, config)
        gpu = make_plan(batch, SHAPE, config, capabilities=Capabilities(runs_ahead=True))
        own = (prompt - 1) * 8 * 2 * 128 * 2
        repeated = max(REPEATED_BYTES, 4 * own // 8) if limited else 4 * own
        (leaf,) = (m for m in gpu.microbatches if not m.children)
        assert meter_of(gpu).working_bytes(leaf) == own + repeated
        assert meter_of(cpu).working_bytes(cpu.microbatches[-1]) == 0


def test_a_step_takes_as_long_as_its_copies() -> None:
    """Of each instruction the direction that takes longer counts, and the first layer's copy."""
    found: dict[str, Plan] = {}
    for name, rate in {"fast": 1e15, "slow": 1e2}.items():
        measured = made_up(out_bytes_per_ms=rate, back_bytes_per_ms=rate)
        config = replace(ACROSS, prefix_cache="host", max_microbatch_tokens=1000)
        found[name] = make_plan(SMALL_BATCH, SMALL, config, calibration=measured)
        config = replace(config, prefix_cache="device")
        found[f"{name}, here"] = make_plan(SMALL_BATCH, SMALL, config, calibration=measured)
    plan = found["slow"]
    assert plan.host_layers and len(plan.microbatches) == 4
    moved = [plan.copied_bytes(i) for i in plan.program.instructions]
    expected = sum(max(out, back) + back / SMALL.attention_layers for out, back in moved) / 1e2
    assert plan.cost == pytest.approx(expected, rel=0.01)
    assert plan.cost > 100 * found["fast"].cost
    assert found["fast"].cost == pytest.approx(found["fast, here"].cost, rel=1e-6)
    assert found["slow, here"].cost == pytest.approx(found["fast, here"].cost, rel=1e-6)


def test_copies_are_of_what_is_read_and_captured() -> None:
    plan = planned(prefix_cache="host", activations="recompute")
    shape = plan.shape
    assert shape is not None
    assert plan.host_layers == LAYERS
    state, total = shape.boundary_bytes_per_token, shape.boundary_gradient_bytes_per_token
    for instruction in plan.program.instructions:
        microbatch = plan.microbatches[instruction.microbatch]
        read = sum(m.tokens for m in plan.microbatches[: microbatch.index] if m.children)
        own = microbatch.tokens * bool(microbatch.children)
        expected = {
            "forward": (own * state, read * state),
            "recompute": (0, read * state),
            "backward": (read * total, read * (state + total) + own * total),
        }
        assert plan.copied_bytes(instruction) == expected[instruction.operation]


def test_ancestors_outside_of_a_microbatch() -> None:
    #  0 - 1 - 3 - 4
    #   \- 2    \- 5
    parent, six = np.array([-1, 0, 0, 1, 3, 3]), np.ones(6, np.int64)
    plan = Plan("tree", "mixed", 6, Forest(six, parent, six, six, six, six, six), ())

    def ancestors(*segments: int) -> set[int]:
        return plan.ancestors_of(Microbatch(0, -1, segments, (), (), 0))

    assert ancestors(4, 5) == {0, 1, 3}
    assert ancestors(3, 4, 2) == {0, 1}
    assert ancestors(0) == set()
