"""`verify` of steps with a router loss: gradients of routers are compared as well."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell, made_up_rollouts, write_rollouts
from experts import expert_batch, expert_model
from router_losses import gradient_error, ordinary_training, parts_of, ragged_batch, routed_model
from transformers import PreTrainedModel

from forkpoint import Config, UnsupportedError, wrap
from forkpoint.engine.changes import Changes
from forkpoint.engine.route_replay import Routes
from forkpoint.engine.routing import Routing
from forkpoint.hosts.checkpointing import checkpoint_blocks
from forkpoint.hosts.routers import WATCHED
from forkpoint.losses import GRPO, GSPO, RouterLoss
from forkpoint.step.router_steps import router_work
from forkpoint.testing import lifted_upcasts, tiny_model
from forkpoint.verify.dense import DenseRouters, dense_run
from lanes import slow_besides

TREE = Config(sharing="tree", max_microbatch_tokens=24, compile_blocks=False)
ROUTER = RouterLoss(load_balancing=0.5, z=0.01)
BATCH = ragged_batch()


@cache
def tiny() -> PreTrainedModel:
    return routed_model("qwen3_moe", output_router_logits=True)


@pytest.mark.parametrize(
    ("scope", "last_token", "head_tokens"),
    [("batch", True, 2), ("rollout", True, None), ([[0, 2, 6], [1, 3], [5, 4]], False, 3)],
    ids=str,
)
def test_rollouts_one_by_one_are_one_graph(
    scope: Any, last_token: bool, head_tokens: int | None
) -> None:
    """Against one graph over all rollouts, with transformers' own load-balancing loss."""
    model = tiny()
    router = replace(ROUTER, scope=scope, last_token=last_token)
    host = wrap(model, TREE).host
    work = router_work(host, BATCH, router)
    assert work is not None
    with lifted_upcasts(model), Changes() as changes:
        wanted = ordinary_training(
            model,
            BATCH,
            GRPO(),
            load_balancing=0.5,
            z=0.01,
            parts=parts_of(scope, BATCH),
            last_token=last_token,
        )
        if head_tokens == 2:
            checkpoint_blocks(host.blocks, "full", changes, but=None)
        routers = DenseRouters(host.routers.found, work.terms, changes, last_token=last_token)
        found = dense_run(model, BATCH, GRPO(), head_tokens=head_tokens, routers=routers)
    assert found.router_loss == pytest.approx(wanted.router_loss, rel=1e-10)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-10)
    for name, parameter in model.named_parameters():
        parameter.grad = found.gradients[name]
    assert gradient_error(model, wanted.gradients) < 1e-10
    model.zero_grad()


def test_routes_of_last_tokens_have_keys() -> None:
    plain, routes = Routes.to_record(BATCH).keys_T, Routes.to_record(BATCH, last_tokens=True).keys_T
    last = BATCH.offsets[1:] - 1
    assert (plain[last] == -1).all() and (routes >= 0).all()
    keys = {}
    for n in range(len(BATCH)):
        tokens = BATCH.token_ids[BATCH.offsets[n] : BATCH.offsets[n + 1]].tolist()
        for end in range(1, len(tokens) + 1):
            # The label belongs to an edge: the next token, or that there is none.
            edge = (*tokens[: end + 1], end == len(tokens))
            key = int(routes[BATCH.offsets[n] + end - 1])
            assert keys.setdefault(edge, key) == key
    assert len(set(keys.values())) == len(keys) == int(routes.max()) + 1


@pytest.mark.parametrize(
    "family", slow_besides(["qwen3_moe"], ("qwen3_moe", "gpt_oss", "qwen3_next"))
)
def test_it_passes_in_float64(family: str) -> None:
    model = tiny() if family == "qwen3_moe" else routed_model(family)
    report = wrap(model, TREE).verify(BATCH, GRPO(), router=ROUTER)
    assert report.passed and report.nearest.allowed == 1e-10, report.table()
    assert [plan.kind for plan in report.plans][:2] == ["within", "across"]
    assert report.nearest.router_loss_difference is not None
    assert abs(report.nearest.router_loss_difference) < 1e-10
    assert "router loss within" in report.table()
    assert not [m for m in model.modules() if "forward" in vars(m) or WATCHED in vars(m)]


def test_a_model_that_adds_the_loss_needs_it() -> None:
    with pytest.raises(UnsupportedError, match=r"output_router_logits=True"):
        wrap(tiny(), TREE).verify(BATCH, GRPO())
    with pytest.raises(UnsupportedError, match="the model has no routers"):
        wrap(tiny_model("qwen3"), TREE).verify(BATCH, GRPO(), router=ROUTER)


def test_tokens_that_are_counted_once_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the log-probs' loss exact, the routers' gradients show it."""
    summed = Routing._summed

    def once(self: Routing, values_PX: torch.Tensor) -> torch.Tensor:
        times = torch.as_tensor(self.plan.forest.multiplicity)
        return summed(self, values_PX) / times[:, None]

    monkeypatch.setattr(Routing, "_summed", once)
    report = wrap(tiny(), TREE).verify(BATCH, GRPO(), router=ROUTER)
    assert report.verdict == "failed"
    assert (
        report.nearest.router_loss_difference is not None
        and abs(report.nearest.router_loss_difference) > 1e-3
    )
    gates = [e for e in report.nearest.worst if "mlp.gate.weight" in e.name]
    assert len(gates) == 2 and all(entry.excess > 1e6 for entry in gates), report.table()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "loss"), [(torch.bfloat16, GSPO()), (torch.float32, GRPO())], ids=str
)
def test_routes_are_held_for_the_loss_as_well(dtype: torch.dtype, loss: Any) -> None:
    policy = wrap(
        expert_model("qwen3_moe", dtype), Config(sharing="group", max_microbatch_tokens=400)
    )
    report = policy.verify(expert_batch(), loss, router=RouterLoss(0.1, 0.001))
    assert report.passed, report.table()
    assert report.nearest.routes is not None and report.nearest.routes.dense is not None
    # Last tokens run, and their routes are held.
    assert report.nearest.routes.dense.decisions == 2 * expert_batch().logical_tokens


def test_the_command_line(shell: Shell, tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "rollouts.jsonl", made_up_rollouts(groups=1))
    routed_model("qwen3_moe", output_router_logits=True).config.save_pretrained(tmp_path / "m")
    given = [str(path), "--model", str(tmp_path / "m/config.json"), "--sharing", "group"]
    refused = shell("verify", *given)
    assert refused.code == 2 and "output_router_logits=True" in refused.err
    options = ["--router-loss", "rollout,z=0.01"]
    done = shell("verify", *given, *options)
    assert done.code == 0, done.out + done.err
    assert abs(done.result["router_loss_difference"]) < 1e-6
    assert done.result["config"]["router_loss"] == "rollout,z=0.01"
    done = shell("replay", *given, *options, "--steps", "1", "--baseline", "dense")
    assert done.code == 0, done.out + done.err
    (shared,), (dense,) = (done.result[f"{way}_router_losses"] for way in ("shared", "dense"))
    assert shared == pytest.approx(dense, rel=1e-5) and shared > 0
