"""Images and videos of rollouts, after a model's processor. Imports no torch."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forkpoint.errors import RolloutError
from forkpoint.rollouts.fields import host_values, read_vector, refuse_where, short

MediaKind = Literal["image", "video"]
KINDS: tuple[MediaKind, ...] = ("image", "video")
"""Kind k of `Rollout.media_types` is `KINDS[k - 1]`; 0 is text."""


class Absent(NamedTuple):
    """Shape and dtype of an input, without its numbers: for plans, which read none."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Media:
    """One image or video: the inputs of the encoder, and the number of its placeholder tokens.

    Two media are equal if they are one object, or if their kinds, tokens, shapes and digests are
    equal. Rollouts share tokens of equal media.

    Attributes:
        kind: "image" or "video".
        inputs: numpy arrays or tensors of this medium by name, as the model's forward takes them,
            such as `pixel_values` [patches, ...] and `image_grid_thw` [1, 3]. They are not copied,
            and must not be changed.
        tokens: number of placeholder tokens in a rollout.
    """

    def __init__(
        self, kind: MediaKind, inputs: Mapping[str, Any], tokens: int, digest: str | None = None
    ) -> None:
        """
        Args:
            kind: as the attribute.
            inputs: as the attribute.
            tokens: as the attribute.
            digest: text that is equal only for equal inputs. By default it is computed from their
                bytes when two media are compared.

        Raises:
            RolloutError: a value is not allowed.
        """
        if kind not in KINDS:
            raise RolloutError(f"A medium's kind is {short(kind)}; it takes 'image' or 'video'.")
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 1:
            raise RolloutError(
                f"A medium's tokens are {short(tokens)}; it takes a whole number of at least 1."
            )
        if digest is not None and (not isinstance(digest, str) or not digest):
            raise RolloutError(f"A medium's digest is {short(digest)}; it takes text or None.")
        if not isinstance(inputs, Mapping) or not inputs:
            raise RolloutError(
                f"A medium's inputs are {short(inputs)}; it takes arrays or tensors by name, such "
                "as {'pixel_values': ..., 'image_grid_thw': ...}."
            )
        for name, value in inputs.items():
            _check_input(name, value)
        self.kind: MediaKind = kind
        self.inputs: dict[str, Any] = dict(inputs)
        self.tokens: int = int(tokens)
        self.given_digest: str | None = digest
        self._sha256: str | None = None
        parts = sorted((n, tuple(x.shape), _dtype(x)) for n, x in self.inputs.items())
        self._shape = (kind, self.tokens, tuple(parts))

    @classmethod
    def absent(
        cls,
        kind: MediaKind,
        inputs: Mapping[str, Any],
        tokens: int,
        digest: str | None,
        *,
        sha256: str,
    ) -> Self:
        """Make a medium with some inputs `Absent`, and with the hash of the complete medium."""
        found = cls(kind, inputs, tokens, digest)
        found._sha256 = sha256
        return found

    @property
    def is_absent(self) -> bool:
        """Whether some inputs are `Absent`. Such a medium can be planned, but not run."""
        return any(isinstance(x, Absent) for x in self.inputs.values())

    def array(self, name: str) -> NDArray[Any]:
        """An input as a numpy array, in the byte order of this machine."""
        array = host_values("A medium", name, self.inputs[name])
        return np.asarray(array, array.dtype.newbyteorder("="))

    @cached_property
    def is_finite(self) -> bool:
        """Whether all numbers of the inputs are finite; computed once."""
        for name, value in self.inputs.items():
            if "float" not in str(value.dtype) or value.dtype.itemsize < 2 or 0 in value.shape:
                continue
            numbers = self.array(name) if isinstance(value, np.ndarray) else value
            if not math.isfinite(float(numbers.min()) - float(numbers.max())):
                return False
        return True

    @property
    def sha256(self) -> str:
        """SHA-256 of kind, tokens and inputs, as 64 hexadecimal digits; computed once."""
        if self._sha256 is None:
            found = hashlib.sha256(repr(self._shape).encode())
            for name in sorted(self.inputs):
                array = np.ascontiguousarray(self.array(name))
                found.update(array.data.cast("B") if array.size else b"")
            self._sha256 = found.hexdigest()
        return self._sha256

    @property
    def digest(self) -> str:
        """Text that is equal for media of equal content, in all processes."""
        given = self.given_digest
        return f"sha256 {self.sha256}" if given is None else f"given {given}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Media):
            return NotImplemented
        same = self._shape == other._shape
        return self is other or (same and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self._shape)

    def __repr__(self) -> str:
        return f"Media({self.kind!r}, {', '.join(self.inputs)}, {self.tokens} tokens)"


def _check_input(name: Any, value: Any) -> None:
    """Raise RolloutError for an input that an encoder cannot take."""
    if not isinstance(name, str):
        raise RolloutError(f"A medium has an input named {short(name)}; names are text.")
    if isinstance(value, Absent):
        return
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise RolloutError(
            f"A medium's {short(name)} is a {type(value).__name__}; it takes a numpy array "
            "or a torch tensor."
        )
    tensor = hasattr(value, "requires_grad")
    numbers = "complex" not in str(value.dtype)
    if tensor:
        numbers &= str(value.layout) == "torch.strided" and not value.is_quantized
        numbers &= not value.is_meta and not value.is_nested
    else:
        dtype = host_values("A medium", name, value).dtype
        numbers &= dtype.kind in "biuf" and dtype.itemsize <= 8
    if not numbers:
        where = f", {value.layout}, on {value.device}" if tensor else ""
        raise RolloutError(
            f"A medium's {short(name)} is a {type(value).__name__} of {value.dtype}{where}; it "
            "takes an ordinary array or tensor of real numbers."
        )
    if tensor and value.requires_grad:
        raise RolloutError(
            f"A medium's {short(name)} requires a gradient, and inputs of encoders get none. Give "
            f"{name}.detach()."
        )


