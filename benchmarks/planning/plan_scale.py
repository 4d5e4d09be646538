"""Time and memory of `forkpoint plan` on large files: `python benchmarks/plan_scale.py`.

Writes files of 1, 10 and 100 million rollout tokens (JSON lines, zstd) one after the other into a
folder that is removed at the end, runs `forkpoint plan` on each in a process of its own, and
appends rows to benchmarks/results/plan-scale.jsonl. Bars: a million tokens in at most 10 s, and a
hundred million in at most twice the memory that ten million take.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan-scale.jsonl"
MODEL = "qwen3-8b"
VOCAB = 150_000
SYSTEM, PROMPT, RESPONSE, GROUP = 500, 1_500, 500, 8
BAR_SECONDS, BAR_GROWTH = 10.0, 2.0


def write(path: Path, tokens: int, seed: int = 0) -> tuple[int, int]:
    """Groups of 8: a prompt of 2,000 tokens, of which all groups share 500, and 250 to 750 tokens
    of response. Returns how many rollouts and tokens there are."""
    random = np.random.default_rng(seed)
    system = random.integers(VOCAB, size=SYSTEM).tolist()
    count = total = group = 0
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as out:
        while total < tokens:
            prompt = system + random.integers(VOCAB, size=PROMPT).tolist()
            for _ in range(GROUP):
                response = random.integers(
                    VOCAB, size=int(random.integers(RESPONSE // 2, 3 * RESPONSE // 2 + 1))
                ).tolist()
                record = {
                    "group_id": str(group),
                    "token_ids": prompt + response,
                    "loss_mask": [0] * len(prompt) + [1] * len(response),
                    "advantage": round(float(random.normal()), 4),
                }
                out.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
                count += 1
                total += len(prompt) + len(response)
            group += 1
    return count, total


def run(path: Path) -> tuple[float, int, dict[str, Any]]:
    """Seconds and most bytes in memory of a process that plans a file, and what it says."""
    command = [sys.executable, "-c", CHILD, str(path), MODEL]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    result, used = done.stdout.splitlines()[-2:]
    return seconds, int(used) * 1024, json.loads(result)


# ru_maxrss of children is the most of all that there were, so that each asks for its own.
CHILD = """
import resource, sys
from forkpoint.cli import main
assert main(["plan", sys.argv[1], "--model", sys.argv[2], "--json"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def environment() -> dict[str, Any]:
    """Device, versions, commit and command: the same for every row of this run."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--", "src", "benchmarks/plan_scale.py")
    names = ("forkpoint", "numpy", "zstandard")
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "commit": git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def main() -> int:
    """Measure; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--folder", type=Path, help="where files are written (default: temporary)")
    arguments = parser.parse_args()
    table = Table(title=f"forkpoint plan FILE --model {MODEL}")
    for name in ("tokens", "rollouts", "batches", "file MB", "seconds", "peak MB", "speed-up"):
        table.add_column(name, justify="right")
    rows: list[dict[str, Any]] = []
    peaks: dict[int, int] = {}
    missed = False
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for millions in arguments.millions:
            path = Path(folder) / f"{millions}m.jsonl.zst"
            rollouts, tokens = write(path, millions * 1_000_000)
            seconds, peak, result = run(path)
            assert result["logical_tokens"] == tokens and result["rollouts"] == rollouts
            file_bytes = path.stat().st_size
            path.unlink()
            peaks[millions] = peak
            missed |= millions == 1 and seconds > BAR_SECONDS
            figures = {
                "tokens": ("1", tokens),
                "rollouts": ("1", rollouts),
                "batches": ("1", result["batches"]),
                "file_size": ("byte", file_bytes),
                "plan": ("s", round(seconds, 2)),
                "tokens_per_second": ("1/s", round(tokens / seconds)),
                "peak_memory": ("byte", peak),
            }
            case = f"{millions}M tokens, groups of {GROUP}, prompts of {SYSTEM + PROMPT}"
            none: dict[str, Any] = {"p20": None, "p50": None, "p80": None}
            rows += [
                {"bench": "plan_scale", "case": case, **none, "metric": name, "unit": unit,
                 "value": value}
                for name, (unit, value) in figures.items()
            ]  # fmt: skip
            table.add_row(
                *(f"{value:,}" for value in (tokens, rollouts, result["batches"])),
                *(f"{value / 1e6:,.0f}" for value in (file_bytes,)),
                f"{seconds:,.1f}",
                f"{peak / 1e6:,.0f}",
                f"{result['modes']['group']['bound']:.2f}x",
            )
    if {10, 100} <= set(peaks):
        missed |= peaks[100] > BAR_GROWTH * peaks[10]
    Console().print(table)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **environment()}) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
