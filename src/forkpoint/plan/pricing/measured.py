"""Time and memory of a plan's microbatches by a calibration.

A microbatch's time is the sum of its blocks' products by how many tokens it has, of its attention
launches by their visible pairs and lengths, of its head by labelled tokens, and of the rest.
"""

from collections.abc import Sequence
from typing import NamedTuple

from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape, visible_pairs
from forkpoint.plan.pricing.meters import logits_bytes
from forkpoint.tree import LAUNCH_COLUMNS, Microbatch, full_table, windowed_table


class _Launches(NamedTuple):
    """A microbatch's attention in one layer."""

    pairs: dict[tuple[bool, float], int]
    """Visible pairs of its sequences, by whether they are causal and by the length that says how
    fast they are."""
    parts: list[int]
    """Tokens of each launch besides the first, or keys that are gathered."""


class MeasuredMeter:
    """Milliseconds of a plan's microbatches by a calibration (see
    `forkpoint.plan.pricing.meters.Meter`)."""

    unit = "ms"

    def __init__(
        self, calibration: Calibration, plan: Plan, labelled_of_microbatch: Sequence[int]
    ) -> None:
        assert plan.shape is not None
        self.calibration: Calibration = calibration
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        self.labelled_of_microbatch = labelled_of_microbatch
        attention = self.shape.linear_parameters / self.shape.layers
        attention -= 3 * self.shape.hidden * self.shape.intermediate
        # Queries, keys and values: about what a block does before its attention is called.
        self._before_attention = 0.75 * attention * self.shape.layers / self.shape.linear_parameters
        self._attention: dict[tuple[int, bool], float] = {}
        self._launches: dict[tuple[int, int], _Launches] = {}

    def forward(self, microbatch: Microbatch, *, boundary_only: bool = False) -> float:
        labelled = 0 if boundary_only else self.labelled_of_microbatch[microbatch.index]
        return self._pass(microbatch, labelled, backward=False)

    def backward(self, microbatch: Microbatch) -> float:
        time = self._pass(microbatch, self.labelled_of_microbatch[microbatch.index], backward=True)
        again = self.shape.repeated_flops_share(microbatch.checkpointing)
        if again:
            blocks = self.shape.layers * self.calibration.block.time(
                microbatch.run_tokens, backward=False
            )
            time += again * blocks
        if again == 1.0:
            time += self._attention_ms(microbatch, backward=False)
        if microbatch.keeps_logits:
            # The backward that was measured computes them first, as the forward does.
            time -= self.calibration.head.time(
                self.labelled_of_microbatch[microbatch.index], backward=False
            )
        return max(time, 0.0)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        found = self.calibration
        return nbytes / (found.out_bytes_per_ms if out else found.back_bytes_per_ms)

    def kept_bytes(self, microbatch: Microbatch) -> int:
        policy = "full" if self.shape.checkpointed else microbatch.checkpointing
        block, rest = self.calibration.kept_bytes[policy]
        # One block is whole while its backward computes it again.
        whole = self.calibration.kept_bytes["none"][0] if policy != "none" else 0.0
        kept = int(microbatch.run_tokens * (self.shape.layers * block + rest + whole))
        return kept + logits_bytes(
            microbatch, self.shape, self.labelled_of_microbatch[microbatch.index]
        )

    def working_bytes(self, microbatch: Microbatch) -> int:
        head, token = self.calibration.working_bytes
        return int(
            microbatch.run_tokens * token
            + (head if self.labelled_of_microbatch[microbatch.index] else 0.0)
        )

    def _pass(self, microbatch: Microbatch, labelled: int, *, backward: bool) -> float:
        found = self.calibration
        layers = float(self.shape.layers)
        attention = self._attention_ms(microbatch, backward=backward)
        if not labelled:
            # Such a microbatch ends at the keys and values of its last layer.
            attention *= (layers - 1) / layers
            layers += self._before_attention - 1
        return (
            layers * found.block.time(microbatch.run_tokens, backward=backward)
            + attention
            + found.rest.time(microbatch.run_tokens, backward=backward)
            + found.head.time(labelled, backward=backward)
        )

    def _attention_ms(self, microbatch: Microbatch, *, backward: bool) -> float:
        """All layers' launches of a microbatch."""
        if (microbatch.index, backward) not in self._attention:
            each = {w: self._layer_ms(microbatch, w, backward) for w in set(self.shape.windows)}
            self._attention[microbatch.index, backward] = sum(each[w] for w in self.shape.windows)
        return self._attention[microbatch.index, backward]

    def _layer_ms(self, microbatch: Microbatch, window: int, backward: bool) -> float:
        if (microbatch.index, window) not in self._launches:
            made = self._windowed(microbatch, window) if window else self._full(microbatch)
            self._launches[microbatch.index, window] = made
        launches, found = self._launches[microbatch.index, window], self.calibration
        time = sum(found.part.time(tokens, backward=backward) for tokens in launches.parts)
        for (causal, length), pairs in launches.pairs.items():
            curve = found.causal if causal else found.rectangle
            time += pairs / curve.rate(length, backward=backward)
        return time

    def _windowed(self, microbatch: Microbatch, window: int) -> _Launches:
        forest, segments = self.plan.forest, list(microbatch.segments)
        pairs = visible_pairs(forest.start[segments], forest.length[segments], window)
        table = windowed_table(forest, microbatch, self.plan.cache_of, window)
        length = min(window, microbatch.run_tokens / len(segments))
        copied = len(table.key_index) if table.key_index is not None else 0
        return _Launches({(True, length): pairs}, [copied])

    def _full(self, microbatch: Microbatch) -> _Launches:
        table = full_table(self.plan.forest, microbatch, self.plan.cache_of)
        cu = table.cu.tolist()
        found = _Launches({}, [])
        for number, values in enumerate(table.launches.tolist()):
            launch: dict[str, int] = dict(zip(LAUNCH_COLUMNS, values, strict=True))
            causal, count = bool(launch["causal"]), launch["count"]
            q, k = (cu[launch[f"cu_{s}_at"] :][: count + 1] for s in "qk")
            # The rate of each sequence by its own length: one may be a whole path, others short.
            for at in range(count):
                queries, keys = q[at + 1] - q[at], k[at + 1] - k[at]
                length = queries if causal else keys
                pairs = queries * (queries + 1) // 2 if causal else queries * keys
                found.pairs[causal, length] = found.pairs.get((causal, length), 0) + pairs
            if number:
                found.parts.append(launch["q_end"] - launch["q_begin"])
        return found
