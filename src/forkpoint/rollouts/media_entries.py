"""Images and videos in files of rollouts: a JSON entry for each occurrence, and each array once.

An entry has the kind, tokens, SHA-256 and digest of a medium, and the dtype and shape of each
input. Short inputs, such as a grid, are in the entry. Longer inputs are arrays named
`SHA256.INPUT`. Plans need only the entries. Imports no torch.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.disk import PIXELS, pixels_path
from forkpoint.rollouts.fields import short
from forkpoint.rollouts.media import Absent, Media
from forkpoint.rollouts.schema import SchemaError, read

if TYPE_CHECKING:  # forkpoint.rollouts.formats imports this module
    from forkpoint.rollouts.formats.limits import MemoryLimit

MOST_VALUES = 64
"""Largest number of values that an entry holds. Longer inputs are arrays."""
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = ("bool", *_WHOLE, "float16", "float32", "float64")
_ENTRY_BYTES = 4096
"""Bytes of a medium without its arrays."""


@dataclass(frozen=True)
class _Input:
    dtype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class _Entry:
    kind: str
    tokens: int
    sha256: str
    inputs: Mapping[str, _Input]
    digest: str | None = None


Arrays = dict[str, NDArray[Any]]
ArrayOf = Callable[[str, Absent], NDArray[Any]]
"""Returns the array with this name, shape and dtype. Raises SchemaError if they differ."""


def entry_of(medium: Media, arrays: Arrays, where: str) -> dict[str, Any]:
    """Make the entry of a medium. The arrays that it names are added to `arrays`.

    Raises RolloutError, beginning with `where`, for inputs that files cannot have.
    """
    if medium.is_absent:
        raise RolloutError(
            f"{where} has {medium!r} without its pixels, which cannot be written. Read its file "
            "with pixels=True."
        )
    inputs: dict[str, Any] = {}
    for name in medium.inputs:
        value = medium.array(name)
        if value.dtype.name not in _DTYPES or not value.size:
            raise RolloutError(
                f"{where} has a medium whose {short(name)} is an array of {value.dtype} and shape "
                f"{list(value.shape)}; files hold numbers, at least one. Convert it, or leave it "
                "out."
            )
        inputs[name] = {"dtype": value.dtype.name, "shape": list(value.shape)}
        if value.size <= MOST_VALUES and np.isfinite(value).all():
            inputs[name]["values"] = value.ravel().tolist()
        else:
            arrays[f"{medium.sha256}.{name}"] = value
    entry = {"kind": medium.kind, "tokens": medium.tokens, "sha256": medium.sha256}
    given = medium.given_digest
    return entry | ({} if given is None else {"digest": given}) | {"inputs": inputs}


class MediaEntries:
    """Reads the entries of one file. Equal entries give one `Media` object.

    Args:
        array_of: reads an array; None leaves out the numbers of arrays (`Media.is_absent`).
        memory: limit that media are charged to, until the whole file is read.
    """

    def __init__(self, array_of: ArrayOf | None, memory: "MemoryLimit") -> None:
        self._array_of, self._memory = array_of, memory
        self._known: dict[str, Media] = {}
        self._sha256: dict[Media, str] = {}
        """SHA-256 of the first of equal media, which steps run instead of the others."""

    def read(self, entries: Any, field: str) -> tuple[Media, ...]:
        """Read the media of a list of entries.

        Raises:
            SchemaError: an entry is wrong, or its arrays are missing or differ.
            RolloutError: they exceed the memory limit, or arrays cannot be read.
        """
        if not isinstance(entries, list):
            raise SchemaError(f"{field} is {short(entries)}; it takes a list")
        return tuple(self._read(entry, f"{field}[{n}]") for n, entry in enumerate(entries))

    def _read(self, entry: Any, field: str) -> Media:
        key = json.dumps(entry, sort_keys=True)
        if key not in self._known:
            self._memory.hold(_ENTRY_BYTES + len(key), "a medium")
            medium = self._make(read(_Entry, entry, field), field)
            first = self._sha256.setdefault(medium, medium.sha256)
            if first != medium.sha256:
                raise SchemaError(
                    f"{field}.digest is {short(medium.given_digest)}, as of a medium with other "
                    f"inputs: their sha256 are {medium.sha256} and {first}; media that differ take "
                    "different digests"
                )
            self._known[key] = medium
        return self._known[key]

    def _make(self, entry: _Entry, field: str) -> Media:
        inputs: dict[str, Any] = {}
        for name, given in entry.inputs.items():
            of = f"{field}.inputs.{name if name.isidentifier() else short(name)}"
            if given.dtype not in _DTYPES:
                raise SchemaError(f"{of}.dtype is {short(given.dtype)}; it takes {_DTYPES}")
            outline = Absent(given.shape, np.dtype(given.dtype))
            if given.values is not None:
                inputs[name] = _of_values(given.values, outline, of)
            elif self._array_of is None:
                inputs[name] = outline
            else:
                inputs[name] = self._array_of(f"{entry.sha256}.{name}", outline)
        kind: Any = entry.kind  # Media checks it
        try:
            if self._array_of is None:
                return Media.absent(kind, inputs, entry.tokens, entry.digest, sha256=entry.sha256)
            medium = Media(kind, inputs, entry.tokens, entry.digest)
        except RolloutError as error:
            raise SchemaError(f"{field}: {error}".rstrip(".")) from None
        if medium.sha256 != entry.sha256:
            raise SchemaError(
                f"{field}.sha256 is {short(entry.sha256)}, and its inputs have {medium.sha256}: "
                "they belong to another file, or have been changed"
            )
        return medium


def _of_values(values: tuple[Any, ...], outline: Absent, field: str) -> NDArray[Any]:
    """The array of an entry's values. The hash of the medium shows whether they have changed."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.array(values, outline.dtype).reshape(outline.shape)
    except (ValueError, OverflowError, TypeError):
        raise SchemaError(
            f"{field}.values are {short(list(values))}, which are not {outline.dtype} of the shape "
            f"{list(outline.shape)}"
        ) from None


