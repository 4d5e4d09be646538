"""scripts/compare_commits.py finds a changed bit, and a refusal of one side."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import compare_commits

    return compare_commits


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: x, "bitwise"),
        (lambda x: x * (1 + 4e-16), "within"),
        (lambda x: -(-x + 0.0), "within"),  # another sign of a zero
        (lambda x: x * (1 + 1e-12), "off by 1.0e-12"),
        (lambda x: x * np.nan, "off by inf"),
        (lambda x: x[:1], "off by inf"),
        (lambda x: x.astype(np.float32), "off by inf"),
    ],
)
def test_differences_are_relative_to_all_gradients(script: Any, change: Any, found: str) -> None:
    weights = {"gradient a": np.array([3.0, 4.0, 0.0]), "gradient b": np.zeros(3)}
    other = weights | {"gradient a": change(weights["gradient a"])}
    assert script.verdict(("", weights, ()), ("", other, ())) == found


def test_a_refusal_of_one_side_is_worse(script: Any) -> None:
    ran, refused = ("", {}, ()), ("PlanError: no", {}, ())
    assert script.verdict(ran, refused) == "old: ran; new: PlanError: no"
    assert script.verdict(refused, refused) == "refused"


@pytest.mark.slow
def test_a_changed_line_is_found(script: Any, tmp_path: Path) -> None:
    """Two copies of the library in processes of their own; one scales the clipped objective."""
    changed = tmp_path / "src"
    shutil.copytree(ROOT / "src", changed, ignore=shutil.ignore_patterns("__pycache__"))
    file = changed / "forkpoint" / "losses" / "policy_loss.py"
    text = file.read_text(encoding="utf-8")
    assert text.count("torch.minimum(") == 1
    file.write_text(text.replace("torch.minimum(", "1.00001 * torch.minimum("), encoding="utf-8")
    chosen = [0, 2, 4]
    pairs = zip(
        script.outcomes(ROOT / "src", chosen), script.outcomes(changed, chosen), strict=True
    )
    verdicts = [script.verdict(*pair) for pair in pairs]
    assert verdicts[0].startswith("off by") and verdicts[1:] == ["bitwise", "bitwise"]
