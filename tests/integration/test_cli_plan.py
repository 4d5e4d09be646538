"""The command plan, run in this process on tiny files and models."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import VOCABULARY, Shell, changed, made_up_rollouts, write_config, write_rollouts

import forkpoint
from forkpoint import Config, RolloutBatch, load_rollouts, record, wrap
from forkpoint.apps.cli.losses import LossOptions
from forkpoint.apps.cli.models import load_model
from forkpoint.apps.cli.options import Runtime
from forkpoint.parallel.placement.lockstep import predict_step
from forkpoint.plan import make_plan
from forkpoint.testing import tiny_model

PLAN_FIELDS = {
    "left_out",
    *("command", "file", "rollouts", "groups", "logical_tokens", "group_tokens", "unique_tokens"),
    *(
        "computed_tokens",
        "trained_tokens",
        "microbatches",
        "max_microbatch_tokens",
        "bound",
        "bound_unit",
    ),
    *("sharing", "boundary", "reason", "candidates"),
    *("predicted_peak_bytes", "predicted_ms", "predicted_speedup", "plans", "batch"),
    *("model", "batches", "modes", "distributions", "format", "skipped"),
    "device_memory",
    "ranks",
}
LOSSES = ("grpo", "gspo", "gmpo", "dpo", "simpo", "likelihood")


def test_plan_counts_tokens(shell: Shell, rollouts: Path) -> None:
    batch = RolloutBatch(load_rollouts(rollouts))
    paths = [
        (group, tuple(ids[:end]))
        for group, ids in zip(
            batch.group_index.tolist(), (r.token_ids.tolist() for r in batch), strict=True
        )
        for end in range(1, len(ids) + 1)
    ]
    unique = {path for _, path in paths}
    done = shell("plan", rollouts, "--details")
    assert done.code == 0 and done.err == ""
    result = done.result
    assert set(result) == PLAN_FIELDS
    assert result["logical_tokens"] == len(paths)
    assert result["group_tokens"] == len(set(paths))
    assert result["unique_tokens"] == len(unique)
    assert len(unique) < len(set(paths)) < len(paths), "the rollouts show no difference"
    assert result["rollouts"] == 9 and result["groups"] == 3
    assert result["trained_tokens"] == batch.trained_tokens
    assert result["bound_unit"] == "tokens"
    assert "looked at" in done.out, "explain() is missing"


def test_plan_obeys_its_options(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell(
        *("plan", rollouts, "--model", config, "--sharing", "group", "--limit", 6),
        *("--boundary", "across", "--max-microbatch-tokens", 32),
    )
    result = done.result
    assert (result["sharing"], result["boundary"]) == ("group", "across")
    assert result["rollouts"] == 6 and result["max_microbatch_tokens"] == 32
    assert [(c["sharing"], c["boundary"]) for c in result["candidates"]] == [("group", "across")]
    assert result["bound_unit"] == "flops" and result["predicted_peak_bytes"] > 0
    peaks = [
        shell("plan", rollouts, "--model", config, *options).result["predicted_peak_bytes"]
        for options in ([], ["--dtype", "float64"], ["--gradient-checkpointing"])
    ]
    assert peaks[2] < peaks[0] < peaks[1]


@pytest.mark.parametrize(
    ("file", "counts"),
    [("rag.jsonl", (705_578, 91_343, 91_222)), ("airline.jsonl", (378_424, 281_171, 249_844))],
)
def test_plan_counts_tokens_of_real_rollouts(
    file: str, counts: tuple[int, ...], shell: Shell, shared_data: Callable[[str], Path]
) -> None:
    result = shell("plan", shared_data(file), "--json").result
    names = ("logical_tokens", "group_tokens", "unique_tokens")
    assert tuple(result[name] for name in names) == counts


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plan_reads_the_shape_that_the_model_has(family: str, tmp_path: Path) -> None:
    """The planner reads config.json itself, without transformers; both must see one model."""
    model = tiny_model(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    options = Runtime(gradient_checkpointing=True)
    loaded = load_model(tmp_path, options)
    assert options.shape(tmp_path) == wrap(loaded).host.shape
    assert Runtime().shape(tmp_path / "config.json") == replace(
        wrap(loaded).host.shape, checkpointed=False
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_plan_is_the_one_that_runs(loss: Any, shell: Shell, tmp_path: Path, config: Path) -> None:
    """Candidates and costs are those of `policy.plan`, for losses that couple tokens as well.

    Rollouts are trained from their system tokens on, so that in short rows every one of them has
    trained tokens in several rows.
    """
    everything = [
        changed(r, loss_mask=np.arange(len(r)) > 0, reference_logprobs=-np.ones(len(r)))
        for r in made_up_rollouts()
    ]
    file = write_rollouts(tmp_path / "everything.jsonl", everything)
    arguments = ("plan", file, "--model", config, "--max-microbatch-tokens", 24, "--loss", loss)
    result = shell(*arguments).result
    policy = wrap(load_model(config, Runtime()), Config(max_microbatch_tokens=24))
    plan = policy.plan(RolloutBatch(everything), LossOptions(loss=loss).make())
    assert result["candidates"] == [asdict(candidate) for candidate in plan.candidates]
    assert (result["sharing"], result["boundary"], result["microbatches"]) == (
        *(plan.sharing, plan.boundary),
        len(plan.microbatches),
    )
    assert result["bound"] == plan.bound
    costs = [candidate["cost"] for candidate in result["candidates"] if candidate["cost"]]
    alone = shell(*arguments, "--loss", "likelihood").result["candidates"]
    dearer = costs != [candidate["cost"] for candidate in alone if candidate["cost"]]
    assert dearer == (loss in ("gspo", "gmpo", "dpo", "simpo")), (
        "only coupled tokens cost another forward"
    )


def test_plan_needs_no_torch(rollouts: Path, config: Path) -> None:
    code = (
        "import sys; from forkpoint.apps.cli import main; "
        f"assert main(['plan', {str(rollouts)!r}, '--model', {str(config)!r}]) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What it estimates, and what it reads ------------------------------------------------------------


def test_plan_streams_batches(shell: Shell, tmp_path: Path, config: Path) -> None:
    """The answer on a stream is the sum of its batches' plans, or one of them where asked for."""
    made = made_up_rollouts(groups=6)
    file = write_rollouts(tmp_path / "six.jsonl", made)
    done = shell("plan", file, "--model", config, "--batch-rollouts", 6, "--details")
    result = done.result
    assert result["batches"] == 3 and ", 3 batches" in done.out
    assert "in visiting order" not in done.out
    parts = [
        shell(
            "plan",
            write_rollouts(tmp_path / f"{n}.jsonl", made[6 * n : 6 * n + 6]),
            "--model",
            config,
            "--details",
        )
        for n in range(3)
    ]
    for name in (
        *("logical_tokens", "group_tokens", "unique_tokens", "trained_tokens", "groups"),
        *("computed_tokens", "microbatches"),
    ):
        assert result[name] == sum(part.result[name] for part in parts)
    for mode in ("none", "group", "tree"):
        flops = sum(part.result["modes"][mode]["flops"] for part in parts)
        assert result["modes"][mode]["flops"] == flops
    peaks = [part.result["predicted_peak_bytes"] for part in parts]
    assert result["predicted_peak_bytes"] == max(peaks) > 0
    assert (result["batch"], result["candidates"]) == (0, parts[0].result["candidates"])
    second = shell(
        "plan", file, "--model", config, "--batch-rollouts", 6, "--batch", 1, "--details"
    )
    assert second.result["candidates"] == parts[1].result["candidates"]
    assert second.result["computed_tokens"] == result["computed_tokens"]
    own, whole = (
        done.out.split("microbatches in visiting order")[1] for done in (parts[1], second)
    )
    assert own.split("what sharing")[0].rstrip() == whole.split("what sharing")[0].rstrip()
    by_tokens = shell("plan", file, "--batch-tokens", 150).result
    assert 1 < by_tokens["batches"] < 6 and by_tokens["group_tokens"] == result["group_tokens"]
    alone = shell("plan", file).result
    assert alone["batches"] == 1 and alone["unique_tokens"] < result["unique_tokens"]
    assert shell("plan", file, "--batch-tokens", 0).code == 2


