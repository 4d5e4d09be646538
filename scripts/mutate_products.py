"""Compares drawn rows of options with whole products: changes lines, and lists what finds them.

    python scripts/mutate_products.py                     40 changes of fixed seed
    python scripts/mutate_products.py --changes 10 --seed 1
    python scripts/mutate_products.py --list              the changes, without running tests
    python scripts/mutate_products.py --drawn-only        without whole products
    python scripts/mutate_products.py --lines             lines that whole products alone run

A change is one of those of scripts/mutate_losses.py (an operator, a comparison, a condition, a
number, a detach()) in a line of engine, layout, plan, ops, losses or hosts that the drawn rows run.
It runs the tests whose options are drawn by `tests/pairwise.py`, with the rows that `make test` and
`make test-slow` draw. Changes that survive these run them with whole products, as `make test-full`
does: changes of different lines together, and each alone if a test fails then. Exits with 1 if a
whole product finds a change that the drawn rows do not.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import mutate_losses
from mutate_losses import IMPORTED_BEFORE, ROOT, Change, changes_of, with_changes

SOURCE = ROOT / "src" / "forkpoint"
# Files whose lines decide numbers; what only says, measures or refuses is tested by itself.
CHANGED = {
    "engine": ("boundary", "states", "gradient_sums", "offload", "guard"),
    "tree": ("launches", "microbatch", "recurrence"),
    "plan": ("packing", "cache", "align"),
    "ops/attention": ("operator", "merge", "source", "table", "cpu_flash", "reference"),
    "ops/recurrence": ("convolution", "levels", "sequences"),
    "ops/delta_rule": ("chunked", "reference"),
    "ops/head": ("logprobs",),
    "losses": ("base", "views", "policy_loss", "grpo", "gspo", "dpo"),
    "hosts": ("transformers/linear_attention", "heads", "checkpointing"),
}
TESTS = (
    "tests/integration/test_acceptance.py::test_steps_are_those_of_dense_training",
    "tests/integration/test_acceptance.py::test_scores_are_those_of_a_dense_forward",
    "tests/integration/test_acceptance.py::test_weights_and_gradients_of_entropies",
    "tests/integration/test_activations.py::test_steps_are_those_of_dense_training",
    "tests/integration/test_hybrid.py::test_steps_are_those_of_dense_training",
    "tests/integration/test_critics.py::test_steps_are_those_of_dense_training",
    "tests/integration/test_hosts_adapters.py::test_adapters_on_a_frozen_base",
    "tests/integration/test_hosts_transformers.py::test_states_of_a_model",
    "tests/integration/test_failures.py",
    "tests/numerics/test_families.py::test_gradients_equal_dense",
)
FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid")
"""Families that differ in what their layers read; all of them take too long for every change."""
IMPORTED_BESIDES = (
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.granitemoehybrid.modeling_granitemoehybrid",
)
SECONDS = 3600


@dataclass(frozen=True)
class Placed:
    """A change with the full name of its module."""

    module: str
    change: Change

    @property
    def path(self) -> Path:
        return SOURCE.parent / Path(*self.module.split(".")).with_suffix(".py")

    @property
    def name(self) -> str:
        return f"{self.module}:{self.change.line} {self.change.what}"


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the changed module in the place of the file's."""

    def __init__(self, module: str, tree: ast.Module, path: Path) -> None:
        self.module, self.tree, self.path = module, tree, path

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None):  # type: ignore[override]
        if name != self.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_Of(self.tree))


class _Of(importlib.abc.Loader):
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(module.__file__), "exec"), module.__dict__)


def all_changes() -> Iterator[Placed]:
    """Every change of every file that may be changed."""
    for folder, names in CHANGED.items():
        for name in names:
            module = ".".join(("forkpoint", *folder.split("/"), name))
            for change in changes_of(SOURCE / folder / f"{name}.py"):
                yield Placed(module, change)


