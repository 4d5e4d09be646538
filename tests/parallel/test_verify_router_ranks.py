"""`policy.verify` of steps with a router loss, where several ranks hold the model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import EMPTY, UNEQUAL, gradients, group, on_ranks, replicated, sharded
from split_models import MOE, Split, data_rank, load
from test_router_ranks import COEFFICIENTS, Routed, mixture, routers

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.engine.routing import Routing
from forkpoint.hosts.routers import WATCHED
from forkpoint.losses import GRPO, GSPO, RouterLoss
from forkpoint.verify.dense import DenseRouters
from versions import needs_splits

TREE = Config(sharing="tree", compile_blocks=False)


@dataclass(frozen=True)
class Verified:
    """A comparison on ranks. `folder` has the files of a model that transformers splits."""

    routed: Routed
    split: Split | None = None
    folder: Path | None = None
    dtype: torch.dtype = torch.float64

    @property
    def place(self) -> int:
        return dist.get_rank() if self.split is None else data_rank(self.split)

    def policy(self) -> forkpoint.Policy:
        if self.split is None:
            whole = mixture().to(self.dtype)
            return on_ranks(self.routed.wrap(whole), self.routed.config, self.routed.gather)
        assert self.folder is not None
        model = load(self.folder, self.split, **self.split.options)
        return forkpoint.wrap(model, self.routed.config)


def verified(case: Verified) -> dict[str, Any]:
    policy, place = case.policy(), case.place
    model = policy.host.model
    batch = RolloutBatch(case.routed.rollouts[place])
    own, _ = routers(case.routed, place)
    report = policy.verify(batch, case.routed.loss, router=own)
    assert all(gradient is None for gradient in gradients(model).values())
    assert not [m for m in model.modules() if WATCHED in vars(m)]
    return {
        "verdict": report.verdict,
        "kinds": [plan.kind for plan in report.plans],
        "errors": [plan.shared_error for plan in report.plans],
        "router loss": [plan.router_loss_difference for plan in report.plans],
        "gates": [
            (error.shared_error, error.excess)
            for plan in report.plans
            for error in plan.worst
            if error.name.endswith("gate.weight")
        ],
    }


def check(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["verdict"] == "passed", each
        assert each["kinds"][:2] == ["within", "across"]
        assert all(error < 1e-10 for error in each["errors"])
        assert all(abs(difference) < 1e-10 for difference in each["router loss"])
        assert len(each["gates"]) >= 2 * len(each["kinds"])
        assert each["errors"] == pytest.approx(found[0]["errors"], rel=1e-9)


BATCH = Routed(wrap=replicated, config=TREE)
SHARDED = replace(BATCH, wrap=sharded)
CASES = {
    "DistributedDataParallel, batch": BATCH,
    "DistributedDataParallel, lists": replace(BATCH, scope="lists", last_token=False),
    "DistributedDataParallel, a rank without": replace(BATCH, rollouts=EMPTY),
    "fully_shard, lists": replace(SHARDED, scope="lists", loss=GSPO()),
    "fully_shard, a rank without, rollout": replace(SHARDED, rollouts=EMPTY, scope="rollout"),
    "fully_shard, gathered once": replace(SHARDED, gather="step"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_verify_router_losses_of_all(name: str) -> None:
    check(run_ranks(2, verified, Verified(CASES[name])))


FEW = ([*group(0, 3, 12, 6), *group(1, 2, 9, 5)], group(2, 2, 9, 5))
COPY = (FEW[0],)
SPLITS: dict[str, tuple[int, dict[str, int], Routed]] = {
    "tensor and expert": (
        2,
        {"tp_size": 2, "ep_size": 2},
        replace(BATCH, rollouts=COPY, scope="lists"),
    ),
    "data and expert, rollout": (
        2,
        {"fsdp_size": 2, "ep_size": 2},
        replace(BATCH, scope="rollout", last_token=False),
    ),
    "tensor x data x expert": (
        4,
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        replace(BATCH, rollouts=FEW),
    ),
}


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_split_ranks_verify_router_losses_of_all(name: str, tmp_path: Path) -> None:
    size, options, routed = SPLITS[name]
    split = Split(family="qwen3_moe", sizes=MOE, options=options)
    check(run_ranks(size, verified, Verified(routed, split, split.save(tmp_path)), limit_s=120))


def louder_router(case: Verified) -> dict[str, Any]:
    """The gradient of one rank's router loss, a little too large."""
    own = Routing.root

    def louder(self: Routing, instruction: Any, inputs: Any, scale: float) -> Any:
        return own(self, instruction, inputs, 1.00001 * scale)

    if dist.get_rank() == 1:
        Routing.root = louder  # type: ignore[method-assign]
    return verified(case)


