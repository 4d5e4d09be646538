"""Cost of a schedule in which copies run beside the computation, by hand."""

from dataclasses import replace

import pytest

from forkpoint import Config, Plan
from forkpoint.plan import make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.predict import plan_cost
from forkpoint.plan.pricing.meters import (
    CPU_FLOPS_PER_MS,
    GPU_FLOPS_PER_MS,
    HOST_BLOCK_MS,
    CountedMeter,
    MeasuredMeter,
)
from made_calibrations import SHAPE, group, line, made_up


def test_waiting_for_copies_by_hand() -> None:
    """One parent over one wave, both over sooner than the copies of the parent."""
    measured = made_up(block=line(0.025), out_bytes_per_ms=100.0, back_bytes_per_ms=100.0)
    config = Config(sharing="group", boundary="across", activations="offload")
    batch = group(1001, 10, 2)
    plan = make_plan(batch, SHAPE, config, calibration=measured)
    (parent, child) = plan.microbatches
    meter = MeasuredMeter(measured, plan)
    forward, backward = meter.forward(parent), meter.backward(parent)
    wave = meter.forward(child) + meter.backward(child)
    copies = meter.kept_bytes(parent) / 100
    assert copies == 1000 * 4 * 100 / 100 > forward + wave + backward
    # Out from the first moment; back when all is out; a fourth of the backward after the last byte.
    assert plan_cost(plan, meter) == pytest.approx(2 * copies + backward / 4)


def played(plan: Plan, back_bytes_per_ms: float) -> tuple[float, list[tuple[float, float, int]]]:
    """Cost of a plan whose copies out take no time, and of each microbatch its forward, backward
    and bytes kept."""
    measured = made_up(out_bytes_per_ms=1e15, back_bytes_per_ms=back_bytes_per_ms)
    meter = MeasuredMeter(measured, plan)
    microbatches = [
        (meter.forward(microbatch), meter.backward(microbatch), meter.kept_bytes(microbatch))
        for microbatch in plan.microbatches
    ]
    return plan_cost(plan, meter), microbatches


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_fetching_into_what_is_given_back_by_hand(checkpointing: str) -> None:
    """A parent of 1,000 tokens and a wave of 600, which keeps all of its activations or few."""
    config = Config(sharing="group", boundary="across", activations="offload")
    plan = make_plan(group(1001, 300, 2), SHAPE, config, calibration=made_up())
    parent, child = plan.microbatches
    plan = replace(plan, microbatches=(parent, replace(child, checkpointing=checkpointing)))
    _, [(first, last, nbytes), (forward, wave, given_back)] = played(plan, 1.0)
    # Blocks' inputs, a tenth of all, and one block.
    assert given_back == (0.6 if checkpointing == "none" else 0.21) * nbytes
    # Two of four layers of the wave stay alive, so that the copy begins at half. It is so fast that
    # what the wave gives back is there when it ends, and the rest takes longer than the backward.
    speed = nbytes / (2 * last)
    cost, _ = played(plan, speed)
    early = given_back / speed
    assert checkpointing == "none" or early < wave / 2
    begins = max(first + forward + wave / 2 + early, first + forward + wave)
    assert cost == pytest.approx(begins + (nbytes - given_back) / speed + last / 4)
    # And where copies take no time nothing is waited for.
    cost, _ = played(plan, 1e15)
    assert cost == pytest.approx(first + forward + wave + last)


def test_what_a_wave_gave_back_serves_one_offloaded_microbatch_after_the_other() -> None:
    """A chain of a prompt's microbatches: as the last of them is asked for, the one above it is
    fetched."""
    config = Config(
        sharing="group", boundary="across", activations="offload", max_microbatch_tokens=500
    )
    plan = make_plan(group(1001, 250, 2), SHAPE, config, calibration=made_up())
    assert [microbatch.tokens for microbatch in plan.microbatches] == [500, 500, 500]
    _, [(*_, nbytes), (_, middle, _), (_, wave, given_back)] = played(plan, 1.0)
    assert given_back == nbytes
    # Each takes as long to copy as its own backward takes. Room for one is there from the middle of
    # the wave on, and for the other as the first is asked for, from its first layers on.
    cost, microbatches = played(plan, nbytes / middle)
    before = sum(forward for forward, *_ in microbatches)
    first_there = before + wave / 2 + middle
    assert first_there > before + wave
    ends = max(before + wave + middle, first_there + middle / 4)
    second_there = first_there + middle
    last = microbatches[0][1]
    assert cost == pytest.approx(max(ends + last, second_there + last / 4))


@pytest.mark.parametrize("tokens", [100, 120_000])
def test_a_gpu_waits_for_what_the_host_has_not_issued(tokens: int) -> None:
    """Two microbatches, which the host issues one after the other: short ones, or long ones."""
    config = Config(sharing="none", max_microbatch_tokens=tokens + 10)
    batch = group(10, tokens, 2)
    gpu, cpu = (
        make_plan(batch, SHAPE, config, capabilities=Capabilities(runs_ahead=ahead))
        for ahead in (True, False)
    )
    meter = CountedMeter(gpu)
    host = HOST_BLOCK_MS * SHAPE.layers * GPU_FLOPS_PER_MS[SHAPE.dtype_bytes]
    work = [meter.forward(m) + meter.backward(m) for m in gpu.microbatches]
    assert len(work) == 2
    short = tokens == 100
    assert gpu.cost == pytest.approx(4 * host if short else sum(work))
    assert (sum(work) < 4 * host) == short
    assert meter.alone(gpu.microbatches[0], backward=False) == max(
        host, meter.forward(gpu.microbatches[0])
    )
    # A CPU does both itself.
    assert cpu.cost == pytest.approx(
        sum(work) + 4 * HOST_BLOCK_MS * SHAPE.layers * CPU_FLOPS_PER_MS
    )
