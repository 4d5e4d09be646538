"""Builds the sdist and the wheel, looks into them, and uses the wheel where nothing else is.

Needs Python alone. Everything is built and installed below a temporary folder, which is removed;
nothing is left in the repository. Exits with 1, and a message, at the first thing that is wrong.
"""

import filecmp
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME, VERSION = PROJECT["project"]["name"], PROJECT["project"]["version"]

RESOLVED = ("docs", "parquet", "report", "trl", "zstd")
"""Extras that pip is asked to resolve, without installing them. `fa4` and `fla` need CUDA, and
`verl` needs older versions than those of constraints.txt."""
ROLLOUTS = [
    {"token_ids": [1, 2, 3, 4, 5 + n], "loss_mask": [0, 0, 0, 0, 1], "advantage": n - 0.5}
    for n in range(2)
]
"""Of 10 tokens 6 are unique: four of a prompt, and two responses of one."""


def main() -> None:
    began = time.perf_counter()
    before = listing()
    with tempfile.TemporaryDirectory(prefix="forkpoint-wheel-") as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        said(began, f"built {sdist.name} and {wheel.name}")
        check_wheel(wheel)
        check_sdist(sdist)
        python = install(folder, wheel)
        said(began, "installed the wheel and what it depends on")
        use(folder, python)
        said(began, "used it")
    left = listing() - before
    assert not left, f"this left behind {', '.join(sorted(left))}"


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel, after building the wheel from the tree and from the sdist."""
    python = environment(folder / "build")
    backend = PROJECT["build-system"]["requires"]
    run(python, "-m", "pip", "install", "--quiet", "build", *backend)
    options = ("-m", "build", "--no-isolation", "--outdir")
    run(python, *options, folder / "tree", "--sdist", "--wheel", ROOT)
    (sdist,), (wheel,) = (sorted((folder / "tree").glob(kind)) for kind in ("*.tar.gz", "*.whl"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(python, *options, folder / "sdist", "--wheel", unpacked)
    (again,) = (folder / "sdist").iterdir()
    assert again.name == wheel.name, f"the sdist builds {again.name}, the tree {wheel.name}"
    assert filecmp.cmp(wheel, again, shallow=False), "the sdist builds another wheel than the tree"
    return sdist, wheel


def check_wheel(wheel: Path) -> None:
    """It holds the package as it is in the tree, and the licence."""
    package = ROOT / "src" / NAME
    source = {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    information = f"{NAME}-{VERSION}.dist-info/"
    others = {name for name in held if not name.startswith(information)}
    assert others == source.keys(), f"in one of wheel and tree alone: {others ^ source.keys()}"
    assert all(held[name] == content for name, content in source.items())
    assert f"{NAME}/py.typed" in held, "type checkers ignore a package without py.typed"
    assert f"{information}licenses/LICENSE" in held


def check_sdist(sdist: Path) -> None:
    """It holds what one needs to test the package, and nothing hidden or built."""
    with tarfile.open(sdist) as archive:
        names = {PurePosixPath(*PurePosixPath(n).parts[1:]) for n in archive.getnames()}
    for needed in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"):
        assert PurePosixPath(needed) in names, f"the sdist lacks {needed}"
    parts = {part for name in names for part in name.parts}
    assert {"src", "tests", "docs", "scripts", "examples", "benchmarks"} <= parts
    unwanted = {p for p in parts if p == "__pycache__" or (p.startswith(".") and p != ".gitignore")}
    assert not unwanted, f"the sdist holds {', '.join(sorted(unwanted))}"


def install(folder: Path, wheel: Path) -> Path:
    """The Python of an empty environment with the wheel, its dependencies, and nothing else."""
    python = environment(folder / "installed")
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel)
    run(python, "-m", "pip", "check")
    names = f"{wheel}[{','.join(RESOLVED)}]"
    run(python, "-m", "pip", "install", "--dry-run", "--quiet", "--constraint", constraints, names)
    return python


def use(folder: Path, python: Path) -> None:
    """The commands that need no model of one's own, from a folder outside of the repository."""
    here = folder / "elsewhere"
    here.mkdir()
    lines = "".join(json.dumps(rollout) + "\n" for rollout in ROLLOUTS)
    (here / "rollouts.jsonl").write_text(lines, encoding="utf-8")
    found = run(python, "-c", f"import {NAME}; print({NAME}.__file__)", cwd=here).strip()
    assert Path(found).is_relative_to(folder / "installed"), f"what is imported is {found}"
    command = python.with_name(NAME)
    assert run(command, "--version", cwd=here) == f"{NAME} {VERSION}\n"
    plan = json.loads(run(command, "plan", "rollouts.jsonl", "--json", cwd=here))
    assert (plan["logical_tokens"], plan["unique_tokens"]) == (10, 6), plan
    absent = "import importlib.util as u; print(u.find_spec('benchmarks'))"
    assert run(python, "-c", absent, cwd=here).strip() == "None", "the wheel has the benchmarks"
    doctor = json.loads(run(command, "doctor", "--json", cwd=here))
    assert doctor["passed"] and doctor["versions"][NAME] == VERSION, doctor


def environment(folder: Path) -> Path:
    """The Python of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*command: object, cwd: Path | None = None) -> str:
    """Output of a command; raises SystemExit with its output where it fails."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**variables, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def listing() -> set[str]:
    """Files and folders at the top of the repository, and within its sources."""
    found = [*ROOT.iterdir(), *(ROOT / "src").rglob("*")]
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def said(began: float, what: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
