"""The commands verify and doctor, run in this process on tiny files and models."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, changed, made_up_rollouts, write_rollouts
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError

from forkpoint import RolloutBatch, losses
from forkpoint.apps.cli.losses import CLASSES, LossOptions, coupling
from forkpoint.apps.cli.output import Output
from forkpoint.apps.cli.verify import groups_with_gradient
from forkpoint.engine.engine import Engine


@pytest.fixture
def wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shared step's gradients are one part in a thousand too large."""
    right = Engine.forward_backward

    def wrong(self: Engine, *args: Any) -> Any:
        return right(self, *args[:-1], 1.001 * args[-1])

    monkeypatch.setattr(Engine, "forward_backward", wrong)


# verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_verify_passes(dtype: str, shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell(
        *("verify", rollouts, "--model", config, "--dtype", dtype, "--limit-groups", 2),
        *("--sharing", "tree", "--boundary", "across", "--max-microbatch-tokens", 24),
    )
    assert done.code == 0, done.out
    result = done.result
    assert result["passed"] and result["dtype"] == dtype
    assert result["groups"] == 2 and result["rollouts"] == 6
    assert (result["sharing"], result["boundary"]) == ("tree", "across")
    assert 0 < result["computed_tokens"] < result["logical_tokens"]
    assert all(entry["norm"] > 0 for entry in result["worst"]), "nothing was compared"
    assert {"shared_error", "dense_error", "allowed", "config", "versions"} <= set(result)
    assert "not compared: a plan that shares within microbatches, because" in done.out
    assert f"passed: {dtype}, tree + across, " in done.out
    assert "passed: 1 of 1 plans, sharing across microbatches" in done.out


@pytest.mark.usefixtures("wrong_gradients")
def test_verify_fails(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("verify", rollouts, "--model", config)
    assert done.code == 1
    assert done.result["passed"] is False and "FAILED" in done.out


def test_nothing_to_verify_has_an_exit_code_of_its_own(
    shell: Shell, tmp_path: Path, rollouts: Path, config: Path
) -> None:
    alone = made_up_rollouts(groups=1)[:1]
    file = write_rollouts(tmp_path / "alone.jsonl", alone)
    for given in (("verify", file), ("verify", rollouts, "--sharing", "none")):
        done = shell(*given, "--model", config)
        assert done.code == 3
        assert done.result["verdict"] == "nothing to verify" and not done.result["passed"]
        assert "NOTHING TO VERIFY: " in done.out and "passed" not in done.out


def test_progress_is_told_through_a_pipe(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "waiting", told)
    TOLD.clear()
    assert shell("verify", rollouts, "--model", config, "--dtype", "float64").code == 0
    names = [text.partition(" ")[0] for text in TOLD]
    assert list(dict.fromkeys(names)) == ["reference", "within", "across"]
    assert all(re.match(r"\w+ \(\d of 3\), \d+% done", text) for text in TOLD)


TOLD: list[str] = []


@contextmanager
def told(_: Output, what: str) -> Iterator[Any]:
    yield TOLD.append if what == "comparing gradients" else str


def test_every_loss_has_a_name() -> None:
    classes = {
        value
        for name in losses.__all__
        if isinstance(value := getattr(losses, name), type) and issubclass(value, losses.Loss)
    }
    named = {getattr(losses, kind) for kind in CLASSES.values()}
    assert named == classes - {
        losses.Loss,
        losses.FunctionLoss,
        losses.PolicyLoss,
        losses.ValueLoss,
    }


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


@pytest.mark.slow
def test_doctor(shell: Shell) -> None:
    done = shell("doctor")
    assert done.code == 0
    result = done.result
    assert set(result) == {
        *("command", "passed", "versions", "devices", "kernels", "families", "self_test"),
        *("delta_rule_kernels", "compiled_self_test"),
    }
    assert result["passed"] and result["self_test"]["passed"]
    compiled = result["compiled_self_test"]
    assert compiled["passed"] and compiled["compiler_failure"] is None
    assert (result["self_test"]["dtype"], compiled["dtype"]) == ("float64", "float32")
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
    for blocks in ("eager", "compiled"):
        assert f"self-test: passed with {blocks} blocks" in done.out
    for word in ("LlamaForCausalLM", torch.__version__, "cpu_flash"):
        assert word in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_gradients")
def test_doctor_fails(shell: Shell) -> None:
    done = shell("doctor")
    assert done.code == 1
    assert done.result["passed"] is False and "self-test: FAILED" in done.out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_doctor_where_the_compiler_fails(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said in one line, and is no failed check: steps then run eagerly."""
    torch._dynamo.reset()
    error = InductorError(RuntimeError("no ptxas\nin sight"), None)

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", failing)
    with functorch_config.patch(enable_autograd_cache=False):
        done = shell("doctor")
    torch._dynamo.reset()
    assert done.code == 0
    assert done.result["compiled_self_test"]["compiler_failure"] == "RuntimeError: no ptxas"
    (line,) = [line for line in done.out.splitlines() if "with compiled blocks" in line]
    assert "The compiler failed here (RuntimeError: no ptxas), so blocks ran eagerly" in line
