"""Readers of files of rollouts from all trainers. Imports torch only for torch files."""

import logging
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import Rollout, short
from forkpoint.rollouts.disk import PIXELS, pixels_path
from forkpoint.rollouts.files import as_path
from forkpoint.rollouts.formats import detect, format_named
from forkpoint.rollouts.formats.containers import container_of, parts
from forkpoint.rollouts.formats.limits import MemoryLimit
from forkpoint.rollouts.formats.record import Made, RecordError, samples
from forkpoint.rollouts.formats.text import Encode, Tokenizer, tokenizer_of
from forkpoint.rollouts.media_entries import MediaEntries, PixelFile
from forkpoint.rollouts.synthetic import normalised
from forkpoint.rollouts.traces.trace import Trace, is_trace, refuse_part_of_trace
from forkpoint.units import MemorySize, format_bytes, size_in_bytes

OnError = Literal["raise", "skip"]
MOST_MESSAGES = 10
_ID_BYTES = 256
"""Bytes for each rollout_id, in addition to its text, to find repeated ids."""
_REWARDS = (
    "The file has rewards and no advantages: advantages are the rewards minus their group's mean, "
    "over their group's standard deviation (0 where that is 0)."
)
_log = logging.getLogger("forkpoint")


@dataclass
class Skipped:
    """Records of a file that were left out, with the reasons.

    count: number of records.
    fields: number of records for each wrong field ("JSON" for lines that are not JSON objects,
    "format" for records without a known format, before the first one that has one).
    messages: whole texts of the first errors.
    """

    count: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, error: RecordError) -> None:
        self.count += 1
        self.fields[error.field] += 1
        if len(self.messages) < MOST_MESSAGES:
            self.messages.append(str(error))

    def __str__(self) -> str:
        why = ", ".join(f"{name} {count:,}" for name, count in self.fields.most_common())
        return f"{self.count:,} skipped ({why})"


