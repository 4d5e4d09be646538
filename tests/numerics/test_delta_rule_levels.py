"""Levels of a microbatch together: how states and their gradients go from level to level.

The kernels are flash-linear-attention's and run on GPUs (test_delta_rule_gpu.py). Here they stand
for a simpler rule, chunk by chunk, whose gradients are known by autograd: values are written less
what the state before the chunk holds for their keys, and outputs read that state alone.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.ops.delta_rule import fla_levels
from forkpoint.ops.recurrence import StateTable
from forkpoint.tree import Level, StateLayout

HEADS, DIM = 2, 3


def chunks_of(cu: Tensor) -> list[list[slice]]:
    return [
        [slice(at, min(at + 64, end)) for at in range(begin, end, 64)]
        for begin, end in pairwise(cu.tolist())
    ]


def states(*, k, w, u, g, initial_state, output_final_state, chunk_offsets, cu_seqlens, **_: Any):
    found = chunks_of(cu_seqlens)
    assert chunk_offsets.tolist() == np.cumsum([0, *map(len, found)]).tolist()
    before, written, ends = [], torch.empty_like(u), []
    for number, sequence in enumerate(found):
        state = u.new_zeros(HEADS, DIM, DIM) if initial_state is None else initial_state[number]
        for at in sequence:
            before.append(state)
            written[0, at] = u[0, at] - torch.einsum("thd,hde->the", w[0, at], state)
            state = state + torch.einsum("thd,the->hde", k[0, at], written[0, at])
        ends.append(state)
    return torch.stack(before)[None], written, torch.stack(ends) if output_final_state else None


def states_backward(*, q, k, w, g, h0, dht, do, dv, scale, chunk_offsets, cu_seqlens, **_: Any):
    found = chunks_of(cu_seqlens)
    dh: list[Tensor] = []
    d_written, d_first = torch.empty_like(dv), []
    for number, sequence in enumerate(found):
        after = dv.new_zeros(HEADS, DIM, DIM) if dht is None else dht[number]
        here = []
        for at in reversed(sequence):
            here.append(after)
            d_written[0, at] = dv[0, at] + torch.einsum("thd,hde->the", k[0, at], after)
            after = after - torch.einsum("thd,the->hde", w[0, at], d_written[0, at])
            after = after + scale * torch.einsum("thd,the->hde", q[0, at], do[0, at])
        dh += here[::-1]
        d_first.append(after)
    return torch.stack(dh)[None], None if h0 is None else torch.stack(d_first), d_written


def outputs(*, q, k, v, h, g, scale, cu_seqlens, **_: Any):
    every = [at for sequence in chunks_of(cu_seqlens) for at in sequence]
    parts = [torch.einsum("thd,hde->the", q[0, at], h[0, i]) for i, at in enumerate(every)]
    return scale * torch.cat(parts)[None]


def rest_backward(*, q, k, v, w, g, h, dv, do, dh, scale, cu_seqlens, **_: Any):
    every = [at for sequence in chunks_of(cu_seqlens) for at in sequence]
    dq, dk, dw = (torch.empty_like(q) for _ in range(3))
    for i, at in enumerate(every):
        dq[0, at] = scale * torch.einsum("the,hde->thd", do[0, at], h[0, i])
        dk[0, at] = torch.einsum("the,hde->thd", v[0, at], dh[0, i])
        dw[0, at] = -torch.einsum("the,hde->thd", dv[0, at], h[0, i])
    return dq, dk, dw, torch.zeros_like(g)


def within(*, k, v, g, beta, A=None, **_: Any):
    w, u = k * beta[..., None], v * beta[..., None]
    return (w, u, beta) if A is None else (w, u)


def within_backward(*, k, v, beta, g, A, dw, du, **_: Any):
    d_beta = (dw * k).sum(-1) + (du * v).sum(-1)
    return dw * beta[..., None], du * beta[..., None], d_beta, torch.ones_like(g)


STAND_INS = SimpleNamespace(
    norm=lambda x: (2 * x, None),
    norm_backward=lambda x, _, dx: 2 * dx,
    cumsum=lambda g, *, scale=1.0, reverse=False, **_: g * scale,
    log2_e=1.0,
    within=within,
    within_again=within,
    within_backward=within_backward,
    states=states,
    states_backward=states_backward,
    outputs=outputs,
    values_backward=lambda *, do, **_: torch.zeros_like(do),
    rest_backward=rest_backward,
)


def by_autograd(
    layout: StateLayout, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same rule, segment by segment along the tree."""
    o_THE, above, kept = torch.zeros_like(v), None, []
    k, q = 2 * k, 2 * q
    w, u = k * beta[..., None], v * beta[..., None]
    for level in layout.levels:
        ends = []
        for begin, length, parent in zip(level.begin, level.length, level.parent, strict=True):
            state = v.new_zeros(HEADS, DIM, DIM)
            if above is not None:
                state = above[int(parent)]
            elif initial is not None:
                state = initial[len(ends)]
            for at in range(int(begin), int(begin + length), 64):
                to = slice(at, min(at + 64, int(begin + length)))
                o_THE = o_THE.index_put(
                    (torch.arange(to.start, to.stop),),
                    DIM**-0.5 * torch.einsum("thd,hde->the", q[to], state),
                )
                written = u[to] - torch.einsum("thd,hde->the", w[to], state)
                state = state + torch.einsum("thd,the->hde", k[to], written)
            ends.append(state)
        above = torch.stack(ends)
        kept.append(above[level.kept])
    return o_THE, torch.cat(kept)


