"""Kill replays at random moments, resume them, and compare: see CONTRIBUTING.md.

python tests/fuzz/run_kills.py --kills 200
python tests/fuzz/run_kills.py --kills 40 --ranks 2

With ranks, any one of them is killed, and the others have to end by themselves within a minute.
Every other kill comes while a checkpoint is being written. Each replay is killed until it has had
its share of kills, and then resumed to its end, which has to be bitwise that of one that nothing
disturbed, in a folder without anything left over.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

import rank_replays
import torch
import torch.distributed as dist
from replays import assert_same_end, run
from torch.distributed import distributed_c10d

from forkpoint.apps.replay.folder import SAVING
from forkpoint.apps.replay.schema import CHECKPOINT, MANIFEST, PLANS, ROWS
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


def killed_while(
    process: Any,
    folder: Path,
    moment: float,
    saving: bool,
    is_saving: Callable[[Path], bool] = lambda folder: any(left_over(folder)),
) -> bool:
    """Kill a process after so many seconds, or then as soon as a file is being saved."""
    end = time.monotonic() + moment
    while process.is_alive() and time.monotonic() < end:
        time.sleep(0.002)
    while saving and process.is_alive() and not is_saving(folder):
        pass
    if not process.is_alive():
        return False
    process.kill()
    process.join()
    return True


def ranked(folder: Path, rank: int, size: int, port: int) -> None:
    """One rank of a replay that saves after every step."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=15))
    # Ranks meet when a model is wrapped. Before that nothing but these limits ends one that waits
    # for another, of which it cannot know whether it was killed or is late; torchrun would.
    distributed_c10d.default_pg_timeout = timedelta(seconds=45)  # of groups that are made later
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=45)
    )
    torch.manual_seed(7)
    model = tiny_model("qwen3", hidden_size=96, intermediate_size=384)
    rank_replays.replayed(folder, steps=STEPS, model=rank_replays.sharded(model))
    dist.barrier()


def all_ranks(context: Any, folder: Path, size: int) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = [context.Process(target=ranked, args=(folder, n, size, port)) for n in range(size)]
    for process in found:
        process.start()
    return found


def kill_ranks(kills: int, seed: int, size: int) -> int:
    """Kill one rank of a replay at a time, at random moments, and resume all of them."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_replays", "transformers.models.qwen3.modeling_qwen3"])
    counts = dict.fromkeys(("kills", "while_saving", "replays"), 0)
    longest = 0.0
    with tempfile.TemporaryDirectory() as place:
        expected = Path(place, "expected")
        for _ in range(2):  # the first imports everything
            shutil.rmtree(expected, ignore_errors=True)
            begin = time.monotonic()
            for process in all_ranks(context, expected, size):
                process.join()
                assert process.exitcode == 0
            seconds = time.monotonic() - begin
        while counts["kills"] < kills:
            folder = Path(place, str(counts["replays"]))
            for number in range(KILLS_A_FOLDER + 1):
                processes = all_ranks(context, folder, size)
                victim = rng.choice(processes)
                last = number == KILLS_A_FOLDER
                moment = 1e9 if last else rng.uniform(0, seconds)
                saving = rng.random() < 0.5
                begin = time.monotonic()
                if last or not killed_while(victim, folder, moment, saving, unfinished):
                    # It may have been measured while the machine had other things to do.
                    seconds = min(seconds, time.monotonic() - begin)
                    break
                counts["kills"] += 1
                counts["while_saving"] += unfinished(folder)
                died = time.monotonic()
                for process in processes:
                    process.join(60)
                    if process.exitcode is None and process.pid is not None:
                        os.kill(process.pid, signal.SIGUSR1)  # it shows where it is
                        process.join(2)
                        process.kill()
                        raise AssertionError("a rank outlives the one that was killed")
                    assert process is victim or process.exitcode != 0 or not unfinished(folder)
                longest = max(longest, time.monotonic() - died)
            for process in processes:
                process.join()
                assert process.exitcode == 0, f"{folder}: exit code {process.exitcode}"
            rank_replays.assert_same_end(folder, expected)
            counts["replays"] += 1
            print(json.dumps(counts), flush=True)
    print(
        f"{counts['kills']} kills of one of {size} ranks in {counts['replays']} replays, "
        f"{counts['while_saving']} of them while a checkpoint was being written; the others ended "
        f"within {longest:.0f} s, and every replay ended bitwise as one that was not killed."
    )
    return 0


def unfinished(folder: Path) -> bool:
    """Whether ranks are writing a checkpoint."""
    return any((folder / SAVING).glob("checkpoint-*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.ranks > 1:
        return kill_ranks(arguments.kills, arguments.seed, arguments.ranks)
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
