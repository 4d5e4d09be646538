"""Changes the losses one small thing at a time, and lists the changes that no test notices.

    python scripts/mutate_losses.py                    every change; exits with 1 if one survives
    python scripts/mutate_losses.py --only cispo value  of these files
    python scripts/mutate_losses.py --list             the changes, without running tests

What is changed: defaults and other numbers, options that are read (another option, the default in
its place), operators, comparisons, conditions, minima and maxima, clamps, detach() and masks. What
is known to change nothing that a test could see is named in UNCHANGED with the reason. The tests
are those of tests/numerics that compare losses with their published definitions.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
LOSSES = ROOT / "src" / "forkpoint" / "losses"
NUMERICS = ROOT / "tests" / "numerics"
TESTS = (
    "test_losses_options.py",
    "test_losses.py",
    "test_losses_importance.py",
    "test_losses_gae.py",
    "test_losses_meaning.py",
)
LEFT_OUT = {"__init__", "outputs"}
"""Files without a formula."""
SECONDS = 600
SURVIVED = "SURVIVED"

# What takes long to import and none of which is ours: once, for every change's process.
IMPORTED_BEFORE = (
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch._inductor.config",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)

UNCHANGED: dict[str, str] = {}
"""By the change's name, why no test could notice it."""


@dataclass(frozen=True)
class Change:
    """One change of one file."""

    module: str
    line: int
    scope: str
    """The class and function that it is in."""
    what: str
    tree: ast.Module
    place: ast.AST
    """The node of the file that is replaced."""
    make: ast.expr
    """The node in its place."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.scope}: {self.what}"


Defaults = dict[str, dict[str, ast.expr]]
"""By class and field."""
Choices = dict[tuple[str, str], list[str]]
"""By class and field, the texts that are allowed."""
BINARY: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
COMPARE: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
NAMES = {
    "minimum": "maximum",
    "maximum": "minimum",
    "relu": "abs",
    "exp": "expm1",
    "expm1": "exp",
    "square": "abs",
    "rollout_sum": "rollout_mean",
    "rollout_mean": "rollout_sum",
    "amax": "amin",
}
DROPPED = {"detach", "clamp", "trained", "clip", "square", "relu"}
"""Calls whose first argument (or object) is put in their place."""


def changes_of(path: Path) -> Iterator[Change]:
    """All changes of a file, in the order of its lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defaults, choices = _fields(tree)
    for node, scope, field in _walk(tree):
        for what, make in _variants(node, scope, field, defaults, choices):
            changed = with_changes(tree, [(node, make)])
            yield Change(path.stem, node.lineno, scope, what, changed, node, make)


def with_changes(tree: ast.Module, changes: Sequence[tuple[ast.AST, ast.expr]]) -> ast.Module:
    """A copy of a file's tree with nodes replaced; none of them lies within another."""
    changed = copy.deepcopy(tree)
    for node, make in changes:
        target = next(n for n in ast.walk(changed) if _same_place(n, node))
        _replace(changed, target, make)
    return ast.fix_missing_locations(changed)


def _fields(tree: ast.Module) -> tuple[Defaults, Choices]:
    """The fields of classes that have a default, and those whose values are named."""
    defaults: Defaults = {}
    choices: Choices = {}
    for node in tree.body:
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                assert isinstance(node, ast.ClassDef)
                strings = [
                    n.value for n in ast.walk(item.annotation) if isinstance(n, ast.Constant)
                ]
                choices[node.name, item.target.id] = [s for s in strings if isinstance(s, str)]
                if item.value is not None:
                    defaults.setdefault(node.name, {})[item.target.id] = item.value
    return defaults, choices


def _walk(tree: ast.Module) -> Iterator[tuple[ast.expr, str, str | None]]:
    """Expressions that compute something, with where they are and the field they are a default of.

    Not what is only text: docstrings, annotations, messages of errors, assertions.
    """

    def visit(node: ast.AST, scope: str, field: str | None) -> Iterator:
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            scope = f"{scope}.{node.name}" if scope else node.name
            children: list[ast.AST] = [*node.body]
            if isinstance(node, ast.FunctionDef):
                children += [d for d in (*node.args.defaults, *node.args.kw_defaults) if d]
        elif isinstance(node, ast.AnnAssign):
            field = node.target.id if isinstance(node.target, ast.Name) else None
            children = [node.value] if node.value else []
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        else:
            children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.expr):
            yield node, scope or "module", field
        for child in children:
            yield from visit(child, scope, field)

    yield from visit(tree, "", None)


def _variants(
    node: ast.expr, scope: str, field: str | None, defaults: Defaults, choices: Choices
) -> Iterator[tuple[str, ast.expr]]:
    """Variants of a place: a description, and the expression in its place."""
    text = ast.unparse(node)
    where = "" if field is None else f"default of {field}: "
    if isinstance(node, ast.Constant) and not isinstance(node.value, str):
        yield from _constants(node, where)
    elif field is not None and text == "math.inf":
        yield f"{where}inf -> 1.5", ast.Constant(1.5)
    elif field is not None and isinstance(node, ast.Constant) and field != "decomposition":
        for other in choices.get((scope, field), []):
            if other != node.value:
                yield f"{where}{node.value!r} -> {other!r}", ast.Constant(other)
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        other = ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
        yield f"{text} -> {ast.unparse(other)}", other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield f"{text} -> {ast.unparse(node.operand)}", node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        other = ast.Compare(node.left, [COMPARE[type(node.ops[0])]()], node.comparators)
        yield f"{text} -> {ast.unparse(other)}", other
    elif isinstance(node, ast.BoolOp):
        for part in node.values:
            yield f"{text} -> {ast.unparse(part)}", part
    elif isinstance(node, ast.IfExp):
        yield f"{text} -> {ast.unparse(node.body)}", node.body
        yield f"{text} -> {ast.unparse(node.orelse)}", node.orelse
    elif isinstance(node, ast.Attribute):
        yield from _attributes(node, scope, defaults)
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _constants(node: ast.Constant, where: str) -> Iterator[tuple[str, ast.expr]]:
    value = node.value
    if isinstance(value, bool):
        yield f"{where}{value} -> {not value}", ast.Constant(not value)
    elif isinstance(value, (int, float)):
        other = value + 1 if isinstance(value, int) else value * 1.25 if value else 0.125
        yield f"{where}{value} -> {other}", ast.Constant(other)
    elif value is None and where:
        yield f"{where}None -> 1.125", ast.Constant(1.125)


