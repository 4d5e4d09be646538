"""Random models, batches, losses and plans: a step is that of ordinary training, in float64.

FORKPOINT_FUZZ_SECONDS: how long all shards together look for new cases; 120 by default.
FORKPOINT_FUZZ_SEED: the first seed; by default it changes from day to day.

A failure prints its seed; `python tests/fuzz/run.py --replay SEED` shows and checks it again.
"""

import json
import os
import time
from pathlib import Path

import pytest
from fuzz_cases import draw_case
from fuzz_check import Tally, check

SHARDS = 4
SECONDS = float(os.environ.get("FORKPOINT_FUZZ_SECONDS", "120"))
FIRST = int(os.environ.get("FORKPOINT_FUZZ_SEED", int(time.time()) // 86_400 * 1_000_000))
KEPT = json.loads((Path(__file__).parent / "kept_seeds.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: str(kept["seed"]))
def test_kept_seeds(kept: dict) -> None:
    case = draw_case(kept["seed"])
    outcome = check(case)
    assert not outcome.refused and not outcome.faults, f"{outcome}\n{kept['what']}\n{case}"
    assert outcome.telling, "this seed shows nothing; keep another"


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_fresh_seeds(shard: int) -> None:
    tally = Tally()
    end = time.monotonic() + SECONDS / SHARDS
    seed = FIRST + shard * 100_000
    while time.monotonic() < end and not tally.failures:
        tally.run(draw_case(seed + tally.cases))
    for failure in tally.failures:
        pytest.fail(
            f"{failure['what']}\n{failure['case']}\n"
            f"again: python tests/fuzz/run.py --replay {failure['seed']}"
        )
    # Few cases in a short time may all be dull.
    dull = tally.cases - tally.refused - tally.telling
    assert dull <= 3 + 0.4 * tally.cases, f"from seed {seed}: {dull} of {tally.cases} show little"
    assert tally.refused <= 2 + 0.1 * tally.cases, f"from seed {seed}: {tally.refusals}"
