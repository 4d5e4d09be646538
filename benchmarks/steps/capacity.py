"""How many tokens train at all under one cap on device memory, dense and shared.

Every point is a real forward and backward of one group. Before that, at a sixteenth of the size,
the gradients of each way are compared with those of plain dense steps.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from tyro.conf import arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import SCALE_TINY, make_group
from benchmarks.steps.options import Steps
from benchmarks.steps.stepper import DENSE, GROUP, Stepper
from forkpoint.apps.cli.options import Count
from forkpoint.errors import ConfigError, PlanError

GIB = 1 << 30
STEP_TOKENS = 512
# At their best both sides reach sizes at which one point takes minutes.
COARSE_STEP_TOKENS = 16_384
# Shares of the prompt in all tokens that are tried, in this order. Offloading gains with the
# prompt's share until the host's memory is full; the published figure is for 0.64.
PROMPT_SHARES = (0.64, 0.55)
CHUNK_TOKENS = 8192
# Of what the device holds besides, where a search begins: the head's logits and workspaces.
UNSEEN_BYTES = 3 << 30
LONG_RESPONSE = 1024
PIECE_NUMBERS = 1 << 26


@dataclass(frozen=True)
class Way:
    """One way to train a group of two rollouts of so many tokens."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    shares: tuple[float, ...] = PROMPT_SHARES