class PixelFile:
    """The safetensors file with the arrays of a file of rollouts. It is opened at the first
    access."""

    def __init__(self, path: Path, memory: "MemoryLimit") -> None:
        self.path: Path = pixels_path(path)
        self._memory = memory
        self._file: Any = None
        self._names: frozenset[str] = frozenset()

    def array_of(self, name: str, outline: Absent) -> NDArray[Any]:
        """Read the array with this name.

        Raises:
            SchemaError: the array is missing, or has another shape or dtype.
            RolloutError: the file is missing or damaged, or the array exceeds the memory limit.
        """
        try:
            if self._file is None:
                self._file = safetensors.safe_open(self.path, framework="np")
                self._names = frozenset(self._file.keys())
            if name not in self._names:
                raise SchemaError(
                    f"{self.path} has no array {short(name)}: it belongs to other rollouts"
                )
            count = int(np.prod(outline.shape, dtype=object)) * outline.dtype.itemsize
            self._memory.hold(count, f"the array {short(name)} of {self.path.name}")
            array = self._file.get_tensor(name)
            if (array.shape, array.dtype) != outline:
                raise SchemaError(
                    f"{self.path} has {short(name)} of shape {list(array.shape)} and dtype "
                    f"{array.dtype}, and the rollout says {list(outline.shape)} and {outline.dtype}"
                )
            return array
        except FileNotFoundError:
            raise RolloutError(
                f"{self.path} does not exist, and rollouts have images or videos whose inputs are "
                f"there. Keep FILE and FILE{PIXELS} in one folder; only forkpoint plan needs no "
                "pixels."
            ) from None
        # numpy raises the last two for dtypes that it lacks.
        except (OSError, safetensors.SafetensorError, TypeError, AttributeError) as error:
            raise RolloutError(
                f"{self.path} cannot be read as safetensors: {short(str(error))}. Copy or write "
                "the file again."
            ) from None
