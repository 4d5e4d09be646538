"""Interrupt steps at the bytecodes of what is in control of them: see CONTRIBUTING.md.

python tests/fuzz/interrupts.py --stride 7 --json interrupts.json
python tests/fuzz/interrupts.py --case plain

With FORKPOINT_INTERRUPTS_DEVICE=cuda models are on a GPU, in bfloat16.
"""

import argparse
import contextlib
import gc
import json
import sys
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

from interrupt_cases import CASES, DEVICE, FOLDER, FailingLoss, Failure, live_tensors
from interrupt_ways import Bytecodes, Interrupt, Timeout

import forkpoint
from open_files import open_files

SOURCE = str(Path(forkpoint.__file__).parent)
# Where a step begins and ends, changes what outlives it, and undoes that.
CONTROL = ("/engine/", "/step/run.py", "/parallel/call.py", "/hosts/", "/policy.py")
KINDS: tuple[type[BaseException], ...] = (
    *(Interrupt, Timeout, KeyboardInterrupt, torch.OutOfMemoryError),
)
"""Of the exceptions that arrive, in turn."""


def of_control(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(SOURCE) and name.removeprefix(SOURCE).startswith(CONTROL)


@dataclass
class Tally:
    """Counts of interrupts by case and outcome, and what went wrong."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def interrupts(self) -> int:
        return sum(n for (_, outcome), n in self.counts.items() if outcome != "none")

    def fail(self, **failure: Any) -> None:
        self.failures.append(failure)
        print(f"FAILED {failure}", flush=True)

    def report(self) -> dict[str, Any]:
        named = {"/".join(key): n for key, n in sorted(self.counts.items())}
        return {"interrupts": self.interrupts, "counts": named, "failures": self.failures}


class Interrupter:
    """Interrupts one case again and again, and looks at what it leaves."""

    def __init__(self, name: str, tally: Tally) -> None:
        self.name, self.tally = name, tally
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Make the case, or make it again after a failure that may have left something."""
        gc.unfreeze()
        gc.collect()
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        torch.set_grad_enabled(True)
        self.case = case = CASES[self.name](self.name)
        with case.around():
            self.state = case.state()
        gc.collect()
        gc.freeze()  # leave out of the counts of tensors all that exists already
        case.next_step_faults(self.state, [])
        case.reset()
        self.tensors = live_tensors()

    def extent(self, bytecodes: Bytecodes) -> tuple[int, int]:
        """Of a call that fails the first of its bytecodes after the failure, else 1; and the
        last."""
        self.case.reset()
        first, loss = 0, self.case.loss
        if isinstance(loss, FailingLoss):

            def reached() -> None:
                nonlocal first
                first = bytecodes.seen

            loss.reached = reached
        with self.case.around(), contextlib.suppress(Failure, torch.OutOfMemoryError):
            bytecodes.count(self.case.call)
        self.case.reset()
        return first + 1, bytecodes.seen

    def everywhere(
        self, wanted: Callable[[CodeType], bool] = of_control, *, stride: int = 1
    ) -> Iterator[None]:
        """Interrupt the call at each bytecode of functions that are wanted, or at one of so many.

        A case that fails by itself is interrupted after that, while it is put back.
        """
        bytecodes = Bytecodes(wanted)
        first, last = self.extent(bytecodes)
        for turn, bytecode in enumerate(range(first, last + 1, stride)):
            self.at(bytecode, KINDS[turn % len(KINDS)], bytecodes)
            if turn % 200 == 199:
                self.look_for_tensors()
            yield
        self.look_for_tensors()

    def at(self, bytecode: int, kind: type[BaseException], bytecodes: Bytecodes) -> None:
        """Interrupt the call at the n-th of these bytecodes, and count what became of it."""
        case = self.case
        last = case.policy.last_step
        with case.around():
            attempt = bytecodes.interrupt(case.call, bytecode, kind)
            faults = case.faults(attempt, {kind}, self.state, last)
        outcome = "none" if not attempt.raised else case.outcome
        if attempt.raised and attempt.error is None:
            outcome = "no effect"
        error, held = repr(attempt.error), [attempt]
        del attempt
        faults += case.next_step_faults(self.state, held)
        case.reset()
        self.tally.counts[case.name, outcome] += 1
        if faults:
            where = bytecodes.where.removeprefix(SOURCE)
            found = {"bytecode": bytecode, "error": error, "where": where, "what": faults}
            self.tally.fail(case=self.name, **found)
            self._begin_anew()

    def look_for_tensors(self) -> None:
        """Count tensors that are alive, and files: no interrupt may leave any."""
        staging = self.case.policy.model_state.staging
        if staging is not None:
            staging._free.clear()  # kept for later steps
            staging._free_in_files.clear()
        tensors = live_tensors()
        if tensors > self.tensors:
            what = f"{tensors} tensors are alive, {self.tensors} were"
            self.tally.fail(case=self.name, what=[what])
            self.tensors = tensors
        if files := open_files(FOLDER):
            self.tally.fail(case=self.name, what=[f"files are open: {files}"])


def write(path: Path | None, tally: Tally) -> None:
    if path is not None:
        path.write_text(json.dumps(tally.report(), indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--stride", type=int, default=1, help="of so many bytecodes one")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(DEVICE.type == "cuda", warn_only=True)
    # What arrives in a destructor or a callback of a weak reference is printed and ignored.
    sys.unraisablehook = lambda _: None
    tally = Tally()
    each = (Interrupter(name, tally).everywhere(stride=given.stride) for name in given.case)
    runs = (_ for moments in each for _ in moments)
    for turn, _ in enumerate(runs):
        if turn % 500 == 499:
            print(f"{tally.interrupts} interrupts, {len(tally.failures)} failures", flush=True)
            write(given.json, tally)
    write(given.json, tally)
    print(json.dumps(tally.report()["counts"], indent=2))
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
