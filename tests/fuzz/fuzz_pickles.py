"""Mutates files of real trainers and reads them: none may crash, grow, run code or raise a bug.

python tests/fuzz/fuzz_pickles.py --mutations 100000 --seed 1 --json pickles.json
python tests/fuzz/fuzz_pickles.py --seed 1 --replay 4711

Workers read the mutations under a limit of address space and of time for each file. A hook of
Python's audit events looks at whatever runs while a file is read: programs that are started, code
that is compiled, modules that are imported, files that are opened. The memory that a worker takes
is measured, beyond what it took for the files as they were written.
"""

import argparse
import base64
import json
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit"), str(TESTS / "fuzz")]

from mutate_pickles import STREAM, Mutations  # noqa: E402

MOST_ADDRESS_BYTES = 1536 << 20
MOST_SECONDS = 10
LIMIT_BYTES = 64 << 20
MOST_GROWTH_BYTES = 512 << 20
_HARMLESS = frozenset(("builtins.id", "object.__getattr__", "object.__setattr__", "sys._getframe"))


# The worker, which imports no torch ---------------------------------------------------------------


class Watch:
    """Names what runs while a file is read and should not."""

    def __init__(self, path: Path) -> None:
        self.armed = False
        self.seen: list[str] = []
        self._path = str(path)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed or event in _HARMLESS:
            return
        if event == "open" and str(args[0]) == self._path and args[1] in ("r", "rb"):
            return
        self.seen.append(f"{event} {args!r}"[:200])


def read(path: Path, watch: Watch) -> tuple[str, str]:
    """Outcome of a file, and the description of a fault."""
    from forkpoint import RolloutError, load_rollouts
    from forkpoint.formats.pickles import load_pickle, load_torch

    head = path.read_bytes()[:64]
    loaded, caught = False, None
    watch.seen.clear()
    watch.armed = True
    try:
        if head.startswith(b"PK") or STREAM in head:
            load_torch(path, str(path), limit_bytes=LIMIT_BYTES)
        else:
            load_pickle(path, limit_bytes=LIMIT_BYTES)
        loaded = True
        load_rollouts(path)
    except Exception as error:
        caught = error
    finally:
        watch.armed = False
    if watch.seen:
        return "ran", "; ".join(watch.seen)
    if caught is None:
        return "read", ""
    if not isinstance(caught, RolloutError):
        return "traceback", "".join(traceback.format_exception(caught)[-5:])
    if not str(caught).startswith(str(path)):
        return "file not named", str(caught)
    return f"refused, {'its rollouts' if loaded else _kind(str(caught))}", ""


def _kind(message: str) -> str:
    for part in (
        "could run code",
        "more than",
        "checksum",
        "damaged",
        "cut short",
        "cannot be read",
    ):
        if part in message:
            return part
    return "a value"


def work(folder: Path, first: int, step: int, count: int, seed: int) -> None:
    """Reads every `step`-th mutation from `first`, and writes a line of JSON about each."""
    warnings.simplefilter("error")  # as under pytest
    mutations = _mutations(folder)
    path = folder / f"{first % step}.pt"
    watch = Watch(path)
    for content in mutations.files.values():
        path.write_bytes(content)
        read(path, watch)  # which imports all that reading takes
        outcome, fault = read(path, watch)
        assert outcome.startswith(("read", "refused, its rollouts")), fault or outcome
    assert "torch" not in sys.modules
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = _peak_bytes()
    for index in range(first, count, step):
        path.write_bytes(mutations.draw(f"{seed}/{index}")[1])
        print(json.dumps({"begin": index}), flush=True)
        signal.alarm(MOST_SECONDS)
        began = time.perf_counter()
        outcome, fault = read(path, watch)
        signal.alarm(0)
        line = {"index": index, "outcome": outcome, "fault": fault}
        line["peak_bytes"] = _peak_bytes()
        line["growth_bytes"] = line["peak_bytes"] - before
        line["seconds"] = time.perf_counter() - began
        print(json.dumps(line), flush=True)


