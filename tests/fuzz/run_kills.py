"""Kill replays at random moments, resume them, and compare: see CONTRIBUTING.md.

python tests/fuzz/run_kills.py --kills 200

Every other kill comes while a checkpoint is being written. Each replay is killed until it has had
its share of kills, and then resumed to its end, which has to be bitwise that of one that nothing
disturbed, in a folder without anything left over.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import torch
from replays import assert_same_end, run

from forkpoint.replay.folder import SAVING
from forkpoint.replay.schema import CHECKPOINT, MANIFEST, PLANS, ROWS
from forkpoint.testing import tiny_model

STEPS, KILLS_A_FOLDER = 12, 10
OWN = {MANIFEST, ROWS, PLANS, CHECKPOINT, ".lock"}


def replayed(folder: Path) -> None:
    """A replay that saves after every step, of a model whose checkpoint has a few megabytes."""
    torch.manual_seed(7)
    model = tiny_model("qwen3", dtype=torch.float32, hidden_size=96, intermediate_size=384)
    run(folder, steps=STEPS, checkpoint_every=1, model=model)


def left_over(folder: Path) -> Iterator[Path]:
    """Files that do not belong to a replay at rest; those that go meanwhile are left out."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if path.relative_to(folder).as_posix() not in OWN:
                yield path


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def killed_while(process: Any, folder: Path, moment: float, saving: bool) -> bool:
    """Kill a process after so many seconds, or then as soon as a file is being saved."""
    end = time.monotonic() + moment
    while process.is_alive() and time.monotonic() < end:
        time.sleep(0.002)
    while saving and process.is_alive() and not any(left_over(folder)):
        pass
    if not process.is_alive():
        return False
    process.kill()
    process.join()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["replays", "transformers.models.qwen3.modeling_qwen3"])
    counts = dict.fromkeys(("kills", "while_saving", "replays", "resumed", "left_over"), 0)
    largest = 0
    with tempfile.TemporaryDirectory() as place:
        expected = Path(place, "expected")
        warm = context.Process(target=time.sleep, args=(0,))
        warm.start()  # which imports everything
        warm.join()
        begin = time.monotonic()
        undisturbed = context.Process(target=replayed, args=(expected,))
        undisturbed.start()
        undisturbed.join()
        seconds = time.monotonic() - begin
        size = (expected / CHECKPOINT).stat().st_size
        while counts["kills"] < arguments.kills:
            folder = Path(place, str(counts["replays"]))
            kills = 0
            while True:
                counts["resumed"] += (folder / CHECKPOINT).exists()
                process = context.Process(target=replayed, args=(folder,))
                process.start()
                if kills == KILLS_A_FOLDER:
                    process.join()
                    break
                saving = rng.random() < 0.5
                if not killed_while(process, folder, rng.uniform(0, seconds / 2), saving):
                    break
                kills += 1
                left = list(left_over(folder))
                counts["while_saving"] += bool(left)
                largest = max([largest, *map(size_of, left)])
            assert process.exitcode == 0, f"{folder}: exit code {process.exitcode}"
            assert_same_end(folder, expected)
            counts["left_over"] += len(list(left_over(folder)))
            assert not (folder / SAVING).exists()
            counts["kills"] += kills
            counts["replays"] += 1
            print(json.dumps(counts), flush=True)
    print(
        f"{counts['kills']} kills of {counts['replays']} replays, {counts['while_saving']} of them "
        f"while a file of up to {largest:,} of {size:,} bytes was being written; every replay "
        f"ended bitwise as one that was not killed, with {counts['left_over']} files left over."
    )
    return int(counts["left_over"] > 0)


if __name__ == "__main__":
    sys.exit(main())
