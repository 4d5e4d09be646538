"""The commands verify and doctor, run in this process on tiny files and models."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell, changed, made_up_rollouts, write_config, write_rollouts
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError

from forkpoint import RolloutBatch, losses
from forkpoint.apps.cli.losses import CLASSES, Objective, RoutedObjective
from forkpoint.apps.cli.output import Output
from forkpoint.apps.cli.verify import groups_with_gradient
from forkpoint.engine.engine import Engine
from lanes import slow_besides_every


@pytest.fixture
def wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shared step's gradients are one part in a thousand too large."""
    right = Engine.forward_backward

    def wrong(self: Engine, *args: Any) -> Any:
        return right(self, *args[:-1], 1.001 * args[-1])

    monkeypatch.setattr(Engine, "forward_backward", wrong)


def test_verify_passes(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @contextmanager
    def waiting(_: Output, what: str) -> Iterator[Any]:
        yield told.append if what == "comparing gradients" else str

    monkeypatch.setattr(Output, "waiting", waiting)
    done = shell(
        *("verify", rollouts, "--model", config, "--dtype", "bfloat16", "--limit-groups", 2),
        *("--sharing", "tree", "--boundary", "across", "--max-microbatch-tokens", 24),
    )
    assert done.code == 0, done.out
    result = done.result
    assert result["passed"] and result["dtype"] == "bfloat16"
    assert result["groups"] == 2 and result["rollouts"] == 6
    assert (result["sharing"], result["boundary"]) == ("tree", "across")
    assert result["config"]["max_microbatch_tokens"] == 24
    assert 0 < result["computed_tokens"] < result["logical_tokens"]
    assert all(entry["norm"] > 0 for entry in result["worst"]), "nothing was compared"
    assert {"shared_error", "dense_error", "allowed", "versions"} <= set(result)
    assert "not compared: a plan that shares within microbatches, because" in done.out
    assert "passed: 1 of 1 plans, sharing across microbatches" in done.out
    assert told == ["reference (1 of 3)", "dense (2 of 3)", "across (3 of 3)"]


def test_verify_of_experts_in_float64(shell: Shell, tmp_path: Path, rollouts: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = write_config(tmp_path / "experts.json", model_type="qwen3_moe", **experts)
    done = shell("verify", rollouts, "--model", model, "--dtype", "float64")
    assert done.code == 0 and done.result["dtype"] == "float64"


@pytest.mark.usefixtures("wrong_gradients")
def test_verify_fails(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("verify", rollouts, "--model", config)
    assert done.code == 1
    assert done.result["passed"] is False and "FAILED" in done.out


def test_nothing_to_verify_has_an_exit_code_of_its_own(
    shell: Shell, tmp_path: Path, rollouts: Path, config: Path
) -> None:
    single = write_rollouts(tmp_path / "single.jsonl", made_up_rollouts(groups=1)[:1])
    for given in ((single,), (rollouts, "--sharing", "none")):
        done = shell("verify", *given, "--model", config)
        assert done.code == 3
        assert done.result["verdict"] == "nothing to verify" and not done.result["passed"]


def test_every_loss_has_a_name() -> None:
    found = {
        kind
        for name in losses.__all__
        if isinstance(kind := getattr(losses, name), type) and issubclass(kind, losses.Loss)
    }
    found -= {losses.Loss, losses.FunctionLoss, losses.PolicyLoss, losses.ValueLoss}
    assert {getattr(losses, kind) for kind in CLASSES.values()} == found
    for name, kind in CLASSES.items():
        text = "dr_grpo,max_tokens=9" if name == "dr_grpo" else name
        assert type(Objective(loss=text).make()) is getattr(losses, kind)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        (None, losses.GRPO()),
        ("grpo,clip=0.1,clip_high=0.3,kl=2e-1", losses.GRPO(clip=0.1, clip_high=0.3, kl=0.2)),
        ("gspo,level=token", losses.GSPO(level="token")),
        ("grpo,clip=inf", losses.GRPO(clip=inf)),
        ("dpo,length_normalized=True", losses.DPO(length_normalized=True)),
        ("dr_grpo,max_tokens=9", losses.DrGRPO(max_tokens=9)),
    ],
)
def test_options_reach_the_loss(text: str | None, loss: losses.Loss) -> None:
    assert Objective(loss=text).make() == loss


def test_options_reach_the_router_loss() -> None:
    assert RoutedObjective().make_router() is None
    made = RoutedObjective(router_loss="rollout,z=0.1,last_token=False").make_router()
    assert made == losses.RouterLoss(z=0.1, scope="rollout", last_token=False)


@pytest.mark.parametrize(
    "loss", slow_besides_every(3, ["dr_grpo,max_tokens=9", "gspo", "sft", "distillation", "dpo"])
)
def test_verify_with_losses(loss: str, shell: Shell, tmp_path: Path, config: Path) -> None:
    pairs = [
        changed(rollout, advantage=n % 2, reference_logprobs=-np.ones(len(rollout)))
        for n, rollout in enumerate(made_up_rollouts(groups=2, rollouts_per_group=2))
    ]
    file = write_rollouts(tmp_path / "pairs.jsonl", pairs)
    done = shell("verify", file, "--model", config, "--loss", loss, "--limit-groups", 2)
    assert done.code == 0 and done.result["passed"]
    assert done.result["config"]["loss"] == loss


def test_verify_leaves_out_groups_without_a_gradient(
    shell: Shell, tmp_path: Path, config: Path
) -> None:
    made = made_up_rollouts(groups=3)
    made[:3] = [changed(rollout, advantage=0.0) for rollout in made[:3]]
    made[6:] = [changed(rollout, loss_mask=np.zeros(len(rollout), bool)) for rollout in made[6:]]
    file = write_rollouts(tmp_path / "rollouts.jsonl", made)
    batch = RolloutBatch(made)
    for loss, expected in (("grpo", [3]), ("likelihood", [0, 3]), ("grpo,kl=0.1", [0, 3])):
        found = groups_with_gradient(batch, Objective(loss=loss).make())
        assert [group[0] for group in found] == expected, loss
    result = shell("verify", file, "--model", config).result
    assert result["groups"] == 1
    assert result["logical_tokens"] == sum(len(rollout) for rollout in made[3:6])
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
    assert result["self_test"]["dtype"] == "float64"
    assert compiled["dtype"] == ("float32" if torch.cuda.is_available() else "float64")
    assert result["self_test"]["computed_tokens"] < result["self_test"]["logical_tokens"]
    assert result["versions"]["torch"] == torch.__version__
    assert {"llama", "qwen3"} <= set(result["families"])
    kernels = {
        (kernel["device"], kernel["dtype"], kernel["kernel"]): kernel
        for kernel in (*result["kernels"], *result["delta_rule_kernels"])
    }
    for dtype in ("bfloat16", "float32"):
        for chosen in ("cpu_flash", "chunked"):
            assert kernels["cpu", dtype, chosen]["auto"]
        reference = kernels["cpu", dtype, "reference"]
        assert not reference["auto"] and reference["refusal"] is None
        assert "runs on cuda" in kernels["cpu", dtype, "fla"]["refusal"]
    for blocks in ("eager", "compiled"):
        assert f"self-test: passed with {blocks} blocks" in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_gradients")
def test_doctor_fails(shell: Shell) -> None:
    done = shell("doctor", "--quick")
    assert done.code == 1 and done.result["compiled_self_test"] is None
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
    assert "The compiler failed (RuntimeError: no ptxas), so steps run blocks eagerly" in done.out
