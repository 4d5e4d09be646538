"""The head with a vocabulary over ranks: values and gradients of the head with all of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch import Tensor

from forkpoint.ops.head import VocabularyShard
from head_reference import token_logprobs, token_logprobs_reference

TOKENS, VOCAB, WIDTH = 23, 37, 8


def inputs(*, scale: float = 1.0, bias: bool = True, tokens: int = TOKENS) -> dict[str, Any]:
    torch.manual_seed(0)
    made = {
        "hidden_TC": scale * torch.randn(tokens, WIDTH),
        "weight_VC": torch.randn(VOCAB, WIDTH),
        "bias_V": torch.randn(VOCAB) if bias else None,
    }
    leaves = {k: None if x is None else x.double().requires_grad_() for k, x in made.items()}
    temperature_T = (torch.rand(tokens) + 0.5).double()
    return {**leaves, "labels_T": torch.arange(tokens) % VOCAB, "temperature_T": temperature_T}


def results(function: Any, given: dict[str, Any], **options: Any) -> list[Tensor]:
    """Outputs, then gradients of an uneven combination of them."""
    logprobs_T, entropies_T = function(**given, **options)
    factor_T = torch.linspace(-1, 2, len(logprobs_T), dtype=logprobs_T.dtype)
    total = (logprobs_T * factor_T).sum()
    outputs = [logprobs_T]
    if entropies_T is not None:
        outputs.append(entropies_T)
        total = total + (entropies_T * factor_T.flip(0).square()).sum()
    leaves = [x for x in given.values() if x is not None and x.requires_grad]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)]


def apart(splits: list[int], given: dict[str, Any], options: dict[str, Any]) -> float:
    """The largest difference from the head with all rows, over this rank's results."""
    rank = dist.get_rank()
    first = sum(splits[:rank])
    rows = slice(first, first + splits[rank])
    part = dict(given)
    for name in ("weight_VC", "bias_V"):
        if given[name] is not None:
            part[name] = given[name].detach()[rows].clone().requires_grad_()
    shard = VocabularyShard(dist.group.WORLD, first)  # type: ignore[arg-type]
    found = results(token_logprobs, part, shard=shard, **options)
    wanted = results(
        token_logprobs_reference,
        given,
        **{k: v for k, v in options.items() if k not in ("chunk_tokens", "keep_logits")},
    )
    outputs = 2 if options.get("entropy") else 1
    wanted[outputs + 1 :] = [x[rows] for x in wanted[outputs + 1 :]]
    return max(
        float((one - other).abs().max()) if one.numel() else 0.0
        for one, other in zip(found, wanted, strict=True)
    )


CASES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    "plain": ([19, 18], {}, {}),
    "entropies": ([19, 18], {}, {"entropy": True}),
    "chunks": ([19, 18], {}, {"entropy": True, "chunk_tokens": 3}),
    "kept": ([19, 18], {}, {"entropy": True, "keep_logits": True}),
    "capped and scaled": ([19, 18], {}, {"softcap": 2.0, "logit_scale": 0.7, "entropy": True}),
    "without a bias": ([30, 7], {"bias": False}, {"entropy": True}),
    "a rank without rows": ([37, 0], {}, {"entropy": True, "chunk_tokens": 5}),
    "sure tokens": ([19, 18], {"scale": 40.0}, {"entropy": True}),
    "one token": ([19, 18], {"tokens": 1}, {"entropy": True}),
}


def every_case() -> dict[str, float]:
    return {
        name: apart(splits, inputs(**made), options)
        for name, (splits, made, options) in CASES.items()
    }


@pytest.mark.slow
def test_two_ranks_give_what_one_gives() -> None:
    for found in run_ranks(2, every_case):
        # Sure tokens have gradients of up to 40 times the others'.
        assert all(error < 1e-11 for error in found.values()), found


def without_tokens() -> list[tuple[int, ...]]:
    given = inputs(tokens=0)
    for name in ("weight_VC", "bias_V"):
        given[name] = given[name].detach()[:10].requires_grad_()
    shard = VocabularyShard(dist.group.WORLD, 10 * dist.get_rank())  # type: ignore[arg-type]
    return [tuple(x.shape) for x in results(token_logprobs, given, shard=shard, entropy=True)]


def test_no_tokens_give_zero_gradients() -> None:
    for found in run_ranks(2, without_tokens):
        assert found == [(0,), (0,), (0, WIDTH), (10, WIDTH), (10,)]


def precision() -> tuple[float, float]:
    """Errors in float32 against float64: of two ranks, and of one."""
    given = inputs(scale=3.0)
    exact = results(token_logprobs_reference, given, entropy=True)
    narrow = {
        k: x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for k, x in given.items()
    }
    one = results(token_logprobs, narrow, entropy=True)
    rows = slice(0, 19) if dist.get_rank() == 0 else slice(19, 37)
    part = dict(narrow)
    for name in ("weight_VC", "bias_V"):
        part[name] = narrow[name].detach()[rows].requires_grad_()
    shard = VocabularyShard(dist.group.WORLD, rows.start)  # type: ignore[arg-type]
    two = results(token_logprobs, part, entropy=True, shard=shard)

    def error(found: list[Tensor]) -> float:
        return max(
            float((x - y).norm() / y.norm()) for x, y in zip(found[:3], exact[:3], strict=True)
        )

    return error(two), error(one)


@pytest.mark.slow
def test_rounding_is_that_of_one_rank() -> None:
    for two, one in run_ranks(2, precision):
        assert two < 2 * one + 1e-7
