"""Random models, batches, losses and plans: a step is that of ordinary training, in float64.

The seeds are fixed, so that an unchanged commit passes every time. `make fuzz` tries fresh ones.
`make test` runs a few of the kept seeds. `make test-slow` runs the others and all shards.

FORKPOINT_FUZZ_CASES: how many cases all shards together try, at least one each; 160 by default.
FORKPOINT_FUZZ_SEED: where their seeds begin; 0 by default.

A failure prints its seed; `python tests/fuzz/run.py --replay SEED` shows and checks it again.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import fuzz_check
import pytest
from fuzz_cases import Case, draw_case
from fuzz_check import Outcome, Tally, check
from fuzz_models import SPECIAL
from transformers import CONFIG_MAPPING

from forkpoint.hosts.transformers.families import FAMILIES
from integration.sabotage import ACROSS_MICROBATCHES, WITHIN, Sabotage
from lanes import slow_besides

SHARDS = 16
CASES = int(os.environ.get("FORKPOINT_FUZZ_CASES", "160"))
FIRST = int(os.environ.get("FORKPOINT_FUZZ_SEED", "0"))

KEPT = json.loads((Path(__file__).parent / "kept_seeds.json").read_text(encoding="utf-8"))
"""Former failures, and a handful of cases that have little in common."""


# This one takes as long as all others, and test_a_model_that_multiplies_rounding is about it.
SHORT = [kept for kept in KEPT[::12] if kept["seed"] != 913039]


@pytest.mark.parametrize("kept", slow_besides(SHORT, KEPT), ids=lambda kept: str(kept["seed"]))
def test_kept_seeds(kept: dict) -> None:
    if kept["family"] not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kept['family']}")
    case = draw_case(kept["seed"], kept["family"])
    outcome = check(case)
    assert str(outcome) == "exact", f"{kept['what']}\n{case}"


def seeds_of(shard: int, cases: int) -> range:
    """Seeds of a shard, of that many cases of all shards."""
    assert cases >= SHARDS, f"FORKPOINT_FUZZ_CASES is {cases}; give at least {SHARDS}"
    # Two shards share a run of seeds.
    first = FIRST + shard // 2 * 100_000 + shard % 2 * -(-cases // SHARDS)
    return range(first, first + len(range(shard, cases, SHARDS)))


def test_shards_divide_all_cases() -> None:
    for cases in (16, 31, 160):
        shards = [seeds_of(shard, cases) for shard in range(SHARDS)]
        assert sum(map(len, shards)) == len(set().union(*shards)) == cases
    with pytest.raises(AssertionError, match="at least 16"):
        seeds_of(15, 15)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_seeds(shard: int) -> None:
    tally, seeds = Tally(), seeds_of(shard, CASES)
    for seed in seeds:
        tally.run(draw_case(seed))
        if tally.failures:
            break
    for failure in tally.failures:
        again = f"python tests/fuzz/run.py --replay {failure['seed']}"
        pytest.fail(f"{failure['what']}\n{failure['case']}\nagain: {again}")
    # A short time may have few cases, all of them refused or dull.
    assert sum(tally.refusals.values()) <= 2 + 0.1 * tally.cases, (
        f"from seed {seeds.start}: {tally.refusals}"
    )
    assert tally.wobbling <= 1 + 0.002 * tally.cases, (
        f"from seed {seeds.start}: {tally.wobbling} wobble"
    )
    dull = tally.cases - sum(tally.refusals.values()) - tally.telling
    assert dull <= 3 + 0.4 * tally.cases, (
        f"from seed {seeds.start}: {dull} of {tally.cases} show little"
    )


# The fuzzer can fail -----------------------------------------------------------------------------

STEADY = 2
"""A seed whose model multiplies no rounding."""


@pytest.mark.slow
@pytest.mark.usefixtures("without_sample")
@pytest.mark.parametrize("bug", [*ACROSS_MICROBATCHES, *WITHIN], ids=lambda bug: bug.__name__)
def test_bugs_are_found(bug: Sabotage, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(check(draw_case(seed)).faults for seed in range(20))


@pytest.mark.slow
def test_a_model_that_multiplies_rounding_has_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_case(913039, "qwen3_5_moe_text")
    steady = draw_case(STEADY)
    assert 1e-13 < fuzz_check.wobble(case) < 1e-11
    assert fuzz_check.WOBBLES * fuzz_check.wobble(steady) < fuzz_check.BAR
    assert str(check(case)) == "exact"
    compare = fuzz_check._compare

    def off(case: Case, bar: float) -> Outcome:
        """As on machines where gradients are off by more: how much differs by machine."""
        found = compare(case, bar)
        return replace(found, faults=(*found.faults, *fuzz_check._off("gradient", 1.5e-10, bar)))

    monkeypatch.setattr(fuzz_check, "_compare", off)
    assert check(case).wobbles and str(check(case)) == "exact"
    assert check(steady).faults
    monkeypatch.setattr(fuzz_check, "_compare", compare)
    # Log-probs are held to what they were.
    distance = fuzz_check._distance
    monkeypatch.setattr(fuzz_check, "_distance", lambda a, b: distance(a, b) + 2e-10)
    assert any(fault.startswith("log-probs") for fault in check(case).faults)


def test_what_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    case, tally = draw_case(STEADY), Tally()

    def broken(*_: object, **__: object) -> None:
        raise ValueError("no refusal by name")

    monkeypatch.setattr(fuzz_check, "wrap", broken)
    tally.run(case)
    [failure] = tally.failures
    assert (failure["seed"], failure["what"]) == (case.seed, "ValueError: no refusal by name")
    assert str(case.seed) in failure["case"] and not tally.refusals


# The fuzzer looks where it should ----------------------------------------------------------------


@pytest.mark.slow
def test_every_family_is_drawn() -> None:
    assert set(SPECIAL) == set(FAMILIES), "say in SPECIAL what a new family can switch"
    drawn = {draw_case(seed).family for seed in range(250)}
    assert drawn == {name for name in FAMILIES if name in CONFIG_MAPPING}
