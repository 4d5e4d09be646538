"""The chunked form in plain torch: any device and dtype, matrix products in place of a loop.

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060), section 6. What tokens of one chunk
give one another is attention without a softmax, decayed; what came before the chunk is a state.
"""

from torch import Tensor

from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.ops.recurrence import Sequences, pairwise_decay

CHUNK = 64


def scan(
    x_TGE: Tensor,
    a_TG: Tensor,
    b_THD: Tensor,
    c_THD: Tensor,
    initial_SGED: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = accumulate_dtype(x_TGE.dtype)
    heads, value_dim = x_TGE.shape[1:]
    chunks = sequences.chunks(min(CHUNK, int(sequences.lengths.max())))

    def cut(y_T: Tensor) -> Tensor:
        """[T, G, ...] -> [chunks, G, C, ...]"""
        return chunks.cut(y_T.to(dtype)).transpose(1, 2)

    def by_head(y_NHCD: Tensor) -> Tensor:
        return y_NHCD.repeat_interleave(heads // y_NHCD.shape[1], dim=1)

    x_NGCE, b_NHCD, c_NHCD = cut(x_TGE), cut(b_THD), cut(c_THD)
    # Behind the end of a sequence a and x are 0: the state passes through unchanged.
    a_NGC = cut(a_TG)
    decay_NGCC = pairwise_decay(a_NGC)
    from_start_NGC1 = a_NGC.cumsum(-1).exp()[..., None]
    within_NGCE = (by_head(c_NHCD @ b_NHCD.mT) * decay_NGCC) @ x_NGCE
    c_NGCD = by_head(c_NHCD) * from_start_NGC1
    x_left_NGCE = x_NGCE * decay_NGCC[..., -1, :, None]
    added_NGED = x_left_NGCE.mT @ by_head(b_NHCD)
    through_NG11 = from_start_NGC1[..., -1:, :]

    def step(at: slice, state: Tensor) -> tuple[Tensor, Tensor]:
        output = within_NGCE[at] + c_NGCD[at] @ state.mT
        return output, state * through_NG11[at] + added_NGED[at]

    if initial_SGED is None:
        initial_SGED = x_NGCE.new_zeros(sequences.count, heads, value_dim, b_THD.shape[2])
    o_NGCE, state = chunks.carry(initial_SGED.to(dtype), step, final)
    return chunks.join(o_NGCE.transpose(1, 2)), state
