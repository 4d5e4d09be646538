"""Heads over a decoder's last hidden states: log-probs of labels, or a critic's values."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import CallContext, refuse_call, refuse_calls
from forkpoint.hosts.wrappers import in_float32
from forkpoint.losses.outputs import Head
from forkpoint.ops.head import VocabularyShard, token_outputs


class ModelHead(Protocol):
    """The head of a model. It reads the model's layer at each use."""

    gives: Head

    def check(self) -> None:
        """Raises UnsupportedError for heads that have not been shown exact."""
        ...

    def width(self) -> int:
        """Number of outputs for one token."""
        ...

    def keeps_logits(self, dtype_bytes: int) -> bool:
        """Whether its logits can be kept for the backward, for a model with `dtype_bytes` bytes for
        a number."""
        ...

    def enter(self, changes: Changes) -> None:
        """Compute outputs within calls of the head's module, until the changes are undone, because
        hooks of the module gather its weights."""
        ...

    def forward(self, hidden_nC: Tensor, context: CallContext) -> dict[str, Tensor]:
        """Outputs [n] by name for the context's entries, from their last hidden states [n, C]."""
        ...


@dataclass(eq=False)
class LogprobHead:
    """The head of a causal language model: log-probs in chunks, without all logits of a
    microbatch."""

    linear: Callable[[], nn.Linear]
    """Returns the model's present layer, or refuses it."""
    options: Callable[[], dict[str, float | None]]
    """Returns `logit_scale` and `softcap`."""
    split: Collection[nn.Module]
    gives: Head = "logprobs"
    _called: bool = field(default=False, init=False)
    """Whether log-probs are computed within calls of the module."""
    _in_float32: bool = field(default=False, init=False)
    """In that case, whether its matrix product is in float32."""

    def check(self) -> None:
        head = self.linear()
        if head in self.split:
            check_local_head(head)

    def width(self) -> int:
        return self.linear().out_features

    def keeps_logits(self, dtype_bytes: int) -> bool:
        # Plans count logits in the model's dtype.
        return dtype_bytes >= 4 or not in_float32(self.linear())

    def enter(self, changes: Changes) -> None:
        head = self.linear()
        changes.set(vars(self), "_in_float32", in_float32(head))
        changes.set(vars(self), "_called", True)
        changes.replace_forward(head, self._logprobs)
        refuse_calls([head], changes)

    def forward(self, hidden_nC: Tensor, context: CallContext) -> dict[str, Tensor]:
        if self._called:
            return self.linear()(hidden_nC, context)
        return self._logprobs(hidden_nC, context)

    def _logprobs(self, hidden_nC: Tensor, context: CallContext | None = None) -> dict[str, Tensor]:
        if context is None:
            refuse_call()
        head, inputs = self.linear(), context.inputs
        weight, bias, shard = local_head(head)
        around = nullcontext()
        if self._in_float32 if self._called else in_float32(head):
            around = torch.autocast(hidden_nC.device.type, enabled=False)
            hidden_nC, weight = hidden_nC.float(), weight.float()
            bias = None if bias is None else bias.float()
        with around:
            return token_outputs(
                hidden_nC,
                weight,
                inputs.head_labels,
                bias_V=bias,
                shard=shard,
                temperature_T=inputs.head_temperatures,
                entropy=context.entropy,
                chunk_tokens=context.config.head_chunk_tokens,
                keep_logits=inputs.microbatch.keeps_logits,
                statistics=context.config.head_statistics,
                **self.options(),
            )


def check_local_head(head: nn.Linear) -> None:
    """Check that a head is replicated, or split over ranks by rows of the vocabulary.

    Raises UnsupportedError otherwise.
    """
    weight = head.weight
    if isinstance(weight, DTensor):
        # Of two dimensions the last one is that of tensor parallelism.
        split = weight.placements[-1]
        if not (split.is_replicate() or split.is_shard(0)):
            raise UnsupportedError(
                f"the output head's weight is split over ranks as {split}, along the hidden size; "
                "only splits by rows of the vocabulary have been shown exact. Use tp_plan with "
                "'embedding_rowwise' (or 'colwise_gather_output' for lm_head)."
            )


def local_head(head: nn.Linear) -> tuple[Tensor, Tensor | None, VocabularyShard | None]:
    """This rank's part of weight and bias, and its rows of the vocabulary; None for all rows.

    Called when weights are gathered over data-parallel ranks. Gradients of the tensors reach the
    head's parameters.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return weight, bias, None
    assert weight.device_mesh.ndim == 1, "the head's weight is sharded over data ranks"
    shard = None
    if weight.placements != (Replicate(),):
        assert weight.placements == (Shard(0),), weight.placements
        mesh = weight.device_mesh
        rows = -(-weight.shape[0] // mesh.size())  # as torch.chunk, which DTensor uses
        start = min(weight.shape[0], rows * mesh.get_local_rank())
        shard = VocabularyShard(mesh.get_group(), start)
    if isinstance(bias, DTensor):
        assert bias.placements == weight.placements, (bias.placements, weight.placements)
        bias = bias.to_local()
    elif bias is not None and shard is not None:
        raise UnsupportedError(
            "the output head's weight is split over ranks and its bias is not, so that gradients "
            "of the bias would not be summed. Split both by one rule of tp_plan for lm_head."
        )
    return weight.to_local(), bias, shard
