"""The commands plan, verify and doctor, run in this process on tiny files and models."""

import json
import math
import os
import pty
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

import dumps
from forkpoint import (
    Config,
    Policy,
    RolloutBatch,
    load_rollouts,
    losses,
    record,
    wrap,
)
from forkpoint.cli.losses import CLASSES, LossOptions, coupling
from forkpoint.cli.model_config import read_shape
from forkpoint.cli.models import load_model
from forkpoint.cli.options import Runtime
from forkpoint.cli.output import Output
from forkpoint.cli.verify import groups_with_gradient
from forkpoint.testing import tiny_model

PLAN_FIELDS = {
    *("command", "file", "rollouts", "groups", "logical_tokens", "group_tokens", "unique_tokens"),
    *("computed_tokens", "trained_tokens", "rows", "max_row_tokens", "bound", "bound_unit"),
    *("sharing", "boundary", "waves", "reason", "candidates"),
    *("predicted_peak_bytes", "predicted_ms", "predicted_speedup", "plans", "batch"),
    *("model", "batches", "modes", "distributions", "splits", "format", "skipped"),
}
LOSSES = ("grpo", "gspo", "dpo", "simpo", "likelihood")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.json")


@pytest.fixture
def wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shared step's gradients are one part in a thousand too large."""
    right = Policy.forward_backward

    def wrong(self: Policy, *args: Any, **kwargs: Any) -> Any:
        return right(self, *args, **{**kwargs, "scale": 1.001})

    monkeypatch.setattr(Policy, "forward_backward", wrong)


# plan ---------------------------------------------------------------------------------------------


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
    done = shell("plan", rollouts)
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
    for count in (result["logical_tokens"], result["group_tokens"], result["unique_tokens"]):
        assert f" {count:,} " in done.out
    assert "looked at" in done.out, "explain() is missing"