SIX = ("shares", "speed-up", "microbatches", "memory", "plan", "next")


@pytest.mark.parametrize(
    "options",
    [
        *((), ("--model", "Qwen/Qwen3-8B"), ("--sharing", "none"), ("--sharing", "tree")),
        ("--model", "Qwen/Qwen3-8B", "--memory-budget", "1.7GB"),
        *(("--batch-rollouts", "4"), ("--batch-rollouts", "4", "--model", "llama3-405b")),
        ("--boundary", "across", "--sharing", "group", "--max-microbatch-tokens", "32"),
    ],
    ids=" ".join,
)
def test_plan_answers_in_six_lines(
    options: tuple[str, ...], shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rollouts.parent)
    done = shell("plan", rollouts.name, *options)
    result, lines = done.result, done.out.splitlines()
    assert done.code == 0 and done.err == ""
    assert tuple(line.split()[0] for line in lines) == SIX
    assert max(map(len, lines)) <= 80
    shares, speed_up, microbatches, memory, plan, further = lines
    if "none" in options:
        assert plan.endswith("none + within, as asked")
    if all(kind.startswith("none ") for kind in result["plans"]):
        assert "nothing" in shares
    else:
        assert f"{result['computed_tokens']:,} of {result['logical_tokens']:,} tokens" in shares
    assert f"{result['bound']:.2f}x" in speed_up
    assert ("in FLOPs" if "--model" in options else "in tokens") in speed_up
    predicted = result["predicted_speedup"]
    assert (predicted is None) == ("predicted" not in speed_up)
    assert predicted is None or f"predicted {predicted:.2f}x over dense" in speed_up
    assert f" {result['microbatches']} of at most" in microbatches and "9 rollouts" in microbatches
    assert ("iB of activations" in memory) == ("--model" in options)
    assert next(iter(result["plans"])) in plan
    nothing_gained = "--details shows what was looked at" in further
    assert nothing_gained or ("--model" in further and "(or --details)" in further)


