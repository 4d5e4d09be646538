"""Changes the source one line at a time, and lists the changes that no test finds.

    python scripts/mutate.py --workers 16 --out DIR           the changes of scripts/mutations.json
    python scripts/mutate.py --workers 16 --out DIR --whole   what survives runs `make test` as well

A change names a file, a function, the lines in it, which occur once, and the lines in their place.
It is made in a copy of the tree, and the tests of its area (AREAS) run there until one fails. Tests
that fail without any change are left out. DIR/rows.jsonl has a row a change, and DIR/summary.json
the counts.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "scripts")
FAST = "not gpu and not multi_gpu and not slow and not examples"
STEPS = (
    "tests/integration/test_acceptance.py",
    "tests/integration/test_hybrid.py",
    "tests/integration/test_activations.py",
    "tests/integration/test_failures.py",
)
PLANS = ("tests/unit/test_plan*.py", "tests/unit/test_align*.py", "tests/unit/test_program.py")
RANKS = ("tests/parallel/test_rank*.py", "tests/unit/test_placement*.py")
# By the beginning of a file's path below src/forkpoint, longest first: patterns of test files.
AREAS: dict[str, tuple[str, ...]] = {
    "losses": ("tests/numerics/test_losses*.py", "tests/integration/test_*losses*.py"),
    "losses/router": ("tests/integration/test_router_losses.py", "tests/numerics/test_losses*.py"),
    "ops/attention": ("tests/numerics/test_attention*.py", *STEPS),
    "ops/head": ("tests/numerics/test_head*.py", *STEPS),
    "ops": ("tests/numerics/test_*delta*.py", "tests/numerics/test_selective*.py", *STEPS),
    "tree": ("tests/unit/test_forest.py", "tests/unit/test_layout.py", *PLANS, *STEPS),
    "plan": (*PLANS, "tests/unit/test_*.py", *STEPS),
    "parallel/placement": ("tests/unit/test_placement*.py", *RANKS),
    "parallel": (*RANKS, "tests/parallel/test_*.py"),
    "rollouts": ("tests/unit/test_*.py", "tests/integration/test_bad_inputs.py"),
    "engine": (*STEPS, "tests/integration/test_[a-h]*.py", "tests/integration/test_[i-z]*.py"),
    "step": ("tests/integration/test_[a-l]*.py", "tests/integration/test_[m-z]*.py"),
    "hosts": (*STEPS, "tests/integration/test_hosts*.py", "tests/integration/test_verify*.py"),
}


@dataclass(frozen=True)
class Change:
    """Lines of one function, and what replaces them."""

    file: str
    """Below src/forkpoint."""
    scope: str
    """The class and function, with dots."""
    old: str
    """Whole lines, without their common indentation."""
    new: str


def read_changes(path: Path) -> list[Change]:
    return [Change(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


class Tree:
    """A copy of the repository in which one change at a time is made."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder
        for name in COPIED:
            if (root / name).exists():
                skipped = shutil.ignore_patterns("__pycache__", ".hypothesis")
                shutil.copytree(root / name, folder / name, ignore=skipped)
        for path in root.iterdir():
            if path.is_file():
                shutil.copy(path, folder / path.name)
        self.source = folder / "src" / "forkpoint"

    def make(self, change: Change) -> Path:
        """Make the change, and return the changed file."""
        named = self.source / change.file
        (at,) = places(named, change)
        lines = named.read_text(encoding="utf-8").splitlines()
        new = textwrap.indent(change.new, _indentation(lines[at])).splitlines()
        lines[at : at + change.old.count("\n") + 1] = new
        self.write(named, "\n".join(lines) + "\n")
        return named

    def write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # A file changed within a second and of the same size would pass for the compiled one.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def places(path: Path, change: Change) -> Iterator[int]:
    """Where a file has the lines of a change within a function of its name; lines from 0."""
    text = path.read_text(encoding="utf-8")
    wanted, name = change.old.splitlines(), change.scope.rpartition(".")[2]
    lines = text.splitlines()
    spans = _spans(text).get(name, [])
    for at in range(len(lines) - len(wanted) + 1):
        if lines[at].strip() != wanted[0].strip():
            continue
        here = textwrap.dedent("\n".join(lines[at : at + len(wanted)])).splitlines()
        if here == wanted and (not name or any(begin <= at < end for begin, end in spans)):
            yield at


