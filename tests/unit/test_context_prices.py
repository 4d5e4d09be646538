"""Prices of a rank of context parallelism: its part of tokens, heads and entries, and what it
sends."""

from dataclasses import replace

import pytest

from forkpoint import Config
from forkpoint.plan import make_plan
from forkpoint.plan.pricing.calibration import Curve
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import CountedMeter, meter_of
from made_calibrations import LINK, SHAPE, flat, group, line, made_up

TWO = replace(SHAPE, context=2)


def numbers_sent(shape: ModelShape, tokens: int) -> int:
    """Of queries, keys, values and outputs; half of them stay."""
    heads = 2 * shape.heads + 2 * max(shape.kv_heads, 2)
    return tokens * heads * shape.head_dim * shape.layers // 2


def test_milliseconds_of_one_rank_by_hand() -> None:
    link = replace(LINK, send_bytes_per_ms=1e3, send_latency_ms=0.5)
    measured = made_up(
        rest=flat(5.0), head=line(1e-2), causal=Curve((1.0, 2.0), (1e4, 1e4), (4e3, 4e3)), link=link
    )
    batch = group(51, 50, 1)  # 100 tokens run, 50 of them with a label
    plan = make_plan(batch, TWO, Config(sharing="none"), calibration=measured)
    (microbatch,), meter = plan.microbatches, meter_of(plan, measured)
    layers, nbytes = SHAPE.layers, numbers_sent(TWO, 50) * SHAPE.dtype_bytes
    sent = nbytes / 1e3 + 2 * layers * 0.5
    computed = layers * 50 * 1e-3 + layers * 5050 / 2 / 1e4 + 5 + 25 * 1e-2
    assert meter.forward(microbatch) == pytest.approx(computed + sent)
    computed = layers * 50 * 2e-3 + layers * 5050 / 2 / 4e3 + 5 + 25 * 2e-2
    assert meter.backward(microbatch) == pytest.approx(computed + sent)
    outputs = SHAPE.layers * SHAPE.heads * SHAPE.value_dim * SHAPE.dtype_bytes
    assert meter.kept_bytes(microbatch) == 50 * (layers * 100 + outputs)
    # Of one block at a time.
    full = replace(microbatch, checkpointing="full")
    assert meter.kept_bytes(full) == 50 * (layers * 10 + 100 + outputs // layers)


def test_kept_logits_are_those_of_a_rank() -> None:
    shape = replace(SHAPE, vocab=1000)
    kept = {}
    for ranks in (1, 2):
        plan = make_plan(group(3, 51, 1), replace(shape, context=ranks), Config(sharing="none"))
        microbatch = replace(plan.microbatches[0], keeps_logits=True)
        without = replace(microbatch, keeps_logits=False)
        meter = CountedMeter(plan)
        kept[ranks] = meter.kept_bytes(microbatch) - meter.kept_bytes(without)
    assert kept == {1: 51 * 1000 * shape.dtype_bytes, 2: 26 * 1000 * shape.dtype_bytes}
