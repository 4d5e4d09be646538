"""The time and memory of `forkpoint plan` on files of 1, 10 and 100 million rollout tokens.

Files (JSON lines, zstd) are written one after the other into a folder that is removed at the end,
and planned in a process each. The bars are 10 s for a million tokens, and for a hundred million
twice the memory that ten million take.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import zstandard
from tyro.conf import DisallowNone, arg

from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline

NAME = "plan-scale"
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
from forkpoint.apps.cli import main
assert main(["plan", sys.argv[1], "--model", sys.argv[2], "--json"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass(frozen=True, kw_only=True)
class PlanScale(Benchmark):
    """Measure time and memory of forkpoint plan on large files.

    Attributes:
        millions: How many million tokens the files have.
        folder: Where the files are written; by default a temporary folder.
    """

    NAME: ClassVar[str] = NAME

    millions: tuple[int, ...] = (1, 10, 100)
    folder: DisallowNone[
        Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: temporary)")]
    ] = None

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        peaks: dict[int, int] = {}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for millions in self.millions:
                if deadline.over(f"{millions} million tokens"):
                    continue
                path = Path(folder) / f"{millions}m.jsonl.zst"
                rollouts, tokens = write(path, millions * 1_000_000)
                seconds, peaks[millions], result = run(path)
                assert result["logical_tokens"] == tokens and result["rollouts"] == rollouts
                file_bytes = path.stat().st_size
                path.unlink()
                case = f"{millions}M tokens, groups of {GROUP}, prompts of {SYSTEM + PROMPT}"
                row = partial(ResultRow, bench=NAME, case=case)
                yield row(metric="tokens", unit="1", value=tokens)
                yield row(metric="rollouts", unit="1", value=rollouts)
                yield row(metric="batches", unit="1", value=result["batches"])
                yield row(metric="file_size", unit="byte", value=file_bytes)
                bar = BAR_SECONDS if millions == 1 else None
                yield row(metric="plan", unit="s", value=round(seconds, 2), bar=bar)
                yield row(metric="tokens_per_second", unit="1/s", value=round(tokens / seconds))
                yield row(metric="peak_memory", unit="byte", value=peaks[millions])
                speed_up = result["modes"]["group"]["bound"]
                yield row(metric="bound", unit="x", value=speed_up)
                if millions == 100 and 10 in peaks:
                    growth = peaks[100] / peaks[10]
                    name = "peak_memory over 10M tokens"
                    yield row(metric=name, unit="1", value=growth, bar=BAR_GROWTH)
