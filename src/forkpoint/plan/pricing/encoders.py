"""Counted work and memory of encoders of images and video."""

from dataclasses import dataclass

from forkpoint.plan.media import PlannedMedium
from forkpoint.plan.pricing.cost import LINEAR_BACKWARD


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder with the projection of its features."""

    parameters: int
    """Number of weights of its matrix products. Every patch uses each weight once."""
    layers: int
    hidden: int
    patches_per_token: float
    """Number of patches that are merged into one token."""
    feature_elements: int
    """Number of feature values of one token, with those for deeper layers."""
    activation_elements: int
    """Number of values that the forward of one patch keeps for the backward."""
    dtype_bytes: int = 2
    trained: bool = True
    """Whether some of its parameters are trained."""
    together: bool = False
    """Whether one call encodes several images or videos."""

    def forward_flops(self, medium: PlannedMedium) -> float:
        """FLOPs of a forward: products of weights, and attention among the patches of each
        frame."""
        patches = medium.tokens * self.patches_per_token
        pairs = patches * patches / medium.frames
        return 2.0 * self.parameters * patches + 4.0 * self.layers * self.hidden * pairs

    def step_flops(self, medium: PlannedMedium) -> float:
        """FLOPs of a forward, and of a backward if the encoder has trained parameters."""
        return self.forward_flops(medium) * (1 + LINEAR_BACKWARD * self.trained)

    def kept_bytes(self, medium: PlannedMedium) -> int:
        """Bytes that a forward keeps for its backward."""
        patches = medium.tokens * self.patches_per_token
        return int(patches * self.activation_elements * self.dtype_bytes)

    def feature_bytes(self, medium: PlannedMedium) -> int:
        """Bytes of features, with the sums of their gradients if the encoder is trained."""
        each = self.dtype_bytes + max(4, self.dtype_bytes) * self.trained
        return medium.tokens * self.feature_elements * each
