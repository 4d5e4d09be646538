"""The longest rollouts that a step trains on in a given memory.

Dense, and with a shared prompt whose prefix cache is on the device or in the host's memory.
"""

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from tyro.conf import DisallowNone, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import make_group, make_model
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Steps
from benchmarks.steps.stepper import DENSE, GROUP, Stepper, Timed
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError, PlanError
from forkpoint.plan import Plan
from forkpoint.plan.longest import longest
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.units import size_in_bytes

Way = Literal["dense", "device", "host"]
Size = DisallowNone[Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="(default: all)")]]
CHECKED_LAYERS = 4
"""Layers whose gradients are compared: hybrids have one of attention among four."""
LIKE_DENSE = 1e-4
"""The most that gradients in float32 may differ from dense's, relative to their norm."""


@dataclass(frozen=True, kw_only=True)
class Capacity(Steps):
    """Find the largest total length, of a prompt and one response, whose step fits.

    The planner's prediction is tried first, and shorter lengths where that runs out of memory.
    Dense and shared steps have the same checkpointing. Gradients are compared first, with few
    layers: in float32 with dense's, and in bfloat16, dense's too, with dense's in float32.

    Attributes:
        shape: The published model with these sizes; weights are random.
        ways: Dense; a shared prompt with its prefix cache on the device; and in the host's memory.
        responses: How many responses the prompt has.
        response: Tokens of each; by default as many as the prompt has.
        device_memory: Use no more of the device than this, such as 80GiB.
        reserve: What plans leave of it, for what predictions leave out.
        host_memory: The most memory of the host for prefix caches.
        checkpointing: What blocks run again in their backward, dense and shared alike.
        checked_prompt: Tokens of the prompt for which gradients are compared; 0 compares none.
        step_tokens: Lengths are multiples of this many tokens.
        most_tokens: The largest total length that is tried.
        second: Time a second step at the largest length too, where the first allocates memory of
            the host; its time is compared with dense's.
    """

    NAME: ClassVar[str] = "capacity"

    shape: Literal["llama3-8b", "qwen3-8b", "qwen3-4b", "qwen3.5-4b"] = "llama3-8b"
    ways: tuple[Way, ...] = ("dense", "device", "host")
    responses: Count = 2
    response: Count = 0
    device_memory: Size = None
    reserve: str = "4GiB"
    host_memory: Size = None
    checkpointing: Literal["none", "selective", "full"] = "full"
    checked_prompt: Count = 64
    step_tokens: Count = 2048
    most_tokens: Count = 1 << 20
    second: Flag = False

    def check(self) -> None:
        super().check()
        if not self.tiny and not torch.cuda.is_available():
            return  # `stepper` says so
        if self.device_memory is None and not torch.cuda.is_available():
            raise ConfigError(
                "device_memory is not given, and a CPU has no memory of its own to fill. Give "
                "--device-memory 4MiB, say."
            )

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        cap = size_in_bytes(self.device_memory, "device_memory")
        if torch.cuda.is_available():
            _, total = torch.cuda.mem_get_info()
            cap = min(cap or total, total)
            torch.cuda.set_per_process_memory_fraction(cap / total)
        stepper = self.stepper(self.shape, checkpointing=self.checkpointing)
        assert cap is not None
        budget = cap - stepper.fixed_bytes - (size_in_bytes(self.reserve, "reserve") or 0)
        if budget <= 0:
            raise ConfigError(
                f"device_memory is {cap} bytes, and weights, gradients and reserve take "
                f"{cap - budget}; give more."
            )
        label = f"{self.shape} {stepper.mode}, {self.responses} responses"
        label += f" of {self.response}" if self.response else ""
        if self.checked_prompt:
            yield from self._compared(stepper.device, label)
        totals: dict[Way, int] = {}
        times: dict[Way, float] = {}
        for way in self.ways:
            case = f"{label}: {way}"
            if deadline.over(case):
                continue
            row = partial(cell_row, self.NAME, case)
            policy = stepper.configured(**self._options(way), memory_budget=budget)

            def plan(tokens: int, policy: Any = policy, way: Way = way) -> Timed | None:
                try:
                    return stepper.planned(policy, self._batch(tokens, stepper.vocab, way))
                except PlanError:
                    return None

            # Compiles, so that this is in no time. A small budget may not fit this group.
            warmup = stepper.configured(**self._options(way))
            stepper.step(warmup, make_group(1024, [512] * self.responses, vocab=stepper.vocab))
            ran: dict[int, Timed] = {}

            def runs(tokens: int, policy: Any = policy, ran: Any = ran, way: Way = way) -> bool:
                planned = plan(tokens)
                if planned is None:
                    return False
                try:
                    batch = self._batch(tokens, stepper.vocab, way)
                    ran[tokens] = stepper.repeat(policy, batch, repeats=1, into=planned)
                except torch.OutOfMemoryError as error:
                    print(f"{way}: {tokens} tokens: {error}", file=sys.stderr, flush=True)
                    gc.collect()  # frames of the error are in cycles with what they hold
                    torch.cuda.empty_cache()
                    return False
                return True

            step = self.step_tokens
            found = longest(lambda n: plan(n) is not None, step=step, most=self.most_tokens)
            yield row("predicted largest total", found, "tokens")
            while found and not runs(found):
                found -= step
            batch = self._batch(found, stepper.vocab, way) if found else None
            yield row("largest total", found, "tokens", note=_lengths(batch))
            if batch is None:
                continue
            totals[way] = found
            times[way] = ran[found].typical_ms / _tflops(ran[found].plan)
            yield from self._figures(row, ran[found])
            if self.second and ran[found].plan.host_layers:
                row = partial(cell_row, self.NAME, f"{case}, second step")
                again = stepper.repeat(policy, batch, repeats=1, into=Timed(ran[found].plan))
                times[way] = again.typical_ms / _tflops(again.plan)
                yield from self._figures(row, again)
        for way in totals.keys() & {"device", "host"} if "dense" in totals else ():
            row = partial(cell_row, self.NAME, f"{label}: {way}", baseline="dense")
            yield row("largest total over dense", totals[way] / totals["dense"], "x")
            yield row("time of a computed TFLOP over dense", times[way] / times["dense"], "x")

    def _options(self, way: Way) -> dict[str, Any]:
        if way == "dense":
            return dict(DENSE)
        shared = {**GROUP, "prefix_cache": way, "host_memory": self.host_memory}
        if self.checkpointing == "none":
            shared["activations"] = "offload"  # those of prompts do not run again either
        return shared

    def _batch(self, total: int, vocab: int, way: Way) -> RolloutBatch:
        """One rollout for dense, which runs one at a time: all take the same time and memory."""
        response = min(self.response, total - 1) or total // 2
        count = 1 if way == "dense" else self.responses
        return make_group(total - response, [response] * count, vocab=vocab)

    def _compared(self, device: torch.device, label: str) -> Iterator[ResultRow]:
        """Gradients of each way beside dense's in float32, for few layers."""
        model = make_model(
            self.shape, device, dtype=torch.float32, layers=CHECKED_LAYERS, tiny=self.tiny
        )
        _cast(model, torch.bfloat16)
        _cast(model, torch.float32)  # so that both dtypes have the same weights
        reference = self._grads(model, "dense")
        shared: list[Way] = [way for way in self.ways if way != "dense"]
        bfloat16: list[Way] = ["dense", *shared]
        for dtype, ways in ((torch.float32, shared), (torch.bfloat16, bfloat16)):
            _cast(model, dtype)
            name = str(dtype).removeprefix("torch.")
            for way in ways:
                pairs = list(zip(self._grads(model, way), reference, strict=True))
                square = sum(float((x - y).square().sum()) for x, y in pairs)
                norm = sum(float(y.square().sum()) for _, y in pairs)
                yield cell_row(
                    self.NAME,
                    f"{label}: {way}, {CHECKED_LAYERS} layers in {name}",
                    "gradient over dense's in float32",
                    (square / norm) ** 0.5,
                    "1",
                    bar=LIKE_DENSE if dtype == torch.float32 else None,
                )
        del model, reference
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _grads(self, model: nn.Module, way: Way) -> list[Tensor]:
        """Gradients in float32 of the prompt of `checked_prompt` tokens and short responses."""
        stepper = Stepper(
            model,
            compile_blocks=self.blocks == "compiled",
            checkpointing=self.checkpointing,
            max_microbatch_tokens=self.checked_prompt + 64,
        )
        batch = make_group(self.checked_prompt, [48] * self.responses, vocab=stepper.vocab)
        stepper.step(stepper.configured(**self._options(way)), batch)
        grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return grads

    def _figures(self, row: Any, timed: Timed) -> Iterator[ResultRow]:
        """Figures of the step at the largest length."""
        plan, stats = timed.plan, timed.stats
        assert stats is not None
        how = (
            f"{len(plan.microbatches)} microbatches of at most {plan.max_microbatch_tokens} tokens"
        )
        yield row("step at the largest", timed.typical_ms, "ms", note=how)
        yield row("time of a computed TFLOP", timed.typical_ms / _tflops(plan), "ms")
        if timed.peak_bytes is not None:
            yield row("peak at the largest", timed.peak_bytes, "bytes")
        if stats.offload is not None:
            yield row("layers in the host's memory", plan.host_layers, "1")
            yield row("memory of the host", stats.offload.host_bytes, "bytes")
            yield row("of the step allocating it", stats.offload.allocation_ms, "ms")
            moved = stats.offload.out_bytes + stats.offload.back_bytes
            yield row("bytes copied", moved, "bytes")
            waited = stats.offload.on_demand
            yield row("layers fetched when asked for", waited, "1")


def _tflops(plan: Plan) -> float:
    assert plan.shape is not None
    return plan.shared.step_flops(plan.shape) / 1e12


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _lengths(batch: RolloutBatch | None) -> str | None:
    if batch is None:
        return None
    first = batch[0]
    trained = int(first.loss_mask.sum())
    return f"prompt {len(first) - trained}, responses of {trained}: {len(batch)}"
