"""Counted work and memory of encoders of images and video."""

from dataclasses import dataclass

from forkpoint.plan.media import PlannedMedium
from forkpoint.plan.pricing.cost import LINEAR_BACKWARD


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder and of what projects its features."""

    parameters: int
    """Weights of its matrix products; each is counted once for a patch."""
    layers: int
    hidden: int
    patches_per_token: float
    """Patches that are merged into one token."""
    feature_elements: int
    """Numbers of the features of one token, those of deeper layers among them."""
    activation_elements: int
    """Numbers that one patch leaves for the backward."""
    dtype_bytes: int = 2
    trained: bool = True
    """Whether some of its parameters are trained."""
    together: bool = False
    """Whether one call encodes several images or videos."""

    def forward_flops(self, medium: PlannedMedium) -> float:
        """Products of weights, and attention of the patches of each frame with one another."""
        patches = medium.tokens * self.patches_per_token
        pairs = patches * patches / medium.frames
        return 2.0 * self.parameters * patches + 4.0 * self.layers * self.hidden * pairs

    def step_flops(self, medium: PlannedMedium) -> float:
        """A forward, and a backward if it has trained parameters."""
        return self.forward_flops(medium) * (1 + LINEAR_BACKWARD * self.trained)

    def kept_bytes(self, medium: PlannedMedium) -> int:
        """Bytes that a forward leaves for its backward."""
        patches = medium.tokens * self.patches_per_token
        return int(patches * self.activation_elements * self.dtype_bytes)

    def feature_bytes(self, medium: PlannedMedium, *, trains: bool) -> int:
        """Features, with the sums of their gradients if the encoder trains."""
        each = self.dtype_bytes + max(4, self.dtype_bytes) * trains
        return medium.tokens * self.feature_elements * each
