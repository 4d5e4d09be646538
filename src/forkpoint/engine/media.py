"""Features of images and videos: encoded once, read by microbatches, trained once.

The encoder is treated as a microbatch whose prefix cache is the features. Microbatches read
features as constants and add gradients to sums in float32. After the backward of the last such
microbatch, the encoder's backward starts from the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forkpoint.engine.feature import Feature
from forkpoint.engine.host import Host
from forkpoint.engine.microbatches import MediaRows, MicrobatchInputs
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.transaction import Transaction
from forkpoint.ops.dtypes import accumulate_dtype
from forkpoint.plan.program import ENCODE, ENCODE_BACKWARD, RELEASE, Instruction
from forkpoint.rollouts.media import Media


@dataclass(eq=False)
class Encoding(Feature):
    """Runs a model's encoder on the media of a batch, and keeps their features while they are read.

    A medium of R tokens has a tensor [R, C] that replaces embeddings, and one for each layer after
    which the model adds features (deepstack).
    """

    host: Host
    media: Sequence[Media]
    transaction: Transaction
    """Has a guard if the encoder is trained."""
    trains: bool
    """Whether the pass computes gradients of the encoder."""
    idle: Media | None = None
    """Medium that this rank encodes when other ranks have more media than it."""
    _outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, init=False)
    """Outputs of the encoder by medium, with a graph if there is one."""
    _sums: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict, init=False)
    """Sums of gradients of the outputs by medium; None if the encoder gets none."""

    # As microbatches read features
    # ------------------------------------------------------------

    def read(self, rows: MediaRows) -> list[Tensor]:
        """Features [m, C] of the places of a microbatch, in their order."""
        parts = [
            [
                _read(x.detach(), total, index)
                for x, total in zip(self._outputs[number], self._sums[number], strict=True)
            ]
            for number, index in rows.parts
        ]
        return [torch.cat(each).index_select(0, rows.order) for each in zip(*parts, strict=True)]

    def anchored(self, embeds: Tensor) -> Tensor:
        """Embeddings that require gradients if the encoder is trained, even if they are frozen.

        Otherwise, with frozen layers, a microbatch of text would add no gradients to the prefix
        caches that it reads, and these lead to the encoder.
        """
        if not self.trains or embeds.requires_grad or not torch.is_grad_enabled():
            return embeds
        return embeds.detach().requires_grad_()

    # As a feature of a pass
    # ------------------------------------------------------------

    def begin_pass(self, cache: PrefixCache) -> None:
        cache.media = self

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        numbers = instruction.media
        if instruction.operation == ENCODE:
            with torch.set_grad_enabled(instruction.keeps_graph):
                encoded = self._encoded(numbers)
            for number, outputs in zip(numbers, encoded if numbers else (), strict=True):
                self._outputs[number] = tuple(outputs)
                self._sums[number] = tuple(
                    torch.zeros_like(x, dtype=accumulate_dtype(x.dtype)) if self.trains else None
                    for x in outputs
                )
        elif instruction.operation == RELEASE:
            for number in numbers:
                del self._outputs[number], self._sums[number]
        elif instruction.operation == ENCODE_BACKWARD:
            outputs = [x for number in numbers for x in self._outputs.pop(number)]
            sums = [x for number in numbers for x in self._sums.pop(number)]
            if not any(x.requires_grad for x in outputs):  # no activations were kept
                with torch.enable_grad():
                    outputs = [x for each in self._encoded(numbers) for x in each]
            if not numbers:
                sums = [torch.zeros_like(x) for x in outputs]
            pairs = zip(outputs, sums, strict=True)
            roots = [(x, g.to(x.dtype)) for x, g in pairs if x.requires_grad and g is not None]
            del outputs, sums, pairs
            if roots:
                guard = self.transaction.guard
                assert guard is not None
                guard.begin()
            tensors, gradients = [x for x, _ in roots], [gradient for _, gradient in roots]
            del roots
            self.host.backward(tensors, gradients, last=instruction.last_backward)

    def _encoded(self, numbers: Sequence[int]) -> tuple[tuple[Tensor, ...], ...]:
        if numbers:
            return self.host.encode([self.media[number] for number in numbers])
        assert self.idle is not None
        return self.host.encode([self.idle])


def _read(table_RC: Tensor, total_RC: Tensor | None, index: Tensor) -> Tensor:
    if total_RC is None:
        return table_RC.index_select(0, index)
    # With frozen embeddings, possibly no other tensor requires a gradient.
    anchor = torch.zeros((), dtype=table_RC.dtype, device=table_RC.device, requires_grad=True)
    return _Read.apply(anchor, table_RC, total_RC, index)  # type: ignore[return-value]


class _Read(torch.autograd.Function):
    """Reads rows of a table as constants. The backward adds their gradients to a second table."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, table_RC: Tensor, total_RC: Tensor, index: Tensor
    ) -> Tensor:
        # Not save_for_backward, whose tensors may be moved to host memory.
        ctx.total, ctx.index = total_RC, index
        return table_RC.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[None, None, None, None]:
        # A microbatch may have a token several times; index_put_ adds these in one order.
        ctx.total.index_put_((ctx.index,), grad_outputs[0].to(ctx.total.dtype), accumulate=True)
        return None, None, None, None
