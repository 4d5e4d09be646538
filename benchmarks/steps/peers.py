"""Updates of the same groups by other methods, as their users run them, beside a default policy."""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline, Seconds
from benchmarks.shapes import SCALE_TINY, checkpoint, make_model, sizes_of
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Layers, check_at_least_one, check_groups, device_for
from benchmarks.steps.packed import grouper_step, tree_step
from benchmarks.steps.plain_loop import measured, plain_step
from benchmarks.steps.trl_task import Task, make_task, reward, stock_gradients, stock_update
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.losses import GRPO
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.wrapping import wrap

Gradients = Mapping[str, Tensor]
Step = Callable[[RolloutBatch], object]
LOOP, GROUPER, TREE, TRL = "plain loop", "PrefixGrouper", "tree packing", "TRL"
NONE, OURS = "forkpoint, sharing none", "forkpoint"
SIDES = {
    "loop": LOOP,
    "prefix-grouper": GROUPER,
    "tree": TREE,
    "none": NONE,
    "forkpoint": OURS,
    "trl": TRL,
}
"""Names of options and of rows, in the order in which they run."""
PACKAGES = {"prefix-grouper": "prefix_grouper", "trl": "trl"}
FLOAT64_BAR = 1e-6
"""Models of transformers compute norms and rotary angles in float32, also in float64 models. So
two orders of the same sums differ by about 1e-7."""
FLOAT32_BAR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Peers(Benchmark):
    """Time one update of groups by other methods that share prompts, beside ours and without.

    The sides are a plain loop over rollouts, PrefixGrouper (its package), a tree packed into one
    row with FlexAttention, TRL's GRPOTrainer, and forkpoint with sharing and without. All start
    from the same weights and have the same loss. First their gradients are compared with those of
    the plain loop in float64, on two layers.

    Attributes:
        shape: Whose sizes the model has; weights are random.
        prompts: Prompts of the update.
        length: Tokens of each prompt.
        responses: Responses to each prompt.
        tokens: Tokens of a response.
        rows: TRL's per_device_train_batch_size: how many rows TRL runs at once.
        checkpointed: Let blocks keep only their inputs, on every side.
        sides: Which sides run; by default all whose packages are installed.
        layers: Give the model fewer layers than its shape has.
        no_check: Compare no gradients beforehand.
        repeats: Updates of each side that are timed, after two that are not.
        max_seconds: Start no side after so many seconds.
        tiny: A tiny model and lengths divided by 64, on the CPU as well.
    """

    NAME: ClassVar[str] = "peers"

    shape: Literal["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"] = "qwen3-1.7b"
    prompts: Count = 2
    length: Count = 8192
    responses: Count = 8
    tokens: Count = 512
    rows: Count = 4
    checkpointed: Flag = False
    sides: tuple[Literal["loop", "prefix-grouper", "tree", "none", "forkpoint", "trl"], ...] = ()
    layers: Layers = None
    no_check: Flag = False
    repeats: Count = 3
    max_seconds: Seconds = 540.0
    tiny: Flag = False

    def check(self) -> None:
        check_at_least_one("layers", self.layers)
        for name in ("prompts", "rows", "repeats"):
            check_at_least_one(name, getattr(self, name))
        for name in ("length", "tokens"):
            if getattr(self, name) < 2 * SCALE_TINY:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it takes at least {2 * SCALE_TINY}."
                )
        check_groups(self.prompts, self.responses, self.rows, "responses")
        for side in self.sides:
            if not installed(side):
                raise ConfigError(
                    f"the side {side} runs the package {PACKAGES[side]}, which is not installed; "
                    f"install it with pip, or leave the side out of --sides."
                )
        device_for(self.NAME, tiny=self.tiny)

    @property
    def _names(self) -> list[str]:
        """Sides that run, in the order of SIDES."""
        return [side for side in SIDES if side in (self.sides or SIDES) and installed(side)]

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = device_for(self.NAME, tiny=self.tiny)
        if not self.no_check:
            yield from self._checked(device)
        scale = SCALE_TINY if self.tiny else 1
        task = self._task(self.length // scale, self.tokens // scale)
        batch = batch_of(task)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = self._model(device, dtype, self.layers)
        case = self._case()
        row = partial(cell_row, self.NAME, case)
        bound = wrap(model).plan(batch, GRPO()).bound
        found: dict[str, float] = {}
        for side in self._names:
            if deadline.over(f"{case}: {SIDES[side]}"):
                continue
            name, note = SIDES[side], self._note(side, device)
            result = self._timed(side, model, device, batch, task)
            if result is None:
                yield row(f"{name}: out of memory", 1.0, "1", note=note)
                continue
            seconds, peak = result
            found[side] = seconds
            yield row(f"{name}: update", seconds * 1e3, "ms", note=note)
            if device.type == "cuda":
                yield row(f"{name}: peak", peak, "bytes")
        for side, seconds in found.items():
            if side != "forkpoint" and "forkpoint" in found:
                yield row(
                    f"faster than {SIDES[side]}",
                    seconds / found["forkpoint"],
                    "x",
                    baseline=SIDES[side],
                    baseline_leaves_out=True,
                    bound=bound,
                )

    def _case(self) -> str:
        parts = [
            "tiny" if self.tiny else self.shape,
            *([f"{self.layers} layers"] if self.layers else []),
            f"{self.prompts} prompts of {self.length}",
            f"{self.responses} responses of {self.tokens} each",
            "checkpointed" if self.checkpointed else "not checkpointed",
        ]
        return ", ".join(parts)

    def _note(self, side: str, device: torch.device) -> str | None:
        if side == "trl":
            return f"per_device_train_batch_size={self.rows}, sdpa"
        if side == "tree":
            return "FlexAttention" if device.type == "cuda" else "sdpa with a dense mask"
        return None

    def _task(self, length: int, tokens: int) -> Task:
        return make_task(
            None,
            prompts=self.prompts,
            completions=self.responses,
            tokens=tokens,
            vocab=sizes_of(self.shape, tiny=self.tiny)["vocab_size"],
            length=length,
        )

    def _model(self, device: torch.device, dtype: torch.dtype, layers: int | None) -> Any:
        model = make_model(self.shape, device, dtype=dtype, layers=layers, tiny=self.tiny)
        if self.checkpointed:
            checkpoint(model)
        return model

    def _timed(
        self, side: str, model: Any, device: torch.device, batch: RolloutBatch, task: Task
    ) -> tuple[float, int] | None:
        """Seconds and peak bytes of an update; None where memory runs out."""
        if side == "trl":
            return stock_update(
                model, task, rows=self.rows, checkpointed=self.checkpointed, repeats=self.repeats
            )
        trained = list(model.parameters())
        with side_step(side, model, device) as step:
            result = measured(step, trained, batch, self.repeats)
        for parameter in trained:
            parameter.grad = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return result

    def _checked(self, device: torch.device) -> Iterator[ResultRow]:
        """Gradients of every side on two layers, beside a plain loop's in float64."""
        dtype, bar = torch.float64, FLOAT64_BAR
        if device.type == "cuda":  # whose fast kernels take float32 at most
            dtype, bar = torch.float32, FLOAT32_BAR
        task = self._task(2 * SCALE_TINY, SCALE_TINY // 2)
        batch, expected = batch_of(task), {}
        case = (
            f"gradients, 2 layers, {self.prompts} prompts of {2 * SCALE_TINY}, "
            f"{self.responses} responses of {SCALE_TINY // 2}"
        )
        for side in ["loop", *(side for side in self._names if side != "loop")]:
            first = side == "loop"
            # Random weights differ by dtype, so all models are made in the one.
            model = self._model(device, dtype, 2).to(torch.float64 if first else dtype)
            found = self._gradients(side, model, device, batch, task)
            if first:
                expected = found
                continue
            yield cell_row(
                self.NAME,
                case,
                f"{SIDES[side]}: apart from the plain loop in float64",
                apart(found, expected),
                "1",
                bar=bar,
                note=str(dtype).removeprefix("torch."),
            )

    def _gradients(
        self, side: str, model: Any, device: torch.device, batch: RolloutBatch, task: Task
    ) -> Gradients:
        if side == "trl":
            return stock_gradients(model, task, rows=self.rows, checkpointed=self.checkpointed)
        with side_step(side, model, device) as step:
            step(batch)
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class side_step:
    """A context with the update of one side, which adds to `.grad`."""

    def __init__(self, side: str, model: Any, device: torch.device) -> None:
        self._side, self._model, self._device = side, model, device
        self._before = model.config._attn_implementation

    def __enter__(self) -> Step:
        model = self._model
        match self._side:
            case "loop":
                return partial(plain_step, model, self._device)
            case "prefix-grouper":
                return grouper_step(model, self._device)
            case "tree":
                return tree_step(model, self._device)
            case "none":
                return partial(wrap(model, Config(sharing="none")).forward_backward, loss=GRPO())
            case _:
                return partial(wrap(model).forward_backward, loss=GRPO())

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation(self._before)


def installed(side: str) -> bool:
    """Whether the package that a side runs is there."""
    return side not in PACKAGES or find_spec(PACKAGES[side]) is not None


def batch_of(task: Task) -> RolloutBatch:
    """The rollouts of a task, with the advantages that TRL gives them by default."""
    rollouts = []
    for prompt, completions in zip(task.prompts, task.completions, strict=True):
        rewards = torch.tensor(reward(completions))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for ids, advantage in zip(completions, advantages.tolist(), strict=True):
            mask = np.repeat([0, 1], [len(prompt), len(ids)])
            rollouts.append(Rollout([*prompt, *ids], mask, advantage))
    return RolloutBatch(rollouts)


def apart(found: Gradients, expected: Gradients) -> float:
    """The norm of the difference over all parameters, relative to the expected gradient's."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[k].double() - expected[k]).square().sum()) for k in expected)
    return (squares / sum(float(x.square().sum()) for x in expected.values())) ** 0.5
