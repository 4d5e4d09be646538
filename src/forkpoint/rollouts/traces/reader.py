"""The one door to files of rollouts, whichever trainer wrote them. Imports no torch by itself."""

import logging
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.batch import Rollout, short
from forkpoint.rollouts.files import as_path
from forkpoint.rollouts.formats import Format, detect, named, of_another_format
from forkpoint.rollouts.formats.containers import container_of, parts
from forkpoint.rollouts.formats.limits import MemoryLimit
from forkpoint.rollouts.formats.record import Record, RecordError
from forkpoint.rollouts.formats.samples import samples
from forkpoint.rollouts.traces.trace import Trace, is_trace, refuse_part_of_trace
from forkpoint.units import MemorySize, format_bytes, size_in_bytes

OnError = Literal["raise", "skip"]
MOST_MESSAGES = 10
MOST_SKIPPED = 100_000
"""Records that are left out at most before the first rollout."""
_ID_BYTES = 256
"""Bytes for recognising a rollout_id again, besides its text."""
_REWARDS = (
    "The file has rewards and no advantages: advantages are the rewards less their group's mean, "
    "over their group's standard deviation (0 where that is 0)."
)
_log = logging.getLogger("forkpoint")


@dataclass
class Skipped:
    """Records that were left out of a file, and why.

    count: how many records.
    fields: how many for each field that was wrong ("JSON" for lines that are no JSON object,
        "format" for records of no known format, before the first that is of one).
    messages: the first errors, whole.
    """

    count: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    def add(self, error: RecordError) -> None:
        self.count += 1
        self.fields[error.field] += 1
        if len(self.messages) < MOST_MESSAGES:
            self.messages.append(str(error))

    @property
    def why(self) -> str:
        """The fields that were wrong, each with how often it was."""
        return ", ".join(f"{field} {count:,}" for field, count in self.fields.most_common())

    def __str__(self) -> str:
        return f"{self.count:,} skipped ({self.why})"


