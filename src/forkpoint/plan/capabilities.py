"""Capabilities of hosts, so that plans ask them for nothing else."""

from dataclasses import dataclass

from forkpoint.plan.pricing.encoders import EncoderShape


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a host with a microbatch."""

    leaves_early: bool = True
    """Whether a forward can end in the last block, once this has computed what later tokens read
    of it. Not where activation checkpointing of the model's own repeats forwards."""
    runs_ahead: bool = False
    """Whether the host issues work ahead of the device, as with GPUs: see `predict.simulate`."""
    checkpoints: tuple[str, ...] = ("none", "selective", "full")
    """Policies of checkpointing that its blocks can run with."""
    deals_segments: bool = True
    """Whether ranks of context parallelism can run whole segments of a microbatch (plan.dealing).
    Not where layers carry a state."""
    encoder: EncoderShape | None = None
    """The encoder of images or video, for a batch with media; None where it is not known."""

    @property
    def trains_encoder(self) -> bool:
        """Whether the encoder has trained parameters, if only perhaps."""
        return self.encoder is None or self.encoder.trained