@cache
def _spans(text: str) -> dict[str, list[tuple[int, int]]]:
    """First line and end of every function and class of a text, by their names."""
    found: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append((node.lineno - 1, node.end_lineno or 0))
    return found


def _indentation(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" "))]


def tests_of(file: str, root: Path) -> list[str]:
    """The test files of a source file's area that exist, in the order of AREAS."""
    area = max((a for a in AREAS if file.startswith(a)), key=len, default="step")
    found = [p for pattern in AREAS[area] for p in sorted(root.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(root).as_posix() for path in found))


def run_tests(
    tree: Path, tests: list[str], left_out: list[str], limit: float, *, stop: bool
) -> tuple[list[str], bool]:
    """The tests that fail in a tree (the first, if `stop`), and whether the limit ended them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-m", FAST]
        command += ["-n", "0", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        command += [f"--deselect={test}" for test in left_out]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*command, *(["-x"] if stop else []), *tests],
            cwd=tree,
            env={**environment, "TMPDIR": folder, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return [], True
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if process.returncode not in (0, 5) and not failed:
        failed = [f"pytest ended with {process.returncode}: {printed[-300:]}"]
    return failed, False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", type=Path, default=Path(__file__).with_name("mutations.json"))
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240, help="limit of a change's tests")
    parser.add_argument("--whole", action="store_true", help="survivors run every fast test")
    parser.add_argument("--match", default="", help="only changes of files with this text")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    changes = [change for change in read_changes(chosen.list) if chosen.match in change.file]
    whole = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("tests/*/test_*.py"))
    whole = [test for test in whole if not test.startswith("tests/integrations_")]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.workers) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(chosen.workers):
            trees.put(Tree(ROOT, Path(folder) / f"tree{number}"))

        def without_change(test: str) -> list[str]:
            tree = trees.get()
            failed, late = run_tests(tree.root, [test], [], 10 * chosen.seconds, stop=False)
            trees.put(tree)
            return [test] if late else failed

        files = (
            whole if chosen.whole else sorted({t for c in changes for t in tests_of(c.file, ROOT)})
        )
        left_out = [test for failed in pool.map(without_change, files) for test in failed]
        print(f"{len(files)} files of tests; {len(left_out)} tests fail without any change")

        def find(change: Change) -> dict[str, object]:
            tree, begun = trees.get(), time.monotonic()
            found, by = "survived", ""
            kept = (tree.source / change.file).read_text(encoding="utf-8")
            changed = tree.make(change)
            stages = [tests_of(change.file, ROOT), *([whole] if chosen.whole else [])]
            for tests, limit in zip(stages, (chosen.seconds, 8 * chosen.seconds), strict=False):
                failed, late = run_tests(tree.root, tests, left_out, limit, stop=True)
                if failed:
                    found, by = "found", failed[0]
                    break
                found = "out of time" if late else "survived"
            tree.write(changed, kept)
            trees.put(tree)
            seconds = round(time.monotonic() - begun, 1)
            return {**asdict(change), "result": found, "by": by, "seconds": seconds}

        counts: Counter[str] = Counter()
        with (chosen.out / "rows.jsonl").open("w", encoding="utf-8") as file:
            for number, row in enumerate(pool.map(find, changes), start=1):
                counts[str(row["result"])] += 1
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"{number}/{len(changes)} {row['file']} {row['scope']}: {row['result']}")
    summary = {"changes": len(changes), **counts, "fail without any change": left_out}
    (chosen.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(dict(counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
