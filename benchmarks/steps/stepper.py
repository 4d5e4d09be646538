"""Training steps, timed: one model, shared and dense."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypedDict

import torch
from torch import Tensor, nn

from benchmarks.timing import quantile
from forkpoint.config import Config
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.plan import Plan
from forkpoint.policy import Policy, StepStats
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.wrapping import wrap

# What the planner is not given of the device: allocations of kernels, the compiler's workspaces,
# what the allocator cannot use for being in pieces.
RESERVED_BYTES = 8 << 30
# Dense rows of short rollouts are tried up to this length. Longer ones gain nothing: in Llama3-8B's
# shapes on an H200, rows of 12,288 and of 24,576 tokens take the same time a token.
DENSE_ROW_TOKENS = 16_384
AFFORDABLE_MS = 12_000.0
"""For repeats of one step."""
DENSE = {"sharing": "none", "boundary": "within"}
GROUP = {"sharing": "group", "boundary": "across"}


@dataclass
class Timed:
    """Repeats of one step."""

    plan: Plan
    ms: list[float] = field(default_factory=list)
    phase_ms: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int | None = None
    """The most that the device held during any of them."""
    alloc_retries: int = 0
    """How often the allocator freed all cached memory to find room, which waits for the device."""
    stats: StepStats | None = None
    planning_ms: float | None = None
    """Milliseconds for making the plan, which `ms` leaves out; None where the plan was given."""

    @property
    def typical_ms(self) -> float:
        return median(self.ms)

    @property
    def rows_ms(self) -> float:
        """From the first row's forward to the end of the last one's backward."""
        phases = list(self.phase_ms.values())
        if not phases:
            return self.typical_ms
        return median(sum(each) for each in zip(*phases, strict=True))

    def quantile(self, share: float) -> float:
        return quantile(self.ms, share)


class RouterArguments(TypedDict, total=False):
    """Arguments of steps, and of their plans, that are about a mixture's routers."""

    router: RouterLoss | None
    router_counts: Tensor | None


class Stepper:
    """Runs steps of one model; everything that is compiled or pinned is kept between them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        compile_blocks: bool | None = None,
        **options: object,
    ) -> None:
        # Dense at its best and cells that were kept: without a limit unless a benchmark sets one.
        limits = {"memory_budget": None, "checkpointing": "none"}
        base = Config(compile_blocks=compile_blocks, **{**limits, **options})  # type: ignore[arg-type]
        self.model = model
        self.policy: Policy = wrap(model, base)
        self.device: torch.device = self.policy.host.device
        self.cuda: bool = self.device.type == "cuda"
        self.routers: RouterArguments = {}
        """Given to every step and to every plan."""
        self._policies: dict[Config, Policy] = {}
        self._ran: set[Config] = set()

    @property
    def mode(self) -> str:
        return "compiled" if self.policy.host.compiles else "eager"

    @property
    def vocab(self) -> int:
        # Behind these are tokens that stand for images and videos.
        return min(self.policy.host.shape.vocab, 100_000)

    @property
    def fixed_bytes(self) -> int:
        """Weights and their gradients."""
        return 2 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that activations may take on this device; None on a CPU, where nobody says."""
        if not self.cuda:
            return None
        _, total = torch.cuda.mem_get_info(self.device)
        return total - self.fixed_bytes - RESERVED_BYTES

    def configured(self, **changes: object) -> Policy:
        config = replace(self.policy.config, **changes)  # type: ignore[arg-type]
        if config not in self._policies:
            self._policies[config] = self.policy.with_config(**changes)
        return self._policies[config]

    def has_run(self, policy: Policy) -> bool:
        """Whether its configuration has run a step, so that what it needs is compiled."""
        return policy.config in self._ran

    def step(self, policy: Policy, batch: RolloutBatch, plan: Plan | None = None) -> Timed:
        """One step, the device idle at both ends; gradients are zeroed beforehand, not freed."""
        into = self.planned(policy, batch) if plan is None else Timed(plan)
        return self.repeat(policy, batch, repeats=1, into=into)

    def planned(self, policy: Policy, batch: RolloutBatch) -> Timed:
        """The plan of a batch and the time it took to make; no step yet."""
        begin = time.perf_counter()
        plan = policy.plan(batch, **self.routers)
        return Timed(plan, planning_ms=(time.perf_counter() - begin) * 1e3)

    def repeat(self, policy: Policy, batch: RolloutBatch, *, repeats: int, into: Timed) -> Timed:
        """Steps added to those already timed."""
        for _ in range(repeats):
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            with self._timed(into):
                stats = policy.forward_backward(batch, GRPO(), plan=into.plan, **self.routers)
            self._ran.add(policy.config)
            into.stats = stats
            for phase, ms in stats.phase_ms.items():
                into.phase_ms.setdefault(phase, []).append(ms)
        return into

    def score(self, policy: Policy, batch: RolloutBatch, *, repeats: int) -> Timed:
        """Log-probs alone, as old and reference passes need them."""
        found = Timed(policy.plan(batch))
        for _ in range(repeats):
            with self._timed(found):
                policy.score(batch, plan=found.plan)
        return found

    @contextmanager
    def _timed(self, into: Timed) -> Iterator[None]:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        retries = self._alloc_retries()
        begin = time.perf_counter()
        yield
        if self.cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            into.peak_bytes = max(into.peak_bytes or 0, peak)
        into.ms.append((time.perf_counter() - begin) * 1e3)
        into.alloc_retries += self._alloc_retries() - retries

    def _alloc_retries(self) -> int:
        return torch.cuda.memory_stats()["num_alloc_retries"] if self.cuda else 0


