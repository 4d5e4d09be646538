"""Runs the examples of the documentation: what a reader copies must work as it stands.

Of every Markdown file, in order and in one namespace and folder: each ```python block is executed,
and each `$ command` of a ```console block is run by bash and must exit with 0. Lines shown below a
command are what it must print, where `...` stands for anything. Blocks of other languages are not
run. A block that cannot run here is preceded by `<!-- not run: why -->`.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forkpoint
from forkpoint.apps.cli import main
from forkpoint.testing import tiny_model

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?((?:(?!\$ ).*\n?)*)", re.MULTILINE)
LANGUAGES = {"python", "console", "json", "sh", "text"}
SHELL = re.compile(r"[|&;<>$`*?(){}\[\]~#!]")
"""Characters that bash has work to do for."""


def blocks(text: str) -> list[tuple[str, int, str, bool]]:
    """Language, first line, code, and whether it runs, of each fenced block of a Markdown text.

    Raises ValueError for a fence without a language that is known here, and for one left open.
    """
    found = [
        (block[2], text.count("\n", 0, block.start(3)) + 1, block[3], not block[1])
        for block in BLOCK.finditer(text)
    ]
    if 2 * len(found) != len(re.findall(r"^```", text, re.MULTILINE)):
        raise ValueError("a block is never closed.")
    if unknown := {language for language, *_ in found} - LANGUAGES:
        raise ValueError(f"blocks of {unknown}; allowed are {LANGUAGES}.")
    return found


def run_file(path: Path, namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a file that run: Python in `namespace`, commands in the present folder."""
    for language, line, code, runs in blocks(path.read_text(encoding="utf-8")):
        if runs and language == "python":
            # Blank lines above it, so that a traceback names the line of the document.
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        elif runs and language == "console":
            assert code.startswith("$ "), f"{path.name}, line {line} is no command"
            for command, shown in COMMAND.findall(code):
                status, out, err = run_command(command, capsys)
                where = f"{path.name}, block at line {line}: {command}\n"
                assert status == 0, f"{where}exit status {status}\n{err}"
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                same = not shown or doctest.OutputChecker().check_output(shown, out, flags)
                assert same, f"{where}printed\n{out}\nand the document shows\n{shown}"


def run_command(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status and output; a plain command of forkpoint runs in this process, which is quick."""
    words = command.replace("\\\n", " ")
    if words.startswith("forkpoint ") and not SHELL.search(words):
        capsys.readouterr()
        return (main(shlex.split(words)[1:]), *capsys.readouterr())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        # Benchmarks are run from a checkout.
        env={**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


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
