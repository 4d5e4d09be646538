"""The recurrence of Mamba-2 over packed microbatches of segments.

    S_t = exp(a_t) S_{t-1} + x_t b_t^T,   y_t = S_t c_t

(Dao and Gu, Transformers are SSMs, arXiv 2405.21060, equation 1 with a scalar decay; x is already
multiplied by its time step).
"""

from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.ops.dtypes import accumulate_dtype, without_autocast
from forkpoint.ops.recurrence import Sequences, StateTable, over_levels, pairwise_decay

CHUNK = 64


def chunked_scan(
    x_TGE: Tensor,
    a_TG: Tensor,
    b_THD: Tensor,
    c_THD: Tensor,
    initial_SGED: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the scan by matrix products instead of a loop over tokens (section 6 of the paper).

    Within a chunk, tokens attend to one another with decays and without a softmax. A state carries
    earlier chunks.
    """
    dtype = accumulate_dtype(x_TGE.dtype)
    heads, value_dim = x_TGE.shape[1:]
    chunks = sequences.chunks(min(CHUNK, int(sequences.lengths.max())))

    def cut(y_T: Tensor) -> Tensor:
        """[T, G, ...] -> [chunks, G, C, ...]"""
        return chunks.cut(y_T.to(dtype)).transpose(1, 2)

    def by_head(y_NHCD: Tensor) -> Tensor:
        return y_NHCD.repeat_interleave(heads // y_NHCD.shape[1], dim=1)

    x_NGCE, b_NHCD, c_NHCD = cut(x_TGE), cut(b_THD), cut(c_THD)
    # After the end of a sequence, a and x are 0, which leaves the state unchanged.
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


def selective_scan(
    x_TGE: Tensor,
    a_TG: Tensor,
    b_THD: Tensor,
    c_THD: Tensor,
    *,
    table: StateTable,
    initial_SGED: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Outputs of every token of a microbatch, and the states that other microbatches start from.

    Args:
        x_TGE: [T, G, E] values, multiplied by their time steps.
        a_TG: [T, G] log of the decay, at most 0.
        b_THD, c_THD: [T, H, D] vectors with which values are written and read; G is a multiple of
            H.
        initial_SGED: [S, G, E, D] float32 (float64), initial states of the S segments of the first
            level; None for zeros.
        kernel: "chunked", which runs on any device in any floating dtype, or "auto".

    Returns:
        [T, G, E] and [K, G, E, D], both float32 (float64); the latter in the order of
        `table.kept_index`, or None if no other microbatch starts from any.

    Raises UnsupportedError for an unknown kernel.
    """
    if kernel not in ("auto", "chunked"):
        raise UnsupportedError(
            f"There is no selective-scan kernel {kernel!r}; there are 'auto', 'chunked'. Name "
            "one of these as recurrence_kernel, or leave the choice to 'auto'."
        )
    assert x_TGE.shape[:2] == a_TG.shape and b_THD.shape == c_THD.shape
    assert x_TGE.shape[1] % b_THD.shape[1] == 0
    assert initial_SGED is None or initial_SGED.dtype == accumulate_dtype(x_TGE.dtype)
    with without_autocast(x_TGE):
        return over_levels(chunked_scan, (x_TGE, a_TG, b_THD, c_THD), table, initial_SGED)
