"""Prices of a rank of context parallelism, and of a measured link, in what ranks choose by it."""

from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint import Config
from forkpoint.errors import ConfigError
from forkpoint.ops.head import logprobs
from forkpoint.plan import make_plan
from forkpoint.plan.gathering import RankCosts, gathering_cost, link_cost, prices_of
from forkpoint.plan.pricing import meters
from forkpoint.plan.pricing.calibration import Calibration, Curve, LinkPrices
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import CountedMeter, meter_of
from forkpoint.plan.shared_prompts import SharedPrompt
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


def test_many_kept_logits_need_a_sum_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logprobs.KEPT_TOKENS == meters.KEPT_ENTRIES
    plan = make_plan(group(3, 51, 1), SHAPE, Config(sharing="none"))
    microbatch = replace(plan.microbatches[0], keeps_logits=True)
    few = meters.logits_bytes(microbatch, SHAPE)
    monkeypatch.setattr(meters, "KEPT_ENTRIES", 50)
    assert meters.logits_bytes(microbatch, SHAPE) == few + 4 * SHAPE.vocab * SHAPE.hidden
    assert meters.logits_bytes(replace(microbatch, keeps_logits=False), SHAPE) == 0


PRICES = LinkPrices(gathering=8.0, calls=1.0, byte=0.5, transfer=2.0)
COSTS = RankCosts(forward=(300.0,), tokens=300)


def test_a_measured_link_is_priced_in_milliseconds() -> None:
    found = prices_of(made_up(link=LINK), SHAPE)
    assert found is not None
    assert found.gathering == pytest.approx(SHAPE.dtype_bytes * SHAPE.linear_parameters / 1e6)
    assert found.calls == pytest.approx(0.5 * (SHAPE.layers + 1))
    assert (found.byte, found.transfer) == (pytest.approx(5e-7), 0.25)
    assert prices_of(made_up(), SHAPE) is prices_of(None, SHAPE) is None


def test_ranks_take_the_dearest_and_none_where_one_knows_none() -> None:
    known = replace(COSTS, link=PRICES)
    dear = replace(COSTS, link=replace(PRICES, gathering=16.0))
    # Of two ranks each receives half of the weights.
    assert gathering_cost([known, known]) == 8.0 / 2 + 1.0
    assert gathering_cost([known, dear]) == gathering_cost([dear, known]) == 16.0 / 2 + 1.0
    # A rank without rollouts prices nothing.
    assert gathering_cost([known, known, RankCosts()]) == 8.0 * 2 / 3 + 1.0
    assert gathering_cost([known, COSTS]) == gathering_cost([COSTS, COSTS]) == 2048.0


def test_sending_takes_rates_and_latencies() -> None:
    costs, prompt = [replace(COSTS, link=PRICES)] * 2, SharedPrompt("a", 10, 0, (0, 1))
    nbytes = 10 * SHAPE.exchanged_token_bytes + SHAPE.state_bytes
    assert link_cost([prompt], SHAPE, costs) == 0.5 * nbytes + 4 * SHAPE.layers * 2.0
    assert link_cost([], SHAPE, costs) == link_cost([prompt], None, costs) == 0.0


def test_a_link_is_written_and_read_back(tmp_path: Path) -> None:
    for calibration in (made_up(), made_up(link=LINK)):
        calibration.save(tmp_path / "c.json")
        assert Calibration.load(tmp_path / "c.json") == calibration
    assert "link of 2 ranks measured by gloo" in made_up(link=LINK).describe()
    text = (tmp_path / "c.json").read_text()
    assert '"send_bytes_per_ms": 2000000.0' in text
    (tmp_path / "c.json").write_text(text.replace("2000000.0", "0.0"))
    with pytest.raises(ConfigError, match=r"damaged: link\.send_bytes_per_ms is 0"):
        Calibration.load(tmp_path / "c.json")
