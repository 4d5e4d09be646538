"""The manifest of a trace: JSON lines that name each other, so that none can change unseen.

Line 0 is the header, each further line one batch. A line holds the checksum of the line before it
(`previous`) and its own (`checksum`, over all its other keys), and is written only once the shard
that it names is on disk. Imports no torch.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forkpoint.errors import TraceError
from forkpoint.rollouts import short

SCHEMA = 1
"""The version that is written. Older ones that can be read would be listed in `read_line`."""
MANIFEST = "manifest.jsonl"
KIND = "forkpoint trace"
_SHARD = re.compile(r"batch-(\d{6,})\.safetensors")


def shard_name(index: int) -> str:
    """The file of batch `index`."""
    return f"batch-{index:06d}.safetensors"


def last_shard(folder: Path) -> int:
    """The number of the last batch that has a file, -1 where none has one."""
    names = (entry.name for entry in folder.glob("batch-*.safetensors"))
    return max((int(found[1]) for name in names if (found := _SHARD.fullmatch(name))), default=-1)


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
            "at its end. Take a copy of the trace as it was recorded."
        )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sealed(values: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """`values` as a line of the manifest after the one whose checksum is `previous`."""
    line = {**values, "previous": previous}
    return {**line, "checksum": _checksum(line)}


def encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_lines(
    path: Path, begin: int, previous: str, number: int
) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a manifest from byte `begin`, and the byte after the last of them.

    A last line without its line feed is being written, or was when its writer ended; it is left.

    Args:
        path: the manifest.
        begin: where a line begins.
        previous: the checksum of the line before it, "" at the beginning.
        number: that line's number, counted from 1.

    Raises TraceError, naming file and line, where a line is not what was written.
    """
    with path.open("rb") as file:
        file.seek(begin)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    lines: list[dict] = []
    for raw in whole.splitlines():
        line = _decode(raw, f"{path}, line {number + len(lines)}", previous)
        previous = line["checksum"]
        lines.append(line)
    return lines, begin + len(whole)


def _decode(raw: bytes, where: str, previous: str) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except ValueError as error:
        raise TraceError(
            f"{where}: not JSON ({error}); the manifest has been changed or damaged. Take a copy "
            "of the trace as it was recorded."
        ) from None
    if not isinstance(line, dict) or not isinstance(line.get("checksum"), str):
        raise TraceError(
            f"{where} is {short(line)}, not a line of a manifest: each is an object with a "
            f"checksum. {MANIFEST} is what forkpoint.record wrote, and nothing else."
        )
    if "schema" in line and line["schema"] != SCHEMA:  # before the checksum: a newer one may differ
        raise TraceError(
            f"{where}: the trace has schema {short(line['schema'])}, and this forkpoint reads "
            f"schema {SCHEMA}. Install the forkpoint that wrote it "
            f"({short(line.get('forkpoint', 'unknown'))}), or a newer one."
        )
    found = _checksum({key: value for key, value in line.items() if key != "checksum"})
    if found != line["checksum"]:
        raise TraceError(
            f"{where} has been changed since it was recorded: its checksum is {line['checksum']}, "
            f"and its content gives {found}. Take a copy of the trace as it was recorded."
        )
    if line.get("previous") != previous:
        raise TraceError(
            f"{where} does not follow the line before it: lines are missing, out of order, or of "
            "another trace. Take a copy of the trace as it was recorded."
        )
    return line


def _checksum(line: Mapping[str, Any]) -> str:
    return sha256(json.dumps(line, allow_nan=False, sort_keys=True, separators=(",", ":")).encode())