def test_sizes_are_numbers_with_units(shell: Shell, rollouts: Path) -> None:
    arguments = ("plan", rollouts, "--model", "qwen3-8b", "--checkpointing", "none")
    arguments = (*arguments, "--memory-budget")
    wanted = shell(*arguments, "1.2GB").result
    assert wanted["microbatches"] > 1, "the budget changes nothing"
    for size in ("1.2 GB", "1.2gb", "1200000000"):
        assert shell(*arguments, size).result == wanted
    assert shell(*arguments, "2 gigs").code == 2


def test_a_folder_comes_before_a_known_name(
    shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rollouts.parent)
    known = shell("plan", rollouts, "--model", "Qwen/Qwen3-8B").result
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    write_config(Path("Qwen/Qwen3-8B/config.json"))
    own = shell("plan", rollouts, "--model", "Qwen/Qwen3-8B").result
    assert own["modes"]["none"]["flops"] < known["modes"]["none"]["flops"] / 1000


@pytest.mark.parametrize("name", ["qwen3-8b", "Llama3-8B", "Qwen/Qwen3-8B"])
def test_plan_knows_models_by_name(name: str, shell: Shell, rollouts: Path) -> None:
    result = shell("plan", rollouts, "--model", name).result
    assert result["bound_unit"] == "flops"
    assert result["modes"]["none"]["flops"] / result["modes"]["none"]["tokens"] > 4e10
    done = shell("plan", rollouts, "--model", "qwen9")
    assert done.code == 2 and "are known: qwen3-0.6b, " in done.err
    done = shell("plan", rollouts, "--model", "Qwen/Qwen3-9B")
    assert done.code == 2 and "did you mean qwen3-" in done.err


def test_a_batch_that_cannot_be_planned_is_named(
    shell: Shell, tmp_path: Path, config: Path
) -> None:
    made = made_up_rollouts(groups=2)
    ids = [*made[3].token_ids.tolist()[:-1], VOCABULARY]
    made[3] = changed(made[3], token_ids=ids, rollout_id=None)
    file = write_rollouts(tmp_path / "two.jsonl", made)
    done = shell("plan", file, "--model", config, "--batch-rollouts", 3)
    assert done.code == 2
    said = f"error: {file}, batch 1: Rollout '0': token_ids[{len(ids) - 1}] is 61, but"
    assert done.err.startswith(said)


def test_plan_takes_the_batches_of_a_trace(shell: Shell, tmp_path: Path) -> None:
    made = made_up_rollouts(groups=4)
    with record(tmp_path / "trace") as trace:
        trace.add(made[:6])
        trace.add(made[6:])
    result = shell("plan", tmp_path / "trace").result
    assert (result["batches"], result["groups"], result["format"]) == (2, 4, "trace")
    assert shell("plan", tmp_path / "trace", "--batch-rollouts", 12).result["batches"] == 1
    assert shell("plan", tmp_path / "trace", "--format", "verl").code == 2


