"""`policy.verify` of models that transformers splits over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_rank_verify
import torch
import torch.distributed as dist
from processes import run_ranks
from scenarios_of_ranks import BAR, EMPTY, UNEQUAL, Failing, said
from split_models import MOE, Split, data_rank, load
from test_rank_verify import reported
from test_split_models import LATENT, adapted

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.errors import ForkpointError
from forkpoint.hosts.transformers.tensor_parallel import TensorSplit
from forkpoint.losses import GRPO, GSPO
from versions import needs_splits

pytestmark = needs_splits
TP2_FSDP2 = {"tp_size": 2, "fsdp_size": 2}
SPLIT = Split(config=Config())


def policy_of(folder: Path, split: Split, dtype: torch.dtype) -> forkpoint.Policy:
    model = load(folder, split, **split.options)
    return forkpoint.wrap(model.to(dtype) if dtype != torch.float64 else model, split.config)


def verified(folder: Path, split: Split, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    rollouts = split.rollouts[data_rank(split)]
    return reported(policy_of(folder, split, dtype), rollouts, split.loss)


def check(
    size: int, folder: Path, split: Split, dtype: torch.dtype = torch.float64
) -> list[dict[str, Any]]:
    found = run_ranks(size, verified, split.save(folder), split, dtype)
    test_rank_verify.check(found, split.rollouts)
    return found


@pytest.mark.slow
def test_ranks_of_one_copy_verify_together(tmp_path: Path) -> None:
    found = check(2, tmp_path, SPLIT)
    assert max(found[0]["norms"]) > 0 and max(found[0]["errors"]) < BAR


TWO = Split(config=Config())
FOUR = Split(config=Config(), options=TP2_FSDP2, rollouts=UNEQUAL)
EXPERTS = Split(config=Config(), family="qwen3_moe", sizes=MOE)
CASES: dict[str, tuple[int, Split, torch.dtype]] = {
    "float32": (2, TWO, torch.float32),
    "LoRA, two passes": (2, replace(TWO, around=adapted, loss=GSPO()), torch.float64),
    "latent attention": (2, replace(TWO, family="deepseek_v3", sizes=LATENT), torch.float64),
    "tensor and expert": (
        2,
        replace(EXPERTS, options={"tp_size": 2, "ep_size": 2}),
        torch.float64,
    ),
    "tensor x data, fused": (
        4,
        replace(FOUR, family="phi3", sizes={"pad_token_id": 0}),
        torch.float64,
    ),
    "a data rank without rollouts": (4, replace(FOUR, rollouts=EMPTY), torch.float64),
    "tensor x data x expert": (
        4,
        replace(EXPERTS, options={**TP2_FSDP2, "ep_size": 4}, rollouts=UNEQUAL),
        torch.float64,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_split_models_are_verified(case: str, tmp_path: Path) -> None:
    size, split, dtype = CASES[case]
    check(size, tmp_path, split, dtype)


def verdict(folder: Path) -> str:
    policy = policy_of(folder, SPLIT, torch.float64)
    return policy.verify(RolloutBatch(SPLIT.rollouts[0]), SPLIT.loss).verdict


@pytest.mark.slow
def test_sums_in_every_backward_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: transformers sums gradients of replicated norms in each backward."""
    monkeypatch.setattr(TensorSplit, "enter", lambda self, changes, blocks, whole: None)
    monkeypatch.setattr(TensorSplit, "deferred_params", lambda self, parameters: [])
    assert run_ranks(2, verdict, SPLIT.save(tmp_path)) == ["failed", "failed"]


def refused(folder: Path) -> list[str]:
    policy = policy_of(folder, SPLIT, torch.float64)
    rollouts = SPLIT.rollouts[0]
    other = [replace(rollouts[0], advantage=9.0), *rollouts[1:]] if dist.get_rank() else rollouts
    found = []
    bad = [replace(rollouts[0], token_ids=rollouts[0].token_ids + 10**6 * dist.get_rank())]
    for given in (other, UNEQUAL[dist.get_rank()], bad):
        try:
            found.append(policy.verify(RolloutBatch(given), GRPO()).verdict)
        except ForkpointError as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, policy.verify(RolloutBatch(rollouts), GRPO()).verdict]


@pytest.mark.slow
def test_ranks_of_one_copy_have_one_batch_to_verify(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, refused, SPLIT.save(tmp_path))):
        for text in found[:2]:
            assert text.startswith("RankError: ranks 0 and 1 hold one copy"), found
            assert "different batches" in text
        kind = "RolloutError" if rank else "RankError: rank 1 cannot compare"
        assert found[2].startswith(kind), found
        assert found[3] == "passed"


def failing(folder: Path) -> str:
    policy = policy_of(folder, SPLIT, torch.float64)
    return said(lambda: policy.verify(RolloutBatch(SPLIT.rollouts[0]), Failing()))


@pytest.mark.slow
def test_a_rank_that_fails_within_a_run_is_named_on_the_others(tmp_path: Path) -> None:
    first, second = run_ranks(2, failing, SPLIT.save(tmp_path))
    assert first.startswith("RankError: rank 1 cannot compare") and "of the test" in first
    assert second == "ZeroDivisionError: of the test"