def test_plan_obeys_its_options(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell(
        *("plan", rollouts, "--model", config, "--sharing", "group", "--limit", 6),
        *("--boundary", "across_rows", "--waves", "padded", "--max-row-tokens", 32),
    )
    result = done.result
    assert (result["sharing"], result["boundary"], result["waves"]) == (
        *("group", "across_rows"),
        "padded",
    )
    assert result["rollouts"] == 6 and result["max_row_tokens"] == 32
    assert [(c["sharing"], c["boundary"]) for c in result["candidates"]] == [
        ("group", "across_rows")
    ]
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
    assert read_shape(tmp_path, options) == wrap(loaded).host.shape
    assert read_shape(tmp_path / "config.json", Runtime()) == replace(
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
    arguments = ("plan", file, "--model", config, "--max-row-tokens", 24, "--loss", loss)
    result = shell(*arguments).result
    policy = wrap(load_model(config, Runtime()), Config(max_row_tokens=24))
    plan = policy.plan(RolloutBatch(everything), LossOptions(loss=loss).make())
    assert result["candidates"] == [asdict(candidate) for candidate in plan.candidates]
    assert (result["sharing"], result["boundary"], result["rows"]) == (
        *(plan.sharing, plan.boundary),
        len(plan.rows),
    )
    assert result["bound"] == plan.bound
    costs = [candidate["cost"] for candidate in result["candidates"] if candidate["cost"]]
    alone = shell(*arguments, "--loss", "likelihood").result["candidates"]
    dearer = costs != [candidate["cost"] for candidate in alone if candidate["cost"]]
    assert dearer == (loss in ("gspo", "dpo", "simpo")), "only coupled tokens cost another forward"


def test_plan_needs_no_torch(rollouts: Path, config: Path) -> None:
    code = (
        "import sys; from forkpoint.cli import main; "
        f"assert main(['plan', {str(rollouts)!r}, '--model', {str(config)!r}]) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_verify_passes(dtype: str, shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell(
        *("verify", rollouts, "--model", config, "--dtype", dtype, "--limit-groups", 2),
        *("--sharing", "tree", "--boundary", "across_rows", "--max-row-tokens", 24),
    )
    assert done.code == 0, done.out
    result = done.result
    assert result["passed"] and result["dtype"] == dtype
    assert result["groups"] == 2 and result["rollouts"] == 6
    assert (result["sharing"], result["boundary"]) == ("tree", "across_rows")
    assert 0 < result["computed_tokens"] < result["logical_tokens"]
    assert all(entry["norm"] > 0 for entry in result["worst"]), "nothing was compared"
    assert {"shared_error", "dense_error", "allowed", "config", "versions"} <= set(result)
    assert "passed" in done.out.splitlines()[-2] + done.out.splitlines()[-3]


@pytest.mark.usefixtures("wrong_gradients")
def test_verify_fails(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("verify", rollouts, "--model", config)
    assert done.code == 1
    assert done.result["passed"] is False and "FAILED" in done.out


def test_every_loss_has_a_name() -> None:
    classes = {
        value
        for name in losses.__all__
        if isinstance(value := getattr(losses, name), type) and issubclass(value, losses.Loss)
    }
    named = {getattr(losses, kind) for kind in CLASSES.values()}
    assert named == classes - {losses.Loss, losses.PolicyLoss, losses.ValueLoss}


def test_options_reach_the_loss() -> None:
    def made(**given: Any) -> losses.Loss:
        return LossOptions(**given).make()

    assert made() == losses.GRPO()
    assert made(clip=0.1, clip_high=0.3, kl=0.2, entropy=0.1, normalize="rollout") == losses.GRPO(
        clip=0.1, clip_high=0.3, kl=0.2, entropy=0.1, normalize="rollout"
    )
    assert made(loss="dapo") == losses.DAPO()
    assert made(loss="dr_grpo", max_tokens=9, clip=0.3) == losses.DrGRPO(max_tokens=9, clip=0.3)
    assert made(loss="gspo", clip=0.1) == losses.GSPO(clip=0.1)
    assert made(loss="dpo", beta=0.3, variant="ipo") == losses.DPO(beta=0.3, variant="ipo")
    assert made(loss="simpo", beta=3.0, gamma=0.2) == losses.SimPO(beta=3.0, gamma=0.2)
    assert made(loss="sft", normalize="rollout") == losses.SFT(normalize="rollout")
    for name, kind in CLASSES.items():
        given = {"max_tokens": 9} if name == "dr_grpo" else {}
        assert type(made(loss=name, **given)) is getattr(losses, kind)


def test_couplings_are_those_of_the_losses() -> None:
    pairs = RolloutBatch(made_up_rollouts(groups=2, rollouts_per_group=2))
    for name in CLASSES:
        loss = LossOptions(loss=name, max_tokens=9 if name == "dr_grpo" else None).make()
        found = coupling(name, pairs)
        assert (found is None) == (loss.decomposition == "token"), name
        if found is not None:
            assert (found == loss.coupling(pairs)).all(), name


@pytest.mark.parametrize("loss", sorted(CLASSES))
def test_verify_with_every_loss(loss: str, shell: Shell, tmp_path: Path, config: Path) -> None:
    pairs = [
        changed(rollout, advantage=n % 2, reference_logprobs=-np.ones(len(rollout)))
        for n, rollout in enumerate(made_up_rollouts(groups=2, rollouts_per_group=2))
    ]
    file = write_rollouts(tmp_path / "pairs.jsonl", pairs)
    options = ("--max-tokens", 9) if loss == "dr_grpo" else ()
    done = shell(
        *("verify", file, "--model", config, "--loss", loss, *options),
        *("--limit-groups", 2, "--json"),
    )
    assert done.code == 0 and done.result["passed"]
    assert done.result["config"]["loss"] == loss


def test_verify_leaves_out_groups_without_a_gradient(
    shell: Shell, tmp_path: Path, config: Path
) -> None:
    made = made_up_rollouts(groups=3)
    made[:3] = [changed(rollout, advantage=0.0) for rollout in made[:3]]
    file = write_rollouts(tmp_path / "rollouts.jsonl", made)
    batch = RolloutBatch(made)
    for loss, expected in (("grpo", [3, 6]), ("dapo", [3, 6]), ("likelihood", [0, 3, 6])):
        assert [g[0] for g in groups_with_gradient(batch, LossOptions(loss=loss))] == expected
    with_kl = LossOptions(loss="grpo", kl=0.1)
    assert [g[0] for g in groups_with_gradient(batch, with_kl)] == [0, 3, 6]
    result = shell("verify", file, "--model", config).result
    expected = sum(len(rollout) for rollout in made[3:6])
    assert result["groups"] == 1 and result["logical_tokens"] == expected
    assert all(entry["norm"] > 0 for entry in result["worst"])


# doctor -------------------------------------------------------------------------------------------


def test_doctor(shell: Shell) -> None:
    done = shell("doctor")
    assert done.code == 0
    result = done.result
    assert set(result) == {
        *("command", "passed", "versions", "devices", "kernels", "families", "self_test"),
        "delta_rule_kernels",
    }
    assert result["passed"] and result["self_test"]["passed"]
    assert result["self_test"]["computed_tokens"] < result["self_test"]["logical_tokens"]
    assert result["versions"]["torch"] == torch.__version__
    assert {"forkpoint", "python", "transformers", "numpy", "triton"} <= set(result["versions"])
    assert result["devices"][0]["device"] == "cpu"
    assert {"llama", "qwen3"} <= set(result["families"])
    for device in result["devices"]:
        for dtype in ("bfloat16", "float32"):
            listed = [
                kernel
                for kernel in result["kernels"]
                if (kernel["device"], kernel["dtype"]) == (device["device"], dtype)
            ]
            assert {"cpu_flash", "reference"} <= {kernel["kernel"] for kernel in listed}
            able = [kernel for kernel in listed if kernel["refusal"] is None]
            assert [kernel["auto"] for kernel in able] == [True] + [False] * (len(able) - 1)
            assert not any(kernel["auto"] for kernel in listed if kernel["refusal"])
    delta = {(k["device"], k["kernel"]): k for k in result["delta_rule_kernels"]}
    assert delta["cpu", "chunked"]["auto"] and not delta["cpu", "reference"]["refusal"]
    assert "runs on cuda" in delta["cpu", "fla"]["refusal"]
    for word in ("self-test: passed", "LlamaForCausalLM", torch.__version__, "cpu_flash"):
        assert word in done.out


@pytest.mark.usefixtures("wrong_gradients")
def test_doctor_fails(shell: Shell) -> None:
    done = shell("doctor")
    assert done.code == 1
    assert done.result["passed"] is False and "self-test: FAILED" in done.out


SHORT_DEMO = ("--groups", 1, "--prompt-tokens", 64, "--response-tokens", 8, "--steps", 1)


@pytest.mark.parametrize(
    "arguments",
    [("plan",), ("verify", "--model"), ("doctor",), ("demo", *SHORT_DEMO)],
    ids=lambda arguments: arguments[0],
)
def test_json_is_one_line(
    arguments: tuple[object, ...],
    shell: Shell,
    rollouts: Path,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = [rollouts] if arguments[0] in ("plan", "verify") else []
    model = [config] if arguments[-1] == "--model" else []
    done = shell(*arguments, *model, *file, "--json")
    assert done.code == 0 and done.err == ""
    assert done.out.count("\n") == 1 and done.out.endswith("}\n")
    assert done.result["command"] == arguments[0]


# What goes wrong ----------------------------------------------------------------------------------


def test_defects_are_not_taken_for_errors_of_users(
    shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_planner(*_: object, **__: object) -> None:
        raise AssertionError("an invariant")

    monkeypatch.setattr("forkpoint.cli.plan.make_plan", broken_planner)
    with pytest.raises(AssertionError, match="an invariant"):
        shell("plan", rollouts)


def test_interrupt(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Policy, "forward_backward", interrupted)
    done = shell("replay", rollouts, "--model", config)
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_a_reader_that_has_enough(form: tuple[str, ...], rollouts: Path) -> None:
    """As `forkpoint plan FILE | true`: no traceback about the broken pipe, then or at exit."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "forkpoint", "plan", str(rollouts), *form],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == "" and done.returncode == 1


def test_progress_on_a_terminal(rollouts: Path, config: Path) -> None:
    """Progress goes to stderr, if that is a terminal; stdout has the result alone."""
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "forkpoint", "replay", str(rollouts), "--model", str(config)]
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=stderr)
    os.close(stderr)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
    out, _ = process.communicate()
    os.close(terminal)
    assert process.returncode == 0
    assert b"training" in shown and b"4/4" in shown
    assert out.count(b"\n") == 1 and json.loads(out)["steps"] == 4


def test_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_only=True).result({"a": math.nan, "b": [1.5, {"c": -math.inf}], "d": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, {"c": None}], "d": "x"}


def test_the_made_up_vocabulary_is_covered(config: Path, rollouts: Path) -> None:
    """The tiny model of these tests has exactly the vocabulary of their rollouts."""
    model = load_model(config, Runtime(dtype="float64", seed=3))
    assert model.config.vocab_size == VOCABULARY and model.training
    assert next(model.parameters()).dtype == torch.float64
    RolloutBatch(load_rollouts(rollouts)).check_vocabulary(VOCABULARY)


# what plan estimates, and what it reads -----------------------------------------------------------


def test_plan_streams_batches(shell: Shell, tmp_path: Path, config: Path) -> None:
    """What is shown of a stream is the sum of its batches' plans; one of them where asked for."""
    made = made_up_rollouts(groups=6)
    file = write_rollouts(tmp_path / "six.jsonl", made)
    done = shell("plan", file, "--model", config, "--batch-rollouts", 6)
    result = done.result
    assert result["batches"] == 3 and "3 batches, each with a plan of its own" in done.out
    assert "rows in visiting order" not in done.out
    parts = [
        shell(
            "plan",
            write_rollouts(tmp_path / f"{n}.jsonl", made[6 * n : 6 * n + 6]),
            "--model",
            config,
        )
        for n in range(3)
    ]
    for name in (
        *("logical_tokens", "group_tokens", "unique_tokens", "trained_tokens", "groups"),
        *("computed_tokens", "rows"),
    ):
        assert result[name] == sum(part.result[name] for part in parts)
    for mode in ("none", "group", "tree"):
        flops = sum(part.result["modes"][mode]["flops"] for part in parts)
        assert result["modes"][mode]["flops"] == flops
    peaks = [part.result["predicted_peak_bytes"] for part in parts]
    assert result["predicted_peak_bytes"] == max(peaks) > 0
    assert (result["batch"], result["candidates"]) == (0, parts[0].result["candidates"])
    second = shell("plan", file, "--model", config, "--batch-rollouts", 6, "--batch", 1)
    assert second.result["candidates"] == parts[1].result["candidates"]
    assert second.result["computed_tokens"] == result["computed_tokens"]
    own, whole = (done.out.split("rows in visiting order")[1] for done in (parts[1], second))
    assert own.split("what sharing")[0].rstrip() == whole.split("what sharing")[0].rstrip()
    by_tokens = shell("plan", file, "--batch-tokens", 150).result
    assert 1 < by_tokens["batches"] < 6 and by_tokens["group_tokens"] == result["group_tokens"]
    alone = shell("plan", file).result
    assert alone["batches"] == 1 and alone["unique_tokens"] < result["unique_tokens"]
    assert shell("plan", file, "--batch-tokens", 0).code == 2


def test_plan_says_what_a_split_loses(shell: Shell, rollouts: Path) -> None:
    done = shell("plan", rollouts)
    result = done.result
    found = {(row["kind"], row["count"]): row for row in result["splits"]}
    assert set(found) == {
        *(("microbatch", n) for n in (1, 2, 4, 8)),
        *((kind, n) for kind in ("ranks", "ranks, dealt in turn") for n in (2, 4, 8)),
    }
    assert found["microbatch", 1]["group_tokens"] == result["modes"]["none"]["tokens"]
    assert found["ranks", 2]["group_more"] > 0
    assert "microbatches of 2, in the order of the file" in done.out
    assert result["distributions"]["group_size"]["p50"] == 3


@pytest.mark.parametrize("name", ["qwen3-8b", "Llama3-8B"])
def test_plan_knows_models_by_name(name: str, shell: Shell, rollouts: Path) -> None:
    result = shell("plan", rollouts, "--model", name).result
    assert result["bound_unit"] == "flops"
    assert result["modes"]["none"]["flops"] / result["modes"]["none"]["tokens"] > 4e10
    done = shell("plan", rollouts, "--model", "qwen9")
    assert done.code == 2 and "are known: qwen3-0.6b, " in done.err


def test_commands_read_what_trainers_write(shell: Shell, tmp_path: Path, config: Path) -> None:
    made = made_up_rollouts()
    file = dumps.write_torch(tmp_path / "batch.pt", dumps.tensors(dumps.trl(_with_logprobs(made))))
    done = shell("plan", file)
    assert done.code == 0 and "batch.pt: torch, format trl" in done.out
    assert "Note: This format does not say the sampling temperature" in done.out
    assert done.result["format"] == "trl" and done.result["rollouts"] == 9
    own = shell("plan", write_rollouts(tmp_path / "own.jsonl", made)).result
    for name in ("logical_tokens", "group_tokens", "unique_tokens", "modes", "splits"):
        assert done.result[name] == own[name]
    verified = shell("verify", file, "--model", config, "--format", "trl")
    assert verified.code == 0 and verified.result["format"] == "trl"
    replayed = shell("replay", file, "--model", config, "--steps", 1, "--format", "trl")
    assert replayed.code == 0 and replayed.result["format"] == "trl"
    wrong = shell("plan", file, "--format", "verl")
    assert wrong.code == 2 and "batch.pt: there is no prompts" in wrong.err


def test_commands_skip_and_say_so(shell: Shell, tmp_path: Path) -> None:
    file = write_rollouts(tmp_path / "some.jsonl")
    with file.open("a") as appended:
        appended.write('{"token_ids": [1, -2], "loss_mask": [0, 1], "advantage": 1}\n{\n')
    stopped = shell("plan", file)
    assert stopped.code == 2 and "line 10" in stopped.err and "token_ids[1] is -2" in stopped.err
    done = shell("plan", file, "--on-error", "skip")
    assert done.code == 0 and done.result["rollouts"] == 9
    assert done.result["skipped"] == {"records": 2, "fields": {"token_ids": 1, "JSON": 1}}
    assert "2 skipped (token_ids 1, JSON 1); first: " in done.out


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


def _with_logprobs(rollouts: list) -> list:
    return [
        changed(r, reference_logprobs=-np.ones(len(r)), old_logprobs=-np.ones(len(r)))
        for r in rollouts
    ]