def test_a_device_is_planned_for(shell: Shell, rollouts: Path) -> None:
    plan = ("plan", rollouts, "--model", "Qwen/Qwen3-8B", "--dtype", "bfloat16")
    fits = shell(*plan, "--device-memory", "80GB", "--optimizer-bytes", "2")
    assert fits.code == 0 and "memory        fits: " in fits.out
    facts = fits.result["device_memory"]
    assert facts["fits"] and facts["bytes"] == 80 * 10**9
    taken = sum(facts[f"{what}_bytes"] for what in ("weights", "gradients", "optimizer"))
    assert taken == pytest.approx(8.19e9 * 6, rel=0.01)
    # It is an answer, so that the exit code is 0.
    too_much = shell(*plan, "--device-memory", "80GB")
    assert too_much.code == 0 and "DOES NOT FIT" in too_much.out
    assert "--optimizer-bytes 2" in too_much.out
    assert not too_much.result["device_memory"]["fits"]
    assert all(len(line) <= 80 for line in too_much.out.splitlines())
    assert shell(*plan).result["device_memory"] is None
    nothing = shell(*plan, "--device-memory", "20GB", "--optimizer-bytes", "0")
    assert nothing.code == 0 and "DOES NOT FIT" in nothing.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device-memory", "80GB"), "without a model bytes cannot be predicted"),
        (("--model", "qwen3-8b", "--device-memory", "much"), "device_memory is 'much'"),
        (("--model", "qwen3-8b", "--trained-share", "2"), "trained_share is 2.0"),
        (("--model", "qwen3-8b", "--optimizer-bytes", "-1"), "optimizer_bytes is -1.0"),
    ],
)
def test_a_device_that_is_none(
    words: tuple[str, ...], message: str, shell: Shell, rollouts: Path
) -> None:
    done = shell("plan", rollouts, *words)
    assert done.code == 2 and message in done.err


def test_plan_on_ranks(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("plan", rollouts, "--model", config, "--ranks", 2)
    assert done.code == 0 and done.err == ""
    lines = done.out.splitlines()
    assert [line.split("  ")[0] for line in lines[-3:]] == ["ranks", "placed", "or placed"]
    assert lines[-3].startswith("ranks         2 ranks: step ")
    found = done.result["ranks"]
    assert found["ranks"] == 2
    ways = found["placements"]
    assert set(ways) == {"forkpoint", "token counts", "file order"}
    batch = RolloutBatch(load_rollouts(rollouts))
    shape = Runtime().shape(config)
    for way in ways.values():
        assert 0 <= way["idle_share"] < 1
    # The figures are those of the plans of what `place` gives.
    placed = forkpoint.place(batch, ranks=2, model=shape)
    plans = [make_plan(batch.select(own), shape) for own in placed]
    step = predict_step(plans)
    alone = predict_step([make_plan(batch, shape)]).lockstep
    assert ways["forkpoint"]["step_over_share"] == pytest.approx(2 * step.lockstep / alone)
    assert ways["forkpoint"]["idle_share"] == pytest.approx(step.idle_share)
    tokens = sum(plan.computed_tokens for plan in plans)
    assert ways["forkpoint"]["replicated_tokens"] == tokens - done.result["computed_tokens"]


def test_plan_on_ranks_of_several_batches(shell: Shell, rollouts: Path) -> None:
    options = ("--batch-rollouts", 5, "--ranks", 3)
    done = shell("plan", rollouts, *options)
    assert done.code == 0 and done.result["batches"] == 2
    ways = done.result["ranks"]["placements"]
    assert ways["file order"]["groups_split"] > 0
    # A pair of dpo is not taken apart.
    pairs = shell("plan", rollouts, "--ranks", 9, "--loss", "dpo").result["ranks"]["placements"]
    assert [way["groups_split"] for way in pairs.values()] == [0, 0, 0]
    singles = shell("plan", rollouts, "--ranks", 9).result["ranks"]["placements"]
    assert singles["file order"]["groups_split"] == 3
    assert shell("plan", rollouts).result["ranks"] is None


def test_plan_on_one_rank_is_the_plan(shell: Shell, rollouts: Path, config: Path) -> None:
    found = shell("plan", rollouts, "--model", config, "--ranks", 1).result["ranks"]["placements"]
    for way in found.values():
        assert way["step_over_share"] == pytest.approx(1)
        assert (way["replicated_tokens"], way["groups_split"]) == (0, 0)
