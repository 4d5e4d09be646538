"""All levels of a microbatch by flash-linear-attention's kernels. Kernels that need no state run
once a microbatch.

Most work of a chunked gated delta rule is within chunks, and does not depend on initial states
(arXiv 2412.06464, section 3.3): norms, sums of decays, triangular systems, and the outputs once the
states before all chunks are known. Only the pass of states from chunk to chunk needs the states of
the level above. So one of nine kernels forward, and one of twelve backward, is launched for each
level, and a tree needs few more launches than a single level.

This calls internal functions of flash-linear-attention 0.6.0. Other versions, and microbatches of
one level, use its public function.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forkpoint.device import on_device
from forkpoint.ops.delta_rule.kernel import CHUNK
from forkpoint.ops.recurrence import StateTable

SHOWN = (0, 6, 0)
"""The version with known internal functions."""


@cache
def _kernels() -> Any:
    """The functions by name."""
    from fla.modules.norm import l2norm  # pyright: ignore[reportMissingImports]
    from fla.ops.common import chunk_delta_h, chunk_o  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_fwd,
        wy_fast,
    )
    from fla.ops.utils import chunk_local_cumsum  # pyright: ignore[reportMissingImports]
    from fla.ops.utils.constant import RCP_LN2  # pyright: ignore[reportMissingImports]

    return SimpleNamespace(
        norm=l2norm.l2norm_fwd,
        norm_backward=l2norm.l2norm_bwd,
        cumsum=chunk_local_cumsum,
        log2_e=RCP_LN2,
        within=chunk_fwd.chunk_gated_delta_rule_fwd_intra,
        within_again=wy_fast.recompute_w_u_fwd,
        within_backward=wy_fast.prepare_wy_repr_bwd,
        states=chunk_delta_h.chunk_gated_delta_rule_fwd_h,
        states_backward=chunk_delta_h.chunk_gated_delta_rule_bwd_dhu,
        outputs=chunk_o.chunk_fwd_o,
        values_backward=chunk_o.chunk_bwd_dv_local,
        rest_backward=chunk_o.chunk_bwd_dqkwg,
    )


class _Chunks:
    """Chunks of adjacent sequences, as arguments of the kernels."""

    def __init__(self, lengths: np.ndarray, device: torch.device) -> None:
        counts = -(-lengths // CHUNK)
        offsets = np.cumsum([0, *counts])
        sequence = np.repeat(np.arange(len(lengths)), counts)
        place = np.arange(offsets[-1]) - offsets[sequence]
        self.tokens: int = int(lengths.sum())
        self.cut: dict[str, Any] = {
            "cu_seqlens": on_device(np.cumsum([0, *lengths]), device),
            "chunk_indices": on_device(np.stack([sequence, place], 1), device),
            "chunk_size": CHUNK,
        }
        self.offsets: Tensor = on_device(offsets, device)


class _MicrobatchChunks:
    """Chunks of a whole microbatch, in the order of its levels, and of each level."""

    def __init__(self, table: StateTable, device: torch.device) -> None:
        lengths = [level.sequences.lengths for level in table.levels]
        self.all: _Chunks = _Chunks(np.concatenate(lengths), device)
        self.levels: list[_Chunks] = [_Chunks(each, device) for each in lengths]

    def parts(self, x_1T: Tensor) -> tuple[Tensor, ...]:
        """Each level's tokens."""
        return x_1T.split([level.tokens for level in self.levels], 1)


_microbatches: WeakKeyDictionary[StateTable, _MicrobatchChunks] = WeakKeyDictionary()


def scan_levels(inputs: tuple[Tensor, ...], table: StateTable, initial_SGDE: Tensor | None) -> Any:
    """As `over_levels` of the kernel's scan. Returns outputs, and kept states or None."""
    if table not in _microbatches:
        _microbatches[table] = _MicrobatchChunks(table, inputs[0].device)
    return _Levels.apply(*inputs, initial_SGDE, table, _microbatches[table])


def _states(
    table: StateTable,
    microbatch: _MicrobatchChunks,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor | None], list[Tensor | None]]:
    """States before all chunks, written values, and the initial and final states of each level."""
    before, written, starts, ends = [], [], [], []
    state = initial
    given = zip(*(microbatch.parts(x) for x in (k, w, u, g)), strict=True)
    for level, chunks, (k_, w_, u_, g_) in zip(table.levels, microbatch.levels, given, strict=True):
        if level.parents is not None:
            assert state is not None
            state = state.index_select(0, level.parents)
        starts.append(state)
        h_, v_, state = _kernels().states(
            k=k_,
            w=w_,
            u=u_,
            g=g_,
            initial_state=state,
            output_final_state=level.final,
            chunk_offsets=chunks.offsets,
            **chunks.cut,
        )
        before.append(h_)
        written.append(v_)
        ends.append(state)
    return torch.cat(before, 1), torch.cat(written, 1), starts, ends


