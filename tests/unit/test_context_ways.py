"""Predicted bytes and times of steps on ranks of context parallelism."""

from dataclasses import replace

import pytest

from benchmarks.planning.context_ways import ContextWays, Step, layer_gathered_bytes
from benchmarks.runner import Deadline
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.dealing import deal
from forkpoint.plan.entries import segment_entries
from forkpoint.plan.pricing.calibration import Calibration

OPTIONS = ContextWays(prompts=(4096,), ranks=(2,), responses=(6,), gb_per_s=(50.0,))


def test_bytes_of_a_prompt_that_two_microbatches_gather() -> None:
    shape = replace(ModelShape.from_config(MODELS["llama3-8b"]), context=2)
    prompt, mask = list(range(11)), [0] * 11 + [1] * 4
    batch = RolloutBatch([Rollout([*prompt, n, 1, 2, 3], mask, 1.0) for n in range(20, 24)])
    config = Config(sharing="tree", boundary="across", max_microbatch_tokens=10)
    plan = make_plan(batch, shape, config, capabilities=Capabilities(deals_segments=False))
    plan = deal(plan, segment_entries(plan.forest, batch))
    # 10 tokens of the prompt, and 4 tokens of each response.
    assert [len(microbatch.parts) for microbatch in plan.microbatches] == [0, 2, 2]
    elements = 10 * 32 * 8 * (128 + 128) // 2
    once, again = elements * (2 + 4), 2 * elements * (2 + 2 + 4)
    assert layer_gathered_bytes(plan) - plan.sent_bytes == again - once


@pytest.mark.slow
def test_ways_of_one_step() -> None:
    calibration = Calibration.load(OPTIONS.calibration)
    step = Step(OPTIONS, calibration, 4096, 6, 2, 50.0)
    faster = Step(OPTIONS, calibration, 4096, 6, 2, 100.0)
    for one, other in ((step.gathered, faster.gathered), (step.dealt, faster.dealt)):
        assert one.sent_bytes == other.sent_bytes
        assert one.ms - other.ms == pytest.approx(one.sent_bytes / 100e6, rel=1e-6)
    # Of the prompt's keys and values each rank has half: 16 bits there, 32 bits back.
    cache = 4096 * 32 * 8 * (128 + 128) * (2 + 4) // 2
    assert cache < step.dealt.sent_bytes < cache + step.by_heads.sent_bytes
    assert step.dealt.sent_bytes < step.gathered.sent_bytes
    # The gathered cache has all heads.
    assert step.dealt.peak_bytes - step.gathered.peak_bytes == 2 * cache * 31 // 32
    rows = list(OPTIONS.measure(Deadline(None)))
    notes = [row.note or "" for row in rows]
    assert len(rows) == 9 and sum("fastest that fits" in note for note in notes) == 1
    assert sum("chosen" in note for note in notes) == 1
    tight = replace(OPTIONS, memory_gib=1.0)
    notes = [row.note or "" for row in tight.measure(Deadline(None)) if row.unit == "ms"]
    assert len(notes) == 3 and all(note.startswith("does not fit") for note in notes)
