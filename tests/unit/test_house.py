"""Rules of the repository that a machine can hold: sizes, imports, and what is not to be named."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import forkpoint

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forkpoint"
BENCHMARKS = ROOT / "benchmarks"
MODULES = sorted(SOURCE.rglob("*.py"))
EVERY_FILE = [*MODULES, *sorted(BENCHMARKS.rglob("*.py"))]

pytestmark = pytest.mark.examples

LAYERS = (
    "version",
    "errors",
    "units",
    "host_memory",
    "config",
    "device",
    "rollouts",
    "tree",
    "plan",
    "ops",
    "losses",
    "parallel",
    "engine",
    "hosts",
    "step",
    "verify",
    "policy",
    "wrapping",
    "testing",
    "integrations",
    "apps",
    "__main__",
)
"""Modules and packages directly below forkpoint. Each may import those before it alone."""
FACADE = forkpoint.__all__
CORE = LAYERS[: LAYERS.index("hosts")]
EXCEPTIONS = {("parallel", "hosts")}
PLANNING = ("__init__", *LAYERS[: LAYERS.index("device")], "rollouts", "tree", "plan")
"""Files and folders that import no torch."""
WITH_TORCH = ("rollouts.formats",)
"""Folders within them that do."""
LIBRARIES_OF_HOSTS = {"transformers", "peft", "accelerate", "trl", "verl", "torchtitan"}
TORCH_AND_HOSTS = {"torch", *LIBRARIES_OF_HOSTS}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """The module or package directly below forkpoint that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(text_of(path))))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of all that a file imports, in functions and for type checking as well.

    An import from a package is that of each name, so that `from forkpoint import plan` counts.
    """
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} imports relatively; give the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, modules: Collection[str]) -> bool:
    """Whether a name is one of these modules or packages, or in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def not_allowed(path: Path, allowed: set[str]) -> set[str]:
    """Modules of forkpoint that a file imports beyond those allowed."""
    named = {name for name in imports(path) if is_within(name, {"forkpoint"})}
    inside = {name.removeprefix("forkpoint.") for name in named}
    return {n for n in inside if not is_within(n, allowed)}


def of_parts(parts: Collection[str]) -> list[Path]:
    found = [path for path in MODULES if part_of(path) in parts]
    assert found, "no file is held to the rule"
    return found


def offences(found: Iterable[tuple[Path, Collection[str]]]) -> str:
    """A line for each file that imports something it must not."""
    return "\n".join(
        f"{relative(p)} imports {', '.join(sorted(names))}" for p, names in found if names
    )


def test_imports_point_one_way() -> None:
    """The package itself is the facade: it imports most names when they are first used."""
    parts = {part_of(path) for path in MODULES} - {"__init__"}
    assert parts == set(LAYERS), "each part has a layer"
    found = []
    for number, part in enumerate(LAYERS):
        allowed = {*LAYERS[: number + 1], "__version__"}
        allowed |= {to for by, to in EXCEPTIONS if by == part}
        if part in ("integrations", "apps"):
            allowed |= set(FACADE)
        found += [(path, not_allowed(path, allowed)) for path in of_parts({part})]
    assert not offences(found), offences(found)


def is_below(path: Path, places: Collection[str]) -> bool:
    return is_within(path.relative_to(SOURCE).as_posix().replace("/", "."), places)


CHOICE = ("hosts.transformers", "hosts.titan", "hosts.libraries")
"""One file chooses a library of models; hosts, steps and verify run those of any."""
RUNNING = of_parts(("hosts", "step", "verify", "policy", "wrapping"))
WITHOUT_LIBRARIES = [path for path in RUNNING if not is_below(path, CHOICE)]
WITHOUT_TORCH = [p for p in MODULES if is_below(p, PLANNING) and not is_below(p, WITH_TORCH)]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (of_parts(CORE), LIBRARIES_OF_HOSTS),
        (WITHOUT_LIBRARIES, {*LIBRARIES_OF_HOSTS, *(f"forkpoint.{place}" for place in CHOICE[:2])}),
        (WITHOUT_TORCH, TORCH_AND_HOSTS),
        (MODULES, {BENCHMARKS.name}),  # not in the wheel
    ],
    ids=["core", "one file chooses a library", "plans need no torch", "no benchmarks"],
)
def test_files_do_not_import(paths: list[Path], names: set[str]) -> None:
    assert len(paths) > 20
    found = offences((p, {n for n in imports(p) if is_within(n, names)}) for p in paths)
    assert not found, found


