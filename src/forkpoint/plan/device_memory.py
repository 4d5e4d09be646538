"""Memory of a device: sizes of weights, gradients and optimizer states, and the rest. Imports no
torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.mixtures import idle_expert_width
from forkpoint.plan.pricing.sizes import count
from forkpoint.units import GIB

MARGIN_BYTES = GIB
MARGIN_SHARE = 0.04
"""Part of the memory that is kept free for allocations that are not predicted, such as workspaces
of matrix products and fragmentation."""
CONTEXT_BYTES = GIB // 2
"""Bytes that CUDA and its libraries take in every process."""
LEAST_BYTES = GIB
"""Smallest budget for activations."""
ADAM_STATES = 2
"""Number of values that AdamW keeps for each parameter, in the dtype of the parameter."""
MOST_RANKS = 1024
"""Largest number of ranks that `least_ranks` tries."""


def margin_bytes(total: int) -> int:
    """Bytes that plans leave free on a device with `total` bytes."""
    return MARGIN_BYTES + int(MARGIN_SHARE * total)


def total_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Number of parameters of a model, with all experts and embeddings, without norms and biases.

    Args:
        config: a transformers configuration as a mapping. Without `tie_word_embeddings`, the head
            is not tied to the embeddings.
        shape: the sizes read from `config`.
    """
    unused = shape.expert_layers * idle_expert_width(config) * 3 * shape.hidden
    return shape.linear_parameters + embedding_parameters(config, shape) + unused


def embedding_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Number of parameters of the embeddings and the head. Arguments are those of
    `total_parameters`."""
    tied = config.get("tie_word_embeddings", False)
    found = (1 if tied else 2) * shape.vocab * shape.hidden
    # Inputs of each layer (Gemma 4).
    names = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
    return found + shape.layers * math.prod(count(config, name) for name in names)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of a device for weights, gradients and optimizer states, in bytes.

    With several ranks it is the memory of one rank. If `fully_shard` has sharded each block and the
    rest, a step holds few gathered blocks at a time, and whole gradients until they are reduced at
    its end. `engine/memory.py` measures the same.
    """

    total_bytes: int
    parameters: int
    """Number of parameters of the whole model."""
    dtype_bytes: int
    optimizer_bytes_per_parameter: float | None = None
    """None means AdamW in the dtype of the parameters."""
    step_bytes_per_parameter: int = 0
    """Bytes that a step adds to the gradient of each trained parameter: a float32 sum, and a copy
    of the earlier gradient."""
    trained_share: float = 1.0
    """Part of the parameters that is trained, from 0 to 1."""
    ranks: int = 1
    """Data-parallel ranks."""
    sharded: bool = True
    """Whether weights, gradients and states are divided over them."""
    embeddings: int = 0
    """Parameters outside of the blocks."""
    layers: int = 1

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's part of the weights, and of the weights that a step gathers at a
        time."""
        return self._part(self.parameters) * self.dtype_bytes + self.gathered_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered weights: embeddings, one block, and the next block in two buffers."""
        if self.ranks == 1 or not self.sharded:
            return 0
        block = -(-(self.parameters - self.embeddings) // self.layers)
        return min(self.parameters, self.embeddings + 3 * block) * self.dtype_bytes

    @property
    def gradients_bytes(self) -> int:
        """Bytes of this rank's part of the gradients, with their sums and copies. With several
        ranks also whole gradients during a step, or the buckets of DistributedDataParallel."""
        trained = self._trained
        elements = trained if self.ranks == 1 else trained + self._part(trained)
        return elements * self.dtype_bytes + self._part(trained) * self.step_bytes_per_parameter

    @property
    def optimizer_bytes(self) -> int:
        each = self.optimizer_bytes_per_parameter
        each = ADAM_STATES * self.dtype_bytes if each is None else each
        return int(self._part(self._trained) * each)

    @property
    def _trained(self) -> int:
        return int(self.parameters * self.trained_share)

    def _part(self, number: int) -> int:
        return -(-number // self.ranks) if self.sharded else number

    @property
    def fixed_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def besides_bytes(self) -> int:
        """Bytes of all memory except activations and prefix cache, with the margin."""
        return self.fixed_bytes + CONTEXT_BYTES + margin_bytes(self.total_bytes)

    @property
    def left_bytes(self) -> int:
        """Bytes left for activations and prefix cache; negative if the rest does not fit."""
        return self.total_bytes - self.besides_bytes

    @property
    def budget_bytes(self) -> int:
        """Memory budget that a policy would measure on such a device: bytes, in whole GiB."""
        return max(LEAST_BYTES, self.left_bytes // GIB * GIB)

    def fits(self, peak_bytes: int) -> bool:
        """Whether activations and prefix cache of this size fit."""
        return peak_bytes <= self.left_bytes

    def has_plan(self, peak_bytes: int) -> bool:
        """Whether a plan with this peak is found on the device: one that fits, and keeps to the
        budget in whole GiB."""
        return self.fits(peak_bytes) and peak_bytes <= self.budget_bytes

    def least_ranks(self, peak_bytes: int) -> int | None:
        """Smallest power of two, at least the present number of ranks, on which a plan with this
        peak is found if the model is sharded; None if there is none."""
        count = 2
        while count <= MOST_RANKS:
            other = replace(self, ranks=count, sharded=True)
            if count >= self.ranks and other.has_plan(peak_bytes):
                return count
            count *= 2
        return None
