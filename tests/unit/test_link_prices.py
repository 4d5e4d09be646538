"""Prices of a measured link, in what ranks choose by them."""

from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.errors import ConfigError
from forkpoint.plan.gathering import RankCosts, gathering_cost, link_cost, prices_of
from forkpoint.plan.pricing.calibration import Calibration, LinkPrices
from forkpoint.plan.shared_prompts import SharedPrompt
from made_calibrations import LINK, SHAPE, made_up

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