@dataclass(frozen=True)
class Dense:
    """The baseline of a cell: some of its rollouts, run densely at their best, scaled to all."""

    timed: Timed
    rollouts: int
    """How many were run."""
    row_tokens: int
    """The most in one row."""
    scale: float
    """The work of all rollouts over that of those that were run."""

    @property
    def note(self) -> str:
        """Note on the sample that stands for the whole, for the rows of figures."""
        run = f"{self.rollouts} rollouts, scaled by {self.scale:.4g}"
        return f"{run}; microbatches of at most {self.row_tokens} tokens"

    @property
    def ms(self) -> float:
        """Of the whole step."""
        return self.scaled(self.timed.typical_ms)

    def scaled(self, ms: float) -> float:
        """Time for all rollouts by that of a pass over the sample, a step or its log-probs alone.

        What comes before a step's first row is there once, and not scaled.
        """
        before = max(0.0, self.timed.typical_ms - self.timed.rows_ms)
        return before + (ms - before) * self.scale

    def quantile(self, share: float) -> float:
        return self.scaled(self.timed.quantile(share))


def best_dense(
    stepper: Stepper,
    batch: RolloutBatch,
    *,
    sample: int = 4,
    row_tokens: int = DENSE_ROW_TOKENS,
    all_rollouts: bool = False,
) -> tuple[Dense, Policy, RolloutBatch]:
    """Dense with the row size that is fastest of those that fit, and the sample that showed it.

    One rollout a row, two, and twice as many as long as such a row has no more than `row_tokens`.
    Logits are kept for the backward where they fit. The dense cost is linear in the rollouts: a
    sample is measured, of at least as many as the longest rows hold, and scaled by counted FLOPs;
    with `all_rollouts` the sample chooses the row size, and one step of the whole batch is timed.
    """
    longest = int(batch.lengths.max())
    sample = max(sample, row_tokens // longest)
    some = batch.select(list(range(min(sample, len(batch)))))
    whole = stepper.configured(**DENSE).plan(batch)
    found: list[tuple[Timed, Policy]] = []
    for rows in _rollouts_of_rows(longest, len(some), row_tokens):
        for logits in ("keep", "recompute"):
            policy = stepper.configured(
                **DENSE, max_microbatch_tokens=rows * longest, head_logits=logits
            )
            try:
                timed = stepper.step(policy, some)
                timed = stepper.repeat(policy, some, repeats=1, into=Timed(timed.plan))
            except torch.OutOfMemoryError:
                gc.collect()  # frames of the error are in cycles with what they hold
                torch.cuda.empty_cache()
                continue
            found.append((timed, policy))
            break
    if not found:
        raise torch.OutOfMemoryError(f"dense training of one rollout of {longest} tokens")
    found.sort(key=lambda f: f[0].typical_ms)
    if all_rollouts:
        return _whole_batch(stepper, batch, [policy for _, policy in found], some)
    timed, policy = found[0]
    row_size = policy.config.max_microbatch_tokens or 0
    assert whole.shape is not None
    scale = whole.dense.step_flops(whole.shape) / timed.plan.dense.step_flops(whole.shape)
    return Dense(timed, len(some), row_size, scale), policy, some


def _whole_batch(
    stepper: Stepper, batch: RolloutBatch, policies: list[Policy], some: RolloutBatch
) -> tuple[Dense, Policy, RolloutBatch]:
    """The whole batch, run densely by the first of the policies for which memory suffices.

    A row of the batch may hold longer rollouts than any of the sample does.
    """
    for policy in policies:
        tokens = policy.config.max_microbatch_tokens or 0
        try:
            return Dense(stepper.step(policy, batch), len(batch), tokens, 1.0), policy, some
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(f"dense training of {len(batch)} rollouts")


def _rollouts_of_rows(longest: int, count: int, row_tokens: int) -> list[int]:
    """How many rollouts a row holds in what is tried, of `count` of at most `longest` tokens."""
    tried = [1, 2]
    while tried[-1] < count and 2 * tried[-1] * longest <= row_tokens:
        tried.append(2 * tried[-1])
    return tried


def repeated(stepper: Stepper, policy: Policy, batch: RolloutBatch) -> Timed:
    """A step once to warm up, and then as often as is affordable.

    One that takes long, of a policy that has run before, is not repeated.
    """
    warm = stepper.has_run(policy)
    first = stepper.step(policy, batch)
    repeats = max(1, min(5, int(AFFORDABLE_MS / max(first.typical_ms, 1.0))))
    if warm and first.typical_ms > AFFORDABLE_MS:
        return first
    into = Timed(first.plan, planning_ms=first.planning_ms)
    return stepper.repeat(policy, batch, repeats=repeats, into=into)
