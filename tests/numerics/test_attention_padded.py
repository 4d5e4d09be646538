"""Long sequences extended into the rows that follow them, with kernels in float64 as stand-ins."""

import pytest
import torch
from torch import Tensor

from forkpoint.ops.attention import cudnn, fa2, padded
from forkpoint.ops.attention.kernel import BackwardInputs, Gradients, Options
from forkpoint.ops.attention.table import AttentionTable, Launch
from forkpoint.tree import FROM_OWN, LaunchLayout, Table


def probabilities(q: Tensor, k: Tensor, lse: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Causal ones of one sequence [H, T, T], by the log-sum-exp [H, T] given or its own."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) > 0, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return torch.exp(scores - lse[..., None]), lse


def forward(
    q: Tensor, k: Tensor, v: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    found = []
    for a, b, c, d in launch.sequences() if launch.count > 1 else [(0, len(q), 0, len(k))]:
        p, lse = probabilities(q[a:b], k[c:d], None, options.scale)
        found.append((torch.einsum("hqk,khd->qhd", p, v[c:d]), lse))
    o, lse = zip(*found, strict=True)
    return torch.cat(o), torch.cat(lse, 1)


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    """As flash kernels do it: with P = exp(s - lse), and the row sums of do * o."""
    found = []
    cuts = launch.sequences() if launch.count > 1 else [(0, len(inputs.q), 0, len(inputs.k))]
    for a, b, *_ in cuts:
        do, q, k, v, o = (x[a:b] for x in inputs[:5])
        p, _ = probabilities(q, k, inputs.lse[:, a:b], options.scale)
        delta = (do * o).sum(-1).T[..., None]
        ds = p * (torch.einsum("qhd,khd->hqk", do, v) - delta) * options.scale
        dq, dk = torch.einsum("hqk,khd->qhd", ds, k), torch.einsum("hqk,qhd->khd", ds, q)
        found.append((dq, dk, torch.einsum("hqk,qhd->khd", p, do)))
    dq, dk, dv = (torch.cat(x) for x in zip(*found, strict=True))
    return dq, dk, dv


@pytest.mark.parametrize("lengths", [[2048], [70, 2049, 9, 5, 2100], [2300, 2600]])
def test_rows_of_the_next_sequences_change_nothing(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    for kernel in (cudnn, fa2):
        monkeypatch.setattr(kernel, "forward", forward)
        monkeypatch.setattr(kernel, "backward", backward)
    torch.manual_seed(0)
    layout = LaunchLayout(FROM_OWN, True, 0, 0, tuple(lengths), tuple(lengths))
    (launch,) = AttentionTable(Table((layout,))).calls
    q, k, v, do = torch.randn(4, sum(lengths), 1, 4, dtype=torch.float64)
    options = Options(scale=0.5)

    o, lse = padded.forward(q, k, v, launch, options)
    grads = padded.backward(BackwardInputs(do, q, k, v, o, lse), launch, options)

    expected_o, expected_lse = forward(q, k, v, launch, options)
    expected = backward(BackwardInputs(do, q, k, v, expected_o, expected_lse), launch, options)
    torch.testing.assert_close((o, lse, *grads), (expected_o, expected_lse, *expected))