class RolloutFile:
    """Rollouts of a file, one at a time, in bounded memory: made by `open_rollouts`.

    Iterating reads the file; what follows is of the last iteration.

    container: the kind of file, such as "parquet".
    format: the name of the format, None before the first record.
    skipped: records left out.
    notes: what has to be known of these rollouts, such as where advantages are from.
    rewarded: whether some of the rollouts had no advantage, and have their reward in its place.
    memory: the limit on memory, and what is held of it. A rollout is the caller's own once it is
        given; one that counts towards the limit is charged with `memory.keep`, as `read` does.
    trace: where the file is the folder of a trace, the trace as it was opened.
    """

    def __init__(
        self,
        path: Path | str,
        format: str | None,
        on_error: OnError,
        limit: int | None,
        tokenizer: Callable[[str], list[int]] | None,
        memory_limit: int | None,
    ) -> None:
        path = path if isinstance(path, Path) else _downloaded(path, self)
        self.path: Path = path
        self.container: str = "trace" if is_trace(path) else container_of(path)
        if format is not None and (format == "trace") != (self.container == "trace"):
            raise ConfigError(
                f"format is {short(format)}, and {path} is of the kind {self.container!r}; a trace "
                "has the format 'trace', and nothing else has it."
            )
        self.format = "trace" if self.container == "trace" else format
        if self.container == "trace" and tokenizer is not None:
            raise _no_text(path, "trace")
        self.skipped = Skipped()
        self.notes: tuple[str, ...] = ()
        self.rewarded: bool = False
        self._asked, self._on_error, self._limit = format, on_error, limit
        self._tokenizer = tokenizer
        self._rewarded: set[int] | None = None
        self.memory: MemoryLimit = MemoryLimit(path, memory_limit)
        self.trace: Trace | None = None
        if self.container == "trace":
            self._open_trace()

    def __iter__(self) -> Iterator[Rollout]:
        """The rollouts. Where a file has no advantages, a rollout's is its reward here."""
        try:
            yield from self._limited()
        except MemoryError:
            raise RolloutError(
                f"{self.path} takes more memory than there is for this process, though less than "
                f"memory_limit, which is {format_bytes(self.memory.limit_bytes)}. Set it to what "
                "there is (memory_limit=, --memory-limit), or read fewer rollouts (limit=, "
                "--limit)."
            ) from None

    def _limited(self) -> Iterator[Rollout]:
        self.format = self._asked
        self.skipped: Skipped = Skipped()
        self.notes, self.rewarded = (), False
        self.memory.reset()
        count = 0
        for item in self._trace() if self.container == "trace" else self._items():
            if isinstance(item, RecordError):
                if self._on_error == "raise":
                    raise item
                self.skipped.add(item)
                if not count and self.skipped.count == MOST_SKIPPED:
                    break
                continue
            yield item
            count += 1
            if count == self._limit:
                break
        if self.skipped.count and count:
            _log.warning("%s: %s; first: %s", self.path, self.skipped, self.skipped.messages[0])
        if not count:
            what = "it is empty or has only blank lines. Look at what wrote it."
            if self.container == "trace":
                what = "it has no whole batch yet. Wait for its recorder, or record again."
            if self.skipped.count:
                which = "all of its records"
                if self.skipped.count == MOST_SKIPPED:
                    which = f"its first {MOST_SKIPPED:,} records"
                what = f"{which} were skipped, {self.skipped.why}; first: "
                what += self.skipped.messages[0]
            raise RolloutError(f"{self.path} holds no rollouts: {what}")

    def read(self) -> list[Rollout]:
        """All rollouts; rewards are made advantages where the file has no advantages.

        They are charged to `memory`. Raises RolloutError where they take more than it has left.
        """
        rollouts: list[Rollout] = []
        self._rewarded = set()
        try:
            for rollout in self:
                self.memory.keep(rollout)
                rollouts.append(rollout)
            if self._rewarded:
                self.notes = (*self.notes, _REWARDS)
                _normalise(rollouts, self._rewarded)
        finally:
            self._rewarded = None
        return rollouts

    def _items(self) -> Iterator[Rollout | RecordError]:
        format = named(self._asked) if self._asked else None
        seen: dict[str, str] = {}
        count = 0
        for where, value in parts(self.path, self.container, self.memory):
            if isinstance(value, RecordError):
                yield value
                continue
            refuse_part_of_trace(value, self.path)
            if format is None:
                try:
                    format = detect(value, where)
                except RolloutError as error:
                    if self._on_error == "raise":
                        raise
                    yield RecordError.of(error, "format")
                    continue
            if self._tokenizer is not None and not format.text:
                raise _no_text(self.path, format.name)
            self.format, self.notes = format.name, format.notes
            for item in samples(where, value, format, self._tokenizer):
                for made in _rollouts(item, format):
                    if isinstance(made, Rollout):
                        twice = self._seen_before(made, item.where, seen)
                        if twice is not None:
                            yield twice
                            continue
                        self.rewarded = self.rewarded or item.rewarded
                        if item.rewarded and self._rewarded is not None:
                            self._rewarded.add(count)
                        count += 1
                    elif self._asked:
                        made = of_another_format(made, format, value)
                    yield made

    def _seen_before(
        self, rollout: Rollout, where: str, seen: dict[str, str]
    ) -> RecordError | None:
        name = rollout.rollout_id
        if name is None:
            return None
        place = where.removeprefix(f"{self.path}, ")
        if name not in seen:
            self.memory.hold(_ID_BYTES + len(name) + len(place), "rollout_ids read so far")
        first = seen.setdefault(name, place)
        if first == place:
            return None
        return RecordError(
            str(self.path),
            "rollout_id",
            f"rollout_id {short(name)} is on {first} and again on {place}; each rollout needs its "
            "own. Rename one, or leave rollout_id out.",
        )

    def _open_trace(self) -> Trace:
        self.trace = Trace(self.path, self.memory)
        return self.trace

    def _trace(self) -> Iterator[Rollout]:
        self.format = "trace"
        for step in self._open_trace():
            for rollout in step.batch:
                group = rollout.group_id
                yield replace(
                    rollout,
                    rollout_id=f"{step.index}/{rollout.rollout_id}",
                    group_id=None if group is None else f"{step.index}/{group}",
                )


