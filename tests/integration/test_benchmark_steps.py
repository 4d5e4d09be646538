"""Benchmarks of whole steps on a CPU, with tiny models: they run, and rows say what they are."""

import json
from pathlib import Path

import pytest
import torch
from commands import Shell

from benchmarks.commands import main
from benchmarks.runner import Deadline
from benchmarks.shapes import SHAPES
from benchmarks.steps import hybrid, moe, moe_checks
from benchmarks.steps.capacity import largest
from benchmarks.steps.moe_experts import kept_elements, layer_parameters
from benchmarks.steps.stepper import Stepper
from forkpoint import ModelShape, save_rollouts
from forkpoint.plan import make_plan
from forkpoint.plan.program import PHASES
from forkpoint.rollouts.synthetic import synthetic_rollouts

TINY = ("--tiny", "--blocks", "eager", "--layers", "1")
Rows = dict[tuple[str, str], dict]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys, main)


def bench(shell: Shell, folder: Path, *arguments: object, code: int = 0) -> Rows:
    """Rows of a benchmark by case and metric, in their order."""
    output = folder / "rows.jsonl"
    done = shell(*arguments, "--output", output)
    assert done.code == code, done.err
    lines = output.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert done.result["rows"] == len(rows)
    for row in rows:
        assert row["value"] == row["value"] and row["bench"] == arguments[0]
        assert row["commit"] and row["command"] and row["versions"]["torch"]
    return {(row["case"], row["metric"]): row for row in rows}


def values(rows: Rows, metric: str) -> dict[str, float]:
    return {case: row["value"] for (case, name), row in rows.items() if name == metric}


def test_step_grid(shell: Shell, tmp_path: Path) -> None:
    splits = ("--splits", "6144/6144", "10240/2048", "--counts", "4", "8")
    rows = bench(shell, tmp_path, "step-grid", *splits, *TINY)
    speed_ups, shared = values(rows, "speed-up"), values(rows, "shared step")
    assert {"eager 6144/6144 N=4", "eager 10240/2048 N=8"} <= set(speed_ups) == set(shared)
    for case, speed_up in speed_ups.items():
        dense, bound = rows[case, "dense step"], rows[case, "speed-up"]["bound"]
        assert speed_up == pytest.approx(dense["value"] / shared[case]) and bound >= 1
        assert rows[case, "share of bound"]["value"] == pytest.approx(speed_up / bound)
        phases = sum(rows[case, f"shared phase {phase}"]["value"] for phase in PHASES)
        assert 0 < phases <= shared[case] * 1.5
    assert "4 rollouts, scaled by 1;" in rows["eager 6144/6144 N=4", "dense step"]["note"]
    assert "4 rollouts, scaled by 2;" in rows["eager 6144/6144 N=8", "dense step"]["note"]


def test_policy_update(shell: Shell, tmp_path: Path) -> None:
    rows = bench(shell, tmp_path, "policy-update", "--shape", "qwen3-8b", *TINY)
    plain, shared = values(rows, "dense log-probs"), values(rows, "shared log-probs")
    speed_ups = values(rows, "log-probs speed-up")
    assert len(speed_ups) == 2
    for case, value in speed_ups.items():
        assert value == pytest.approx(plain[case] / shared[case])
        assert rows[case, "log-probs speed-up"]["bound"] > 1


def test_memory(shell: Shell, tmp_path: Path) -> None:
    splits = ("--splits", "10240/2048", "6144/6144", "--count", "3")
    rows = bench(shell, tmp_path, "memory", *splits, *TINY)
    over = values(rows, "time over keep")
    assert {case.split(" ")[-1] for case in over} == {"keep", "offload", "recompute"}
    assert all(value == 1 for case, value in over.items() if case.endswith("keep"))
    # Longer prompts leave more to offload.
    out = {case.split(" ")[1]: value for case, value in values(rows, "offload out_bytes").items()}
    assert out["10240/2048"] > out["6144/6144"] > 0
    assert set(values(rows, "offload left_bytes").values()) == {0}


