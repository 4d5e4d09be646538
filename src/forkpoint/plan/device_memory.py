"""Memory of a device: what weights, gradients and an optimizer take, and what is left. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    tied = config.get("tie_word_embeddings", False)
    embeddings = (1 if tied else 2) * shape.vocab * shape.hidden
    used = count(config, "num_experts_per_tok")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((found for name in names if (found := count(config, name))), used)
    width = count(config, "moe_intermediate_size", count(config, "intermediate_size"))
    routed = shape.layers - min(shape.layers, count(config, "first_k_dense_replace"))
    unused = routed * max(0, experts - used) * 3 * shape.hidden * width if used else 0
    return shape.linear_parameters + embeddings + unused


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device that a training run takes besides activations, in bytes."""

    total_bytes: int
    parameters: int
    dtype_bytes: int
    optimizer_bytes_per_parameter: float = 8
    trained_share: float = 1.0
    """The part of the parameters that is trained: less for adapters and frozen layers."""

    @property
    def weights_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def gradients_bytes(self) -> int:
        return int(self.parameters * self.trained_share) * self.dtype_bytes

    @property
    def optimizer_bytes(self) -> int:
        return int(self.parameters * self.trained_share * self.optimizer_bytes_per_parameter)

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
    def budget_bytes(self) -> int | None:
        """The budget that a policy would measure there, in whole GiB; None where there is not even
        room for the rest."""
        return max(LEAST_BYTES, self.left_bytes // GIB * GIB) if self.left_bytes > 0 else None

    def fits(self, peak_bytes: int) -> bool:
        """Whether activations and prefix cache of so many bytes fit besides."""
        return peak_bytes <= self.left_bytes
