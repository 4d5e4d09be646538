"""Prefix caches in host memory: their sizes, and the bytes that are copied."""

from collections.abc import Iterable, Sequence

from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.program import BACKWARD, FORWARD, SCORE, Instruction
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest

LAYERS_HERE = 2
"""Number of layers with their prefix cache in host memory that are on the device at a time: one is
read, and the next one is copied."""


def layer_cache_bytes(cache_tokens: int, shape: ModelShape) -> int:
    """Bytes of the prefix cache of `tokens` tokens in one attention layer, with its gradients."""
    each = shape.boundary_bytes_per_token + shape.boundary_gradient_bytes_per_token
    return cache_tokens * each // max(1, shape.attention_layers)


def most_host_layers(cache_tokens: int, shape: ModelShape, host_memory: int | None) -> int:
    """Number of layers whose prefix cache fits in `limit` bytes of host memory; None means no
    limit."""
    layer = layer_cache_bytes(cache_tokens, shape)
    if host_memory is None or not layer:
        return shape.attention_layers
    return min(shape.attention_layers, host_memory // layer)


def outer_ancestors(parents: Sequence[int], segments: Iterable[int]) -> set[int]:
    """Ancestors of these segments that are not among them. `parents`: the parent of each segment,
    -1 for roots."""
    inside, found = set(segments), set[int]()
    for segment in inside:
        above = parents[segment]
        while above >= 0 and above not in found:
            if above not in inside:
                found.add(above)
            above = parents[above]
    return found


class CacheCopies:
    """Bytes of prefix cache that instructions copy to host memory and back."""

    def __init__(
        self,
        shape: ModelShape,
        host_layers: int,
        forest: Forest,
        microbatches: Sequence[Microbatch],
    ) -> None:
        """`host_layers`: number of layers with their prefix cache in host memory."""
        share = host_layers / max(1, shape.attention_layers)
        self._state: float = share * shape.boundary_bytes_per_token
        self._sum: float = share * shape.boundary_gradient_bytes_per_token
        self._forest = forest
        self._parents: list[int] = forest.parent.tolist()
        self._microbatches = microbatches
        self._rows: dict[int, tuple[int, int]] = {}

    def of(self, instruction: Instruction) -> tuple[int, int]:
        """Bytes that an instruction copies to host memory, and bytes that it copies back.

        Sums of gradients count as copied back even if they are still zero.
        """
        read, own = self._rows_of(instruction.microbatch)
        if instruction.operation == BACKWARD:
            return int(read * self._sum), int(read * (self._state + self._sum) + own * self._sum)
        captures = instruction.operation in (FORWARD, SCORE)
        return int(own * self._state * captures), int(read * self._state)

    def _rows_of(self, index: int) -> tuple[int, int]:
        """Number of tokens that a microbatch reads from others, and number that it captures."""
        if index not in self._rows:
            microbatch, length = self._microbatches[index], self._forest.length
            read = outer_ancestors(self._parents, microbatch.segments)
            kept = zip(microbatch.segments, microbatch.cache_begin, strict=True)
            own = [segment for segment, begin in kept if begin >= 0]
            self._rows[index] = int(length[list(read)].sum()), int(length[own].sum())
        return self._rows[index]
