"""Runs the examples of the documentation: what a reader copies must work as it stands.

Of every Markdown file, in order and in one namespace and folder: each ```python block is executed,
and each `$ command` of a ```console block is run by bash and must exit with 0. Lines shown below a
command are what it must print, where `...` stands for anything. Blocks of other languages are not
run. A block that cannot run here is preceded by `<!-- not run: why -->`.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

import forkpoint
from forkpoint.testing import tiny_model

ROOT = Path(__file__).parents[1]
RUN = ("python", "console")
SHOWN = ("json", "sh", "text")
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COMMAND_SECONDS = 300

_FENCE = re.compile(r"^```(.*)$")
_NOT_RUN = re.compile(r"^<!-- not run: (\S.*) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    line: int
    """Of its first line of code, counted from 1."""
    code: str
    runs: bool


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text.

    Raises ValueError for a fence without a language that is known here, and for one left open.
    """
    found: list[Block] = []
    lines = text.splitlines()
    opened, language = 0, ""
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence and not opened:
            opened, language = number, fence[1]
            if language not in (*RUN, *SHOWN):
                allowed = ", ".join((*RUN, *SHOWN))
                raise ValueError(f"line {number}: a block of {language!r}; allowed are {allowed}.")
        elif fence:
            above = lines[opened - 2] if opened > 1 else ""
            runs = language in RUN and not _NOT_RUN.match(above)
            found.append(Block(language, opened + 1, "\n".join(lines[opened : number - 1]), runs))
            opened = 0
    if opened:
        raise ValueError(f"line {opened}: this block is never closed.")
    return found


def run_file(path: Path, folder: Path, namespace: dict[str, Any]) -> int:
    """Run the blocks of a file that run, and say how many there were.

    Python runs in `namespace`, commands in `folder`; the caller has made `folder` the present one.
    """
    ran = [block for block in blocks(path.read_text(encoding="utf-8")) if block.runs]
    for block in ran:
        run = _run_python if block.language == "python" else _run_console
        run(block, path, folder, namespace)
    return len(ran)


def _run_python(block: Block, path: Path, folder: Path, namespace: dict[str, Any]) -> None:
    # Blank lines above it, so that a traceback names the line of the document.
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, str(path), "exec"), namespace)


def _run_console(block: Block, path: Path, folder: Path, namespace: dict[str, Any]) -> None:
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        # Benchmarks are run from a checkout.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    for line, command, shown in commands(block):
        if (argv := plain_arguments(command)) is not None:
            done = _forkpoint(argv, folder)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        where = f"{path.name}, line {line}: {command}\n"
        assert done.returncode == 0, f"{where}exit status {done.returncode}\n{done.stderr}"
        same = not shown or doctest.OutputChecker().check_output(shown, done.stdout, OUTPUT_FLAGS)
        assert same, f"{where}printed\n{done.stdout}\nand the document shows\n{shown}"


def plain_arguments(command: str) -> list[str] | None:
    """The arguments of a command of forkpoint; None for others, and where bash has work to do."""
    if re.search(r"[|&;<>$`*?(){}\[\]~#!]", command):
        return None
    words = shlex.split(command)
    return words[1:] if words[0] == "forkpoint" else None


@cache
def _server() -> subprocess.Popen[str]:
    """An interpreter that has imported what commands import, and forks for each of them.

    To import torch and transformers takes longer than most commands do.
    """
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        text=True,
    )


def _forkpoint(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([argv, str(folder)]) + "\n")
    server.stdin.flush()
    return subprocess.CompletedProcess(argv, *json.loads(server.stdout.readline()))


def _serve(answers: IO[str]) -> None:
    """Run commands, one JSON array of arguments and folder a line; answer with code and texts."""
    import transformers  # noqa: F401

    from forkpoint.apps.cli import main

    for line in sys.stdin:
        argv, folder = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                code = 1
                try:
                    os.chdir(folder)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    os.dup2(out.fileno(), 1)
                    os.dup2(err.fileno(), 2)
                    code = main(argv)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
        answers.write(json.dumps([code, *texts]) + "\n")
        answers.flush()


def commands(block: Block) -> list[tuple[int, str, str]]:
    """(line, command, what it is shown to print) of a console block.

    Raises ValueError where the block does not begin with a command.
    """
    found: list[tuple[int, str, str]] = []
    continued = False
    for line, text in enumerate(block.code.splitlines(), start=block.line):
        if text.startswith("$ "):
            found.append((line, text[2:], ""))
        elif not found:
            raise ValueError(f"line {line}: a console block begins with `$ ` and a command.")
        else:
            begin, command, shown = found[-1]
            more = (f"{command}\n{text}", shown) if continued else (command, f"{shown}{text}\n")
            found[-1] = (begin, *more)
        continued = text.endswith("\\")
    return found


def reader(folder: Path) -> dict[str, Any]:
    """Names that the documents take for granted, and the files rollouts.jsonl and config.json.

    Two groups of four rollouts over a vocabulary of 61 tokens, and a Llama of three layers.
    """
    rng = np.random.default_rng(0)
    rollouts = []
    for group in range(2):
        prompt = rng.integers(1, 61, 40).tolist()
        for turn in range(4):
            response = rng.integers(1, 61, 6 + 2 * turn).tolist()
            rollouts.append(
                forkpoint.Rollout(
                    token_ids=prompt + response,
                    loss_mask=[0] * len(prompt) + [1] * len(response),
                    advantage=turn - 1.5,
                    group_id=f"question-{group}",
                    rollout_id=f"question-{group}/{turn}",
                )
            )
    forkpoint.save_rollouts(folder / "rollouts.jsonl", rollouts)
    model = tiny_model("llama", dtype=torch.float32)
    model.config.to_json_file(folder / "config.json")
    return {"__name__": "__docs__", "model": model}


if __name__ == "__main__":
    _serve(sys.stdout)
