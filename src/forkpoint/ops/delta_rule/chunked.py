"""The chunked form in plain torch, for any device and dtype: matrix products instead of a loop.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3.3. Within a chunk, the
written values u_i = beta_i (v_i - exp(g_i) S_{i-1}^T k_i) depend on one another by a lower
triangular system. One solve separates the contributions of the values and of the state before the
chunk. All chunks are prepared at once. Then a loop over chunks of a sequence advances all sequences
together.
"""

import torch
from torch import Tensor

from forkpoint.ops.delta_rule.kernel import CHUNK, DeltaKernel, by_value_head, normalized
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import Sequences, pairwise_decay


def scan(
    q_THD: Tensor,
    k_THD: Tensor,
    v_TGE: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    initial_SGDE: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = accumulate_dtype(v_TGE.dtype)
    heads, value_dim = v_TGE.shape[1:]
    key_dim = q_THD.shape[2]
    # Chunks are no longer than the longest sequence, because more would only be padding.
    chunks = sequences.chunks(min(CHUNK, int(sequences.lengths.max())))

    def cut(x_T: Tensor) -> Tensor:
        """[T, G, ...] -> [chunks, G, C, ...]"""
        return chunks.cut(x_T).transpose(1, 2)

    q_NGCD = cut(by_value_head(normalized(q_THD.to(dtype)), heads)) * key_dim**-0.5
    k_NGCD = cut(by_value_head(normalized(k_THD.to(dtype)), heads))
    v_NGCE = cut(v_TGE.to(dtype))
    # After the end of a sequence, g and beta are 0, which leaves the state unchanged.
    g_NGC, beta_NGC = cut(g_TG.to(dtype)), cut(beta_TG.to(dtype))

    decay_NGCC = pairwise_decay(g_NGC)
    from_start_NGC1 = g_NGC.cumsum(-1).exp()[..., None]

    system_NGCC = (k_NGCD * beta_NGC[..., None]) @ k_NGCD.mT * decay_NGCC
    sides = torch.cat([v_NGCE, k_NGCD * from_start_NGC1], -1) * beta_NGC[..., None]
    # Unit triangular, so the diagonal is not read.
    solved = torch.linalg.solve_triangular(system_NGCC, sides, upper=False, unitriangular=True)
    written_NGCE, read_NGCD = solved.split([value_dim, key_dim], -1)
    within_NGCC = q_NGCD @ k_NGCD.mT * decay_NGCC
    from_chunk_NGCD = k_NGCD * decay_NGCC[..., -1, :, None]
    from_before_NGCD, through_NG11 = q_NGCD * from_start_NGC1, from_start_NGC1[..., -1:, :]

    def step(at: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        u_SGCE = written_NGCE[at] - read_NGCD[at] @ state
        output = from_before_NGCD[at] @ state + within_NGCC[at] @ u_SGCE
        return output, state * through_NG11[at] + from_chunk_NGCD[at].mT @ u_SGCE

    if initial_SGDE is None:
        initial_SGDE = v_NGCE.new_zeros(sequences.count, heads, key_dim, value_dim)
    o_NGCE, state = chunks.carry(initial_SGDE.to(dtype), step, final)
    return chunks.join(o_NGCE.transpose(1, 2)).to(v_TGE.dtype), state


KERNEL = DeltaKernel(
    name="chunked",
    scan=scan,
    device_types=None,
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    deterministic=True,
)
