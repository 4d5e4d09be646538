"""`policy.verify` where several ranks hold the model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from processes import run_ranks
from scenarios_of_ranks import (
    EMPTY,
    UNEQUAL,
    gradients,
    group,
    hybrid_mesh,
    own_loss,
    replicated,
    sharded,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import forkpoint
from forkpoint import Rollout, RolloutBatch
from forkpoint.apps.replay.loop import replay
from forkpoint.engine.objective import LossPart, MicrobatchLosses
from forkpoint.errors import RankError, RolloutError, UnsupportedError
from forkpoint.hosts.torch_dist.copies import copy_in
from forkpoint.losses import GRPO, GSPO, Loss
from forkpoint.testing import tiny_model

SINGLE = (tuple(group(4, 1, 9, 6)), tuple(group(5, 1, 9, 6)))
"""Nothing that is shared."""


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    return tiny_model("qwen3", dtype=dtype).train()


def adapted() -> nn.Module:
    found = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:  # zeros would leave the other factor without gradients
            torch.nn.init.normal_(parameter, std=0.05)
    return found


def reported(policy: forkpoint.Policy, rollouts: list[Rollout], loss: Any) -> dict[str, Any]:
    """Compare without changing gradients."""
    model = policy.host.model
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, float(number))
    before = {name: g.clone() for name, g in gradients(model).items() if g is not None}
    report = policy.verify(RolloutBatch(rollouts), loss)
    after = {name: g for name, g in gradients(model).items() if g is not None}
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return {
        "verdict": report.verdict,
        "kinds": [plan.kind for plan in report.plans],
        "errors": [plan.shared_error for plan in report.plans],
        "dense": report.dense_error,
        "norms": [error.norm for plan in report.plans for error in plan.worst],
        "counts": [(plan.counts.logical_tokens, plan.counts.shares) for plan in report.plans],
        "given": report.logical_tokens,
    }


def verified(wrap: Any, make: Any, loss: Any, rollouts: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return reported(forkpoint.wrap(wrap(make())), rollouts[dist.get_rank()], loss)


def check(found: list[dict[str, Any]], rollouts: Any) -> None:
    given = sum(len(r.token_ids) for part in rollouts for r in part)
    for each in found:
        assert each["verdict"] == "passed", each
        assert each["kinds"][:2] == ["within", "across"]
        assert each["given"] == given
        assert all(logical == given for logical, _ in each["counts"])
        # The planner's choice for so small a model may be dense.
        assert all(shares for _, shares in each["counts"][:2])
        assert max(each["norms"]) > 0
        for name in ("errors", "dense", "norms"):
            assert each[name] == pytest.approx(found[0][name], rel=1e-12)


@pytest.mark.parametrize("wrap", [sharded, pytest.param(replicated, marks=pytest.mark.slow)])
def test_ranks_verify_together(wrap: Any) -> None:
    found = run_ranks(2, verified, wrap, model, GRPO(clip=0.2), UNEQUAL)
    check(found, UNEQUAL)
    assert max(found[0]["errors"]) < 1e-10


def half(whole: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(whole, mp_policy=policy)


def on_both(whole: nn.Module) -> nn.Module:
    return sharded(whole, mesh=hybrid_mesh())


CASES = {
    "a rank without rollouts": (2, sharded, model, GRPO(), EMPTY),
    "a function under DDP": (2, replicated, model, own_loss, UNEQUAL),
    "two passes": (2, sharded, model, GSPO(), UNEQUAL),
    "LoRA": (2, sharded, adapted, GRPO(), UNEQUAL),
    "mixed precision": (2, half, lambda: model(torch.float32), GRPO(), UNEQUAL),
    "HSDP": (4, on_both, model, GRPO(), (*UNEQUAL, *EMPTY)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_verify_in_every_way(case: str) -> None:
    size, *work, rollouts = CASES[case]
    found = run_ranks(size, verified, *work, rollouts)
    check(found, rollouts)
    if case == "mixed precision":
        assert found[0]["dense"] > 1e-4


def sabotaged(wrap: Any) -> str:
    """The gradients of one rank's backwards, a little too large."""
    if dist.get_rank() == 1:
        own = MicrobatchLosses._differentiated

        def louder(self: MicrobatchLosses, *args: Any, **kwargs: Any) -> LossPart:
            part = own(self, *args, **kwargs)
            return replace(part, gradients={n: 1.000001 * g for n, g in part.gradients.items()})

        MicrobatchLosses._differentiated = louder  # type: ignore[method-assign]
    policy = forkpoint.wrap(wrap(model()))
    return policy.verify(RolloutBatch(UNEQUAL[dist.get_rank()]), GRPO()).verdict


@pytest.mark.slow
def test_an_error_on_one_rank_fails_on_all() -> None:
    assert run_ranks(2, sabotaged, sharded) == ["failed", "failed"]


def nothing() -> tuple[str, str]:
    policy = forkpoint.wrap(sharded(model()))
    report = policy.verify(RolloutBatch(SINGLE[dist.get_rank()]), GRPO())
    return report.verdict, report.reason or ""


def test_ranks_that_share_nothing_have_nothing_to_verify() -> None:
    for verdict, reason in run_ranks(2, nothing):
        assert verdict == "nothing to verify"
        assert "no two rollouts" in reason


class OfAll(Loss):
    decomposition = "joint"
    across_ranks = True

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        return batch.trained(outputs.logprobs).sum() ** 2


def refused() -> list[str]:
    rank = dist.get_rank()
    policy = forkpoint.wrap(sharded(model(torch.float32)))
    good = UNEQUAL[rank]
    found = []
    try:
        policy.verify(RolloutBatch(good), OfAll())
    except UnsupportedError as error:
        found.append(str(error))
    # Beyond float32, on one rank.
    bad = [replace(rollout, advantage=1e300) for rollout in good] if rank == 1 else good
    try:
        policy.verify(RolloutBatch(bad), GRPO())
    except (RolloutError, RankError) as error:
        found.append(f"{type(error).__name__}: {error}")
    found.append(policy.verify(RolloutBatch(good), GRPO()).verdict)
    return found


@pytest.mark.slow
def test_what_cannot_be_verified_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, refused)
    for coupled, _, verdict in (first, second):
        assert "across_ranks" in coupled and verdict == "passed"
    assert first[1].startswith("RankError: rank 1 cannot compare") and "1e+300" in first[1]
    assert second[1].startswith("RolloutError")


def copied() -> tuple[list[str], bool]:
    whole, other = model(), model()
    handle = whole.model.layers[0].register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    parts = sharded(whole)
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
