"""`policy.verify` where several ranks hold the model, with and without a router loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_of_ranks import (
    LATENT,
    MIXTURE,
    MOE,
    Case,
    named,
    on_rank,
    on_ranks_of,
    over_all,
    over_replicas,
)
from processes import run_ranks
from scenarios_of_ranks import (
    EMPTY,
    UNEQUAL,
    Failing,
    OfAllRanks,
    gradients,
    group,
    in_hybrid_mesh,
    own_loss,
    sharded,
)
from test_ranks import lora
from test_router_ranks import COEFFICIENTS, Routed
from test_split_models import adapted
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.apps.replay.loop import replay
from forkpoint.engine.objective import LossPart, MicrobatchLosses
from forkpoint.engine.routing import Routing
from forkpoint.errors import ForkpointError, UnsupportedError
from forkpoint.hosts.routers import WATCHED
from forkpoint.hosts.torch_dist.copies import copy_in
from forkpoint.losses import GRPO, GSPO, RouterLoss
from forkpoint.testing import tiny_model
from forkpoint.verify.dense import DenseRouters
from media_scenes import tool_tree
from multimodal_models import tiny_multimodal

ANY = Config(compile_blocks=False)


def of(*rollouts: list[Rollout], **changes: Any) -> Case:
    given: dict[str, Any] = {"config": ANY, "loss": GRPO(), "rollouts": rollouts, **changes}
    return Case(**given)


def of_data(**changes: Any) -> Case:
    return of(*UNEQUAL, **changes)


def of_one(**changes: Any) -> Case:
    return of(UNEQUAL[0], **changes)


def half(whole: Any, _: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(whole, mp_policy=policy)


TP2: dict[str, Any] = {"options": {"tp_size": 2}}
TP2_FSDP2 = {"tp_size": 2, "fsdp_size": 2}
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "sizes": MOE}
MIXED: dict[str, Any] = {"family": "qwen3_moe", "sizes": MIXTURE}
FOUR_LAYERS = {"num_hidden_layers": 4}
FEW = ([*group(0, 3, 12, 6), *group(1, 2, 9, 5)], group(2, 2, 9, 5))
DDP_BATCH = Routed(of_data(hold=over_replicas, **MIXED))
CASES: dict[str, Case | Routed] = {
    "fully_shard": of_data(loss=GRPO(clip=0.2)),
    "DDP": of_data(hold=over_replicas),
    "a rank without rollouts": of(*EMPTY),
    "a function under DDP": of_data(hold=over_replicas, loss=own_loss),
    "two passes": of_data(loss=GSPO()),
    "LoRA": of_data(make=lora),
    "mixed precision": of_data(hold=half, dtype=torch.float32),
    "mixed precision, gathered once": of_data(
        hold=half, dtype=torch.float32, config=replace(ANY, gather="step")
    ),
    "HSDP": of(*UNEQUAL, *EMPTY, hold=in_hybrid_mesh),
    "tensor": of_one(**TP2),
    "tensor, float32": of_one(**TP2, dtype=torch.float32),
    "tensor, LoRA, two passes": of_one(**TP2, around=adapted, loss=GSPO()),
    "tensor, latent attention": of_one(**TP2, family="deepseek_v3", sizes=LATENT),
    "tensor x data, fused": of_data(options=TP2_FSDP2, family="phi3", sizes={"pad_token_id": 0}),
    "tensor x data x expert": of_data(options={**TP2_FSDP2, "ep_size": 4}, **EXPERTS),
    "context, data": of_data(cp=2),
    "context, LoRA, two passes": of_one(cp=2, make=lora, loss=GSPO()),
    "stages, tied": of_one(pp=2, sizes={**FOUR_LAYERS, "tie_word_embeddings": True}),
    "stages, tensor": of_one(pp=2, tp=2, sizes=FOUR_LAYERS),
    "stages, data": of_data(pp=2, sizes=FOUR_LAYERS),
    "stages, images": of(tool_tree("qwen3_vl"), pp=2, make=lambda: tiny_multimodal("qwen3_vl")),
    "routers": Routed(of_data(**MIXED, loss=GSPO()), scope="lists"),
    "routers, DDP": DDP_BATCH,
    "routers, a rank without, rollout": Routed(of(*EMPTY, **MIXED), scope="rollout"),
    "routers, gathered once": Routed(of_data(**MIXED, config=replace(ANY, gather="step"))),
    "routers, tensor and expert": Routed(
        of(FEW[0], options={"tp_size": 2, "ep_size": 2}, **EXPERTS), scope="lists"
    ),
    "routers, data and expert, rollout": Routed(
        of(*FEW, options={"fsdp_size": 2, "ep_size": 2}, **EXPERTS),
        scope="rollout",
        last_token=False,
    ),
    "routers, stages of context": Routed(
        of(FEW[0], pp=2, cp=2, family="qwen3_moe", sizes={**MIXTURE, **FOUR_LAYERS})
    ),
}


def case_of(value: Case | Routed) -> Case:
    return value if isinstance(value, Case) else value.case


def reported(folder: Path, case: Case, routed: Routed | None = None) -> dict[str, Any]:
    """Compare, without changing gradients."""
    policy, place = on_rank(folder, case)
    model = policy.host.model
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, float(number))
    before = {name: g.clone() for name, g in gradients(model).items() if g is not None}
    router = routed and routed.routers(place)[0]
    report = policy.verify(RolloutBatch(case.rollouts[place]), case.loss, router=router)
    after = {name: g for name, g in gradients(model).items() if g is not None}
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not [m for m in model.modules() if WATCHED in vars(m)]
    entries = [entry for plan in report.plans for entry in plan.worst]
    return {
        "verdict": report.verdict,
        "kinds": [plan.kind for plan in report.plans],
        "errors": [plan.shared_error for plan in report.plans],
        "dense": report.dense_error,
        "norms": [entry.norm for entry in entries],
        "counts": [(plan.counts.logical_tokens, plan.counts.shares) for plan in report.plans],
        "given": report.logical_tokens,
        "router loss": [abs(plan.router_loss_difference or 0.0) for plan in report.plans],
        "gates": [entry.excess for entry in entries if "mlp.gate.weight" in entry.name],
    }


@named(CASES, "fully_shard", case=case_of)
def test_ranks_verify_together(name: str, tmp_path: Path) -> None:
    value, case = CASES[name], case_of(CASES[name])
    found = on_ranks_of(case, tmp_path, reported, value if isinstance(value, Routed) else None)
    given = sum(len(r.token_ids) for part in case.rollouts for r in part)
    for each in found:
        assert each["verdict"] == "passed", each
        assert each["kinds"][:2] == ["within", "across"]
        assert each["given"] == given
        assert all(logical == given for logical, _ in each["counts"])
        # The planner's choice for so small a model may be dense.
        assert all(shares for _, shares in each["counts"][:2])
        assert max(each["norms"]) > 0
        if case.pp > 1:  # of all stages
            whole = len(list(case.made().parameters()))
            assert len(each["norms"]) == whole * len(each["kinds"])
        if case.dtype == torch.float64:
            assert max(*each["errors"], *each["router loss"]) < 1e-10
        for key in ("errors", "dense", "norms"):
            assert each[key] == pytest.approx(found[0][key], rel=1e-9, abs=1e-13)
        if isinstance(value, Routed):
            assert len(each["gates"]) >= 2 * len(each["kinds"])
    assert "mixed precision" not in name or found[0]["dense"] > 1e-4


# What is wrong on one rank fails on all
# ------------------------------------------------------------


def louder_losses() -> None:
    """Gradients of losses are a little too large."""
    own = MicrobatchLosses._differentiated

    def louder(self: MicrobatchLosses, *args: Any, **kwargs: Any) -> LossPart:
        part = own(self, *args, **kwargs)
        return replace(part, gradients={n: 1.000001 * g for n, g in part.gradients.items()})

    MicrobatchLosses._differentiated = louder  # type: ignore[method-assign]


def louder_routers() -> None:
    """The gradient of the router loss is, and its value is exact."""
    own = Routing.root
    Routing.root = lambda self, instruction, inputs, scale: own(  # type: ignore[method-assign]
        self, instruction, inputs, 1.00001 * scale
    )


def counted_alone() -> None:
    """Ordinary training counts this rank's rollouts alone."""
    DenseRouters.counted = lambda self: None  # type: ignore[method-assign]