def test_capacity(shell: Shell, tmp_path: Path) -> None:
    options = ("--most-tokens", "4096", "--long-prompt", "16384")
    rows = bench(shell, tmp_path, "capacity", *options, *TINY, "--only", "longest", "for like")
    # There is no cap on a CPU: everything trains up to where it is told to stop.
    assert set(values(rows, "largest total").values()) == {4096 // 64}
    errors = values(rows, "gradient over dense").values()
    assert 0 < max(errors) < 1e-4, "gradients were compared, and not with themselves"
    assert list(values(rows, "prompt that trained").values()) == [256]
    done = shell("capacity", *TINY, "--only", "shortest")
    assert done.code == 2 and "no case has shortest in its name; there are: " in done.err


@pytest.mark.parametrize("limit", [0, 15, 16, 100, 1023, 5000])
@pytest.mark.parametrize("first", [1, 90, 9000])
def test_the_largest_that_fits(limit: int, first: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest(fits, first=first, most=1030, step=16) == min(limit, 1024) // 16 * 16
    assert all(size % 16 == 0 and 0 < size <= 1024 for size in tried) and len(tried) < 14


def test_tree(shell: Shell, tmp_path: Path) -> None:
    made = synthetic_rollouts(groups=2, rollouts_per_group=4, prompt_tokens=64, response_tokens=16)
    save_rollouts(tmp_path / "rollouts.jsonl", made)
    rows = bench(shell, tmp_path, "tree", tmp_path / "rollouts.jsonl", *TINY)
    (ratio,) = (row for (_, metric), row in rows.items() if metric == "speed-up")
    assert ratio["bound"] > 1.5 and "2 of 2 groups" in ratio["note"]
    each = values(rows, "dense step").values()
    (whole,) = values(rows, "dense step, sum").values()
    assert len(each) == 2 and sum(each) == pytest.approx(whole)


def test_time_that_is_up_is_said(shell: Shell, tmp_path: Path) -> None:
    output = ("--output", tmp_path / "rows.jsonl", "--max-seconds", 0)
    result = shell("step-grid", *TINY, *output).result
    assert result["rows"] == 0 and len(result["left_out"]) == 20


# Mixtures of experts ------------------------------------------------------------------------------

CELL = ("moe", *TINY, "--only", "P2048-R2048-N8", "--repeats", 1)


def test_modes_of_router_losses(shell: Shell, tmp_path: Path) -> None:
    modes = ("none", "rollout", "batch-pass")
    options = ("--microbatch", 96, "--dense-microbatch", 16384, "--unchecked", "--modes", *modes)
    rows = bench(shell, tmp_path, *CELL, *options)
    found = {(case.split(" ")[-1], metric): row for (case, metric), row in rows.items()}
    for mode in modes:
        speed_up, dense = found[mode, "speed-up"], found[mode, "dense step"]
        ratio = dense["value"] / found[mode, "shared step"]["value"]
        assert speed_up["value"] == pytest.approx(ratio)
        assert "4 rollouts, scaled by 2" in dense["note"]
        assert found[mode, "shared nonfinite"]["value"] == 0
        assert found[mode, "microbatches"]["value"] > 1
    # Counts that are given take no pass; a pass of its own is counted.
    assert ("rollout", "bound without the pass") not in found
    without = found["batch-pass", "bound without the pass"]["value"]
    assert 1 < found["batch-pass", "speed-up"]["bound"] < without
    assert found["rollout", "score pass"]["value"] > 0
    losses = [found[mode, "router loss"]["value"] for mode in modes[1:]]
    assert losses[0] == pytest.approx(losses[1], rel=0.2) and losses[0] > 0


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_of_mixtures_are_compared_first(
    wrong: bool, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router losses that the shared step leaves out miss their bars."""
    gradients = moe_checks._gradients

    def without(policy, batch, router, *, given):
        if wrong and policy.config.sharing == "group":
            router = type(router)(load_balancing=0.0, z=0.0, scope=router.scope)
        return gradients(policy, batch, router, given=given)

    monkeypatch.setattr(moe_checks, "_gradients", without)
    monkeypatch.setattr(moe_checks, "_held_rows", lambda model, figure: iter(()))
    rows = bench(shell, tmp_path, *CELL, "--modes", "none", code=int(wrong))
    checks = [row for row in rows.values() if row["bar"] == moe_checks.BAR]
    assert len(checks) == 6 and all((row["value"] > row["bar"]) == wrong for row in checks)
    metrics = [metric for _, metric in rows]
    assert metrics.index("shared step") > metrics.index(checks[-1]["metric"])


def test_memory_that_runs_out_is_planned_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Stepper.step, []

    def once(self, policy, batch, plan=None):
        calls.append(policy.config.sharing)
        if policy.config.sharing == "group" and calls.count("group") == 1:
            raise torch.OutOfMemoryError
        return step(self, policy, batch, plan)

    monkeypatch.setattr(Stepper, "step", once)
    made = moe.Moe(
        tiny=True,
        layers=1,
        blocks="eager",
        only=("P2048-R2048-N8",),
        modes=("none",),
        unchecked=True,
    )
    rows = {row.metric: row for row in made.measure(Deadline(None))}
    assert rows["planned again, memory ran out"].value == 1 and "speed-up" in rows


def test_the_count_of_layers() -> None:
    """Weights of the published model, and what one token leaves in the tiny one's layer."""
    sizes = SHAPES[moe.SHAPE]
    weights = 48 * layer_parameters(sizes) + 2 * sizes["vocab_size"] * sizes["hidden_size"]
    assert weights == pytest.approx(30.53e9, rel=1e-3)
    assert kept_elements(SHAPES["tiny-moe"]) == 4 * (2 * 64 + 4 * 32) + 8 * 64 + 3 * 6 * 16


# Hybrids ------------------------------------------------------------------------------------------


def test_hybrid(shell: Shell, tmp_path: Path) -> None:
    options = ("--suite", "smoke", "--only", "R24", "--repeats", 1)
    found = bench(shell, tmp_path, "hybrid", *options)
    rows = {metric: row for (_, metric), row in found.items()}
    assert {case for case, _ in found} == {"P70-R24-G3"}
    for side in ("dense", "shared"):
        assert rows[f"{side} nonfinite"]["value"] == 0 and rows[f"{side} step"]["value"] > 0
    speed_up = rows["speed-up"]
    ratio = rows["dense step"]["value"] / rows["shared step"]["value"]
    assert speed_up["value"] == pytest.approx(ratio) and speed_up["bound"] > 1.5
    for side in ("", "dense again: "):
        assert rows[f"{side}gradient difference"]["value"] < 1e-4
        assert rows[f"{side}log-prob difference"]["value"] < 1e-5
    assert rows["gradient difference"]["value"] > 0 < rows["log-prob difference"]["value"]


def test_gradients_that_are_not_finite_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(hybrid.make_model(hybrid.TINY, 1, torch.float32, "cpu"))
    repeat = Stepper.repeat

    def spoiled(self, policy, batch, **options):
        timed = repeat(self, policy, batch, **options)
        if timed.plan.sharing == "group":
            self.model.model.layers[0].linear_attn.dt_bias.grad[0] = float("nan")
        return timed

    monkeypatch.setattr(Stepper, "repeat", spoiled)
    rows = {r.metric: r for r in hybrid.run_case(hybrid.SUITES["smoke"][0], stepper, repeats=1)}
    assert rows["shared nonfinite"].failed and not rows["dense nonfinite"].failed
    assert "model.layers.0.linear_attn.dt_bias" in (rows["shared nonfinite"].note or "")


@pytest.mark.parametrize(
    ("prompt", "response", "bound"), [(16_384, 64, 8.65), (16_384, 1024, 5.61), (8192, 4096, 2.18)]
)
def test_the_bounds_of_the_published_cases(prompt: int, response: int, bound: float) -> None:
    """Counted here again from FLOPs of products and of attention."""
    cases = hybrid.SUITES["prompt-caching"]
    case = next(c for c in cases if (c.prompt, c.response) == (prompt, response))
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 8
    shape = ModelShape.from_config({**hybrid.QWEN35_4B, "layer_types": kinds})
    found = make_plan(case.batch(1000), shape).bound
    assert round(found, 2) == bound

    def step(tokens: int, pairs: int) -> float:
        products = 2 * tokens * shape.linear_parameters + 2 * 9 * response * 2560 * 248_320
        return 3 * products + 3.5 * 8 * pairs * 2 * 16 * 512

    def below(edges: int) -> int:
        return edges * (edges + 1) // 2

    whole, shared = prompt + response - 1, prompt - 1
    dense = step(9 * whole, 9 * below(whole))
    pairs = below(shared) + 9 * (below(whole) - below(shared))
    assert found == pytest.approx(dense / step(shared + 9 * response, pairs))
