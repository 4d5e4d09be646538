"""The link between ranks, as measured: what gathering weights and sending prefix caches take."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """Rates of one process group, the same on all of its ranks.

    A transfer of n bytes takes a latency and n over a rate.
    """

    ranks: int
    """How many ranks it was measured with."""
    backend: str
    """Of the process group: nccl or gloo."""
    gather_bytes_per_ms: float
    """Bytes that each rank receives in an all-gather."""
    gather_latency_ms: float
    send_bytes_per_ms: float
    """Bytes that each rank sends to one other, while it receives as many from another."""
    send_latency_ms: float

    def describe(self) -> str:
        """Such as "link of 2 ranks measured by nccl"."""
        return f"link of {self.ranks} ranks measured by {self.backend}"


@dataclass(frozen=True)
class LinkPrices:
    """Prices of a measured link, in milliseconds, for one model."""

    gathering: float
    """Receiving all weights of the blocks from other ranks, were all of them elsewhere."""
    calls: float
    """Latencies of these gathers."""
    byte: float
    """A byte sent to another rank."""
    transfer: float
    """Latency of one transfer."""