FAULTS: dict[Any, tuple[Case | Routed, int | None]] = {
    louder_losses: (CASES["fully_shard"], 1),
    louder_routers: (DDP_BATCH, 1),
    counted_alone: (DDP_BATCH, None),
}
"""With the rank that has it, or None."""


def with_fault(folder: Path, case: Case, routed: Routed | None, fault: Any, on: Any) -> Any:
    if on is None or dist.get_rank() == on:
        fault()
    return reported(folder, case, routed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail_on_all_ranks(fault: Any, tmp_path: Path) -> None:
    value, on = FAULTS[fault]
    routed = value if isinstance(value, Routed) else None
    for each in on_ranks_of(case_of(value), tmp_path, with_fault, routed, fault, on):
        assert each["verdict"] == "failed"
        if fault is louder_routers:
            assert max(each["router loss"]) < 1e-10 and min(each["gates"]) > 1e3
        if fault is counted_alone:
            assert min(each["router loss"]) > 1e-3


SINGLE = of(group(4, 1, 9, 6), group(5, 1, 9, 6))
"""Nothing that is shared."""


def nothing(folder: Path, case: Case) -> tuple[str, str]:
    policy, place = on_rank(folder, case)
    report = policy.verify(RolloutBatch(case.rollouts[place]), GRPO())
    return report.verdict, report.reason or ""


def test_ranks_that_share_nothing_have_nothing_to_verify(tmp_path: Path) -> None:
    for verdict, reason in on_ranks_of(SINGLE, tmp_path, nothing):
        assert verdict == "nothing to verify"
        assert "no two rollouts" in reason


# What is refused, and ranks that fail
# ------------------------------------------------------------


def answer(policy: forkpoint.Policy, rollouts: list[Rollout], loss: Any, **options: Any) -> str:
    """A verdict, or an error."""
    try:
        return policy.verify(RolloutBatch(rollouts), loss, **options).verdict
    except (ForkpointError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"


def refused(folder: Path, case: Case) -> list[str]:
    (policy, rank), good = on_rank(folder, case), UNEQUAL[dist.get_rank()]
    # Beyond float32, on one rank.
    bad = [replace(rollout, advantage=1e300) for rollout in good] if rank == 1 else good
    given = ((good, OfAllRanks()), (bad, GRPO()), (good, Failing()), (good, GRPO()))
    return [answer(policy, rollouts, loss) for rollouts, loss in given]


@pytest.mark.slow
def test_what_cannot_be_verified_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = on_ranks_of(of_data(dtype=torch.float32), tmp_path, refused)
    for coupled, *_, verdict in (first, second):
        assert "across_ranks" in coupled and verdict == "passed"
    assert first[1].startswith("RankError: rank 1 failed") and "1e+300" in first[1]
    assert second[1].startswith("RolloutError")
    assert first[2].startswith("RankError: rank 1 failed") and "of the test" in first[2]
    assert second[2] == "ZeroDivisionError: of the test"


def refused_routers(folder: Path, case: Case) -> list[str]:
    (policy, rank), router = on_rank(folder, case), RouterLoss(**COEFFICIENTS)
    lists = RouterLoss(scope=[[0]], **COEFFICIENTS)
    calls = (
        (GRPO(), router if rank else None),
        (GRPO(), replace(router, z=0.1 + rank)),
        (own_loss, router),
        (GRPO(), lists if rank else replace(router, scope="rollout")),
        (GRPO(), router),
    )
    return [answer(policy, UNEQUAL[rank], loss, router=given) for loss, given in calls]


@pytest.mark.slow
def test_ranks_verify_one_router_loss(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks_of(of_data(**MIXED), tmp_path, refused_routers)):
        missing, other, own, lists, passed = found
        for text in (missing, other):
            assert text.startswith("RankError: the ranks do not verify the same router loss"), found
        assert "rank 0: no router" in missing
        assert own.startswith("UnsupportedError: router= was given with a loss that is a function")
        kind = "ConfigError: scope of RouterLoss" if rank else "RankError: rank 1 failed"
        assert lists.startswith(kind), found
        assert passed == "passed"


def failing_around_counts(folder: Path, case: Case, moment: str) -> list[str]:
    """One rank fails before it has given its counts, or after; then a comparison works."""
    (policy, rank), router = on_rank(folder, case), RouterLoss(**COEFFICIENTS)
    own = getattr(DenseRouters, moment)

    def fail(self: DenseRouters, *args: Any) -> Any:
        raise ZeroDivisionError("of the test")

    found = []
    for method in (fail if rank == 1 else own, own):
        setattr(DenseRouters, moment, method)
        found.append(answer(policy, UNEQUAL[rank], GRPO(), router=router))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["count", "term"])
def test_a_rank_that_fails_around_the_counts_ends_both(moment: str, tmp_path: Path) -> None:
    first, second = on_ranks_of(DDP_BATCH.case, tmp_path, failing_around_counts, moment)
    assert first[0].startswith("RankError: rank 1 failed"), first
    assert "of the test" in first[0] and second[0] == "ZeroDivisionError: of the test"
    assert first[1] == second[1] == "passed"


def copied() -> tuple[list[str], bool]:
    whole, other = (tiny_model("qwen3", dtype=torch.float64).train() for _ in range(2))
    handle = whole.model.layers[0].register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    parts = over_all(whole, None)
    twin, blocks = copy_in(parts, parts.model.layers, torch.float64, streamed=False)  # type: ignore[union-attr]
    assert list(blocks) == list(twin.model.layers)  # type: ignore[union-attr]
    handle.remove()
    ids = torch.arange(12)[None]
    same = torch.equal(twin(input_ids=ids).logits, other(input_ids=ids).logits)
    ordinary = [type(m).__name__ for m in twin.modules() if type(m).__name__.startswith("FSDP")]
    hooks = len(twin.model.layers[0]._forward_hooks)  # type: ignore[union-attr]
    assert hooks == 1, "the user's own hook is copied, and those of fully_shard are not"
    with pytest.raises(UnsupportedError, match="replay trains a model of one process"):
        replay(parts, RolloutBatch(UNEQUAL[0]), GRPO(), optimizer=torch.optim.SGD, steps=1)
    return ordinary, same


def test_copies_of_sharded_models_are_whole() -> None:
    assert run_ranks(2, copied) == [([], True)] * 2
