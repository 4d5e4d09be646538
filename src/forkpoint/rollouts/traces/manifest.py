"""The manifest of a trace: JSON lines that name each other, so that none can change unseen.

Line 1 is the header, each further line one batch. A line holds the checksum of the line before it
(`previous`) and its own (`checksum`, over all its other keys), and is written only once the shard
that it names is on disk. Imports no torch.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkpoint.errors import TraceError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats.json_lines import parse_strictly
from forkpoint.rollouts.formats.limits import TIMES_FILE, MemoryLimit
from forkpoint.rollouts.traces.fields import BATCH, HEADER, Problem, check_counts, check_fields

SCHEMA = 1
"""The version that is written. Older ones that can be read would be listed in `read_lines`."""
MANIFEST = "manifest.jsonl"
KIND = "forkpoint trace"
AGAIN = "Take a copy of the trace as it was recorded."
_SHARD = re.compile(r"batch-(\d{6,})\.safetensors")

Line = dict[str, Any]


@dataclass(frozen=True)
class Broken:
    """A line that is not what a recorder wrote there, after lines that are.

    reason: which line, and what is wrong with it.
    lines: how many whole lines are left from it on.
    batches: the numbers of batches that these lines say they are of, as far as they can be read.
    """

    reason: str
    lines: int
    batches: frozenset[int]


def shard_name(index: int) -> str:
    """The file of batch `index`."""
    return f"batch-{index:06d}.safetensors"


def last_shard(folder: Path) -> int:
    """The number of the last batch that has a file, -1 where none has one."""
    last = -1
    with os.scandir(folder) as entries:
        for entry in entries:
            if found := _SHARD.fullmatch(entry.name):
                last = max(last, int(found[1]))
    return last


def check_end(path: Path, batches: int, last: int) -> None:
    """Whether lines are missing at the end of a manifest, which the lines that are left cannot say.

    Args:
        path: the manifest.
        batches: how many it lists.
        last: what last_shard gave before it was read. A recorder is one file ahead of it at most.

    Raises TraceError where there are files of more batches.
    """
    if last > batches:
        raise TraceError(
            f"{path} lists {batches} batches, and {shard_name(last)} is there: lines are missing "
            f"at its end. {AGAIN}"
        )


def sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def sealed(values: Mapping[str, Any], previous: str) -> Line:
    """`values` as a line of the manifest after the one whose checksum is `previous`."""
    line = {**values, "previous": previous}
    return {**line, "checksum": _checksum(line)}


def encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class Lines:
    """The whole lines of a manifest, one at a time, each checked by itself and against the one
    before it.

    A last line without its line feed is being written, or was when its writer ended; it is left.

    end: the byte after the last line that was given.
    broken: what is wrong after that line, once all have been given; None where nothing is.
    """

    def __init__(self, path: Path, memory: MemoryLimit) -> None:
        self.path = path
        self.end: int = 0
        self.broken: Broken | None = None
        self._memory = memory

    def __iter__(self) -> Iterator[Line]:
        """The lines, of which the first is the header.

        Raises TraceError, naming file and line, where the header is not one, where a line has been
        changed that others follow, and where a line has other fields than a recorder writes.
        """
        previous, self.end, self.broken = "", 0, None
        with self.path.open("rb") as file:
            for number, raw in enumerate(self._whole(file), start=1):
                where = f"{self.path}, line {number}"
                self._memory.check(TIMES_FILE * len(raw), f"line {number} of the manifest")
                try:
                    line = _parsed(raw, where)
                    _check_chain(line, where, previous)
                except TraceError as error:
                    self.broken = self._rest(file, raw, error)
                    if number == 1:
                        raise
                    return
                _check_line(line, where, number)
                yield line
                self.end, previous = self.end + len(raw), line["checksum"]

    def _whole(self, file: Any) -> Iterator[bytes]:
        while raw := file.readline(most := max(1, self._memory.left_bytes)):
            if not raw.endswith(b"\n"):
                if len(raw) == most:
                    raise self._memory.refusal(most + 1, "a line of the manifest")
                return
            yield raw

    def _rest(self, file: Any, raw: bytes, error: TraceError) -> Broken:
        """Lines that are left from a wrong line on.

        Raises that error where the next line follows this one as it was before it was changed.
        """
        claimed = _claimed(raw)
        batches = {claimed.get("batch")}
        lines = 1
        for later in self._whole(file):
            self._memory.check(TIMES_FILE * len(later), "a line of the manifest")
            found = _claimed(later)
            checksum = claimed.get("checksum")
            follows = isinstance(checksum, str) and found.get("previous") == checksum
            if lines == 1 and follows and "has been changed" in str(error):
                raise error
            batches.add(found.get("batch"))
            lines += 1
        return Broken(str(error), lines, frozenset(n for n in batches if type(n) is int))


def _claimed(raw: bytes) -> Mapping[str, Any]:
    """Fields of a line that may be wrong; none where it is not even an object."""
    try:
        found = parse_strictly(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(raw: bytes, where: str) -> Line:
    try:
        line = parse_strictly(raw)
    except ValueError as error:
        raise TraceError(
            f"{where}: not JSON ({error}); the manifest has been changed or damaged. {AGAIN}"
        ) from None
    if not isinstance(line, dict) or not isinstance(line.get("checksum"), str):
        raise TraceError(
            f"{where} is {short(line)}, not a line of a manifest: each is an object with a "
            f"checksum. {MANIFEST} is what forkpoint.record wrote, and nothing else."
        )
    return line


def _check_chain(line: Line, where: str, previous: str) -> None:
    schema = line.get("schema", SCHEMA)  # before the checksum: a newer one may differ
    if "schema" in line and (type(schema) is not int or schema != SCHEMA):
        raise TraceError(
            f"{where}: the trace has schema {short(line['schema'])}, and this forkpoint reads "
            f"schema {SCHEMA}. Install the forkpoint that wrote it "
            f"({short(line.get('forkpoint', 'unknown'))}), or a newer one."
        )
    found = _checksum({key: value for key, value in line.items() if key != "checksum"})
    if found != line["checksum"]:
        raise TraceError(
            f"{where} has been changed since it was recorded: its checksum is "
            f"{short(line['checksum'])}, and its content gives {found}. {AGAIN}"
        )
    if line.get("previous") != previous:
        raise TraceError(
            f"{where} does not follow the line before it: lines are missing, out of order, or of "
            f"another trace. {AGAIN}"
        )


def _check_line(line: Line, where: str, number: int) -> None:
    """Whether a line has the fields that a recorder writes there."""
    if number == 1 and line.get("kind") != KIND:
        raise TraceError(
            f"{where} is {short(line)}, not the header of a trace. Give the folder that was given "
            "to forkpoint.record."
        )
    try:
        check_fields(line, HEADER if number == 1 else BATCH)
        if number > 1:
            check_counts(line)
    except Problem as problem:
        raise TraceError(f"{where}: {problem}. {AGAIN}") from None
    index = number - 2
    if number > 1 and (line["batch"], line["file"]) != (index, shard_name(index)):
        raise TraceError(
            f"{where} is of batch {line['batch']} in {short(line['file'])}; here belongs batch "
            f"{index}. {AGAIN}"
        )


def _checksum(line: Mapping[str, Any]) -> str:
    return sha256(json.dumps(line, allow_nan=False, sort_keys=True, separators=(",", ":")).encode())