@pytest.mark.slow
def test_a_router_gradient_of_one_rank_is_found() -> None:
    """The losses of log-probs are exact, and values of the router loss."""
    for each in run_ranks(2, louder_router, Verified(BATCH)):
        assert each["verdict"] == "failed"
        assert all(abs(difference) < 1e-10 for difference in each["router loss"])
        assert all(excess > 1e3 for _, excess in each["gates"]), each


@pytest.mark.slow
def test_a_yardstick_of_one_rank_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the other side: ordinary training counts this rank's rollouts."""
    monkeypatch.setattr(DenseRouters, "counted", lambda self: None)
    for each in run_ranks(2, verified, Verified(BATCH)):
        assert each["verdict"] == "failed"
        assert all(abs(difference) > 1e-3 for difference in each["router loss"])


# What is refused, and ranks that fail
# ------------------------------------------------------------


def said(policy: forkpoint.Policy, loss: Any, router: RouterLoss | None) -> str:
    try:
        return policy.verify(RolloutBatch(UNEQUAL[dist.get_rank()]), loss, router=router).verdict
    except forkpoint.errors.ForkpointError as error:
        return f"{type(error).__name__}: {error}"


def refused(wrap: Any) -> list[str]:
    policy, rank = on_ranks(wrap(mixture()), TREE), dist.get_rank()
    router = RouterLoss(**COEFFICIENTS)

    def own(outputs: Any, batch: Any) -> torch.Tensor:
        return batch.trained(outputs.logprobs).mean()

    lists = RouterLoss(scope=[[0]], **COEFFICIENTS)
    return [
        said(policy, GRPO(), router if rank else None),
        said(policy, GRPO(), replace(router, z=0.1 + rank)),
        said(policy, own, router),
        said(policy, GRPO(), lists if rank else replace(router, scope="rollout")),
        said(policy, GRPO(), router),
    ]


@pytest.mark.slow
def test_ranks_verify_one_router_loss() -> None:
    for rank, found in enumerate(run_ranks(2, refused, sharded)):
        missing, other, own, lists, passed = found
        for text in (missing, other):
            assert text.startswith("RankError: the ranks do not verify the same router loss"), found
        assert "rank 0: no router" in missing
        assert own.startswith("UnsupportedError: router= was given with a loss that is a function")
        kind = "ConfigError: scope of RouterLoss" if rank else "RankError: rank 1 cannot compare"
        assert lists.startswith(kind), found
        assert passed == "passed"


def failing(wrap: Any, moment: str) -> list[str]:
    """One rank fails before it has given its counts, or after; then a comparison works."""
    policy = on_ranks(wrap(mixture()), TREE)
    router = RouterLoss(**COEFFICIENTS)
    own = getattr(DenseRouters, moment)

    def fail(self: DenseRouters, *args: Any) -> Any:
        raise ZeroDivisionError("of the test")

    if dist.get_rank() == 1:
        setattr(DenseRouters, moment, fail)
    try:
        policy.verify(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO(), router=router)
        found = "nothing"
    except (ZeroDivisionError, forkpoint.errors.RankError) as error:
        found = f"{type(error).__name__}: {error}"
    setattr(DenseRouters, moment, own)
    return [found, said(policy, GRPO(), router)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["count", "term"])
def test_a_rank_that_fails_around_the_counts_ends_both(moment: str) -> None:
    first, second = run_ranks(2, failing, replicated, moment)
    assert first[0].startswith("RankError: rank 1 cannot compare"), first
    assert "of the test" in first[0] and second[0] == "ZeroDivisionError: of the test"
    assert first[1] == second[1] == "passed"
