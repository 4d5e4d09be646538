"""Steps of prompts that are long for one GPU, on ranks of context parallelism.

One prompt with 8 responses of 2,048 tokens, random tokens and weights. Ranks hold the weights by
fully_shard and run parts of each microbatch. Three ways are timed: all of it by heads, responses
dealt out whole, and these with prefix caches that are gathered by layer (`layer_gather`).

Beside these stand the same step on one GPU where it fits, and dense training under the same
parallelism, a rollout a microbatch, extrapolated from two samples. Before anything is timed,
gradients of a few layers in float32 are compared with those of one rank.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import forkpoint
from benchmarks.planning.context_ways import layer_gathered_bytes
from benchmarks.ranks.layer_gather import by_layer
from benchmarks.ranks.team import (
    OnRanks,
    RankSteps,
    RankTimed,
    Team,
    dense_ms,
    sharded,
    team_here,
)
from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, make_group, make_model
from benchmarks.steps.capacity import Size
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, device_for
from benchmarks.steps.stepper import DENSE, GROUP, Stepper, Timed
from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError, PlanError
from forkpoint.losses import GRPO
from forkpoint.plan import Plan, builder
from forkpoint.plan.longest import longest
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.units import size_in_bytes

RESPONSES = [2048] * 8
SAMPLES = (1, 2)
"""Rollouts of the two samples of dense training."""
CHECKED_LAYERS = 2
MOST_ERROR = 1e-4
"""Of a parameter's gradient in float32, by its norm."""
ACROSS: dict[str, Any] = dict(GROUP)
Shape = Literal["qwen3-8b", "llama3-8b"]
Way = Literal["by heads", "leaves dealt out", "gathered by layer"]
WAYS: tuple[Way, ...] = ("by heads", "leaves dealt out", "gathered by layer")


class _Longest(NamedTuple):
    """The longest prompt that is predicted to fit, and its first step; without one, none fits."""

    tokens: int
    ms: float | None = None
    peak_bytes: float | None = None


Alone = tuple[float, float | None] | None
"""Milliseconds and peak bytes of the step on one rank; None where it does not fit."""
ONE_RANK_BAR = 0.56
"""The most that the faster way takes on two ranks, of the step on one."""
LONGEST_MICROBATCH = 4096
LONGEST_STEP, MOST_TOKENS = 16_384, 1 << 19
"""Lengths of the longest prompt that are tried: multiples of the one, up to the other."""


@dataclass(frozen=True, kw_only=True)
class Context(OnRanks):
    """Time steps of long prompts on ranks of context parallelism; under torchrun.

    Attributes:
        max_seconds: Start no measurement after so many seconds, and list the missing ones.
        shapes: Whose sizes the models have.
        prompts: Tokens of the prompt.
        layers: Give the models fewer layers than their shapes have.
        blocks: Whether decoder blocks are compiled, dense and shared alike.
        repeats: How often a step is timed after a first time.
        unchecked: Leave out the comparison of gradients.
        undense: Leave out dense training.
        longest: The longest prompts whose steps fit one rank and all ranks are predicted as well,
            with the prefix cache on the device, and a step of each runs.
        device_memory: Limit the memory of each GPU to this.
        tiny: Tiny models and lengths divided by 64, to try the command out, on CPUs as well.
    """

    NAME: ClassVar[str] = "context"

    max_seconds: Seconds = 540.0
    shapes: tuple[Shape, ...] = ("qwen3-8b", "llama3-8b")
    prompts: tuple[int, ...] = (32_768, 65_536)
    layers: Layers = None
    blocks: Literal["compiled", "eager"] = "compiled"
    repeats: Count = 2
    unchecked: Flag = False
    undense: Flag = False
    longest: Flag = False
    device_memory: Size = None
    tiny: Flag = False

    def check(self) -> None:
        for name in ("layers", "repeats"):
            check_at_least_one(name, getattr(self, name))
        for prompt in self.prompts:
            check_at_least_one("prompts", prompt)
        if not torchrun.is_on_ranks() or torchrun.size() < 2:
            raise ConfigError(
                "context measures steps of several ranks, and this process is alone. Start it by "
                "torchrun --nproc-per-node 2 -m benchmarks context."
            )
        device_for(self.NAME, tiny=self.tiny)
        if self.device_memory is not None and not torch.cuda.is_available():
            raise ConfigError("device_memory limits GPUs, and this process has none; leave it out.")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        team = team_here()
        if (limit := size_in_bytes(self.device_memory, "device_memory")) is not None:
            _, total = torch.cuda.mem_get_info(team.device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), team.device)
        for shape in self.shapes:
            yield from _Measuring(self, shape, team, deadline).rows()