def _attributes(
    node: ast.Attribute, scope: str, defaults: Defaults
) -> Iterator[tuple[str, ast.expr]]:
    text = ast.unparse(node)
    if node.attr in NAMES:
        other = ast.Attribute(node.value, NAMES[node.attr])
        yield f"{text} -> {ast.unparse(other)}", other
    fields = defaults.get(scope.partition(".")[0], {})
    if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in fields:
        yield f"{text} is ignored", fields[node.attr]


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    text = ast.unparse(node)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        whole = ast.unparse(node.func.value) in ("batch", "torch", "F", "view")
        kept = node.args[0] if whole and node.args else node.func.value
        yield f"{text} -> {ast.unparse(kept)}", kept
    if name in ("clamp", "clip"):
        for at, argument in enumerate(node.args):
            infinite = ast.parse("-float('inf')" if at == 0 else "float('inf')", mode="eval").body
            arguments = [*node.args[:at], infinite, *node.args[at + 1 :]]
            other = ast.Call(node.func, arguments, node.keywords)
            yield f"{text} without {ast.unparse(argument)}", other
    if len(node.args) == 2 and name in ("minimum", "maximum", "where"):
        return
    if name == "where" and len(node.args) == 3:
        for part in node.args[1:]:
            yield f"{text} -> {ast.unparse(part)}", part


def _same_place(one: ast.AST, other: ast.AST) -> bool:
    place = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return type(one) is type(other) and all(
        getattr(one, name, None) == getattr(other, name, None) for name in place
    )


def _replace(tree: ast.Module, target: ast.AST, make: ast.expr) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, copy.deepcopy(make))
                return
            if isinstance(value, list) and any(item is target for item in value):
                at = next(i for i, item in enumerate(value) if item is target)
                value[at] = copy.deepcopy(make)
                return
    raise AssertionError("the place is not in the tree")


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the changed module in the place of the file's."""

    def __init__(self, change: Change) -> None:
        self.name = f"forkpoint.losses.{change.module}"
        self.change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None):  # type: ignore[override]
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.change.tree, f"{self.change.module}.py", "exec"), module.__dict__)


class _FirstFailure:
    """A plugin of pytest: the first test that failed."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.test:
            self.test = f"{report.nodeid} (import)"


def run(change: Change | None, tests: Sequence[str]) -> str:
    """The first test that fails with the change, in a process of its own; "" if all pass."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_here(change, tests, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return found or ("it did not end" if status else "")


def _run_here(change: Change | None, tests: Sequence[str], writing: int) -> None:
    import pytest

    signal.alarm(SECONDS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if change is not None:
        sys.meta_path.insert(0, _Changed(change))
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not gpu"]
    found = ""
    with tempfile.TemporaryDirectory() as folder:
        # A file at a time: to collect them all takes longer than most changes live.
        for path in tests:
            first = _FirstFailure()
            code = pytest.main([*options, f"--basetemp={folder}/tests", path], plugins=[first])
            if code:
                found = first.test or f"pytest ended with {code}"
                break
    os.write(writing, found.encode())
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=[], help="files of losses, without .py")
    parser.add_argument("--list", action="store_true", help="the changes, without running tests")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are tested at a time")
    parser.add_argument("--match", default="", help="only changes whose name has this text")
    chosen = parser.parse_args()
    paths = [p for p in sorted(LOSSES.glob("*.py")) if p.stem not in LEFT_OUT]
    paths = [p for p in paths if not chosen.only or p.stem in chosen.only]
    changes = [c for p in paths for c in changes_of(p) if chosen.match in c.name]
    if chosen.list:
        print("\n".join(f"{c.name} (line {c.line})" for c in changes))
        return 0
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    tests = [str(NUMERICS / name) for name in TESTS if (NUMERICS / name).exists()]
    failing = run(None, tests)
    if failing:
        print(f"without any change {failing} fails")
        return 2
    survived = []
    begun = time.monotonic()
    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = pool.map(lambda c: (UNCHANGED.get(c.name) and "-") or run(c, tests), changes)
        for n, (change, found) in enumerate(zip(changes, results, strict=True), start=1):
            if not found:
                survived.append(change)
            what = f"nothing to see: {UNCHANGED[change.name]}" if found == "-" else found
            print(f"{n}/{len(changes)} {change.name} (line {change.line}) | {what or SURVIVED}")
    print(f"{len(changes)} changes in {time.monotonic() - begun:.0f} s, {len(survived)} survived:")
    for change in survived:
        print(f"  {change.name} (line {change.line})")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
