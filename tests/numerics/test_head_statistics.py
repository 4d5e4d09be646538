"""Numbers of the head's distributions besides log-probs, against all logits in plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.head import STATISTICS, token_outputs

TOKENS, VOCAB, WIDTH = 23, 37, 8


def operands(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden_TC": (TOKENS, WIDTH), "weight_VC": (VOCAB, WIDTH), "bias_V": (VOCAB,)}
    found = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {name: x.to(dtype).requires_grad_() for name, x in found.items()} | {
        "labels_T": torch.randint(VOCAB, (TOKENS,), generator=generator),
        "temperature_T": (torch.rand(TOKENS, generator=generator) + 0.5).to(dtype),
    }


def expected(given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """In float64, of all logits at once."""
    x = {k: v.detach() if k == "labels_T" else v.detach().double() for k, v in given.items()}
    z_TV = F.linear(x["hidden_TC"], x["weight_VC"], x.get("bias_V"))
    z_TV = z_TV * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z_TV = options["softcap"] * torch.tanh(z_TV / options["softcap"])
    if "temperature_T" in x:
        z_TV = z_TV / x["temperature_T"][:, None]
    p_TV = z_TV.softmax(-1)
    return {
        "mean_logits": z_TV.mean(-1),
        "is_top1": (z_TV.argmax(-1) == x["labels_T"]).double(),
        "log_sum_sq_probs": p_TV.square().sum(-1).log(),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 1},
        {"chunk_tokens": 5, "keep_logits": True},
        {"softcap": 3.0, "logit_scale": 0.25},
        {"softcap": 3.0, "logit_scale": 2.0, "keep_logits": True, "chunk_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("left_out", [(), ("bias_V",), ("temperature_T",)], ids=str)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values(
    options: dict[str, Any], left_out: tuple[str, ...], dtype: torch.dtype, bar: float
) -> None:
    given = {k: v for k, v in operands(dtype).items() if k not in left_out}
    found = token_outputs(**given, statistics=STATISTICS, **options)
    for name, wanted_T in expected(given, **options).items():
        assert found[name].dtype == dtype and not found[name].requires_grad
        torch.testing.assert_close(found[name].double(), wanted_T, rtol=bar, atol=bar)


def test_of_equal_logits_the_first_is_the_largest() -> None:
    weight_VC = torch.tensor([[1.0], [2.0], [2.0]])
    found = token_outputs(
        torch.ones(3, 1), weight_VC, torch.tensor([0, 1, 2]), statistics=("is_top1",)
    )
    assert found["is_top1"].tolist() == [0.0, 1.0, 0.0]


def test_large_logits_stay_finite() -> None:
    found = token_outputs(
        torch.tensor([[1.0], [-1.0]]),
        torch.tensor([[300.0], [-300.0]]),
        torch.tensor([0, 0]),
        statistics=("log_sum_sq_probs",),
    )
    assert found["log_sum_sq_probs"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("keep_logits", [False, True])
def test_the_rest_is_as_without_them(keep_logits: bool) -> None:
    results = []
    for statistics in ((), STATISTICS):
        given = operands()
        found = token_outputs(
            **given, entropy=True, statistics=statistics, keep_logits=keep_logits, chunk_tokens=6
        )
        factor_T = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
        (found["logprobs"] * factor_T + found["entropies"] * factor_T.square()).sum().backward()
        leaves = [given[name].grad for name in ("hidden_TC", "weight_VC", "bias_V")]
        results.append([found["logprobs"], found["entropies"], *leaves])
    for without, with_them in zip(*results, strict=True):
        assert torch.equal(without, with_them)


def test_those_asked_for_alone() -> None:
    found = token_outputs(**operands(), statistics=("is_top1", "mean_logits"))
    assert list(found) == ["logprobs", "is_top1", "mean_logits"]


def test_a_vocabulary_that_ranks_share_has_none() -> None:
    shard: Any = object()
    with pytest.raises(UnsupportedError, match="hold the vocabulary together"):
        token_outputs(**operands(), statistics=("is_top1",), shard=shard)
