"""numpy's arrays, scalars and dtypes of a pickle, rebuilt from (code, shape, bytes).

No state of a file reaches numpy's own dtype or array: a forged one makes pointers of bytes. A dtype
is a code and a byte order out of a list. Its state has to equal what numpy writes for that code. An
array is a view of the bytes of the file, made after its shape was checked against their number.
"""

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.formats.budget import Budget, Malformed, TooLarge, Unsafe
from forkpoint.formats.pickle_nodes import Name, Names, Node
from forkpoint.rollouts import short

NUMBERS = {
    "b1": 1,
    "i1": 1,
    "i2": 2,
    "i4": 4,
    "i8": 8,
    "u1": 1,
    "u2": 2,
    "u4": 4,
    "u8": 8,
    "f2": 2,
    "f4": 4,
    "f8": 8,
}
"""The codes of dtypes of numbers, with the bytes of one entry."""
MOST_DIMENSIONS = 32
MOST_EMPTY_ROWS = 1 << 16
"""The most rows of an array without entries, which take no byte of a file."""
MOST_TEXT = 1 << 20
"""The most characters of one entry of an array of text."""
_TEXT = re.compile(r"([SU])([1-9][0-9]{0,6})")
_OBJECTS = "O8"
_ALLOWED = "booleans, integers and floats of up to 64 bits, text and objects"


class Dtype(Node):
    """A dtype: its code, the bytes of one entry, and its byte order once its state is set."""

    __slots__ = ("code", "order", "size_bytes")

    def __init__(self, code: str) -> None:
        text = _TEXT.fullmatch(code)
        if code in NUMBERS:
            self.size_bytes = NUMBERS[code]
        elif code == _OBJECTS:
            self.size_bytes = 8
        elif text and int(text[2]) <= MOST_TEXT:
            self.size_bytes: int = int(text[2]) * (4 if text[1] == "U" else 1)
        else:
            raise Unsafe(f"it has a dtype {short(code)}; arrays of {_ALLOWED} are read")
        self.code: str = code
        self.order: str | None = None

    def build(self, state: Any) -> None:
        """Compares the state with what numpy writes; of the state only the byte order is taken."""
        if self.order is not None:
            raise Unsafe(f"it sets the state of a dtype {self.code} twice")
        order = state[1] if type(state) is tuple and len(state) == 8 else None
        if self.code[0] in "OS" or self.size_bytes == 1:
            orders: tuple[str, ...] = ("|",)
        else:
            orders = ("<", ">")
        sizes = (-1, -1)
        if self.code[0] in "SU":
            sizes = (self.size_bytes, 4 if self.code[0] == "U" else 1)
        flags = {"O": 63, "U": 8}.get(self.code[0], 0)
        if (
            type(order) is not str
            or order not in orders
            or not _same(state, (3, order, None, None, None, *sizes, flags))
        ):
            raise Unsafe(f"it has a dtype {self.code} with a state that numpy does not write")
        self.order = order

    @property
    def objects(self) -> bool:
        return self.code == _OBJECTS

    def made(self) -> np.dtype[Any]:
        """numpy's dtype of it."""
        return np.dtype("O" if self.objects else f"{self._known_order()}{self.code}")

    def _known_order(self) -> str:
        if self.order is None:
            raise Unsafe(f"it has a dtype {self.code} without its state")
        return self.order


