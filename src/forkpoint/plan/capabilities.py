"""Capabilities of hosts, which plans must respect."""

from dataclasses import dataclass

from forkpoint.plan.pricing.encoders import EncoderShape


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a host with a microbatch."""

    leaves_early: bool = True
    """Whether a forward can end inside the last block, after the keys, values or states that later
    tokens read. False if the model itself checkpoints activations."""
    runs_ahead: bool = False
    """Whether the host issues work ahead of the device, as with GPUs: see `predict.plan_cost`."""
    checkpoints: tuple[str, ...] = ("none", "selective", "full")
    """Checkpointing policies that its blocks support."""
    deals_segments: bool = True
    """Whether context-parallel ranks can run whole segments of a microbatch (`plan.dealing`). False
    if layers carry a state."""
    keeps_logits: bool = True
    """Whether the head can keep its logits for the backward."""
    encoder: EncoderShape | None = None
    """Encoder of images or video, for a batch with media; None if its sizes are not known."""

    @property
    def trains_encoder(self) -> bool:
        """Whether the encoder has trained parameters. True if the encoder is not known."""
        return self.encoder is None or self.encoder.trained
