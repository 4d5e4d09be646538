"""Interrupt steps at random moments, or at every bytecode: see CONTRIBUTING.md.

python tests/fuzz/interrupts.py --interrupts 20000 --seed 1 --json interrupts.json
python tests/fuzz/interrupts.py --every --case plain

With FORKPOINT_INTERRUPTS_DEVICE=cuda models are on a GPU, in bfloat16.
"""

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from interrupt_cases import CASES, DEVICE, FailingLoss, Failure, live_tensors
from interrupt_ways import (
    Alarm,
    Attempt,
    Bytecodes,
    Interrupt,
    OtherThread,
    Sigint,
    Timeout,
    quick_threads,
)

import forkpoint

SOURCE = str(Path(forkpoint.__file__).parent)
# Not torch's compiler: code that it has made is what runs later.
WITHOUT = (
    "<",
    "/_dynamo/",
    "/_inductor/",
    "/_functorch/",
    "/interrupt",
    "/_guards.py",
    "importlib",
)
# Where a step begins and ends, changes what outlives it, and undoes that.
CONTROL = {
    *(f"/engine/{name}.py" for name in ("changes", "engine", "gradients")),
    *(f"/engine/{name}.py" for name in ("offload", "executor", "staging")),
    *(f"/{name}.py" for name in ("engine/transaction", "parallel/call", "step/run")),
    *(f"/hosts/{name}.py" for name in ("checkpointing", "compiled", "host", "modules")),
    *(f"/hosts/transformers/{name}.py" for name in ("entry", "linear_attention", "upcasts")),
    "/policy.py",
    "/verify.py",
}
KINDS: dict[str, type[BaseException]] = {
    "interrupt": Interrupt,
    "timeout": Timeout,
    "keyboard": KeyboardInterrupt,
    "memory": torch.OutOfMemoryError,
}
WAYS = ("bytecode", "any-bytecode", "twice", "thread", "sigint", "sigalrm")
# To trace all bytecodes takes ten times as long as the step.
SHARES = {"any-bytecode": 1, "twice": 2, "bytecode": 4, "thread": 4, "sigint": 3, "sigalrm": 4}


def of_forkpoint(code: CodeType) -> bool:
    return code.co_filename.startswith(SOURCE)


def of_control(code: CodeType) -> bool:
    return code.co_filename.removeprefix(SOURCE) in CONTROL


def of_anything(code: CodeType) -> bool:
    return not any(part in code.co_filename for part in WITHOUT)