class Array(Node):
    """An array: its dtype, its shape and its bytes, or a list where it holds objects."""

    __slots__ = ("axes", "data", "dtype", "fortran", "shape")

    def __init__(self) -> None:
        self.dtype: Dtype | None = None
        self.shape: tuple[int, ...] = (0,)
        self.fortran = False
        self.axes: tuple[int, ...] | None = None
        self.data: bytes | list[Any] = b""

    def build(self, state: Any) -> None:
        """Takes (1, shape, dtype, whether in Fortran's order, bytes or a list of objects)."""
        if self.dtype is not None:
            raise Unsafe("it sets the state of an array twice")
        if type(state) is not tuple or len(state) != 5 or state[0] != 1:
            raise Malformed(f"an array has the state {short(state)}")
        _, shape, dtype, fortran, data = state
        if type(fortran) is not bool:
            raise Malformed(f"an array has the order {short(fortran)}")
        self.fill(dtype, shape, data)
        self.fortran: bool = fortran

    def fill(self, dtype: Any, shape: Any, data: Any) -> None:
        """Sets what it holds. Raises Refused where the shape is not that of as many bytes."""
        if type(dtype) is not Dtype or dtype.order is None:
            raise Unsafe("an array has no dtype, or one without its state")
        if type(data) is not (list if dtype.objects else bytes):
            found = len(data) // dtype.size_bytes if type(data) is bytes else "none"
            raise Malformed(_declares(shape, dtype, found))
        self.dtype, self.shape, self.data = dtype, checked_shape(shape), data
        self.check_size()

    def check_size(self) -> None:
        """Raises Malformed where there are not as many entries as the shape says.

        A list of objects may change after it was set, so that this is asked again when it is read.
        """
        assert self.dtype is not None
        declared = math.prod(self.shape)
        if self.dtype.objects:
            if declared != len(self.data):
                raise Malformed(_declares(self.shape, self.dtype, len(self.data)))
        elif declared * self.dtype.size_bytes != len(self.data):
            found = len(self.data) // self.dtype.size_bytes
            raise Malformed(_declares(self.shape, self.dtype, found))

    @property
    def size_bytes(self) -> int:
        return 8 * len(self.data) if type(self.data) is list else len(self.data)

    @property
    def holds_objects(self) -> bool:
        return self.dtype is not None and self.dtype.objects

    def objects(self) -> NDArray[Any]:
        """An array of None [n] for its objects, to be filled in and then to get its shape."""
        self.check_size()
        return np.full(len(self.data), None, object)

    def numbers(self) -> NDArray[Any]:
        """The array of numbers or text, a view of the bytes of the file."""
        if self.dtype is None or not isinstance(self.data, bytes):
            raise Malformed("an array begins, and its state is never set")
        flat = checked(np.frombuffer(self.data, self.dtype.made()))
        array = flat.reshape(self.shape, order="F" if self.fortran else "C")
        return array if self.axes is None else array.transpose(self.axes)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """`shape` where it is one. Raises Malformed, and TooLarge for many rows of nothing."""
    if (
        type(shape) is not tuple
        or len(shape) > MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    ):
        raise Malformed(f"an array has the shape {short(shape)}")
    if 0 in shape and math.prod(n for n in shape if n) > MOST_EMPTY_ROWS:
        raise TooLarge(
            f"an array without entries has the shape {short(shape)}; at most {MOST_EMPTY_ROWS} "
            "rows of nothing are read"
        )
    return shape


def checked(array: NDArray[Any]) -> NDArray[Any]:
    """`array` where its bytes are values of its dtype. Raises Malformed.

    numpy takes any byte for a boolean and any 32 bits for a character, and fails later.
    """
    if array.dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise Malformed(f"a boolean is {array.view(np.uint8).max()}")
    if array.dtype.kind == "U":
        codes = array.view(f"{array.dtype.byteorder}u4")
        if codes.max(initial=0) > 0x10FFFF:
            raise Malformed(f"a text has the character {codes.max():#x}")
    return array


def _same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    return all(type(a) is type(b) and a == b for a, b in zip(found, wanted, strict=True))


def _is_order(axes: tuple[Any, ...], count: int) -> bool:
    """Whether axes are the numbers below `count` in some order."""
    whole = len(axes) == count and all(type(axis) is int for axis in axes)
    return whole and sorted(axes) == list(range(count))


def _declares(shape: Any, dtype: Dtype, found: Any) -> str:
    entries = math.prod(checked_shape(shape))
    name = "object" if dtype.objects else str(dtype.made())
    return f"an array declares {entries} entries of {name}, and there are {found}"