LIKE_FOR_LIKE = (
    Way("dense", dict(DENSE), shares=(0.5,)),
    Way("offload", {**GROUP, "activations": "offload"}),
)
AT_THEIR_BEST = (
    Way(
        "dense, checkpointing full",
        {**DENSE, "checkpointing": "full"},
        shares=(0.5,),
    ),
    Way(
        "dense, chains, recompute, checkpointing full",
        {
            "sharing": "none",
            "boundary": "across",
            "max_microbatch_tokens": CHUNK_TOKENS,
            "activations": "recompute",
            "checkpointing": "full",
        },
        shares=(0.5,),
    ),
    Way(
        "shared, chains, recompute, checkpointing full",
        {
            **GROUP,
            "max_microbatch_tokens": CHUNK_TOKENS,
            "activations": "recompute",
            "checkpointing": "full",
        },
        shares=(0.55,),
    ),
    Way(
        "shared, chains, offload, checkpointing full",
        {
            **GROUP,
            "max_microbatch_tokens": CHUNK_TOKENS,
            "activations": "offload",
            "checkpointing": "full",
        },
        shares=(0.55,),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Capacity(Steps):
    """Find the largest total length that trains under one cap on memory, dense and shared.

    Attributes:
        device_gib: The most device memory for either side, in GiB.
        host_gib: The most pinned memory of the host, in GiB.
        most_tokens: Look no further than this total length.
        long_prompt: Then train one prompt of so many tokens by chains, without the cap; 0 leaves
            it out.
        only: Parts of the names of cases to measure, such as "longest prompt"; by default every
            case.
    """

    NAME: ClassVar[str] = "capacity"

    device_gib: Annotated[float, arg(metavar="G")] = 80.0
    host_gib: Annotated[float, arg(metavar="G")] = 100.0
    most_tokens: Count = 131_072
    long_prompt: Count = 262_144
    only: tuple[str, ...] = ()

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        return capacity(
            self.stepper("llama3-8b"),
            deadline,
            cap_bytes=int(self.device_gib * GIB),
            host_bytes=int(self.host_gib * GIB),
            most_tokens=self.most_tokens,
            long_prompt=self.long_prompt,
            only=self.only,
            tiny=self.tiny,
        )


def largest(fits: Callable[[int], bool], *, first: int, most: int, step: int) -> int:
    """The largest multiple of `step` up to `most` that fits, if all smaller ones do; 0 for none.

    Begins at `first`, goes up or down by steps that double until it is past the answer, then halves
    what lies between: few attempts where `first` is near it.
    """
    most -= most % step
    low, high = 0, most + step
    at, stride = min(max(step, first - first % step), most), step
    while low < at < high:
        if fits(at):
            low, at = at, at + stride
        else:
            high, at = at, at - stride
        if low and high <= most:
            break
        stride *= 2
        at = min(max(at, step), most)
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def capacity(
    stepper: Stepper,
    deadline: Deadline,
    *,
    cap_bytes: int,
    host_bytes: int,
    most_tokens: int,
    long_prompt: int,
    only: tuple[str, ...] = (),
    tiny: bool = False,
) -> Iterator[ResultRow]:
    """The largest total lengths of each way, and one prompt of `long_prompt` tokens by chains.

    With `only`, of the cases those that have one of these in their name.

    Raises:
        ConfigError: no case has.
    """
    scale = SCALE_TINY if tiny else 1
    longest = f"{stepper.mode} longest prompt"
    names = [
        *(f"{stepper.mode} like for like: {way.name}" for way in LIKE_FOR_LIKE),
        *(f"{stepper.mode} at their best: {way.name}" for way in AT_THEIR_BEST),
        longest,
    ]
    if only and not any(part in name for part in only for name in names):
        raise ConfigError(
            f"no case has {' or '.join(only)} in its name; there are: {'; '.join(names)}."
        )

    def wanted(case: str) -> bool:
        return not only or any(part in case for part in only)

    found: dict[str, int] = {}
    plain_gradients: dict[str, Tensor] = {}
    with capped(stepper, cap_bytes):
        for ways, kind, step_tokens in (
            (LIKE_FOR_LIKE, "like for like", STEP_TOKENS),
            (AT_THEIR_BEST, "at their best", COARSE_STEP_TOKENS),
        ):
            most = most_tokens // scale
            step = min(max(16, step_tokens // scale), most)
            for way in ways:
                case = f"{stepper.mode} {kind}: {way.name}"
                if not wanted(case) or deadline.over(case):
                    continue
                run = _Attempt(stepper, way, host_bytes, deadline, scale)
                yield _row(
                    case,
                    "gradient over dense",
                    run.gradient_error(plain_gradients),
                    "1",
                    run.checked,
                )
                room = cap_bytes - stepper.fixed_bytes - UNSEEN_BYTES
                first = largest(
                    lambda n, run=run, room=room: run.predicted_bytes(n) <= room,
                    first=most // 2,
                    most=most,
                    step=step,
                )
                tokens = largest(run, first=first, most=most, step=step)
                found[f"{kind}: {way.name}"] = tokens
                yield _row(case, "largest total", tokens, "tokens", run.note)
                if tokens:
                    yield _row(case, "step at the largest", run.ms[tokens], "ms", run.note)
        plain, offload = (found.get(f"like for like: {way.name}", 0) for way in LIKE_FOR_LIKE)
        if plain and offload:
            name = f"{stepper.mode} like for like: offload"
            yield _row(name, "largest total over dense", offload / plain, "x", None)
    if long_prompt and wanted(longest) and not deadline.over(longest):
        yield from _long_prompt(stepper, longest, long_prompt // scale, host_bytes, scale)


class _Attempt:
    """Tries one way at one size; remembers times."""

    def __init__(
        self, stepper: Stepper, way: Way, host_bytes: int, deadline: Deadline, scale: int
    ) -> None:
        self.stepper, self.way, self.deadline, self.scale = stepper, way, deadline, scale
        self.host_bytes = host_bytes
        self.ms: dict[int, float] = {}
        self.note = ""
        self.checked = ""

    def __call__(self, tokens: int) -> bool:
        if self.deadline.over(f"{self.way.name} at {tokens} tokens"):
            self.note = f"{self.note}; time was up before {tokens} tokens were tried"
            return False
        for share in self.way.shares:
            prompt = max(2, int(tokens * share) // 16 * 16)
            if self._fits(tokens, prompt, tokens - prompt):
                return True
        return False

    def predicted_bytes(self, tokens: int) -> int:
        """Bytes predicted for activations and prefix cache, at this way's best share."""
        return min(self._predicted(tokens, share) for share in self.way.shares)

    def _predicted(self, tokens: int, share: float) -> int:
        prompt = max(2, int(tokens * share) // 16 * 16)
        batch = make_group(prompt, [tokens - prompt] * 2, vocab=self.stepper.vocab)
        plan = self._policy(prompt, tokens - prompt).plan(batch)
        assert plan.predicted_peak_bytes is not None
        return plan.predicted_peak_bytes

    def _policy(self, prompt: int, response: int):
        options = {"max_microbatch_tokens": max(prompt, response), **self.way.options}
        if options.get("boundary") == "across":
            # One response at a time.
            options["max_leaf_tokens"] = 1
        if self.way.options.get("boundary") == "within":
            options["max_microbatch_tokens"] = prompt + response
        elif "max_microbatch_tokens" in self.way.options:
            options["max_microbatch_tokens"] = max(16, CHUNK_TOKENS // self.scale)
        return self.stepper.configured(**options, host_memory=self.host_bytes)

    def _fits(self, tokens: int, prompt: int, response: int) -> bool:
        batch = make_group(prompt, [response] * 2, vocab=self.stepper.vocab)
        try:
            timed = self.stepper.step(self._policy(prompt, response), batch)
        except (torch.OutOfMemoryError, PlanError):
            torch.cuda.empty_cache()
            return False
        self.ms[tokens] = timed.typical_ms
        self.note = f"prompt {prompt}, two responses of {response}"
        return True

    def gradient_error(self, expected: dict[str, Tensor]) -> float:
        """How far this way's gradients are from plain dense ones, at a size where both fit.

        `expected` are the dense ones; where they are not there they are computed, and left there.
        """
        prompt, response = max(32, 1024 // self.scale), max(16, 512 // self.scale)
        batch = make_group(prompt, [response] * 2, vocab=self.stepper.vocab)
        if not expected:
            plain = self.stepper.configured(**DENSE, max_microbatch_tokens=prompt + response)
            self.stepper.step(plain, batch)
            expected.update(_gradients(self.stepper.model))
        options = dict(self.way.options)
        if options.get("boundary") != "within":
            options["max_microbatch_tokens"] = max(16, response // 2)
        else:
            options["max_microbatch_tokens"] = prompt + response
        self.stepper.step(self.stepper.configured(**options), batch)
        self.checked = f"prompt {prompt}, two responses of {response}, norms over all parameters"
        return _distance(self.stepper.model, expected)


def _long_prompt(
    stepper: Stepper, case: str, prompt: int, host_bytes: int, scale: int
) -> Iterator[ResultRow]:
    batch = make_group(prompt, [max(2, LONG_RESPONSE // scale)] * 2, vocab=stepper.vocab)
    for activations in ("recompute", "offload"):
        policy = stepper.configured(
            **GROUP,
            activations=activations,
            checkpointing="full",
            max_microbatch_tokens=max(16, CHUNK_TOKENS // scale),
            host_memory=host_bytes,
        )
        note = (
            f"chains of {policy.config.max_microbatch_tokens} tokens, {activations}, "
            f"checkpointing full"
        )
        try:
            timed = stepper.step(policy, batch)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            yield _row(case, "out of memory", prompt, "tokens", f"{note}: {str(error)[:80]}")
            continue
        yield _row(case, "prompt that trained", prompt, "tokens", note)
        yield _row(case, "its step", timed.typical_ms, "ms", note)
        if timed.peak_bytes is not None:
            yield _row(case, "its peak", timed.peak_bytes, "bytes", note)
        return


@contextmanager
def capped(stepper: Stepper, cap_bytes: int) -> Iterator[None]:
    """At most so much device memory for this process, while the block runs. On a CPU, nothing."""
    if not stepper.cuda:
        yield
        return
    _, total = torch.cuda.mem_get_info(stepper.device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), stepper.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, stepper.device)


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """On the host: the device's memory is what is measured."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to("cpu", copy=True) for name, grad in found.items()}


def _distance(model: torch.nn.Module, expected: dict[str, Tensor]) -> float:
    """Where the model is, a piece at a time: billions of numbers take a host a minute."""
    square = total = 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        pairs = (x.flatten().split(PIECE_NUMBERS) for x in (parameter.grad, expected[name]))
        for found, wanted in zip(*pairs, strict=True):
            wanted = wanted.to(found.device).double()
            square += float((found.double() - wanted).square().sum())
            total += float(wanted.square().sum())
    return math.sqrt(square / total)


def _row(case: str, metric: str, value: float, unit: str, note: str | None) -> ResultRow:
    return ResultRow(
        bench="capacity", case=case, metric=metric, unit=unit, value=float(value), note=note
    )