def _dtype(value: Any) -> str:
    """Name of the dtype in numpy; float32 for narrow floats, which numpy lacks."""
    dtype = value.dtype
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    return "float32" if name.startswith(("bfloat16", "float8", "float4")) else name


class MediumOutline(NamedTuple):
    """Shapes and dtypes of a medium's inputs, from which other ranks make a medium of ones."""

    kind: MediaKind
    tokens: int
    floats: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of inputs such as pixels, by name."""
    others: dict[str, NDArray[Any]]
    """Values of other inputs, such as grids."""

    @classmethod
    def of(cls, medium: Media) -> "MediumOutline":
        """The outline of a medium."""
        arrays = {name: medium.array(name) for name in medium.inputs}
        floats = {n: (x.shape, x.dtype.str) for n, x in arrays.items() if x.dtype.kind == "f"}
        others = {n: x for n, x in arrays.items() if n not in floats}
        return cls(medium.kind, medium.tokens, floats, others)

    def medium(self) -> Media:
        """A medium whose pixels are ones. SmolVLM leaves out tiles of zeros."""
        ones = {name: np.ones(shape, dtype) for name, (shape, dtype) in self.floats.items()}
        return Media(self.kind, {**ones, **self.others}, self.tokens)


def read_media(
    who: str, media: Sequence[Media], types: Any, loss_mask: NDArray[np.bool_]
) -> tuple[tuple[Media, ...], NDArray[np.int8] | None]:
    """Read the media of a rollout and the types of its tokens, if any.

    Raises RolloutError if tokens and media do not fit.
    """
    if not isinstance(media, list | tuple) or not all(isinstance(m, Media) for m in media):
        raise RolloutError(f"{who}: media is {short(media)}; it takes a tuple of forkpoint.Media.")
    takes = "it takes 0 for text, 1 for tokens of images and 2 for tokens of videos, one per token."
    if types is None:
        if media:
            raise RolloutError(f"{who}: media_types is None, and media has {len(media)}; {takes}")
        return (), None
    given = read_vector(who, "media_types", types, "iu", takes)
    refuse_where(who, "media_types", (given < 0) | (given > len(KINDS)), given, f"; {takes}")
    if len(given) != len(loss_mask):
        raise RolloutError(
            f"{who}: media_types has {len(given)} entries, and there are {len(loss_mask)} tokens; "
            f"{takes}"
        )
    advice = ", and the token is trained: a token of an image is not sampled. Set loss_mask to 0."
    refuse_where(who, "media_types", (given > 0) & loss_mask, given, advice)
    for number, kind in enumerate(KINDS, 1):
        places = int(np.count_nonzero(given == number))
        tokens = sum(m.tokens for m in media if m.kind == kind)
        if places != tokens:
            raise RolloutError(
                f"{who}: media_types has {places} tokens of kind {kind!r}, and the media of this "
                f"kind have {tokens}. Give each medium whole, in the order of their tokens."
            )
    return tuple(media), given.astype(np.int8)


def media_columns(
    media: Sequence[tuple[Media, ...]],
    types: Sequence[NDArray[np.int8] | None],
    offsets: NDArray[np.int64],
) -> tuple[tuple[Media, ...], NDArray[np.int64], NDArray[np.int64]]:
    """Collect the media of the rollouts of a batch.

    Returns the distinct media; int64 [T], the index of the medium of each token, -1 for text; and
    int64 [T], the position of each token within its medium.
    """
    numbers: dict[Media, int] = {}
    of_T = np.full(int(offsets[-1]), -1, np.int64)
    row_T = np.zeros(int(offsets[-1]), np.int64)
    for begin, own, types_T in zip(offsets.tolist(), media, types, strict=False):
        for number, kind in enumerate(KINDS, 1):
            given = [m for m in own if m.kind == kind]
            if given and types_T is not None:
                places = begin + np.flatnonzero(types_T == number)
                count = [m.tokens for m in given]
                of_T[places] = np.repeat(
                    [numbers.setdefault(m, len(numbers)) for m in given], count
                )
                row_T[places] = np.concatenate([np.arange(tokens) for tokens in count])
    return tuple(numbers), of_T, row_T


def share_index(
    route_index: NDArray[np.int64] | None, media_of: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    """int64 [T], below 2^32, equal for tokens with the same experts and the same medium.

    None for a batch without experts and media.
    """
    if route_index is None or media_of is None:
        return route_index if media_of is None else media_of + 1
    both = np.stack([route_index, media_of], axis=1)
    return np.unique(both, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


class ShownMedia(NamedTuple):
    """Media of an ordinary forward of N rows with L tokens each."""

    rows: tuple[tuple[Media, ...], ...]
    """Media of each row, in the order of their tokens."""
    types_NL: NDArray[np.int64]
    """Types of tokens, int64 [N, L]: 0 for text, k for a placeholder of `KINDS[k - 1]`."""