# What pickles of numpy's own call ----------------------------------------------------------------


def _dtype(args: tuple[Any, ...], _: Budget) -> Dtype:
    """`numpy.dtype(code, align, copy)`, to which the state is set afterwards."""
    match args:
        case (str(code), 0, 1):  # or False and True, which are equal to them
            return Dtype(code)
    raise Unsafe(f"it makes a dtype of {short(args)}")


def _reconstruct(args: tuple[Any, ...], _: Budget) -> Array:
    """An empty array, whose state is set afterwards."""
    match args:
        case (Name(full="numpy.ndarray"), (0,), b"b"):
            return Array()
        case (Name(full="numpy.ndarray"), shape, _):
            raise Malformed(f"an array begins with the shape {short(shape)}, and numpy writes (0,)")
    raise Unsafe(f"it makes an array of {short([type(a).__name__ for a in args])}")


def _frombuffer(args: tuple[Any, ...], _: Budget) -> Array:
    """An array of protocol 5: its bytes, dtype, shape, order, and axes for the order K."""
    made = Array()
    match args:
        case (data, dtype, shape, "C" | "F" as order):
            made.fill(dtype, shape, data)
            made.fortran = order == "F"
        case (data, dtype, shape, "K", axes):
            made.fill(dtype, shape, data)
            if type(axes) is not tuple or not _is_order(axes, len(made.shape)):
                raise Malformed(f"an array has the axes {short(axes)}")
            made.axes = axes
        case _:
            raise Malformed(f"an array of {len(args)} arguments; numpy writes 4 or 5")
    if made.dtype is not None and made.dtype.objects:
        raise Unsafe("it has an array of objects in a buffer")
    return made


def _scalar(args: tuple[Any, ...], budget: Budget) -> Any:
    """A numpy scalar, of its dtype and its bytes."""
    match args:
        case (Dtype(objects=False) as dtype, bytes(data)):
            budget.take(4 * len(data))
            made = Array()
            made.fill(dtype, (), data)
            return made.numbers()[()]
    raise Unsafe("it has a numpy scalar of another dtype than numbers and text")


def _ndarray(*_: Any) -> Any:
    raise Unsafe("an array is made in another way than numpy's")


def _latin1(args: tuple[Any, ...], budget: Budget) -> bytes:
    """Bytes, which protocol 2 has as text; no other codec is run."""
    match args:
        case (str(text), "latin1" | "latin-1"):
            budget.take(len(text))
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                raise Malformed("bytes as text have a character beyond 255") from None
    raise Unsafe(f"it calls _codecs.encode with {short([_shown(arg) for arg in args])}")


def _shown(arg: Any) -> str:
    return arg[:40] if type(arg) is str else type(arg).__name__


def _no_bytes(args: tuple[Any, ...], budget: Budget) -> bytes:
    """Bytes and bytearrays of protocols 2 to 4: of nothing, of bytes, or of text."""
    match args:
        case ():
            return b""
        case (bytes(data),):
            return data
    return _latin1(args, budget)


def _dict(args: tuple[Any, ...], _: Budget) -> dict[Any, Any]:
    """An OrderedDict, which gets its entries afterwards."""
    if args:
        raise Malformed("an OrderedDict is made of arguments")
    return {}


NAMES: Names = {
    "numpy.ndarray": _ndarray,
    "numpy.dtype": _dtype,
    "_codecs.encode": _latin1,
    "collections.OrderedDict": _dict,
    **{
        f"{package}.{name}": builder
        for package in ("numpy.core", "numpy._core")
        for name, builder in {
            "multiarray._reconstruct": _reconstruct,
            "multiarray.scalar": _scalar,
            "numeric._frombuffer": _frombuffer,
        }.items()
    },
    **{
        f"{package}.{name}": _no_bytes
        for package in ("builtins", "__builtin__")
        for name in ("bytes", "bytearray")
    },
}
"""The globals of pickles of arrays, by both names that numpy and Python have had for them."""
