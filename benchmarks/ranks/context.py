"""Steps of prompts that are long for one GPU, on ranks of context parallelism.

One prompt with 8 responses of 2,048 tokens, random tokens and weights. Ranks hold the weights by
fully_shard and run parts of each microbatch; a note says whether responses ran by heads or whole.
Beside it stand dense training under the same parallelism, a rollout a microbatch, extrapolated from
two samples, and the same step on one GPU where it fits. Before anything is timed, gradients of a
few layers in float32 are compared with those of one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import forkpoint
from benchmarks.ranks.team import OnRanks, RankSteps, Team, dense_ms, team_here
from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, make_group, make_model
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, device_for
from benchmarks.steps.stepper import DENSE, Stepper, Timed
from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError, PlanError
from forkpoint.losses import GRPO
from forkpoint.plan.context import context_bytes
from forkpoint.rollouts.batch import RolloutBatch

RESPONSES = [2048] * 8
SAMPLES = (2, 4)
"""Rollouts of the two samples of dense training."""
CHECKED_LAYERS = 2
MOST_ERROR = 1e-4
"""Of a parameter's gradient in float32, by its norm."""
Shape = Literal["qwen3-8b", "llama3-8b"]


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

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        team = team_here()
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
            yield self._checked()
        alone: dict[int, float] = {}
        for prompt in self.options.prompts:
            if not self._over(f"one rank, {self.shape}, P{prompt}"):
                found = self.team.exchange(self._alone(prompt) if self.team.rank == 0 else None)
                self.team.free()
                if found[0] is None:
                    yield self._row(f"P{prompt}, one rank", "out of memory", 1.0, "1")
                else:
                    alone[prompt], peak = found[0]
                    figure = partial(self._row, f"P{prompt}, one rank")
                    yield figure("shared step", alone[prompt], "ms")
                    if peak is not None:
                        yield figure("shared peak", peak, "bytes")
        if self._over(f"context parallelism, {self.shape}"):
            return
        steps = RankSteps(
            self.team,
            self._sharded_model(self.dtype),
            compile_blocks=self.compiled,
            checkpointing="auto",
            mesh=self.mesh,
        )
        for prompt in self.options.prompts:
            if not self._over(f"{self.shape}, P{prompt}"):
                yield from self._figures(steps, prompt, alone.get(prompt))

    def _figures(self, steps: RankSteps, prompt: int, alone: float | None) -> Iterator[ResultRow]:
        batch = self._batch(prompt, steps.policy.host.shape.vocab)
        figure = partial(self._row, f"P{prompt}")
        timed = steps.time(batch, repeats=self.options.repeats)
        plan = timed.plan
        assert plan.shape is not None
        yield figure("shared step", timed.typical_ms, "ms", note=plan.dealing)
        if timed.peak_bytes is not None:
            yield figure("shared peak", timed.peak_bytes, "bytes")
        sent = context_bytes(plan.shape, plan.microbatches, plan.program)
        yield figure("sent by each rank", sent, "bytes")
        if alone is not None:
            yield figure("one rank's step over that of ranks", alone / timed.typical_ms, "x")
        if self._over(f"dense, {self.shape}, P{prompt}"):
            return
        rows: dict[str, Any] = {**DENSE, "max_microbatch_tokens": int(batch.lengths.max())}
        peaks: list[float | None] = []

        def run(some: RolloutBatch) -> float:
            found = steps.time(some, repeats=1, **rows)
            peaks.append(found.peak_bytes)
            return found.typical_ms

        dense = dense_ms(run, batch, SAMPLES)
        yield figure("dense step", dense, "ms")
        if peaks[-1] is not None:
            yield figure("dense peak", peaks[-1], "bytes")
        yield figure(
            "speed-up",
            dense / timed.typical_ms,
            "x",
            baseline="dense",
            baseline_leaves_out=True,
            bound=plan.bound,
        )

    def _alone(self, prompt: int) -> tuple[float, float | None] | None:
        """Milliseconds and peak of the step on the first rank alone; None where it does not
        fit."""
        try:
            model = self._model(self.dtype)
            stepper = Stepper(
                model,
                compile_blocks=self.options.blocks == "compiled",
                self_check=False,
                checkpointing="auto",
                memory_budget="auto",
                optimizer_bytes_per_parameter=0,
            )
            batch = self._batch(prompt, stepper.vocab)
            policy = stepper.configured()
            first = stepper.step(policy, batch)
            timed = stepper.repeat(
                policy, batch, repeats=self.options.repeats, into=Timed(first.plan)
            )
        except (torch.OutOfMemoryError, PlanError):
            return None
        return timed.typical_ms, timed.peak_bytes

    def _checked(self) -> ResultRow:
        """Gradients of small models, beside those of one rank."""
        batch = self._group(64, [24] * 3, vocab=64)
        found: list[dict[str, Tensor]] = []
        for sharded in (True, False):
            make = self._sharded_model if sharded else self._model
            model = make(torch.float32, CHECKED_LAYERS)
            policy = forkpoint.wrap(
                model,
                forkpoint.Config(compile_blocks=self.compiled),
                mesh=self.mesh if sharded else None,
            )
            policy.forward_backward(batch, GRPO())
            found.append(_gradients(model))
            del model, policy
            self.team.free()
        worst = max(
            float((found[0][name] - wanted).norm() / wanted.norm().clamp_min(1e-30))
            for name, wanted in found[1].items()
        )
        return self._row(
            f"{CHECKED_LAYERS} layers, float32",
            "error of gradients beside one rank's",
            self.team.most(worst),
            "1",
            bar=MOST_ERROR,
        )

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
        model = self._model(dtype, layers)
        for block in model.get_decoder().layers:  # pyright: ignore[reportGeneralTypeIssues]
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        self.team.free()
        return model

    def _batch(self, prompt: int, vocab: int) -> RolloutBatch:
        return self._group(prompt // self.scale, [n // self.scale for n in RESPONSES], vocab)

    def _group(self, prompt: int, responses: list[int], vocab: int) -> RolloutBatch:
        return make_group(max(2, prompt), responses, vocab=vocab)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients. Collective where they are sharded."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found
