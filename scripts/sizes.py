"""Counts of the sources: files, lines, and functions with many parameters.

    python scripts/sizes.py [COMMIT ...]

Without a commit the files of the working tree are counted, with commits those of each.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "benchmarks", "scripts", "tests")
MANY_PARAMETERS = 8


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def sources(folder: str, commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of each Python file below a folder."""
    if commit is None:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        return
    for name in git("ls-tree", "-r", "--name-only", commit, "--", folder).splitlines():
        if name.endswith(".py"):
            yield name, git("show", f"{commit}:{name}")


def wide_functions(name: str, text: str) -> Iterator[str]:
    """Functions with MANY_PARAMETERS parameters or more, self and cls left out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            count = sum(each.arg not in ("self", "cls") for each in every)
            count += (given.vararg is not None) + (given.kwarg is not None)
            if count >= MANY_PARAMETERS:
                yield f"{name}:{node.lineno} {node.name} has {count}"


def main() -> None:
    for commit in sys.argv[1:] or [None]:
        print(commit or "the working tree")
        for folder in FOLDERS:
            files = list(sources(folder, commit))
            lines = sum(len(text.splitlines()) for _, text in files)
            wide = [found for name, text in files for found in wide_functions(name, text)]
            print(
                f"  {folder}: {len(files)} files, {lines:,} lines, {len(wide)} functions with "
                f"{MANY_PARAMETERS} parameters or more"
            )


if __name__ == "__main__":
    main()
