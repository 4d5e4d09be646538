"""Options that differ between ranks are refused by name, or change no gradient."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_of_ranks import Case, both, error_of, on_rank, on_ranks_of, over_replicas
from processes import run_ranks
from scenarios_of_ranks import BAR, DEEP, UNEQUAL, replicated, said
from test_ranks import checkpointed

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.errors import ConfigError
from forkpoint.losses import GRPO
from forkpoint.step.plan import describe_loss
from forkpoint.testing import tiny_model

HOSTED = {"prefix_cache": "host", "activations": "offload", "host_memory": 1 << 16}
OTHER: dict[str, Any] = {
    "sharing": "none",
    "boundary": "within",
    "max_microbatch_tokens": 70,
    "memory_budget": "2GiB",
    "optimizer_bytes_per_parameter": 2.0,
    "activations": "recompute",
    "checkpointing": "full",
    "prefix_cache": "host",
    "host_memory": "1GiB",
    "offload_folder": {"offload_folder": tempfile.gettempdir(), **HOSTED},
    "calibration": None,
    "attention_kernel": "reference",
    "recurrence_kernel": "chunked",
    "head_chunk_tokens": 3,
    "head_logits": "recompute",
    "head_statistics": ("is_top1",),
    "all_logprobs": True,
    "gather": "step",
    "split": "replicate",
    "grad_accumulation_dtype": "float32",
    "self_check": False,
    "restore_grads": True,
}
"""By option, another value than that of the other rank."""
FIXED = {"compile_blocks"}
"""Options that only `wrap` sets. Ranks of one model may run compiled and eager blocks."""
ONE_BATCH = {"split", "head_statistics", "sharing", "boundary"}
CASES = {
    "data": (Case(hold=over_replicas, rollouts=UNEQUAL), {"split", "grad_accumulation_dtype"}),
    "context": (Case(cp=2), ONE_BATCH),
    "stages": (Case(pp=2, sizes={"num_hidden_layers": 4}), ONE_BATCH),
}
"""Two ranks, and some of the options that they refuse."""


def stepped(folder: Path, case: Case) -> dict[str, str | float]:
    """By option that rank 1 has another value of, the error of a step, or that of its gradients."""
    found: dict[str, str | float] = {}
    with both(folder, case) as (policy, alone, place):
        model, own = policy.host.model, RolloutBatch(case.rollouts[place])
        whole = RolloutBatch([r for part in case.rollouts for r in part])
        alone.forward_backward(whole, case.loss)
        for name, value in OTHER.items():
            changes = value if isinstance(value, dict) else {name: value}
            changed = policy
            try:
                changed = policy.with_config(**changes if dist.get_rank() else {})
            except ConfigError as error:  # which `wrap` raises on all ranks
                assert name in str(error)
            model.zero_grad()
            text = said(lambda policy=changed: policy.forward_backward(own, case.loss))
            found[name] = text or error_of(model, alone.host.model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_options_of_one_rank(name: str, tmp_path: Path) -> None:
    assert {*OTHER} == {field.name for field in fields(Config)} - FIXED
    case, refused = CASES[name]
    for found in on_ranks_of(case, tmp_path, stepped):
        for option, result in found.items():
            if isinstance(result, str):
                assert result.startswith("RankError") and option in result, result
            else:
                assert result < BAR and option not in refused, option


def wrapped() -> str:
    """Rank 1 asks for an option that replicas do not have."""
    config = replace(DEEP, gather="step") if dist.get_rank() else DEEP
    return said(lambda: forkpoint.wrap(replicated(tiny_model("qwen3")), config))


def test_a_configuration_that_one_rank_refuses() -> None:
    first, second = run_ranks(2, wrapped)
    assert first.startswith("RankError: rank 1 failed, so no rank goes on: ConfigError: gather is")
    assert second.startswith("ConfigError: gather is 'step'")


def in_two_states(folder: Path, case: Case) -> list[str]:
    """Rank 1 alone computes in another dtype, then with checkpoints."""
    policy, _ = on_rank(folder, case)
    batch = RolloutBatch(case.rollouts[0])

    def step() -> str:
        return said(lambda: policy.forward_backward(batch, case.loss))

    with torch.autocast("cpu", torch.bfloat16) if dist.get_rank() else nullcontext():
        found = [step()]
    if dist.get_rank():
        checkpointed(policy.host.model)
    return [*found, step()]


@pytest.mark.slow
def test_ranks_that_share_a_batch_run_its_layers_alike(tmp_path: Path) -> None:
    for found in on_ranks_of(Case(cp=2, dtype=torch.float32), tmp_path, in_two_states):
        for text, state in zip(
            found, ("autocast to torch.bfloat16", "gradient checkpointing"), strict=True
        ):
            assert text.startswith("RankError: the ranks make different calls") and state in text


@dataclass(frozen=True)
class Shaped(GRPO):
    shape: Any = None


def test_losses_are_compared_without_addresses() -> None:
    assert describe_loss(Shaped(shape=object())) == describe_loss(Shaped(shape=object()))
    assert describe_loss(Shaped(shape=1)) != describe_loss(Shaped(shape=2))