class _Measuring:
    """The figures of one model on this rank."""

    def __init__(self, options: Context, shape: Shape, team: Team, deadline: Deadline) -> None:
        self.options, self.shape, self.team, self.deadline = options, shape, team, deadline
        self.scale = SCALE_TINY if options.tiny else 1
        self.dtype = torch.bfloat16 if team.cuda else torch.float32
        self.compiled = options.blocks == "compiled"
        self.mesh = init_device_mesh(team.device.type, (team.size,), mesh_dim_names=("cp",))

    def rows(self) -> Iterator[ResultRow]:
        if not self.options.unchecked and not self._over("comparison of gradients"):
            yield from self._checked()
        alone, longest_alone = self._one_rank()
        for prompt, found in alone.items():
            figure = partial(self._row, f"P{prompt}, one rank")
            if found is None:
                yield figure("out of memory", 1.0, "1")
                continue
            yield figure("shared step", found[0], "ms")
            if found[1] is not None:
                yield figure("shared peak", found[1], "bytes")
        if self._over(f"context parallelism, {self.shape}"):
            return
        steps = RankSteps(
            self.team,
            self._sharded_model(self.dtype),
            compile_blocks=self.compiled,
            checkpointing="auto",
            mesh=self.mesh,
        )
        fastest: dict[int, RankTimed] = {}
        for prompt in self.options.prompts:
            if not self._over(f"{self.shape}, P{prompt}"):
                timed = yield from self._ways(steps, prompt, alone.get(prompt))
                fastest[prompt] = timed
        for prompt, timed in fastest.items():
            if not self.options.undense and not self._over(f"dense, {self.shape}, P{prompt}"):
                yield from self._dense(steps, prompt, timed)
        if self.options.longest and not self._over("the longest prompt"):
            yield from self._longest(steps, longest_alone)

    # One rank
    # ------------------------------------------------------------

    def _one_rank(self) -> tuple[dict[int, Alone], _Longest | None]:
        """Steps on the first rank alone, by prompt, and that of the longest prompt that is
        predicted to fit it. Collective."""
        found: tuple[dict[int, Alone], _Longest | None] = {}, None
        if self.team.rank == 0:
            found = self._measured_alone()
        self.team.free()
        return self.team.exchange(found)[0]

    def _measured_alone(self) -> tuple[dict[int, Alone], _Longest | None]:
        stepper = Stepper(
            self._model(self.dtype),
            compile_blocks=self.compiled,
            self_check=False,
            checkpointing="auto",
            memory_budget="auto",
            optimizer_bytes_per_parameter=0,
        )
        policy = stepper.configured()
        found: dict[int, Alone] = {}
        for prompt in self.options.prompts:
            if self.deadline.over(f"one rank, {self.shape}, P{prompt}"):
                continue
            batch = self._batch(prompt, stepper.vocab)
            try:
                first = stepper.step(policy, batch)
                timed = stepper.repeat(
                    policy, batch, repeats=self.options.repeats, into=Timed(first.plan)
                )
            except (torch.OutOfMemoryError, PlanError):
                found[prompt] = None
            else:
                found[prompt] = timed.typical_ms, timed.peak_bytes
        if not self.options.longest or self.deadline.over("the longest prompt on one rank"):
            return found, None
        if not (tokens := self._longest_of(policy)):
            return found, _Longest(0)
        policy = policy.with_config(**self._of_longest())
        timed = stepper.step(policy, self._longest_batch(tokens, stepper.vocab))
        return found, _Longest(tokens, timed.typical_ms, timed.peak_bytes)

    # All ranks
    # ------------------------------------------------------------

    def _ways(
        self, steps: RankSteps, prompt: int, alone: Alone
    ) -> Generator[ResultRow, None, RankTimed]:
        """Rows of each way to split sequences; returns the fastest that ran."""
        batch = self._batch(prompt, steps.policy.host.shape.vocab)
        ran: dict[Way, RankTimed] = {}
        for way in WAYS:
            with _forced(way):
                timed = steps.time(batch, repeats=self.options.repeats, planned=False, **ACROSS)
            if any(m.parts for m in timed.plan.microbatches) == (way != "by heads"):
                ran[way] = timed
        chosen = "leaves dealt out" if self._deals(steps, batch) else "by heads"
        for way, timed in ran.items():
            figure = partial(self._row, f"P{prompt}, {way}")
            note = _outline(timed.plan) + (", chosen by the planner" if way == chosen else "")
            yield figure("shared step", timed.typical_ms, "ms", note=note)
            if timed.peak_bytes is not None:
                yield figure("shared peak", timed.peak_bytes, "bytes")
            sent = timed.plan.sent_bytes
            if way == "gathered by layer":
                sent = layer_gathered_bytes(timed.plan)
            yield figure("sent by each rank", sent, "bytes")
            if alone is not None:
                bar = ONE_RANK_BAR if self.team.cuda and self.team.size == 2 else None
                ratio, baseline = timed.typical_ms / alone[0], "one rank"
                yield figure("shared step over one rank's", ratio, "1", bar=bar, baseline=baseline)
        of_forkpoint = [timed for way, timed in ran.items() if way != "gathered by layer"]
        return min(of_forkpoint, key=lambda timed: timed.typical_ms)

    def _deals(self, steps: RankSteps, batch: RolloutBatch) -> bool:
        """Whether the planner takes leaves dealt out. On the first rank's budget."""
        plan = steps.policy.plan(batch)
        return self.team.exchange(any(m.parts for m in plan.microbatches))[0]

    def _dense(self, steps: RankSteps, prompt: int, shared: RankTimed) -> Iterator[ResultRow]:
        batch = self._batch(prompt, steps.policy.host.shape.vocab)
        rows: dict[str, Any] = {**DENSE, "max_microbatch_tokens": int(batch.lengths.max())}
        peaks: list[float | None] = []

        def run(some: RolloutBatch) -> float:
            found = steps.time(some, repeats=1, planned=False, **rows)
            peaks.append(found.peak_bytes)
            return found.typical_ms

        dense = dense_ms(run, batch, SAMPLES)
        figure = partial(self._row, f"P{prompt}")
        yield figure("dense step", dense, "ms")
        if peaks[-1] is not None:
            yield figure("dense peak", peaks[-1], "bytes")
        yield figure(
            "speed-up",
            dense / shared.typical_ms,
            "x",
            baseline="dense",
            baseline_leaves_out=True,
            bound=shared.plan.bound,
        )

    def _longest(self, steps: RankSteps, alone: _Longest | None) -> Iterator[ResultRow]:
        """The longest prompts with the same responses, and steps of them."""
        tokens, timed = min(self.team.exchange(self._longest_of(steps.policy))), None
        if tokens:
            batch = self._longest_batch(tokens, steps.policy.host.shape.vocab)
            timed = steps.time(batch, repeats=1, warm=0, planned=False, **self._of_longest())
        ran = _Longest(tokens, timed and timed.typical_ms, timed and timed.peak_bytes)
        for where, each in (("one rank", alone), ("all ranks", ran)):
            if each is None:
                continue
            figure = partial(self._row, f"longest prompt, {where}")
            yield figure("predicted to fit", each.tokens, "tokens")
            if each.ms is not None:
                yield figure("step of it", each.ms, "ms", note="the first one")
            if each.peak_bytes is not None:
                yield figure("peak of it", each.peak_bytes, "bytes")
        if alone is not None and alone.tokens:
            ratio = tokens / alone.tokens
            yield self._row("longest prompt", "all ranks over one", ratio, "x", baseline="one rank")

    def _longest_of(self, policy: Policy) -> int:
        """The longest prompt whose plan fits the budget of this rank; 0 if none does."""
        policy = policy.with_config(**self._of_longest())

        def fits(prompt: int) -> bool:
            try:
                return policy.plan(self._longest_batch(prompt, policy.host.shape.vocab)).fits
            except PlanError:
                return False

        most = MOST_TOKENS // self.scale
        return longest(fits, step=LONGEST_STEP // self.scale, most=most)

    def _of_longest(self) -> dict[str, Any]:
        """Changes of the configuration: with short microbatches, few lengths are tried."""
        tokens = max(1, LONGEST_MICROBATCH // self.scale)
        return {**ACROSS, "max_microbatch_tokens": tokens, "prefix_cache": "device"}

    def _longest_batch(self, prompt: int, vocab: int) -> RolloutBatch:
        return make_group(prompt, [n // self.scale for n in RESPONSES], vocab=min(vocab, 8192))

    def _checked(self) -> Iterator[ResultRow]:
        """Gradients of small models, beside those of one rank."""
        batch = self._group(64, [24] * 3, vocab=64)
        wanted = self._small_gradients(batch, self._model, None)
        for way in WAYS:
            with _forced(way):
                found = self._small_gradients(batch, self._sharded_model, self.mesh)
            worst = max(
                float((found[name] - gradient).norm() / gradient.norm().clamp_min(1e-30))
                for name, gradient in wanted.items()
            )
            yield self._row(
                f"{CHECKED_LAYERS} layers, float32, {way}",
                "error of gradients beside one rank's",
                self.team.most(worst),
                "1",
                bar=MOST_ERROR,
            )

    def _small_gradients(
        self, batch: RolloutBatch, make: Callable[..., PreTrainedModel], mesh: DeviceMesh | None
    ) -> dict[str, Tensor]:
        model = make(torch.float32, CHECKED_LAYERS)
        config = forkpoint.Config(compile_blocks=self.compiled, **ACROSS)
        forkpoint.wrap(model, config, mesh=mesh).forward_backward(batch, GRPO())
        found = _gradients(model)
        del model
        self.team.free()
        return found

    # Models and batches
    # ------------------------------------------------------------

    def _over(self, what: str) -> bool:
        """Whether the time of the first rank is up, which counts on all. Collective."""
        return self.team.exchange(self.deadline.over(what))[0]

    def _row(self, case: str, metric: str, value: float, unit: str, **more: Any) -> ResultRow:
        name = f"tiny {self.shape}" if self.options.tiny else self.shape
        layers = f", {self.options.layers} layers" if self.options.layers else ""
        where = f"{name}{layers}, {self.team.size} ranks, {self.options.blocks}"
        return cell_row(Context.NAME, f"{where}, {case}", metric, value, unit, **more)

    def _model(self, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
        return make_model(
            self.shape,
            self.team.device,
            dtype=dtype,
            layers=layers or self.options.layers,
            tiny=self.options.tiny,
        )

    def _sharded_model(self, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
        model = sharded(self._model(dtype, layers), self.mesh)
        self.team.free()
        return model

    def _batch(self, prompt: int, vocab: int) -> RolloutBatch:
        return self._group(prompt // self.scale, [n // self.scale for n in RESPONSES], vocab)

    def _group(self, prompt: int, responses: list[int], vocab: int) -> RolloutBatch:
        return make_group(max(2, prompt), responses, vocab=vocab)


def _outline(plan: Plan) -> str:
    """How many microbatches a plan has, and how they keep activations."""
    kinds = {(m.checkpointing, m.activations) for m in plan.microbatches}
    kept = "; ".join(f"checkpointing {c}, activations {a}" for c, a in sorted(kinds))
    return f"{len(plan.microbatches)} microbatches: {kept}"


@contextmanager
def _forced(way: Way) -> Iterator[None]:
    """Within it the planner takes this way wherever it can."""
    noise = float("inf") if way == "by heads" else -float("inf")
    with patch.object(builder, "NOISE", noise), by_layer(way == "gathered by layer"):
        yield


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients. Collective where they are sharded."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found