def open_rollouts(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    limit: int | None = None,
    tokenizer: str | os.PathLike[str] | Callable[[str], list[int]] | None = None,
    memory_limit: MemorySize | None = None,
) -> RolloutFile:
    """The rollouts of a file, to be read one at a time; arguments and errors of `load_rollouts`."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(
            f"limit is {short(limit)}; it takes a whole number of at least 1. Leave it out to read "
            "all rollouts."
        )
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is {short(on_error)}; allowed are 'raise', 'skip'.")
    if format not in (None, "trace"):
        named(format)
    memory_bytes = size_in_bytes(memory_limit)
    if tokenizer is not None and not callable(tokenizer):
        tokenizer = _tokenizer(Path(tokenizer))
    source = path if isinstance(path, str) and "://" in path else as_path(path, "a file")
    return RolloutFile(source, format, on_error, limit, tokenizer, memory_bytes)


def load_rollouts(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    on_error: OnError = "raise",
    limit: int | None = None,
    tokenizer: str | os.PathLike[str] | Callable[[str], list[int]] | None = None,
    memory_limit: MemorySize | None = None,
) -> list[Rollout]:
    """The rollouts of a file in their order.

    Args:
        path: JSON lines (plain, gzip or zstd), parquet, safetensors, a torch file, or the folder
            of a recorded trace. The content tells which it is. A url that fsspec opens, such as
            "hf://datasets/NAME/FILE" or "s3://BUCKET/FILE", is fetched as a whole first.
        format: how its fields are named, one of `forkpoint.traces.FORMATS`; None sees it from the
            first record.
        on_error: "raise" stops at the first record that cannot be read; "skip" leaves such records
            out, and logs as a warning how many and why. `open_rollouts` has them as an object. A
            file that is damaged as a whole is an error either way.
        limit: at most this many rollouts; what lies beyond is not looked at.
        tokenizer: for files that hold text, and refused for others: a function from text to token
            ids, or the path of a tokenizer.json.
        memory_limit: the most memory for the rollouts and for one line, row group or batch that is
            read to make them, as a number of bytes or text such as "8GB". Sizes are estimated
            before anything is allocated; docs/security.md says what is not bounded. None takes
            640 MiB, or 16 times what the file has on disk where that is more.

    Raises RolloutError, naming the file, record and field, for anything that is not a rollout, for
    a rollout_id that is there twice, for a file that is missing, empty, damaged, of no known
    format, a pickle or a torch file that names code, and for one that takes more memory than the
    limit; and ConfigError for arguments that are not allowed and for an extra that is missing.
    """
    return open_rollouts(
        path,
        format=format,
        on_error=on_error,
        limit=limit,
        tokenizer=tokenizer,
        memory_limit=memory_limit,
    ).read()


def _downloaded(url: str, reader: RolloutFile) -> Path:
    """A local copy of the file at a url, which is removed when nobody has the reader any more."""
    folder = tempfile.mkdtemp(prefix="forkpoint-")
    weakref.finalize(reader, shutil.rmtree, folder, ignore_errors=True)
    try:
        from fsspec.core import url_to_fs

        files, remote = url_to_fs(url)
        copy = Path(folder) / Path(remote).name
        files.get_file(remote, str(copy))
    except ImportError as error:
        raise ConfigError(
            f"{url} is read by fsspec with the package of its protocol, and one of them is not "
            f"installed: {error}. Install it, or give the path of a local file."
        ) from None
    except Exception as error:  # of any kind: each protocol raises its own
        raise RolloutError(
            f"{url} cannot be fetched: {type(error).__name__}: {short(str(error))}. Check the "
            "address and your access, or give the path of a local file."
        ) from None
    return copy


def _rollouts(record: Record, format: Format) -> Iterator[Rollout | RecordError]:
    try:
        yield from format.rollouts(record)
    except RecordError as error:
        yield error


def _normalise(rollouts: list[Rollout], which: set[int]) -> None:
    groups: dict[str | None, list[int]] = {}
    for n in sorted(which):
        groups.setdefault(rollouts[n].group_id, []).append(n)
    for members in groups.values():
        rewards = np.array([rollouts[n].advantage for n in members])
        spread = float(rewards.std())
        for n, reward in zip(members, rewards.tolist(), strict=True):
            advantage = (reward - float(rewards.mean())) / spread if spread > 0 else 0.0
            rollouts[n] = replace(rollouts[n], advantage=advantage)


def _no_text(path: Path, format: str) -> ConfigError:
    return ConfigError(
        f"{path} is of format {format!r}, which has token ids, and a tokenizer is for files that "
        "hold text. Leave it out (tokenizer=, --tokenizer)."
    )


def _tokenizer(path: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"tokenizer {path} cannot be read: {short(str(error))}. Give a tokenizer.json as "
            "Hugging Face's tokenizers write it."
        ) from None
    return lambda text: made.encode(text, add_special_tokens=False).ids