def _peak_bytes() -> int:
    """The most memory of this process so far; that of getrusage begins with its parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _mutations(folder: Path) -> Mutations:
    corpus = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    files = {name: base64.b64decode(raw) for name, raw in corpus["files"].items()}
    attacks = [base64.b64decode(raw) for raw in corpus["attacks"]]
    return Mutations(files, corpus["names"], attacks)


# The parent ---------------------------------------------------------------------------------------


def corpus() -> dict[str, bytes]:
    """Files that trainers wrote, and files of their schemas in other ways of writing."""
    import io
    import pickle

    import torch

    import dumps
    from stand_ins import verl_pickle

    files = {p.name: p.read_bytes() for p in sorted((TESTS / "fixtures").glob("*.p[kt]*"))}
    rollouts = dumps.truth()
    for protocol in (2, 3, 4, 5):
        files[f"verl-{protocol}.pkl"] = pickle.dumps(dumps.verl(rollouts), protocol)
    files["slime.pkl"] = pickle.dumps(dumps.slime_samples(rollouts[:4]))
    files["tensors.pkl"] = pickle.dumps(dumps.tensors(dumps.trl(rollouts)))
    for way in ("numpy", "tensordict", "consolidated"):
        files[f"verl-{way}.pkl"] = verl_pickle(rollouts, way)
    table = dumps.tensors(dumps.openrlhf(rollouts))
    table["action_log_probs"] = table["action_log_probs"].bfloat16()
    table["advantages"] = torch.nn.Parameter(table["advantages"])
    microbatches = list(table["sequences"])
    table["other"] = torch.nested.as_nested_tensor(microbatches, layout=torch.jagged)
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save(table, file, _use_new_zipfile_serialization=zipped)
        files[f"openrlhf-{zipped}.pt"] = file.getvalue()
    return files


def write_corpus(folder: Path) -> None:
    from hostile_pickles import FIELDS

    from forkpoint.formats.pickles import NAMES

    encoded = {name: base64.b64encode(raw).decode() for name, raw in corpus().items()}
    attacks = [base64.b64encode(v).decode() for v, _ in FIELDS.values() if len(v) < 4096]
    content = {"files": encoded, "names": sorted(NAMES), "attacks": attacks}
    (folder / "corpus.json").write_text(json.dumps(content), encoding="utf-8")


class Tally:
    """Counts of what became of the mutations, and all faults."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []
        self.growth_bytes = 0
        self.peak_bytes = 0
        self.slowest_seconds = 0.0
        self.seconds = 0.0

    def add(self, line: dict[str, Any]) -> None:
        self.outcomes[line["outcome"]] += 1
        self.growth_bytes = max(self.growth_bytes, line.get("growth_bytes", 0))
        self.peak_bytes = max(self.peak_bytes, line.get("peak_bytes", 0))
        self.slowest_seconds = max(self.slowest_seconds, line.get("seconds", 0.0))
        if line["fault"]:
            self.faults.append(line)

    def report(self) -> dict[str, Any]:
        return {
            "mutations": self.outcomes.total(),
            "outcomes": dict(self.outcomes.most_common()),
            "faults": self.faults,
            "growth_bytes": self.growth_bytes,
            "peak_bytes": self.peak_bytes,
            "slowest_seconds": round(self.slowest_seconds, 3),
            "seconds": round(self.seconds, 1),
        }


def fuzz(count: int, seed: int, workers: int, command: tuple[str, ...] = (__file__,)) -> Tally:
    """Outcomes of `count` mutations, read in worker processes.

    Args:
        count: how many mutations.
        seed: of all of them.
        workers: how many processes read at a time.
        command: what Python runs as a worker.
    """
    began = time.monotonic()
    with TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        folder = Path(name)
        write_corpus(folder)
        parts = [
            pool.submit(_shard, folder, n, workers, count, seed, command) for n in range(workers)
        ]
        tallies = [part.result() for part in parts]
    whole = tallies[0]
    for tally in tallies[1:]:
        whole.outcomes += tally.outcomes
        whole.faults += tally.faults
        whole.growth_bytes = max(whole.growth_bytes, tally.growth_bytes)
        whole.peak_bytes = max(whole.peak_bytes, tally.peak_bytes)
        whole.slowest_seconds = max(whole.slowest_seconds, tally.slowest_seconds)
    if whole.growth_bytes > MOST_GROWTH_BYTES:
        whole.faults.append({"outcome": "growth", "fault": f"{whole.growth_bytes} bytes"})
    whole.seconds = time.monotonic() - began
    return whole


def _shard(
    folder: Path, first: int, step: int, count: int, seed: int, command: tuple[str, ...]
) -> Tally:
    """Every `step`-th mutation; a worker that dies is a fault, and another goes on after it."""
    tally = Tally()
    while first < count:
        arguments = [str(n) for n in (folder, first, step, count, seed)]
        begun, options = None, [*command, "--work", *arguments]
        with subprocess.Popen([sys.executable, *options], stdout=PIPE, text=True) as worker:
            assert worker.stdout is not None
            for text in worker.stdout:
                line = json.loads(text)
                begun = line.get("begin")
                if begun is None:
                    tally.add(line)
        if worker.returncode == 0:
            break
        assert begun is not None, "a worker ended before it read anything"
        outcome = "too slow" if worker.returncode == -signal.SIGALRM else "crash"
        fault = f"the worker ended with {worker.returncode}"
        tally.add({"index": begun, "outcome": outcome, "fault": fault})
        first = begun + step
    return tally


def replay(index: int, seed: int) -> int:
    """Reads one mutation in this process, and says what is in it."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        path = folder / "x.pt"
        origin, content = _mutations(folder).draw(f"{seed}/{index}")
        path.write_bytes(content)
        print(f"{origin}, mutated: {len(content)} bytes\n{content[:4000]!r}")
        outcome, fault = read(path, Watch(path))
        print(outcome, fault, sep="\n")
    return int(bool(fault))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where counts and faults are written")
    parser.add_argument("--replay", type=int, metavar="INDEX", help="read one mutation here")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        folder, *numbers = arguments.work
        work(Path(folder), *map(int, numbers))
        return 0
    if arguments.replay is not None:
        return replay(arguments.replay, arguments.seed)
    report = fuzz(arguments.mutations, arguments.seed, arguments.workers).report()
    text = json.dumps({"seed": arguments.seed, **report}, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(report["faults"]))


if __name__ == "__main__":
    sys.exit(main())