class _Levels(torch.autograd.Function):
    """Autograd function of q, k [T, H, D], v [T, G, E], g, beta [T, G], and initial states or
    None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        table: StateTable,
        microbatch: _MicrobatchChunks,
    ) -> tuple[Tensor, Tensor | None]:
        run, cut = _kernels(), microbatch.all.cut
        ctx.dtypes = [x.dtype for x in (q, k, v, g, beta)]
        ctx.scale = q.shape[-1] ** -0.5
        q, k, v, g, beta = (table.ordered(x).contiguous()[None] for x in (q, k, v, g, beta))
        q, q_length = run.norm(q)
        k, k_length = run.norm(k)
        g = run.cumsum(g, scale=run.log2_e, **cut)
        w, u, solved = run.within(k=k, v=v, g=g, beta=beta, **cut)
        before, written, _, ends = _states(table, microbatch, k, w, u, g, initial)
        o = run.outputs(q=q, k=k, v=written, h=before, g=g, scale=ctx.scale, **cut)
        kept = [
            state.index_select(0, level.kept)
            for level, state in zip(table.levels, ends, strict=True)
            if level.kept is not None and state is not None
        ]
        ctx.save_for_backward(q, q_length, k, k_length, v, g, beta, solved, initial)
        ctx.table, ctx.microbatch = table, microbatch
        ctx.set_materialize_grads(False)
        return table.as_within(o[0].to(v.dtype)), torch.cat(kept) if kept else None

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's type)
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, q_length, k, k_length, v, g, beta, solved, initial = ctx.saved_tensors
        table, microbatch, scale = ctx.table, ctx.microbatch, ctx.scale
        run, cut = _kernels(), microbatch.all.cut
        grad_o, grad_kept = gradients
        # The backward may be called under autocast, unlike the forward.
        with torch.autocast(v.device.type, enabled=False):
            do = torch.zeros_like(v) if grad_o is None else table.ordered(grad_o).contiguous()[None]
            plain = {name: x for name, x in cut.items() if name != "chunk_size"}
            w, u = run.within_again(k=k, v=v, beta=beta, A=solved, g=g, **plain)
            before, written, starts, ends = _states(table, microbatch, k, w, u, g, initial)
            dv = run.values_backward(q=q, k=k, g=g, do=do, scale=scale, **cut)
            dh, dv, d_initial = _states_backward(
                table, microbatch, (q, k, w, g, do, dv), starts, ends, grad_kept, scale
            )
            dq, dk, dw, dg = run.rest_backward(
                q=q, k=k, v=written, w=w, g=g, h=before, dv=dv, do=do, dh=dh, scale=scale, **cut
            )
            dk_within, dv, dbeta, dg_within = run.within_backward(
                k=k, v=v, beta=beta, g=g, A=solved, dw=dw, du=dv, **plain
            )
            dg = run.cumsum(dg + dg_within, reverse=True, **cut)
            dq = run.norm_backward(q, q_length, dq)
            dk = run.norm_backward(k, k_length, dk + dk_within)
        found = zip((dq, dk, dv, dg, dbeta), ctx.dtypes, strict=True)
        return (*(table.as_within(x[0]).to(dtype) for x, dtype in found), d_initial, None, None)


def _states_backward(
    table: StateTable,
    microbatch: _MicrobatchChunks,
    inputs: tuple[Tensor, ...],
    starts: list[Tensor | None],
    ends: list[Tensor | None],
    grad_kept: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the states before all chunks, of written values, and of initial states.

    Runs from the last level to the first, because children start from the final states of parents.
    """
    kept_parts: list[Tensor | None] = [None] * len(table.levels)
    if grad_kept is not None:
        keeping = [i for i, level in enumerate(table.levels) if level.kept is not None]
        sizes = [len(table.levels[i].kept) for i in keeping]  # pyright: ignore[reportArgumentType]
        for i, part in zip(keeping, grad_kept.split(sizes), strict=True):
            kept_parts[i] = part
    dh: list[Tensor] = []
    dv: list[Tensor] = []
    below: Tensor | None = None
    parents: Tensor | None = None
    given = list(zip(*(microbatch.parts(x) for x in inputs), strict=True))
    for i in reversed(range(len(table.levels))):
        level, chunks, end = table.levels[i], microbatch.levels[i], ends[i]
        d_end = None
        if end is not None:
            d_end = torch.zeros_like(end)
            for index, part in ((parents, below), (level.kept, kept_parts[i])):
                if index is not None and part is not None:
                    d_end.index_add_(0, index, part.to(d_end.dtype))
        q, k, w, g, do, dv_within = given[i]
        dh_, below, dv_ = _kernels().states_backward(
            q=q,
            k=k,
            w=w,
            g=g,
            h0=starts[i],
            dht=d_end,
            do=do,
            dv=dv_within,
            scale=scale,
            chunk_offsets=chunks.offsets,
            **chunks.cut,
        )
        dh.append(dh_)
        dv.append(dv_)
        parents = level.parents
    return torch.cat(dh[::-1], 1), torch.cat(dv[::-1], 1), below
