"""Calls of policies of split models: what ranks of one copy have in common, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cases_of_ranks import MOE, Case
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, UNEQUAL, Failing, distance, gradients, said
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.losses import GRPO
from versions import needs_splits

pytestmark = needs_splits
TP2 = {"tp_size": 2}
SPLIT = Case(options=TP2)


def afterwards(policy: forkpoint.Policy, folder: Path) -> float:
    """Whether the next step works: its distance from one process."""
    policy.forward_backward(RolloutBatch(UNEQUAL[0]), GRPO())
    alone = forkpoint.wrap(SPLIT.model(folder, None), DEEP)
    alone.forward_backward(RolloutBatch(UNEQUAL[0]), GRPO())
    found, wanted = gradients(policy.host.model), gradients(alone.host.model)
    return distance(found, wanted, list(wanted))


def of_the_rank(outputs: Any, batch: Any) -> Tensor:
    return outputs.logprobs.sum() * (1 + dist.get_rank())


def different() -> dict[str, Callable[[forkpoint.Policy], object]]:
    """By name: calls in which the two ranks differ."""
    rank = dist.get_rank()
    one = UNEQUAL[0][0]
    batch = RolloutBatch(UNEQUAL[0])
    extras = [replaced(one, extras={"judge": rank}), *UNEQUAL[0][1:]]
    advantages = [replaced(one, advantage=1.0 + rank), *UNEQUAL[0][1:]]
    return {
        "tokens": lambda p: p.forward_backward(RolloutBatch(UNEQUAL[rank]), GRPO()),
        "advantages": lambda p: p.forward_backward(RolloutBatch(advantages), GRPO()),
        "extras": lambda p: p.forward_backward(RolloutBatch(extras), GRPO()),
        "no rollouts": lambda p: p.score(RolloutBatch(UNEQUAL[0] if rank else [])),
        "plans": lambda p: p.with_config(max_microbatch_tokens=20 + 60 * rank).score(batch),
        "scale": lambda p: p.forward_backward(batch, GRPO(), scale=1.0 + rank),
        "weights": lambda p: (p.logprobs(batch).sum() * (1 + rank)).backward(),
        "losses": lambda p: p.forward_backward(batch, of_the_rank),
        "a failing loss": lambda p: p.forward_backward(batch, Failing()),
        "a bad rollout": lambda p: p.score(
            RolloutBatch([forkpoint.Rollout([1, 2, 10**6 * rank], [0, 1, 1], 1.0)])
        ),
    }


def replaced(rollout: forkpoint.Rollout, **changes: Any) -> forkpoint.Rollout:
    return replace(rollout, **changes)


def refused_calls(folder: Path) -> tuple[dict[str, str], list[str], float]:
    policy = forkpoint.wrap(SPLIT.model(folder, None, tp_size=2), DEEP)
    found, touched = {}, []
    for name, call in different().items():
        found[name] = said(lambda call=call: call(policy))
        if any(p.grad is not None for p in policy.host.model.parameters()):
            touched.append(name)
    return found, touched, afterwards(policy, folder)


@pytest.mark.slow
def test_ranks_of_one_copy_have_the_same_batch(tmp_path: Path) -> None:
    for rank, (found, touched, error) in enumerate(
        run_ranks(2, refused_calls, SPLIT.save(tmp_path))
    ):
        for name in ("tokens", "advantages", "extras", "no rollouts"):
            assert found[name].startswith("RankError: ranks 0 and 1 hold one copy"), (name, found)
            assert "different batches" in found[name]
        assert "planned the same batch differently" in found["plans"]
        assert "scale one loss differently" in found["scale"]
        assert "scale the loss or its gradients differently" in found["weights"]
        assert "came to different losses" in found["losses"]
        kind = "ZeroDivisionError" if rank else "RankError: rank 1 failed in this step"
        assert found["a failing loss"].startswith(kind)
        kind = "RolloutError" if rank else "RankError: rank 1 cannot run this step"
        assert found["a bad rollout"].startswith(kind)
        assert not touched
        assert error < BAR


def refused_models(folder: Path) -> dict[str, str]:
    def whole_head() -> None:
        plan = {"lm_head": "replicate", "model.embed_tokens": "embedding_colwise"}
        forkpoint.wrap(SPLIT.model(folder, None, tp_size=2, tp_plan=plan), DEEP)

    def other_mesh() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("extra",))
        forkpoint.wrap(SPLIT.model(folder, None), DEEP, mesh=mesh)

    def same_mesh() -> None:
        model = SPLIT.model(folder, None, tp_size=2)
        forkpoint.wrap(model, DEEP, mesh=model._device_mesh)

    works = {"other mesh": other_mesh, "same mesh": same_mesh, "whole head": whole_head}
    return {name: said(work) for name, work in works.items()}


@pytest.mark.slow
def test_what_is_not_exact_is_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(2, refused_models, SPLIT.save(tmp_path)):
        assert "dimension 'extra' has the ranks [0, 1]" in found["other mesh"]
        assert not found["same mesh"] and not found["whole head"]


def local_plans(folder: Path, case: Case) -> list[int]:
    shape = forkpoint.wrap(case.model(folder, None, tp_size=2), DEEP).host.shape
    whole = forkpoint.wrap(case.model(folder, None), DEEP).host.shape
    sizes = [(shape.heads, whole.heads), (shape.kv_heads, whole.kv_heads)]
    sizes += [(shape.intermediate, whole.intermediate), (shape.vocab, whole.vocab + 1)]
    sizes.append((shape.boundary_bytes_per_token, whole.boundary_bytes_per_token))
    return [2 * part - all_ for part, all_ in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [SPLIT, Case(family="qwen3_moe", sizes=MOE, options=TP2)], ids=["", "moe"]
)
def test_plans_count_this_rank_s_heads(tmp_path: Path, case: Case) -> None:
    for found in run_ranks(2, local_plans, case.save(tmp_path), case):
        assert found == [0, 0, 0, 0, 0]