class RolloutFile:
    """Rollouts of a file, one at a time, in bounded memory. `open_rollouts` makes it.

    Iterating reads the file. `format` and the attributes after it describe the last iteration. If a
    file has no advantages, iteration gives rewards as advantages.

    container: kind of file, such as "parquet".
    format: name of the format; None before the first record.
    skipped: records that were left out.
    notes: remarks about these rollouts, such as the origin of their advantages.
    rewarded: whether some rollouts have their reward instead of an advantage.
    memory: limit on memory. Call `memory.keep` for rollouts that you keep, as `read` does.
    trace: the opened trace, if the file is the folder of a trace; else None.
    """

    def __init__(
        self,
        path: Path | str,
        format: str | None,
        on_error: OnError,
        limit: int | None,
        tokenize: Tokenizer | None,
        memory_limit: int | None,
        pixels: bool,
    ) -> None:
        self._pixels = pixels
        self.path: Path = path if isinstance(path, Path) else _downloaded(path, self, pixels)
        self.container: str = "trace" if is_trace(self.path) else container_of(self.path)
        if format is not None and (format == "trace") != (self.container == "trace"):
            raise ConfigError(
                f"format is {short(format)}, and {self.path} is of the kind {self.container!r}; a "
                "trace has the format 'trace', and nothing else has it."
            )
        self.format = "trace" if self.container == "trace" else format
        self.skipped: Skipped = Skipped()
        self.notes: tuple[str, ...] = ()
        self.rewarded: bool = False
        self._asked, self._on_error, self._limit = self.format, on_error, limit
        self.memory: MemoryLimit = MemoryLimit(self.path, memory_limit)
        self._tokenize = None if tokenize is None else tokenize.within(self.memory)
        self.trace: Trace | None = None
        if self.container == "trace":
            self._check_tokenizer(is_text=False)
            self.trace = Trace(self.path, self.memory)

    def __iter__(self) -> Iterator[Rollout]:
        return (rollout for rollout, _ in self._made())

    def read(self) -> list[Rollout]:
        """Read all rollouts. If there are no advantages, the rewards of each group give them.

        Raises RolloutError if the rollouts exceed the rest of `memory`.
        """
        rollouts: list[Rollout] = []
        groups: dict[str | None, list[int]] = {}
        for rollout, is_rewarded in self._made():
            self.memory.keep(rollout)
            if is_rewarded:
                groups.setdefault(rollout.group_id, []).append(len(rollouts))
            rollouts.append(rollout)
        for members in groups.values():
            advantages = normalised(np.array([rollouts[n].advantage for n in members]))
            for n, advantage in zip(members, advantages, strict=True):
                rollouts[n] = replace(rollouts[n], advantage=float(advantage))
        if groups:
            self.notes = (*self.notes, _REWARDS)
        return rollouts

    def _made(self) -> Iterator[Made]:
        """Yield rollouts up to the limit. Records that cannot be read raise an error or are left
        out."""
        self.format, self.skipped, self.notes, self.rewarded = self._asked, Skipped(), (), False
        self.memory.held_bytes = count = 0
        try:
            for item in self._of_records() if self.trace is None else self._of_trace():
                if isinstance(item, RecordError):
                    if self._on_error == "raise":
                        raise item
                    self.skipped.add(item)
                    continue
                self.rewarded = self.rewarded or item[1]
                yield item
                count += 1
                if count == self._limit:
                    break
        except MemoryError:
            raise RolloutError(
                f"{self.path} takes more memory than this process can allocate, and memory_limit "
                f"is {format_bytes(self.memory.limit_bytes)}. Lower it to the free memory "
                "(memory_limit=, --memory-limit), or read fewer rollouts (limit=, --limit)."
            ) from None
        if not count:
            what = "it is empty or has only blank lines. Check the program that wrote it."
            if self.skipped.count:
                what = f"{self.skipped}; first: {self.skipped.messages[0]}"
            raise RolloutError(f"{self.path} holds no rollouts: {what}")
        if self.skipped.count:
            _log.warning("%s: %s; first: %s", self.path, self.skipped, self.skipped.messages[0])

    def _of_records(self) -> Iterator[Made | RecordError]:
        format = format_named(self._asked) if self._asked else None
        array_of = PixelFile(self.path, self.memory).array_of if self._pixels else None
        media = MediaEntries(array_of, self.memory)
        seen: dict[str, str] = {}
        for where, value in parts(self.path, self.container, self.memory):
            if isinstance(value, RecordError):
                yield value
                continue
            refuse_part_of_trace(value, self.path)
            if format is None:
                try:
                    format = detect(value, where)
                except RolloutError as error:
                    yield RecordError(str(error), "format")
                    continue
            self.format, self.notes = format.name, format.notes
            self._check_tokenizer(is_text=format.text)
            for record in samples(where, value, format, self._tokenize, media, self.path):
                try:
                    for made in format.rollouts(record):
                        self._check_new(made[0].rollout_id, record.place, seen)
                        yield made
                except RecordError as error:
                    yield error

    def _check_new(self, name: str | None, place: str, seen: dict[str, str]) -> None:
        """Raises RecordError if a rollout_id was read before."""
        if name is None:
            return
        if name in seen:
            raise RecordError(
                f"{self.path}: rollout_id {short(name)} is on {seen[name]} and again on {place}; "
                "ids must differ. Rename one, or leave rollout_id out.",
                "rollout_id",
            )
        self.memory.hold(_ID_BYTES + len(name), "the rollout_ids")
        seen[name] = place

    def _of_trace(self) -> Iterator[Made]:
        self.trace = Trace(self.path, self.memory)
        for step in self.trace:
            for rollout in step.batch:
                group = rollout.group_id
                named = replace(
                    rollout,
                    rollout_id=f"{step.index}/{rollout.rollout_id}",
                    group_id=None if group is None else f"{step.index}/{group}",
                )
                yield named, False

    def _check_tokenizer(self, *, is_text: bool) -> None:
        if self._tokenize is not None and not is_text:
            raise ConfigError(
                f"{self.path} is of format {self.format!r}, which has token ids, and a tokenizer "
                "is for files that hold text. Leave it out (tokenizer=, --tokenizer)."
            )