def run(changes: Sequence[Placed], *, full: bool) -> str:
    """The first test that fails with the changes, in a process of its own; "" if all pass."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["FORKPOINT_FULL_PRODUCTS"] = "1" if full else "0"
        for module in {placed.module for placed in changes}:
            these = [placed for placed in changes if placed.module == module]
            path = these[0].path
            tree = ast.parse(path.read_text(encoding="utf-8"))
            tree = with_changes(tree, [(p.change.place, p.change.make) for p in these])
            sys.meta_path.insert(0, _Changed(module, tree, path))
        _run_here(writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return found or ("it did not end" if status else "")


def lines_run(*, full: bool) -> set[tuple[str, int]]:
    """File and line of all that the tests run in files that may be changed.

    Raises RuntimeError where a test fails without any change.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["FORKPOINT_FULL_PRODUCTS"] = "1" if full else "0"
        seen: set[tuple[str, int]] = set()
        wanted = {str(SOURCE / folder / f"{n}.py") for folder, ns in CHANGED.items() for n in ns}

        def of_file(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return of_file

        def of_call(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
            if frame.f_code.co_filename not in wanted:
                return None
            # A function whose every line was seen is not traced again.
            code = frame.f_code
            lines = {line for *_, line in code.co_lines() if line is not None}
            if all((code.co_filename, line) in seen for line in lines):
                return None
            return of_file(frame, event, None)

        sys.settrace(of_call)
        threading.settrace(of_call)
        _run_here(writing, seen)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.loads(pipe.read() or '"the tests did not end"')
    os.waitpid(child, 0)
    if isinstance(found, str):
        raise RuntimeError(f"without any change: {found}")
    return {(file, line) for file, line in found}


def _run_here(writing: int, seen: set[tuple[str, int]] | None = None) -> None:
    import signal
    import tempfile

    import pytest

    signal.alarm(SECONDS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    first = mutate_losses._FirstFailure()
    # Of families a few: names of others are deselected by their ids.
    others = " or ".join(_other_families())
    with tempfile.TemporaryDirectory() as folder:
        options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not gpu"]
        options += [f"--basetemp={folder}/tests", f"--rootdir={ROOT}"]
        options += ["-k", f"not (test_gradients_equal_dense and ({others}))"]
        code = pytest.main([*options, *(str(ROOT / test) for test in TESTS)], plugins=[first])
    found = (first.test or f"pytest ended with {code}") if code else ""
    sys.settrace(None)
    if seen is not None:
        found = json.dumps(found or sorted(seen))
    with os.fdopen(writing, "w") as pipe:
        pipe.write(found)
    os._exit(0)


def _other_families() -> list[str]:
    from transformers import CONFIG_MAPPING

    text = (SOURCE / "hosts" / "transformers" / "families.py").read_text(encoding="utf-8")
    strings = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
    names = {s for s in strings if isinstance(s, str) and s in CONFIG_MAPPING}
    # An id is found by its beginning as well: llama is in codellama, gemma2 is not in gemma.
    return [f"[{name}]" for name in sorted(names - set(FAMILIES))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--changes", type=int, default=40, help="changes that are drawn")
    parser.add_argument(
        "--match", nargs="+", default=[], help="changes whose name has one of these texts, undrawn"
    )
    parser.add_argument("--whole-only", action="store_true", help="without the drawn rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="the changes, without running tests")
    parser.add_argument(
        "--lines", action="store_true", help="the lines that whole products alone run"
    )
    parser.add_argument("--drawn-only", action="store_true", help="without whole products")
    chosen = parser.parse_args()
    for name in (*IMPORTED_BEFORE, *IMPORTED_BESIDES):
        importlib.import_module(name)
    ran = set() if chosen.match else lines_run(full=False)
    if chosen.lines:
        only = sorted(lines_run(full=True) - ran)
        print("\n".join(f"{Path(file).relative_to(ROOT)}:{line}" for file, line in only))
        print(f"{len(ran)} lines run by the drawn rows, {len(only)} by whole products alone")
        return 1 if only else 0
    if chosen.match:
        changes = [p for p in all_changes() if any(text in p.name for text in chosen.match)]
    else:
        every = [p for p in all_changes() if (str(p.path), p.change.line) in ran]
        changes = random.Random(chosen.seed).sample(every, min(chosen.changes, len(every)))
    if chosen.list:
        print("\n".join(placed.name for placed in changes))
        return 0
    survivors = []
    for n, placed in enumerate(changes, start=1):
        begun = time.monotonic()
        found = "" if chosen.whole_only else run([placed], full=False)
        if not found:
            survivors.append(placed)
        seconds = time.monotonic() - begun
        found = found or ("not run" if chosen.whole_only else "survives the drawn rows")
        print(f"{n}/{len(changes)} {placed.name} | {found} | {seconds:.0f} s", flush=True)
    if chosen.drawn_only:
        return 0
    lost = 0
    for group in apart(survivors):
        begun = time.monotonic()
        found = run(group, full=True)
        names = "\n    ".join(placed.name for placed in group)
        seconds = time.monotonic() - begun
        print(
            f"whole products, together: {found or 'survive'} | {seconds:.0f} s\n    {names}",
            flush=True,
        )
        for placed in group if found else ():
            alone = run([placed], full=True) if len(group) > 1 else found
            lost += bool(alone)
            print(f"whole products, alone: {placed.name} | {alone or 'survives'}", flush=True)
    print(
        f"{len(changes)} changes; {len(survivors)} survive the drawn rows; whole products find "
        f"{lost} of these"
    )
    return 1 if lost else 0


def apart(changes: Sequence[Placed]) -> list[list[Placed]]:
    """Groups of changes that can be made together: of one line one at most."""
    groups: list[dict[tuple[str, int], Placed]] = []
    for placed in changes:
        line = (placed.module, placed.change.line)
        group = next((g for g in groups if line not in g), None)
        if group is None:
            group = {}
            groups.append(group)
        group[line] = placed
    return [list(group.values()) for group in groups]


if __name__ == "__main__":
    sys.exit(main())