def module_of(path: Path) -> str:
    parts = (
        path.relative_to(SOURCE.parent if SOURCE in path.parents else ROOT).with_suffix("").parts
    )
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules() -> dict[str, set[str]]:
    """By module: the modules that it imports, in functions and for type checking as well."""
    found = {module_of(path): path for path in EVERY_FILE}
    graph = {}
    for module, path in found.items():
        named = set(imports(path))
        # The import of a name is that of the module which has it.
        modules = {n if n in found else n.rpartition(".")[0] for n in named}
        graph[module] = (modules & found.keys()) - {module}
    return graph


def test_modules_import_in_no_circle() -> None:
    TopologicalSorter(imported_modules()).prepare()  # raises an error that names the circle


SETS_FORWARD = re.compile(r"""\.forward = |\b(?:set|setattr)\(.*["']forward["']""")


def test_forwards_are_replaced_in_one_place() -> None:
    """By `Changes.replace_forward`, which records how to put the module's own back."""
    found = [path for path in MODULES if SETS_FORWARD.search(text_of(path))]
    assert found == [SOURCE / "engine" / "changes.py"], found


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    folders = [ROOT / folder for folder in ("src", "tests", "benchmarks", "scripts")]
    written = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    found = [relative(path) for path in written if re.search(r'"{3}What\b', text_of(path))]
    assert not found, f"docstrings of these begin with What: {found}"


PLAN = """
import forkpoint
from forkpoint.plan import make_plan
rollouts = [forkpoint.Rollout([1, 2, n], [0, 0, 1], 0.5) for n in range(3)]
make_plan(forkpoint.RolloutBatch(rollouts)).explain()
forkpoint.save_rollouts("rollouts.jsonl", rollouts)
with forkpoint.record("trace") as trace:
    trace.add(rollouts)
list(forkpoint.traces.open_trace("trace"))
"""
COMMAND = """
import runpy, sys
sys.argv = ["forkpoint", ARGUMENTS]
try:
    runpy.run_module("forkpoint", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    "code",
    [PLAN, COMMAND.replace("ARGUMENTS", '"plan", "--help"')],
    ids=["make_plan", "plan --help"],
)
def test_runs_without_torch(code: str, tmp_path: Path) -> None:
    """Measured in a new interpreter, since imports of imports count too."""
    loaded = f"import sys; found = {TORCH_AND_HOSTS} & set(sys.modules); assert not found, found"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{loaded}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Makefile", "CONTRIBUTING.md", "docs/architecture.md"])
def test_named_files_exist(name: str) -> None:
    folders = "tests|src|benchmarks|scripts|examples"
    named = re.findall(rf"\b(?:{folders})/[\w/.-]+\.(?:py|sh|md|jsonl?)\b", text_of(ROOT / name))
    assert named
    missing = [path for path in named if not (ROOT / path).is_file()]
    assert not missing, f"{name} names files that do not exist: {missing}"


# Written in pieces, so that this file does not name them either.
NOT_NAMED = {
    "a machine's path": r"(?<![\w.~}])/(?:" + "|".join(["work", "root", "home", "opt"]) + r")/\w",
    "a package host": "|".join(["pypi" + r"\.org", "download" + r"\.pytorch", "find-" + "links"]),
}


@pytest.mark.parametrize("what", NOT_NAMED)
def test_tracked_files_do_not_name(what: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so that what is tracked is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pattern = re.compile(NOT_NAMED[what])
    for path in (ROOT / file for file in listed.split("\0") if file):
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            found = pattern.search(line)
            assert not found, f"{relative(path)}, line {number} names {what}: {line.strip()}"
