"""Predicted steps of long prompts on ranks of context parallelism, by how they split sequences.

The batch is one prompt with some responses of 2,048 tokens each. Computation has the prices of a
calibration (`plan.pricing.meters`), and bytes take the time that a link needs for them; transfers
and computation do not overlap, and latencies are left out. Prefix caches and activations have
`memory_gib` on each rank.

- by heads: `hosts.torch_dist.context_parallel`.
- leaves dealt out: the prompt by heads; its prefix cache is gathered once, each rank runs its share
  of the responses whole, and gradients of the cache go back once, in float32 (`plan.dealing`). All
  leaves, also where the planner would run them by heads.
- gathered by layer: the same, but each microbatch of responses gathers the keys and values of a
  layer before its attention, in the backward again, and sends their gradients back (schedule-level
  reuse, section 4.4).

A note marks the fastest that fits, and the one that the planner chooses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from forkpoint import Config, RolloutBatch
from forkpoint.errors import ConfigError
from forkpoint.plan import MODELS, ModelShape, Plan, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.dealing import deal
from forkpoint.plan.entries import segment_entries
from forkpoint.plan.host_cache import layer_cache_bytes
from forkpoint.plan.predict import cache_bytes, peak_bytes, plan_cost
from forkpoint.plan.pricing.calibration import Calibration, Link
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.plan.program import BACKWARD
from forkpoint.rollouts.batch import Rollout
from forkpoint.units import GIB

NAME = "context-ways"
RESPONSE_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class ContextWays(Benchmark):
    """Predict steps on ranks of context parallelism: time, bytes and memory of each way.

    Attributes:
        model: Whose sizes are taken; the calibration is of these.
        calibration: Measured prices of one rank.
        ranks: Sizes of the mesh dimension.
        prompts: Tokens of the prompt.
        responses: Responses of 2,048 tokens each.
        gb_per_s: Rates of the link at which each rank sends.
        memory_gib: Activations and prefix cache that each rank may hold.
    """

    NAME: ClassVar[str] = NAME

    model: str = "llama3-8b"
    calibration: Path = Path("benchmarks/results/step-grid-h200.calibration.json")
    ranks: tuple[int, ...] = (2, 4, 8)
    prompts: tuple[int, ...] = (8_192, 32_768, 65_536, 131_072, 262_144)
    responses: tuple[int, ...] = (8, 64)
    gb_per_s: tuple[float, ...] = (244.0, 50.0)
    memory_gib: float = 100.0

    def check(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model is {self.model!r}; it takes one of {', '.join(MODELS)}.")
        heads = ModelShape.from_config(MODELS[self.model]).heads
        if not all(size > 1 and heads % size == 0 for size in self.ranks):
            raise ConfigError(
                f"ranks is {self.ranks}; each is above 1 and divides the model's {heads} heads."
            )
        if min(self.prompts) < 2 or min(self.responses) < 1 or min(self.gb_per_s) <= 0:
            raise ConfigError(
                "prompts have 2 tokens at least, and responses and gb_per_s are above 0."
            )

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        calibration = Calibration.load(self.calibration)
        cases = product(self.gb_per_s, self.responses, self.prompts, self.ranks)
        for rate, responses, prompt, size in cases:
            case = f"{self.model}, P{prompt}-N{responses}, {size} ranks, {rate:g} GB/s"
            if not deadline.over(case):
                yield from rows_of(case, Step(self, calibration, prompt, responses, size, rate))


@dataclass(frozen=True)
class Way:
    """A predicted step of the slowest rank."""

    ms: float
    sent_bytes: int
    """By each rank, without its weights."""
    peak_bytes: int


def rows_of(case: str, step: "Step") -> Iterator[ResultRow]:
    """Rows of each way, the fastest that fits the memory marked."""
    ways = {
        "by heads": step.by_heads,
        "leaves dealt out": step.dealt,
        "gathered by layer": step.gathered,
    }
    room = step.options.memory_gib * GIB
    fitting = {name: way.ms for name, way in ways.items() if way.peak_bytes <= room}
    for name, way in ways.items():
        notes = [] if name in fitting else ["does not fit"]
        if name == min(fitting, key=fitting.__getitem__, default=""):
            notes.append("fastest that fits")
        if name == step.chosen:
            notes.append("chosen")
        yield _row(case, f"{name}: step", way.ms, "ms", note=", ".join(notes) or None)
        yield _row(case, f"{name}: sent by each rank", way.sent_bytes / 1e9, "GB")
        yield _row(case, f"{name}: peak", way.peak_bytes / GIB, "GiB")


def _row(case: str, metric: str, value: float, unit: str, **more: Any) -> ResultRow:
    return ResultRow(bench=NAME, case=case, metric=metric, unit=unit, value=value, **more)


class Step:
    """One batch on ranks of one link."""

    def __init__(
        self,
        options: ContextWays,
        calibration: Calibration,
        prompt: int,
        responses: int,
        ranks: int,
        rate: float,
    ) -> None:
        self.options: ContextWays = options
        self.ranks: int = ranks
        self.prompt: int = prompt
        self.responses: int = responses
        self.bytes_per_ms: float = rate * 1e6
        link = Link(
            ranks=ranks,
            backend="nccl",
            gather_bytes_per_ms=self.bytes_per_ms,
            gather_latency_ms=0.0,
            send_bytes_per_ms=self.bytes_per_ms,
            send_latency_ms=0.0,
        )
        self.calibration: Calibration = replace(calibration, link=link)
        self._by_heads = Capabilities(deals_segments=False)
        whole = ModelShape.from_config(MODELS[options.model], compiled=True)
        self.split: ModelShape = replace(whole, context=ranks)

    @cached_property
    def by_heads(self) -> Way:
        plan, meter = self._plan, meter_of(self._plan, self.calibration)
        return Way(plan_cost(plan, meter), plan.sent_bytes, peak_bytes(plan, meter))

    @cached_property
    def dealt(self) -> Way:
        plan, meter = self._dealt, meter_of(self._dealt, self.calibration)
        return Way(plan_cost(plan, meter), plan.sent_bytes, peak_bytes(plan, meter))

    @cached_property
    def gathered(self) -> Way:
        """That by leaves dealt out, with a gathered prefix cache of one layer."""
        sent = layer_gathered_bytes(self._dealt)
        ms = self.dealt.ms + (sent - self.dealt.sent_bytes) / self.bytes_per_ms
        gathered = cache_bytes(self._dealt) * self.ranks // (self.ranks + 1)
        layer = self.ranks * layer_cache_bytes(self._dealt.cache_tokens, self.split)
        return Way(ms, sent, self.dealt.peak_bytes - gathered + layer)

    @cached_property
    def chosen(self) -> str:
        """The way that the planner takes."""
        plan = self._make(Capabilities())
        return "leaves dealt out" if any(m.parts for m in plan.microbatches) else "by heads"

    @cached_property
    def _dealt(self) -> Plan:
        # The prompt in microbatches of its own.
        plan = self._make(self._by_heads, sharing="tree", boundary="across")
        return deal(plan, segment_entries(plan.forest, self._batch))

    @cached_property
    def _plan(self) -> Plan:
        return self._make(self._by_heads)

    def _make(self, capabilities: Capabilities, **options: Any) -> Plan:
        return make_plan(
            self._batch,
            self.split,
            Config(checkpointing="auto", **options),
            calibration=self.calibration,
            capabilities=capabilities,
            budget_bytes=int(self.options.memory_gib * GIB),
        )

    @cached_property
    def _batch(self) -> RolloutBatch:
        """Responses to one prompt. The prompt has a token more than edges that they share."""
        random = np.random.default_rng(0)
        prompt = random.integers(1000, size=self.prompt + 1)
        mask = np.repeat([0, 1], [self.prompt + 1, RESPONSE_TOKENS])
        found = []
        for number in range(self.responses):
            own = random.integers(1000, size=RESPONSE_TOKENS)
            own[0] = number
            found.append(Rollout(np.concatenate([prompt, own]), mask, 1.0, group_id="one"))
        return RolloutBatch(found)


def layer_gathered_bytes(plan: Plan) -> int:
    """Bytes that each rank sends in a step that gathers prefix caches by layer, without weights.

    Each microbatch of responses gathers the prefix cache. `Plan.sent_bytes` counts one gather for
    all of them.
    """
    shape, nbytes = plan.shape, plan.sent_bytes
    assert shape is not None
    for instruction in plan.program.instructions:
        microbatch = plan.microbatches[instruction.microbatch]
        backward = instruction.operation == BACKWARD
        if microbatch.gathered:
            nbytes -= shape.gathered_bytes(plan.captured_tokens(microbatch), backward=backward)
        if microbatch.parts:
            read = plan.read_tokens(microbatch)
            gathers = 2 if backward and microbatch.checkpointing == "full" else 1
            nbytes += gathers * shape.gathered_bytes(read, backward=False)
            nbytes += shape.gathered_bytes(read, backward=True) if backward else 0
    return nbytes
