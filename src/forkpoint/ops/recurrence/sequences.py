"""Adjacent sequences of different lengths, and their chunks."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from forkpoint.device import on_device, to_device


class Chunks:
    """Chunks of equal size. The i-th chunks of all sequences run together.

    Sequences are sorted by length, longest first. Chunks are sorted by their index i in the
    sequence: the i-th chunks are `at[i] : at[i + 1]`, for the first `at[i + 1] - at[i]` sequences.
    """

    def __init__(self, lengths: np.ndarray, size: int, device: torch.device | str) -> None:
        begins = np.cumsum([0, *lengths])
        order = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[order] // size)
        active = [int((counts > place).sum()) for place in range(int(counts[0]))]
        self.size = size
        self.at: list[int] = np.cumsum([0, *active]).tolist()
        sequence = np.concatenate([order[:n] for n in active])
        place = np.repeat(np.arange(len(active)), active)
        offset = place[:, None] * size + np.arange(size)
        real = offset < lengths[sequence][:, None]
        token = np.where(real, begins[sequence][:, None] + offset, begins[-1]).ravel()
        where = np.zeros(begins[-1] + 1, np.int64)
        where[token] = np.arange(len(token))
        self.order: Tensor = on_device(order, device)
        """[S] indices of the sequences, longest first."""
        self.rank: Tensor = on_device(np.argsort(order, kind="stable"), device)
        """[S] index of each sequence in that order."""
        self._token = on_device(token, device)
        self._where = on_device(where[:-1], device)

    def cut(self, x_T: Tensor) -> Tensor:
        """[T, ...] -> [chunks, size, ...], with zeros after the end of a sequence."""
        padded = F.pad(x_T, (*(0, 0) * (x_T.dim() - 1), 0, 1))
        return padded.index_select(0, self._token).unflatten(0, (-1, self.size))

    def carry(
        self, state_S: Tensor, step: Callable[[slice, Tensor], tuple[Tensor, Tensor]], final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Carry states from chunk to chunk, for all sequences together.

        Args:
            state_S: [S, ...] initial states of the sequences.
            step: (slice of the i-th chunks, states before them) -> (their outputs, states after
                them).
            final: whether to return the final states, [S, ...].
        """
        state = state_S.index_select(0, self.order)
        outputs, ended = [], []
        for begin, end in pairwise(self.at):
            if end - begin < len(state):
                ended.append(state[end - begin :])
                state = state[: end - begin]
            output, state = step(slice(begin, end), state)
            outputs.append(output)
        if not final:
            return torch.cat(outputs), None
        ends = torch.cat([state, *reversed(ended)])
        return torch.cat(outputs), ends.index_select(0, self.rank)

    def join(self, x_NC: Tensor) -> Tensor:
        """The inverse of `cut`."""
        return x_NC.flatten(0, 1).index_select(0, self._where)


def pairwise_decay(g_NGC: Tensor) -> Tensor:
    """Decay from each token of a chunk to each later one.

    Each exponent is summed separately (the segment sum of Dao and Gu, arXiv 2405.21060, listing 1).
    Differences of cumulative sums would cancel, in the decays and even more in the gradient of g,
    whose diagonal terms are by far the largest for strong decays.

    Args:
        g_NGC: log decays of the C tokens of each chunk, at most 0.

    Returns:
        [N, G, C, C]: row i, column j is exp(g_{j+1} + ... + g_i) where j <= i, else 0.
    """
    size = g_NGC.shape[-1]
    later_CC = torch.ones(size, size, dtype=torch.bool, device=g_NGC.device).triu(1)
    between_NGCC = g_NGC[..., :, None].expand(*g_NGC.shape, size).masked_fill(~later_CC.T, 0)
    # Masked before exp, so that a decay of 0 and its gradient are exact.
    return between_NGCC.cumsum(-2).masked_fill(later_CC, -torch.inf).exp()


class Sequences:
    """Lengths of adjacent sequences, on the CPU and on the device."""

    def __init__(self, lengths: np.ndarray, device: torch.device | str) -> None:
        self.lengths = lengths
        self.count: int = len(lengths)
        self.tokens: int = int(lengths.sum())
        self.device = device
        self.cu_cpu: Tensor = torch.from_numpy(np.cumsum([0, *lengths]))
        """[S + 1] int64"""
        self.cu: Tensor = to_device(self.cu_cpu, device)
        self._chunks: dict[int, Chunks] = {}

    def chunks(self, size: int) -> Chunks:
        """The chunks of this size, built once for all layers and passes."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(self.lengths, size, self.device)
        return self._chunks[size]