@dataclass
class Tally:
    """Counts of interrupts by case, way and outcome, and what went wrong."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def interrupts(self) -> int:
        return sum(n for (_, _, outcome), n in self.counts.items() if outcome != "none")

    def table(self) -> str:
        """A line for each case, a column for each outcome."""
        outcomes = sorted({outcome for _, _, outcome in self.counts})
        lines = [f"{'case':24}" + "".join(f"{outcome:>12}" for outcome in outcomes)]
        for name in [*dict.fromkeys(case for case, _, _ in self.counts), "all"]:
            sums = Counter[str]()
            for (case, _, outcome), n in self.counts.items():
                sums[outcome] += n * (name in (case, "all"))
            lines.append(f"{name:24}" + "".join(f"{sums[o]:>12}" for o in outcomes))
        return "\n".join(lines)

    def report(self) -> dict[str, Any]:
        named = {"/".join(key): n for key, n in sorted(self.counts.items())}
        return {
            "interrupts": self.interrupts,
            "seconds": self.seconds,
            "counts": named,
            "failures": self.failures,
        }


class Interrupter:
    """Interrupts one case again and again, and looks at what it leaves."""

    def __init__(self, name: str, tally: Tally) -> None:
        self.name, self.tally = name, tally
        self.own, self.any = Bytecodes(of_forkpoint), Bytecodes(of_anything)
        self._begin_anew()
        self.lengths = {"bytecode": self._length(self.own)}

    def _begin_anew(self) -> None:
        """Make the case, or make it again after a failure that may have left something."""
        gc.unfreeze()
        gc.collect()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(True)
        self.case = case = CASES[self.name](self.name)
        times = []
        with case.around():
            for _ in range(5):
                begin = time.perf_counter()
                case.run()
                times.append(time.perf_counter() - begin)
                case.reset()
            self.state = case.state()
        self.seconds = statistics.median(times)
        gc.collect()
        gc.freeze()  # leave out of the counts of tensors all that exists already
        case.next_step_faults(self.state, [])
        case.reset()
        self.tensors = live_tensors()

    def _length(self, bytecodes: Bytecodes) -> int:
        return self.extent(bytecodes)[1]

    def extent(self, bytecodes: Bytecodes) -> tuple[int, int]:
        """Of a call that fails the first of its bytecodes after the failure, else 1; and the
        last."""
        self.case.reset()
        first = 0
        loss = self.case.loss
        if isinstance(loss, FailingLoss):

            def reached() -> None:
                nonlocal first
                first = bytecodes.seen

            loss.reached = reached
        with self.case.around(), contextlib.suppress(Failure, torch.OutOfMemoryError):
            bytecodes.count(self.case.call)
        self.case.reset()
        return first + 1, bytecodes.seen

    def once(
        self, way: str, moment: float, kind: type[BaseException], *, second: float = 0.0
    ) -> None:
        """Interrupt the call at a moment, of [0, 1), and count what became of it."""
        call = self.case.call
        seconds = moment * self.seconds
        if way == "thread":
            self._do(way, moment, lambda: OtherThread().interrupt(call, seconds, kind), {kind})
        elif way == "sigint":
            kinds = {KeyboardInterrupt}
            self._do(way, moment, lambda: Sigint().interrupt(call, seconds, kind), kinds)
        elif way == "sigalrm":
            self._do(way, moment, lambda: Alarm().interrupt(call, seconds, kind), {kind})
        elif way == "twice":
            first = int(moment * self.lengths["bytecode"])
            # The second comes while the first is dealt with, as a rule.
            moments = {1 + first: kind, 2 + first + int(second * 600): kind}
            run = lambda: self.own.interrupt(call, moments, defer=True)  # noqa: E731
            self._do(way, moment, run, {kind}, at=self.own)
        else:
            bytecodes = self.own if way == "bytecode" else self.any
            if way not in self.lengths:
                self.lengths[way] = self._length(bytecodes)
            self.at(way, 1 + int(moment * self.lengths[way]), kind, bytecodes)

    def at(self, way: str, bytecode: int, kind: type[BaseException], bytecodes: Bytecodes) -> None:
        """Interrupt the call at the n-th of these bytecodes."""
        call = self.case.call
        run = lambda: bytecodes.interrupt(call, {bytecode: kind}, defer=False)  # noqa: E731
        self._do(way, bytecode, run, {kind}, at=bytecodes)

    def everywhere(
        self, wanted: Callable[[CodeType], bool] = of_control, *, stride: int = 1
    ) -> Iterator[None]:
        """Interrupt the call at each bytecode of functions that are wanted, or at one of so many.

        A case that fails by itself is interrupted after that, while it is put back.
        """
        bytecodes = Bytecodes(wanted)
        first, last = self.extent(bytecodes)
        for turn, bytecode in enumerate(range(first, last + 1, stride)):
            self.at("every", bytecode, Interrupt, bytecodes)
            if turn % 200 == 199:
                self.look_for_tensors()
            yield
        self.look_for_tensors()

    def _do(
        self,
        way: str,
        moment: float,
        run: Callable[[], Attempt],
        kinds: set[type],
        at: Bytecodes | None = None,
    ) -> None:
        case = self.case
        last = case.policy.last_step
        with case.around():
            attempt = run()
            faults = case.faults(attempt, kinds, self.state, last)
        outcome = "none" if not attempt.raised else case.outcome
        if attempt.raised and attempt.error is None:
            outcome = "no effect"
        error = repr(attempt.error)
        held = [attempt]
        del attempt
        faults += case.next_step_faults(self.state, held)
        case.reset()
        self.tally.counts[case.name, way, outcome] += 1
        if faults:
            where = at.where if at else ""
            failure = {
                "case": case.name,
                "way": way,
                "moment": moment,
                "error": error,
                "where": where.removeprefix(SOURCE),
                "what": faults,
            }
            self.tally.failures.append(failure)
            print(f"FAILED {failure}", flush=True)
            self._begin_anew()

    def look_for_tensors(self) -> None:
        """Count tensors that are alive: no interrupt may leave any."""
        tensors = live_tensors()
        if tensors > self.tensors:
            what = f"{tensors} tensors are alive, {self.tensors} were"
            self.tally.failures.append({"case": self.case.name, "what": [what]})
            print(f"FAILED {self.tally.failures[-1]}", flush=True)
            self.tensors = tensors


def interrupt_at_random(
    names: list[str], interrupts: int, seed: int, ways: tuple[str, ...], tally: Tally
) -> Iterator[None]:
    """As many interrupts of each case, in ways and at moments that are drawn."""
    generator = random.Random(seed)
    for index, name in enumerate(names):
        wanted = interrupts * (index + 1) // len(names)
        interrupter = Interrupter(name, tally)
        turn = 0
        while tally.interrupts < wanted:
            [way] = generator.choices(ways, [SHARES[way] for way in ways])
            kind = KINDS[generator.choice(list(KINDS))]
            turn += 1
            moment, second = generator.random(), generator.random()
            interrupter.once(way, moment, kind, second=second)
            if turn % 200 == 0:
                interrupter.look_for_tensors()
            yield
        interrupter.look_for_tensors()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", nargs="+", choices=WAYS, default=WAYS, help="ways to interrupt")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--every", action="store_true", help="at each bytecode of what is in control of a step"
    )
    parser.add_argument("--stride", type=int, default=1, help="with --every: of so many one")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(DEVICE.type == "cuda", warn_only=True)
    tally, begin = Tally(), time.monotonic()
    saved = begin

    def save() -> None:
        tally.seconds = round(time.monotonic() - begin, 1)
        line = (
            f"{tally.seconds:.0f} s: {tally.interrupts} interrupts, {len(tally.failures)} failures"
        )
        print(line, flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(tally.report(), indent=2) + "\n")

    def runs() -> Iterator[None]:
        if not arguments.every:
            ways = tuple(arguments.kind)
            yield from interrupt_at_random(
                arguments.case, arguments.interrupts, arguments.seed, ways, tally
            )
            return
        for name in arguments.case:
            yield from Interrupter(name, tally).everywhere(stride=arguments.stride)

    # What arrives in a destructor or a callback of a weak reference is printed and ignored.
    sys.unraisablehook = lambda _: None
    with quick_threads():
        for _ in runs():
            if time.monotonic() - saved > 30:
                saved = time.monotonic()
                save()
    save()
    print(tally.table())
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
