"""A loop over single rollouts in plain transformers, as most write it, beside a default policy."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from tyro.conf import DisallowNone, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline, Seconds
from benchmarks.shapes import make_group, make_model, read_rollouts
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import device_for
from benchmarks.steps.tree import with_advantages
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.config import Config
from forkpoint.losses import GRPO
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.units import format_bytes, size_in_bytes
from forkpoint.wrapping import wrap

BATCHES = (
    # prompt, response and rollouts of one group each
    (128, 128, 8),
    (256, 512, 8),
    (1024, 256, 16),
    (1024, 1024, 8),
    (2048, 256, 16),
    (2048, 2048, 4),
    (4096, 512, 8),
    (4800, 1000, 8),
    (8192, 512, 8),
    (12288, 1024, 4),
    (16384, 512, 4),
    (32768, 1024, 2),
)
"""Twelve groups, short and long."""


@dataclass(frozen=True, kw_only=True)
class PlainLoop(Benchmark):
    """Time steps and take their peaks beside a plain loop of transformers over single rollouts.

    Attributes:
        shape: Whose sizes the model has.
        file: Rollouts in place of the made-up groups; groups are taken whole.
        groups: How many groups of FILE make a batch.
        batches: At most so many batches.
        only: Parts of the names of made-up groups to measure, such as P=8192; by default all.
        device_memory: Use no more of the device than this, such as 80GB.
        optimizer: What holds states on the device: AdamW in the parameters' dtype, SGD with
            momentum, which takes as much as Adam in 8 bits on bfloat16 weights, or nothing.
        repeats: Steps of each side that are timed, after two that are not.
        max_seconds: Begin no batch after so many seconds.
        tiny: A tiny model and lengths divided by 64, on the CPU as well.
    """

    NAME: ClassVar[str] = "plain-loop"

    shape: Literal["qwen3-1.7b", "qwen3-8b"] = "qwen3-1.7b"
    file: DisallowNone[
        Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: made up)")]
    ] = None
    groups: Count = 1
    batches: Count = 12
    only: tuple[str, ...] = ()
    device_memory: DisallowNone[
        Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="(default: all of it)")]
    ] = None
    optimizer: Literal["adamw", "momentum", "none"] = "adamw"
    repeats: Count = 2
    max_seconds: Seconds = 540.0
    tiny: Flag = False

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = device_for(self.NAME, tiny=self.tiny)
        limit = size_in_bytes(self.device_memory, "device_memory")
        if device.type == "cuda" and limit is not None:
            _, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        model = make_model(self.shape, device, tiny=self.tiny)
        trained = list(model.parameters())
        states = self._states(trained)
        each = {"adamw": 4, "momentum": 2, "none": 0}[self.optimizer]
        policy = wrap(model, Config(optimizer_bytes_per_parameter=each))
        label = f"{self.shape}, all trained, {self.optimizer}"
        if limit is not None:
            label += f", {format_bytes(limit)}"
        sides: dict[str, Callable[[RolloutBatch], object]] = {
            "plain": partial(plain_step, model, device),
            "forkpoint": partial(policy.forward_backward, loss=GRPO()),
        }
        for name, batch in self._inputs(model.config.vocab_size):
            case = f"{label}: {name}"
            if deadline.over(case):
                continue
            bound = policy.plan(batch, GRPO()).bound
            yield from compared(sides, trained, batch, case, self.repeats, bound)
        if policy.memory_budget_bytes is not None:
            yield cell_row(self.NAME, label, "budget", policy.memory_budget_bytes, "bytes")
        del states

    def _states(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """An optimizer that has its states, from a step with gradients of zeros."""
        if self.optimizer == "none":
            return None
        made = (
            torch.optim.AdamW(trained, lr=0.0, foreach=False)
            if self.optimizer == "adamw"
            else torch.optim.SGD(trained, lr=0.0, momentum=0.9, foreach=False)
        )
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        made.step()
        made.zero_grad(set_to_none=True)
        return made

    def _inputs(self, vocab: int) -> Iterator[tuple[str, RolloutBatch]]:
        if self.file is None:
            scale = 64 if self.tiny else 1
            for prompt, response, count in BATCHES[: self.batches]:
                name = f"P={prompt} R={response} N={count}"
                if self.only and not any(part in name for part in self.only):
                    continue
                lengths = [max(2, response // scale)] * count
                made = make_group(max(2, prompt // scale), lengths, vocab=vocab)
                yield name, made
            return
        whole = RolloutBatch(read_rollouts(self.file, vocab=vocab, tiny=self.tiny))
        known = int(whole.group_index.max()) + 1
        for number in range(min(self.batches, known // self.groups)):
            first = number * self.groups
            inside = (whole.group_index >= first) & (whole.group_index < first + self.groups)
            part = whole.select(np.flatnonzero(inside).tolist())
            name = f"{self.file.name}, groups {first} to {first + self.groups - 1}"
            name += f", {part.logical_tokens} tokens"
            if not any(np.any(rollout.advantage) for rollout in part):  # nothing would run
                part, name = with_advantages(part, seed=number), f"{name}, random advantages"
            yield name, part


WARM_STEPS = 2


def plain_step(
    model: Callable[..., Any],
    device: torch.device,
    batch: RolloutBatch,
    inputs: Callable[[Rollout], dict[str, Any]] | None = None,
) -> None:
    """The policy gradient of a batch, one rollout after the other.

    It leaves out what gives no gradient, as forkpoint does.

    inputs: returns more arguments of the model for a rollout, such as its images. With
        `logits_to_keep` the model makes logits of the last tokens alone, else of all.
    """
    trained = int(batch.loss_mask.sum())
    for n, rollout in enumerate(batch):
        gives = np.flatnonzero(rollout.loss_mask * (rollout.advantage != 0))
        if not len(gives):
            continue
        length = int(rollout.loss_mask.nonzero()[0][-1]) + 1
        ids_BL = torch.tensor(rollout.token_ids[:length], device=device)[None]
        more = inputs(rollout) if inputs else {}
        logits_BLV = model(input_ids=ids_BL, use_cache=False, **more).logits
        logprobs_L = logits_BLV[0, :-1].float().log_softmax(-1)
        kept = len(logprobs_L)
        taken_L = logprobs_L.gather(-1, ids_BL[0, length - kept :, None])[:, 0]
        begin, end = batch.offsets[n] + length - kept, batch.offsets[n] + length
        advantages = batch.advantages[begin:end] * batch.loss_mask[begin:end]
        weights_L = torch.as_tensor(advantages, dtype=torch.float32, device=device)
        (-(weights_L * taken_L).sum() / trained).backward()


def compared(
    sides: dict[str, Callable[[RolloutBatch], object]],
    trained: list[nn.Parameter],
    batch: RolloutBatch,
    case: str,
    repeats: int,
    bound: float,
) -> Iterator[ResultRow]:
    """Steps of each side by turns, and how far their gradients are apart."""
    found: dict[str, tuple[float, int] | None] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    for name, step in sides.items():
        found[name] = measured(step, trained, batch, repeats)
        if found[name] is not None:
            # On the host, for the device may have no room; compared on the device, one by one.
            gradients[name] = [p.grad.to("cpu") for p in trained if p.grad is not None]
        for parameter in trained:
            parameter.grad = None
    row = partial(cell_row, PlainLoop.NAME, case)
    ours = found["forkpoint"]
    for name, result in found.items():
        if result is None:
            yield row(f"{name} out of memory", 1.0, "1")
            continue
        seconds, peak = result
        yield row(f"{name} step", seconds * 1e3, "ms")
        yield row(f"{name} peak", peak, "bytes")
        if name != "forkpoint" and ours is not None:
            yield row(
                f"faster than {name}",
                seconds / ours[0],
                "x",
                baseline=name,
                baseline_leaves_out=True,
                bound=bound,
            )
            yield row(
                f"gradients apart from {name}",
                distance(gradients["forkpoint"], gradients[name], trained[0].device),
                "1",
                note="norm of the difference over the norm",
            )


def measured(
    step: Callable[[RolloutBatch], object],
    trained: list[nn.Parameter],
    batch: RolloutBatch,
    repeats: int,
) -> tuple[float, int] | None:
    """Seconds (median) and the peak of allocated bytes; None where memory runs out.

    Two steps are not timed: the first compiles, and the second is slow as well where it is first
    to allocate what compiled code needs.
    """
    cuda = trained[0].is_cuda
    seconds = []
    try:
        for number in range(repeats + WARM_STEPS):
            for parameter in trained:
                parameter.grad = None
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            step(batch)
            if cuda:
                torch.cuda.synchronize()
            if number >= WARM_STEPS:
                seconds.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        out = True
    else:
        out = False
    if out:
        for parameter in trained:
            parameter.grad = None
        gc.collect()
        torch.cuda.empty_cache()
        return None
    return median(seconds), torch.cuda.max_memory_allocated() if cuda else 0


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor], device: torch.device) -> float:
    """The norm of the difference of two gradients over the norm of the second."""
    apart = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.zeros_like(apart)
    for one, other in zip(found, wanted, strict=True):
        theirs = other.to(device).float()
        total += theirs.square().sum()
        # Not in place: `theirs` may be `other` itself.
        apart += (theirs - one.to(device).float()).square().sum()
    return float((apart / total).sqrt()) if total else 0.0
