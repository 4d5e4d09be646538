"""Memory of a device: what weights, gradients and an optimizer take, and what is left. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.sizes import count
from forkpoint.units import GIB

MARGIN_BYTES = GIB
MARGIN_SHARE = 0.04
"""Kept free: what predictions leave out, such as workspaces of matrix products and memory lost
between blocks of the allocator."""
CONTEXT_BYTES = GIB // 2
"""Taken by CUDA and its libraries in every process."""
LEAST_BYTES = GIB
"""The least budget for activations that is planned for."""
ADAM_STATES = 2
"""Numbers of the parameter's dtype that AdamW keeps for it."""
MOST_RANKS = 1024
"""The most ranks that are tried to find how many it takes."""


def margin_bytes(total: int) -> int:
    """Bytes of a device of so many that no plan counts on."""
    return MARGIN_BYTES + int(MARGIN_SHARE * total)


def total_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of a model, all experts and the embeddings included, norms and biases left out.

    Args:
        config: a transformers configuration as a mapping. Where it does not say whether the head
            is tied to the embeddings, it is not.
        shape: the sizes read from it.
    """
    used = count(config, "num_experts_per_tok")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((found for name in names if (found := count(config, name))), used)
    width = count(config, "moe_intermediate_size", count(config, "intermediate_size"))
    routed = shape.layers - min(shape.layers, count(config, "first_k_dense_replace"))
    unused = routed * max(0, experts - used) * 3 * shape.hidden * width if used else 0
    return shape.linear_parameters + embedding_parameters(config, shape) + unused


def embedding_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of the embeddings and the head; arguments of `total_parameters`."""
    tied = config.get("tie_word_embeddings", False)
    return (1 if tied else 2) * shape.vocab * shape.hidden


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of a device that a training run takes besides activations, in bytes.

    With several ranks it is that of one of them. Where `fully_shard` has divided the model, each
    block and the rest together, a step has few blocks at a time whole on every rank, and all
    gradients until its end, when they are reduced (`engine/memory.py` measures the same).
    """

    total_bytes: int
    parameters: int
    """Of the whole model."""
    dtype_bytes: int
    optimizer_bytes_per_parameter: float | None = None
    """None is AdamW's, in the parameters' dtype."""
    trained_share: float = 1.0
    """The part of the parameters that is trained: less for adapters and frozen layers."""
    ranks: int = 1
    """Data-parallel ranks."""
    sharded: bool = True
    """Whether weights, gradients and states are divided over them."""
    embeddings: int = 0
    """Parameters outside of the blocks."""
    layers: int = 1

    @property
    def weights_bytes(self) -> int:
        """This rank's part, and what a step has whole at once."""
        return self._part(self.parameters) * self.dtype_bytes + self.gathered_bytes

    @property
    def gathered_bytes(self) -> int:
        """Whole weights at once: of embeddings, of a block, and of the next in two buffers."""
        if self.ranks == 1 or not self.sharded:
            return 0
        block = -(-(self.parameters - self.embeddings) // self.layers)
        return min(self.parameters, self.embeddings + 3 * block) * self.dtype_bytes

    @property
    def gradients_bytes(self) -> int:
        """This rank's part; and, of several, whole ones of a step that is not over or the buckets
        of DistributedDataParallel."""
        trained = self._trained
        elements = trained if self.ranks == 1 else trained + self._part(trained)
        return elements * self.dtype_bytes

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
        """Weights, gradients and the optimizer's states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def besides_bytes(self) -> int:
        """All that is taken besides activations and prefix cache: what is kept free as well."""
        return self.fixed_bytes + CONTEXT_BYTES + margin_bytes(self.total_bytes)

    @property
    def left_bytes(self) -> int:
        """Bytes left for activations and prefix cache; negative where there is too little for the
        rest."""
        return self.total_bytes - self.besides_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget that a policy would measure there, in whole GiB."""
        return max(LEAST_BYTES, self.left_bytes // GIB * GIB)

    def fits(self, peak_bytes: int) -> bool:
        """Whether activations and prefix cache of so many bytes fit besides."""
        return peak_bytes <= self.left_bytes

    def least_ranks(self, peak_bytes: int) -> int | None:
        """The least power of two of ranks, not below those given, on which so many bytes fit if the
        model is sharded over them; None where no number does."""
        count = 2
        while count <= MOST_RANKS:
            if count >= self.ranks and replace(self, ranks=count, sharded=True).fits(peak_bytes):
                return count
            count *= 2
        return None
