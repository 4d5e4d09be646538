"""scripts/compare_commits.py: its cases are those of the tests, and it finds a changed bit."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import test_acceptance
import test_activations
import test_critics
import test_hybrid
from scenarios import acceptance_batch, paired_batch
from steps import forked_batch

from forkpoint import Config, RolloutBatch
from forkpoint.config import Boundary
from forkpoint.rollouts.batch import Rollout

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import compare_cases
    import compare_commits
    import compare_side

    return SimpleNamespace(cases=compare_cases, commits=compare_commits, side=compare_side)


def test_options_and_batches_are_those_of_the_tests(scripts: Any) -> None:
    for table, of in {
        "ACCEPTANCE": test_acceptance.CONFIGS,
        "NESTED": test_activations.NESTED,
        "HYBRID": test_hybrid.CONFIGS,
        "CRITIC": test_critics.CONFIGS,
    }.items():
        options = getattr(scripts.cases, table)
        assert tuple(Config(**given) for given in options) == tuple(of), table
    for made, of in (
        (scripts.cases.scenario(apart=False), acceptance_batch()),
        (scripts.cases.forked(), forked_batch()),
        (scripts.cases.pairs(), paired_batch()),
    ):
        batch = RolloutBatch([Rollout(**fields) for fields in made])
        assert batch.rollout_ids == of.rollout_ids
        for mine, other in zip(batch, of, strict=True):
            same = np.array(mine.token_ids) == np.array(other.token_ids)
            # Warm rollouts begin with another token where nothing is to be shared with the others.
            assert same[1:].all() and (same[0] or other.temperature != 1)
            assert (mine.loss_mask == other.loss_mask).all()
            assert np.array_equal(mine.advantage, other.advantage)
            assert (mine.temperature, mine.group_id) == (other.temperature, other.group_id)


def test_every_case_is_named_once(scripts: Any) -> None:
    names = [case.name for case in scripts.cases.cases()]
    assert len(names) > 3000 and len(set(names)) == len(names)
    found = {case.loss.removeprefix("verify ") for case in scripts.cases.cases()}
    assert found == {*scripts.side.losses(), "score"}


def test_options_by_the_names_of_a_commit(scripts: Any) -> None:
    now: dict[str, Any] = {"boundary": Boundary, "max_microbatch_tokens": int | None}
    before: dict[str, Any] = {
        "boundary": Literal["auto", "in_row", "across_rows", "mixed"],
        "max_row_tokens": int | None,
    }
    given = {"boundary": "across", "max_microbatch_tokens": 8}
    assert scripts.side.named_now(given, now) == given
    wanted = {"boundary": "across_rows", "max_row_tokens": 8}
    assert scripts.side.named_now(given, before) == wanted
    with pytest.raises(KeyError, match="unknown"):
        scripts.side.named_now({"unknown": 1}, before)


def test_events_are_compared_but_for_names(scripts: Any) -> None:
    rows = [SimpleNamespace(slots=5), SimpleNamespace(slots=3)]
    before = SimpleNamespace(rows=rows, row_names=("A0", "B0"))
    microbatches = [SimpleNamespace(padded_tokens=5), SimpleNamespace(padded_tokens=3)]
    now = SimpleNamespace(microbatches=microbatches, microbatch_names=("prefix 0", "leaf 1"))
    events = "F A0", "F B0", "B B0", "R A0", "B A0"
    today = "forward prefix 0", "forward leaf 1", "backward leaf 1", "recompute prefix 0"
    today = (*today, "backward prefix 0")
    found = scripts.side.numbered(today, now)
    assert found == scripts.side.numbered(events, before)
    assert found[:2] == ("forward 0 of 5 tokens", "forward 1 of 3 tokens")
    microbatches[1].padded_tokens = 4
    assert scripts.side.numbered(today, now) != found


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: x, 0.0),
        (lambda x: x * (1 + 4e-16), 4.4e-16),
        (lambda x: x * (1 + 1e-12), 1e-12),
        (lambda x: x * np.nan, np.inf),
        (lambda x: x[:1], np.inf),
        (lambda x: x.astype(np.float32), np.inf),
    ],
)
def test_differences_are_relative_to_all_gradients(scripts: Any, change: Any, found: float) -> None:
    weights = {"gradient a": np.array([3.0, 4.0]), "gradient b": np.zeros(3), "loss 0": np.ones(())}
    old = scripts.cases.Outcome(numbers=weights)
    new = scripts.cases.Outcome(numbers=weights | {"gradient a": change(weights["gradient a"])})
    assert scripts.commits.difference(old, new) == pytest.approx(found, rel=0.2)


def test_a_zero_of_another_sign_and_what_is_missing_are_differences(scripts: Any) -> None:
    old = scripts.cases.Outcome(numbers={"gradient a": np.array([1.0, 0.0])})
    new = scripts.cases.Outcome(numbers={"gradient a": np.array([1.0, -0.0])})
    assert 0 < scripts.commits.difference(old, new) < 1e-300
    assert scripts.commits.difference(old, scripts.cases.Outcome(numbers={})) == np.inf


def test_faults_are_counted(scripts: Any) -> None:
    case = next(scripts.cases.cases())
    outcome = scripts.cases.Outcome(inputs="x", numbers={"loss 0": np.ones(())})
    for changes, fault in (
        ({"inputs": "y"}, "other weights or batches"),
        ({"refused": "PlanError: no"}, "old: ran; new: PlanError: no"),
        ({"numbers": {"loss 0": np.full((), 1.1)}}, "off by 1.0e-01"),
    ):
        counted = scripts.commits.Counted()
        other = scripts.cases.Outcome(**({"inputs": "x", "numbers": outcome.numbers} | changes))
        scripts.commits.count(counted, case, outcome, other)
        assert len(counted.faults) == 1 and fault in counted.faults[0]
        assert not counted.bitwise and not counted.within


def test_differences_that_were_meant_are_named_with_their_reason(scripts: Any) -> None:
    counted = scripts.commits.Counted(steps=3, within=3)
    counted.not_bitwise = [f"{group}: a, b: off" for group in ("temperatures", "families")]
    counted.faults = ["families: a: off by 1.0e-05"]
    text = scripts.commits.table({"families": counted}, scripts.commits.CHANGES)
    lines = text.splitlines()[3:]
    assert lines[0] == "worse: families: a: off by 1.0e-05"
    assert lines[1].startswith("not bitwise, 1 as meant since 320bc5a: rollouts of")
    assert lines[2:] == ["not bitwise: families: a, b: off"]


@pytest.mark.slow
def test_a_changed_line_is_found(scripts: Any, tmp_path: Path) -> None:
    """Two copies of the library in processes of their own; one scales the clipped objective."""
    changed = tmp_path / "src"
    shutil.copytree(ROOT / "src", changed, ignore=shutil.ignore_patterns("__pycache__"))
    of = {case.loss: case for case in reversed(list(scripts.cases.cases()))}
    chosen = [of["grpo"], of["dpo"], of["score"]]
    file = changed / "forkpoint" / "losses" / "policy_loss.py"
    text = file.read_text(encoding="utf-8")
    assert text.count("torch.minimum(") == 1
    file.write_text(text.replace("torch.minimum(", "1.00001 * torch.minimum("), encoding="utf-8")
    found = scripts.commits.compare((ROOT / "src", changed), chosen, progress=False)
    assert sum(counted.bitwise for counted in found.values()) == 2
    assert not any(counted.other_events for counted in found.values())
    faults = [fault for counted in found.values() for fault in counted.faults]
    assert len(faults) == 1 and ", grpo, " in faults[0]
