"""Attention with sinks in bfloat16 errs by chance alone, and by less than gpt-oss's own attention.

Errors against float64 over many draws: their size, how far they lean along the true value (a factor
that is off), and their mean (an offset). Rounding gives the first alone. So a mixture of experts
with sinks leaves dense training's gradients by flips of near ties, in either direction, and not by
a difference that a path through sinks adds up.
"""

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_bar import Case, attend, make_case_inputs
from test_attention_forest import Forest, Inputs, gradients, make_forest, path_attention
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from forkpoint.ops.attention import AttentionTable
from lanes import slow_besides

DRAWS = 40
LEAST = 2**-14
"""A bias that is not told from none: of bfloat16's unit in the last place, 1/128."""

FORESTS = {
    "in a microbatch": make_forest([-1, 0, 0, 1, 1], [40, 20, 13, 9, 17]),
    "across microbatches": make_forest([-1, 0, 0, 0], [48, 20, 13, 9], external=[0]),
}
Errors = dict[str, np.ndarray]
"""By tensor, [draws, 3]: the error's part along the true value, its mean, its size; all relative to
the true value's."""


def stock_attention(case: Case, exact: Inputs) -> Tensor:
    """o [T, H, E] by the attention of transformers' gpt-oss in bfloat16, a path at a time.

    Of inputs in float64, so that gradients of paths are rounded as its own are and summed exactly.
    """
    forest, (heads, groups) = case.forest, case.heads
    assert exact.sinks is not None
    cache = forest.cache_tokens_
    q = torch.cat([exact.q, exact.q.new_zeros(cache, *exact.q.shape[1:])])
    k, v = exact.k, exact.v
    if exact.cache_k is not None and exact.cache_v is not None:
        k, v = torch.cat([k, exact.cache_k]), torch.cat([v, exact.cache_v])
    sinks = exact.sinks.to(case.dtype)
    module = SimpleNamespace(num_key_value_groups=heads // groups, sinks=sinks, training=False)
    found: dict[int, Tensor] = {}
    for leaf in (s for s in forest.inside if s not in forest.parents):
        path = torch.from_numpy(forest.path(leaf)).to(case.device)
        parts = (x[path].to(case.dtype).transpose(0, 1)[None] for x in (q, k, v))
        distance = torch.arange(len(path))[:, None] - torch.arange(len(path))
        hidden = (distance < 0) | (distance >= (case.window or len(path)))
        mask = torch.zeros(hidden.shape, dtype=case.dtype)
        mask = mask.masked_fill(hidden, torch.finfo(case.dtype).min)[None, None].to(case.device)
        o, _ = eager_attention_forward(module, *parts, mask, case.scale)  # type: ignore[arg-type]
        for at, token in enumerate(path.tolist()):
            found.setdefault(token, o[0, at].double())
    return torch.stack([found[token] for token in range(forest.microbatch_tokens)])


def measure(
    forest: Forest, window: int, device: str, change: Callable[[Inputs], None] = lambda _: None
) -> tuple[Errors, Errors]:
    """Errors of shared attention, whose inputs `change` may spoil, and of the stock model's."""
    ours: dict[str, list] = {}
    stocks: dict[str, list] = {}
    table: AttentionTable = forest.table(window, device)
    for seed in range(DRAWS):
        case = Case(
            forest, "auto", dims=(64, 64), device=device, sinks=True, window=window, seed=seed
        )
        given = make_case_inputs(case)
        exact = given.to(torch.float64)
        with torch.device(device):
            o, _ = path_attention(forest, exact, scale=case.scale, softcap=0.0, window=window)
        truth = gradients(o, exact) | {"o": o.detach()}
        stock = stock_attention(case, exact)
        change(given)
        sides = ((ours, attend(case, given, table)), (stocks, gradients(stock, exact)))
        sides[1][1]["o"] = stock.detach()
        for name, true in truth.items():
            # Places of the cache that no segment owns have no number or a gradient of zero.
            real = true.isfinite() & (true != 0)
            size = true[real].square().mean().sqrt()
            for errors, found in sides:
                error = (found[name].double() - true)[real] / size
                along = (error * true[real] / size).mean()
                values = (along, error.mean(), error.square().mean().sqrt())
                errors.setdefault(name, []).append([float(x) for x in values])
    return (
        {name: np.array(values) for name, values in ours.items()},
        {name: np.array(values) for name, values in stocks.items()},
    )


def biases(errors: Errors) -> dict[str, float]:
    """By tensor, the larger of its two mean biases over what chance and LEAST allow: up to 1."""
    found = {}
    for name, values in errors.items():
        mean = np.abs(values[:, :2].mean(0))
        chance = 5 * values[:, :2].std(0, ddof=1) / math.sqrt(len(values))
        found[name] = float((mean / (LEAST + chance)).max())
    return found


def check(forest: Forest, window: int, device: str) -> None:
    ours, stocks = measure(forest, window, device)
    assert {"q", "k", "v", "sinks", "o"} <= ours.keys()
    assert max(biases(ours).values()) < 1, biases(ours)
    assert max(biases(stocks).values()) < 1, biases(stocks)
    for name, values in ours.items():
        size, stock = (float(np.sqrt((x[:, 2] ** 2).mean())) for x in (values, stocks[name]))
        assert size < 1.1 * stock, f"{name}: {size} where the stock model errs by {stock}"


@pytest.mark.parametrize(
    ("where", "window"),
    slow_besides([("across microbatches", 16)], product(FORESTS, (0, 16))),
)
def test_sinks_add_no_bias(where: str, window: int) -> None:
    check(FORESTS[where], window, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("where", FORESTS)
def test_sinks_add_no_bias_on_cuda(where: str, window: int) -> None:
    check(FORESTS[where], window, "cuda")


def test_a_bias_of_one_hundredth_of_a_sink_is_seen() -> None:
    """One that no error's size would show."""

    def spoil(inputs: Inputs) -> None:
        assert inputs.sinks is not None
        inputs.sinks.data += 0.01 * inputs.sinks.data.abs() + 0.01

    ours, stocks = measure(FORESTS["in a microbatch"], 0, "cpu", spoil)
    assert biases(ours)["o"] > 1 > biases(stocks)["o"]
    assert ours["o"][:, 2].mean() < 1.1 * stocks["o"][:, 2].mean()
