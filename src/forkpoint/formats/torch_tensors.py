"""Torch's tensors and storages in a pickle, as numpy views of its bytes. Imports no torch.

A tensor is a storage, an offset, sizes and strides. All of them are checked against the bytes of
the storage before a view is made. bfloat16, which numpy does not have, becomes float32.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forkpoint.formats.budget import Budget, Malformed, Undescribed
from forkpoint.formats.pickle_arrays import MOST_DIMENSIONS, MOST_EMPTY_ROWS, checked, checked_shape
from forkpoint.formats.pickle_nodes import NODE_BYTES, Builder, Name, Names, Node, Opaque
from forkpoint.rollouts import short

BFLOAT16 = "bfloat16"
DTYPES = {
    "bool": "b1",
    "uint8": "u1",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    BFLOAT16: "u2",
}
"""The dtypes of tensors that are read, with how numpy reads their bytes."""
_STORAGES = {
    "torch.BoolStorage": "bool",
    "torch.ByteStorage": "uint8",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": BFLOAT16,
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.storage.UntypedStorage": "uint8",
}
_NO_BITS = ([], [{}], [None])
"""The arguments after hooks of a tensor that is neither lazily negative nor conjugate."""
_OTHER_DTYPES = ("complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
_OTHER_STORAGES = (
    "torch.ComplexFloatStorage",
    "torch.ComplexDoubleStorage",
    "torch.QInt8Storage",
    "torch.QUInt8Storage",
    "torch.QInt32Storage",
)


class Storage(Node):
    """Numbers of one tensor or several.

    data: their bytes; None until they are known, as they come last in files before torch 1.6.
    big: whether their bytes are in big-endian order.
    """

    __slots__ = ("_arrays", "big", "data", "dtype", "size_bytes")

    def __init__(self, kind: Any, entries: Any, *, big: bool = False) -> None:
        if type(kind) is not Name or kind.full not in _STORAGES:
            raise Undescribed(f"a tensor is of {short(kind)}; read are {', '.join(_STORAGES)}")
        if type(entries) is not int or not 0 <= entries < 1 << 48:
            raise Malformed(f"a storage declares {short(entries)} entries")
        self.dtype: str = _STORAGES[kind.full]
        self.size_bytes: int = entries * entry_bytes(self.dtype)
        self.data: memoryview | None = None
        self.big: bool = big
        self._arrays: dict[str, NDArray[Any]] = {}

    def fill(self, data: memoryview) -> None:
        """Sets the bytes. Raises Malformed where there are not as many as were declared."""
        if len(data) != self.size_bytes:
            raise Malformed(f"a storage declares {self.size_bytes} bytes, and has {len(data)}")
        self.data = data

    def array(self, dtype: str, budget: Budget) -> NDArray[Any]:
        """All of it as entries [n] of a dtype."""
        if dtype not in self._arrays:
            if self.data is None:
                raise Malformed("a storage is named, and its bytes are not in the file")
            whole = len(self.data) - len(self.data) % entry_bytes(dtype)
            order = ">" if self.big else "<"
            array = checked(np.frombuffer(self.data[:whole], f"{order}{DTYPES[dtype]}"))
            if dtype == BFLOAT16:
                budget.take(2 * whole)
                array = widened(array)
            self._arrays[dtype] = array
        return self._arrays[dtype]


class Tensor(Node):
    """A view of a storage."""

    __slots__ = ("dtype", "offset", "size", "storage", "stride")

    def __init__(self, storage: Storage, offset: Any, size: Any, stride: Any, dtype: str) -> None:
        self.storage: Storage = storage
        self.dtype: str = dtype
        found = _layout(offset, size, stride)
        self.offset: int = found[0]
        self.size: tuple[int, ...] = found[1]
        self.stride: tuple[int, ...] = found[2]

    def made(self, budget: Budget) -> NDArray[Any]:
        """The view. Raises Refused where the storage has not all of its entries."""
        flat = self.storage.array(self.dtype, budget)
        return strided(flat, self.offset, self.size, self.stride, self.dtype, budget)


class Jagged(Node):
    """Rows of several lengths, one after another in `values`."""

    __slots__ = ("axis", "lengths", "offsets", "values")

    def __init__(self, fields: dict[Any, Any]) -> None:
        values, offsets = fields.get("values"), fields.get("offsets")
        lengths, axis = fields.get("lengths"), fields.get("_ragged_idx", 1)
        if (
            type(values) is not Tensor
            or type(offsets) is not Tensor
            or not (lengths is None or type(lengths) is Tensor)
            or type(axis) is not int
            or not 1 <= axis <= len(values.size)
        ):
            raise Malformed("a nested tensor has no values, or no offsets")
        self.values: Tensor = values
        self.offsets: Tensor = offsets
        self.lengths: Tensor | None = lengths
        self.axis: int = axis

    def made(self, budget: Budget) -> list[NDArray[Any]]:
        """Its rows."""
        values = self.values.made(budget)
        starts = self.offsets.made(budget)
        lengths = None if self.lengths is None else self.lengths.made(budget)
        return jagged(values, starts, lengths, budget, axis=self.axis - 1)


class Nested(Node):
    """Rows of several shapes in one buffer, each with its sizes, strides and offset."""

    __slots__ = ("parts",)

    def __init__(self, args: tuple[Any, ...]) -> None:
        if len(args) != 4 or not all(type(arg) is Tensor for arg in args):
            raise Malformed(f"a nested tensor of {len(args)} arguments")
        self.parts: tuple[Any, Any, Any, Any] = args

    def made(self, budget: Budget) -> list[NDArray[Any]]:
        """Its rows."""
        buffer: Tensor = self.parts[0]
        flat = buffer.made(budget)
        if not flat.flags.c_contiguous:
            raise Malformed("the buffer of a nested tensor has gaps")
        sizes, strides, offsets = (part.made(budget) for part in self.parts[1:])
        for part, ndim in ((sizes, 2), (strides, 2), (offsets, 1)):
            _check_whole(part, ndim, budget)
        if flat.ndim != 1 or sizes.shape != strides.shape or len(sizes) != len(offsets):
            raise Malformed("the rows of a nested tensor have no sizes, strides or offsets")
        rows = []
        for offset, size, stride in zip(
            offsets.tolist(), sizes.tolist(), strides.tolist(), strict=True
        ):
            layout = _layout(offset, tuple(size), tuple(stride))
            rows.append(strided(flat, *layout, buffer.dtype, budget))
        return rows


class Other(Node):
    """A tensor that is not dense."""

    __slots__ = ("layout",)

    def __init__(self, layout: str) -> None:
        self.layout: str = layout

    def made(self, _: Budget) -> Any:
        """Raises Undescribed."""
        raise Undescribed(f"a tensor is {self.layout}; dense ones can be read")


def entry_bytes(dtype: str) -> int:
    """Bytes of one entry of a dtype of DTYPES."""
    return int(DTYPES[dtype][1:])


def dtype_of(name: Any) -> str:
    """The dtype of DTYPES by its name, with or without "torch."; raises Undescribed for others."""
    short_name = name.removeprefix("torch.") if type(name) is str else None
    if short_name not in DTYPES:
        raise Undescribed(f"a tensor is of {short(name)}; read are {', '.join(DTYPES)}")
    return short_name


def widened(array: NDArray[Any]) -> NDArray[np.float32]:
    """bfloat16, whose bits are `array` of uint16, as float32 of the same shape."""
    wide = array.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def strided(
    flat: NDArray[Any],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: str,
    budget: Budget,
) -> NDArray[Any]:
    """The view of `flat` [n] with these sizes and strides in entries.

    Raises Refused where it reaches beyond `flat`, or repeats its numbers more often than is read.
    """
    entries = math.prod(size)
    if not entries:
        return np.zeros(checked_shape(size), flat.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= len(flat):
        raise Malformed(
            f"a tensor declares {(last + 1) * entry_bytes(dtype)} bytes, and the file has "
            f"{len(flat) * entry_bytes(dtype)} for it"
        )
    rows = entries // size[-1] if len(size) > 1 else 1
    most = budget.limit_bytes // flat.itemsize
    if entries > max(len(flat), most) or rows > max(len(flat), MOST_EMPTY_ROWS):
        bound = f"{MOST_EMPTY_ROWS} rows" if rows > MOST_EMPTY_ROWS else f"{most} entries"
        raise Undescribed(
            f"a tensor declares {entries} entries in {rows} rows, and holds {len(flat)} numbers "
            f"that it repeats; at most {bound} are read of such a tensor",
            "Write it with .contiguous().",
        )
    steps = (step if n > 1 else 0 for n, step in zip(size, stride, strict=True))
    step_bytes = tuple(step * flat.itemsize for step in steps)
    # numpy compares sizes and strides with the buffer once more.
    return np.ndarray(size, flat.dtype, flat, offset * flat.itemsize, step_bytes)


def jagged(
    values: NDArray[Any],
    starts: NDArray[Any],
    lengths: NDArray[Any] | None,
    budget: Budget,
    *,
    axis: int = 0,
) -> list[NDArray[Any]]:
    """The rows of `values` that begin at `starts`, and end at the next, or after `lengths`."""
    _check_whole(starts, 1, budget)
    begins, count = starts.tolist(), values.shape[axis]
    if lengths is None:
        ends = begins[1:]
        begins = begins[:-1]
    else:
        _check_whole(lengths, 1, budget)
        if len(lengths) > len(begins):
            raise Malformed("a nested tensor has more lengths than offsets")
        begins = begins[: len(lengths)]
        ends = [begin + n for begin, n in zip(begins, lengths.tolist(), strict=True)]
    before = (slice(None),) * axis
    rows = []
    for begin, end in zip(begins, ends, strict=True):
        if not 0 <= begin <= end <= count:
            raise Malformed(f"a row of a nested tensor is {begin}:{end} of {count}")
        rows.append(values[(*before, slice(begin, end))])
    return rows


def _check_whole(array: NDArray[Any], ndim: int, budget: Budget) -> None:
    """Raises Refused for what is no array of sizes or offsets, or would be too long as a list."""
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise Malformed(
            f"offsets or sizes of a nested tensor are {array.ndim}-dimensional {array.dtype}"
        )
    budget.take(NODE_BYTES * array.size)


def _layout(offset: Any, size: Any, stride: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    if (
        type(size) is not tuple
        or type(stride) is not tuple
        or len(size) != len(stride)
        or len(size) > MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *size, *stride))
    ):
        raise Malformed(
            f"a tensor has the offset {short(offset)}, the sizes {short(size)} and the strides "
            f"{short(stride)}"
        )
    return offset, size, stride


# What pickles of torch's own call ----------------------------------------------------------------


def _tensor(args: tuple[Any, ...], _: Budget) -> Tensor:
    """`_rebuild_tensor` and `_rebuild_tensor_v2`: the dtype is that of the storage."""
    match args:
        case (Storage() as storage, offset, size, stride):
            return Tensor(storage, offset, size, stride, storage.dtype)
        case (Storage() as storage, offset, size, stride, _, _, *bits) if bits in _NO_BITS:
            return Tensor(storage, offset, size, stride, storage.dtype)
    raise _not_a_tensor(args)


def _tensor_v3(args: tuple[Any, ...], _: Budget) -> Tensor:
    """`_rebuild_tensor_v3`: the dtype is an argument."""
    match args:
        case (Storage() as storage, offset, size, stride, _, _, Name() as name, *bits) if (
            bits in _NO_BITS
        ):
            return Tensor(storage, offset, size, stride, dtype_of(name.full))
    raise _not_a_tensor(args)


def _not_a_tensor(args: tuple[Any, ...]) -> Malformed:
    return Malformed(
        f"a tensor is made of {short([type(arg).__name__ for arg in args])}, or is lazily negative "
        "or conjugate"
    )


def _jagged(args: tuple[Any, ...], _: Budget) -> Jagged:
    match args:
        case (dict(fields),):
            return Jagged(fields)
    raise Malformed("a nested tensor has no fields")


def _nested(args: tuple[Any, ...], _: Budget) -> Nested:
    return Nested(args)


def _other(args: tuple[Any, ...], _: Budget) -> Other:
    match args:
        case (str(layout), _) if layout.isprintable() and len(layout) < 80:
            return Other(layout)
    raise Malformed("a tensor has no layout")


_TENSORS: dict[str, Builder] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_sparse_tensor": _other,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
}
_CLASSES = (
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nested._internal.nested_tensor.NestedTensor",
)


def _parameter(args: tuple[Any, ...], _: Budget) -> Any:
    """A parameter: its tensor, whether it requires a gradient, hooks, and attributes."""
    match args:
        case (Tensor() | Jagged() | Nested() | Other() as tensor, _, _, *_):
            return tensor
    raise _not_a_tensor(args)


def _of_type(args: tuple[Any, ...], budget: Budget) -> Any:
    """`_rebuild_from_type_v2(function, class, arguments, attributes)`."""
    match args:
        case (Name(full=function), Name(full=kind), tuple(own), _):
            if function in _TENSORS and kind in _CLASSES:
                return _TENSORS[function](own, budget)
    raise _not_a_tensor(args)


def _size(args: tuple[Any, ...], budget: Budget) -> tuple[Any, ...]:
    """`torch.Size`."""
    match args:
        case ():
            return ()
        case (tuple() | list() as size,):
            budget.take(8 * len(size))
            return tuple(size)
    raise Malformed(f"a size is made of {len(args)} arguments")


def _text(args: tuple[Any, ...], _: Budget) -> str:
    """A device or layout, as text."""
    match args:
        case (str(kind),):
            return kind
        case (str(kind), int(index)) if len(kind) < 100:
            return f"{kind}:{index}"
    raise Malformed(f"a device or layout of {len(args)} arguments")


def _opaque(args: tuple[Any, ...], _: Budget) -> Opaque:
    if args:
        raise Malformed(f"an object of {len(args)} arguments")
    return Opaque()


NAMES: Names = {
    **_TENSORS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._dynamo.decorators._DimRange": _opaque,
    "torch.Size": _size,
    "torch.device": _text,
    "torch.serialization._get_layout": _text,
    **dict.fromkeys((*_CLASSES, *_STORAGES, *_OTHER_STORAGES)),
    **{f"torch.{name}": None for name in (*DTYPES, *_OTHER_DTYPES)},
}
"""The globals of pickles of tensors."""
STORAGE_NAMES: Names = dict.fromkeys((*_STORAGES, *_OTHER_STORAGES))
"""The globals of a torch file that holds one storage."""
DTYPE_NAMES = frozenset(f"torch.{name}" for name in (*DTYPES, *_OTHER_DTYPES))
"""The globals that are dtypes, which may be values of their own."""