# Two trees in visiting order: segments of all lengths, states kept of some in every level.
LEVELS = (
    ((0, 130, -1), (399, 3, -1)),
    ((130, 1, 0), (131, 65, 0), (402, 70, 1)),
    ((196, 64, 1), (260, 139, 1), (472, 2, 2)),
)


@pytest.mark.parametrize("from_states", [True, False], ids=["from-states", "from-zero"])
@pytest.mark.parametrize("kept", [((), (), ()), ((0,), (), (2, 1)), ((1, 0), (2,), ())], ids=repr)
def test_states_and_their_gradients(
    kept: tuple, from_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla_levels, "_kernels", lambda: STAND_INS)
    levels = []
    for at, (segments, keeps) in enumerate(zip(LEVELS, kept, strict=True)):
        begin, length, parent = np.array(segments, np.int64).T
        final = at + 1 < len(LEVELS) or bool(keeps)
        levels.append(Level(begin, length, parent, np.array(keeps, np.int64), final))
    layout = StateLayout(tuple(levels), np.arange(sum(map(len, kept))))
    table, tokens = StateTable(layout), 474
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, HEADS, DIM, dtype=torch.float64) / 16 for _ in range(3))
    g, beta = torch.randn(2, tokens, HEADS, dtype=torch.float64)
    initial = torch.randn(2, HEADS, DIM, DIM, dtype=torch.float64) if from_states else None
    leaves = [x.requires_grad_() for x in (q, k, v, beta, *([] if initial is None else [initial]))]

    o_THE, ends = fla_levels.scan_levels((q, k, v, g.requires_grad_(), beta), table, initial)
    expected_THE, expected_ends = by_autograd(layout, q, k, v, beta, initial)
    torch.testing.assert_close(o_THE, expected_THE)
    assert (ends is None) == (len(expected_ends) == 0)
    weight_THE, weight_ends = torch.randn_like(o_THE), torch.randn_like(expected_ends)
    total, expected = ((o * weight_THE).sum() for o in (o_THE, expected_THE))
    if ends is not None:
        torch.testing.assert_close(ends, expected_ends)
        total, expected = (
            total + (ends * weight_ends).sum(),
            expected + (expected_ends * weight_ends).sum(),
        )
    found = torch.autograd.grad(total, [*leaves, g])
    wanted = torch.autograd.grad(expected, leaves)
    torch.testing.assert_close(found[:-1], wanted)
    torch.testing.assert_close(found[-1], torch.ones_like(g))


def test_the_states_alone_may_be_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a microbatch that ends at the states of its last layer."""
    monkeypatch.setattr(fla_levels, "_kernels", lambda: STAND_INS)
    begins, lengths, parents = np.array([[0], [70]]), np.array([[70], [5]]), np.array([[-1], [0]])
    root, child = (
        Level(begin, length, parent, np.array([0]), True)
        for begin, length, parent in zip(begins, lengths, parents, strict=True)
    )
    layout = StateLayout((root, child), np.arange(2))
    q, k, v = (torch.randn(75, HEADS, DIM, dtype=torch.float64) for _ in range(3))
    g, beta = torch.randn(2, 75, HEADS, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    _, ends = fla_levels.scan_levels(tuple(inputs), StateTable(layout), None)
    _, expected = by_autograd(layout, q, k, v, beta, None)
    found = torch.autograd.grad(ends.square().sum(), [k, v, beta])
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), [k, v, beta]))