def open_rollouts(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    limit: int | None = None,
    tokenizer: str | os.PathLike[str] | Encode | None = None,
    memory_limit: MemorySize | None = None,
    pixels: bool = True,
) -> RolloutFile:
    """Open a file of rollouts, to read them one at a time.

    Args:
        pixels: False reads images and videos without their pixels, and needs no file of pixels.
            Such rollouts can be planned, and steps refuse them.

    The other arguments, and errors, are those of `load_rollouts`.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(
            f"limit is {short(limit)}; it takes a whole number of at least 1. Leave it out to read "
            "all rollouts."
        )
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is {short(on_error)}; allowed are 'raise', 'skip'.")
    if format not in (None, "trace"):
        format_named(format)
    memory_bytes = size_in_bytes(memory_limit)
    tokenize = None if tokenizer is None else tokenizer_of(tokenizer)
    source = path if isinstance(path, str) and "://" in path else as_path(path, "a file")
    return RolloutFile(source, format, on_error, limit, tokenize, memory_bytes, pixels)


def load_rollouts(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    limit: int | None = None,
    tokenizer: str | os.PathLike[str] | Encode | None = None,
    memory_limit: MemorySize | None = None,
) -> list[Rollout]:
    """Read the rollouts of a file, in order.

    Args:
        path: JSON lines (plain, gzip or zstd), parquet, safetensors, a torch file, or the folder
            of a recorded trace. The content decides. Inputs of images and videos are in
            FILE.media.safetensors in the same folder. A url that fsspec opens, such as
            "hf://datasets/NAME/FILE" or "s3://BUCKET/FILE", is downloaded first.
        format: names of the fields, one of `forkpoint.traces.FORMATS`. None finds it by the first
            record.
        on_error: "raise" stops at the first record that cannot be read. "skip" leaves such records
            out, and logs a warning with their number and the reasons. A file that is damaged as a
            whole is always an error.
        limit: largest number of rollouts. Later records are not read.
        tokenizer: for files with text or messages only: a function from text to token ids, the path
            of a tokenizer.json, or a tokenizer of transformers. Messages need the chat template of
            the last.
        memory_limit: limit on memory for the rollouts and for one line, row group or batch of the
            file, in bytes or as text such as "8GB". Sizes are estimated before allocation;
            docs/reference/security.md lists memory without a limit. None means two limits: 640 MiB,
            or 16 times the size of the file if that is more, for one line, row group or batch; and
            half of the memory of the machine or its container for all.

    Raises:
        RolloutError: a record is not a rollout, or has the rollout_id of another one; or the file
            is missing, empty, damaged, of no known format, a pickle, a torch file that names code,
            or exceeds the limit on memory. The message names the file, record and field.
        ConfigError: an argument is not allowed, or an extra is missing.
    """
    return open_rollouts(
        path,
        format=format,
        on_error=on_error,
        limit=limit,
        tokenizer=tokenizer,
        memory_limit=memory_limit,
    ).read()


def _downloaded(url: str, reader: RolloutFile, pixels: bool) -> Path:
    """Download a file. The local copy is removed when the reader is garbage-collected.

    With `pixels`, its file of media is downloaded too, if there is one.
    """
    folder = tempfile.mkdtemp(prefix="forkpoint-")
    weakref.finalize(reader, shutil.rmtree, folder, ignore_errors=True)
    try:
        from fsspec.core import url_to_fs

        files, remote = url_to_fs(url)
        copy = Path(folder) / Path(remote).name
        files.get_file(remote, str(copy))
        if pixels and files.exists(remote + PIXELS):
            files.get_file(remote + PIXELS, str(pixels_path(copy)))
    except Exception as error:  # any error, because protocols raise their own
        raise RolloutError(
            f"{url} cannot be fetched: {type(error).__name__}: {short(str(error))}. Check the "
            "address, your access and the package of its protocol, or give a local file."
        ) from None
    return copy
