"""Values that a pickle describes, as dicts, lists and numpy arrays.

Descriptions of arrays and tensors become arrays, and shells of trainers' classes become dicts. A
value that a pickle names several times stays one object. The bytes that it would take as several
objects are counted, because the code that makes rollouts of it copies it several times.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.formats.budget import (
    AGAIN,
    Budget,
    Malformed,
    Refused,
    TooLarge,
    Undescribed,
    Unsafe,
)
from forkpoint.formats.pickle_arrays import MOST_DIMENSIONS, Array, Dtype, checked, checked_shape
from forkpoint.formats.pickle_nodes import (
    CONTAINER_BYTES,
    ENTRY_BYTES,
    NODE_BYTES,
    SLOT_BYTES,
    TEXT_BYTES,
    Name,
    Node,
)
from forkpoint.formats.torch_tensors import (
    BFLOAT16,
    DTYPE_NAMES,
    DTYPES,
    Jagged,
    Nested,
    Other,
    Tensor,
    dtype_of,
    entry_bytes,
    jagged,
    widened,
)
from forkpoint.rollouts import short

MOST_DEPTH = 64
"""The most lists and dicts inside one another."""
Plain = tuple[Any, int]
"""A plain value, and the bytes of memory that it takes where it is copied."""
_SCALARS = frozenset((int, float, bool, type(None)))
_ATOMS = _SCALARS | {str, bytes}
_METADATA = frozenset(("cls", "cls_metadata", "leaves", "non_tensors", "size"))
_VALUES, _LENGTHS, _OFFSETS = "<NJT_VALUES>", "<NJT_LENGTHS>", "<NJT_OFFSETS>"


class Shell(Node):
    """An object of a class that is not imported: its state, and nothing else."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Takes the state, once."""
        if self.state is not None:
            raise Unsafe(f"it sets the state of a {type(self).__name__} twice")
        self.state = state


class DataProto(Shell):
    """verl's batch: (tensors, arrays that are no tensors, settings)."""

    __slots__ = ()


class Fields(Shell):
    """A dataclass of a trainer: its fields by name."""

    __slots__ = ()


class TensorDict(Shell):
    """A TensorDict; its tensors are in `_tensordict`."""

    __slots__ = ()


class Consolidated(Node):
    """A TensorDict whose tensors lie in one storage of bytes, with where each lies."""

    __slots__ = ("metadata", "storage")

    def __init__(self, metadata: Any, storage: Any) -> None:
        self.metadata: Any = metadata
        self.storage: Any = storage


def refusal(error: Refused, where: str) -> RolloutError:
    """The error of a value that cannot be read, for users."""
    return RolloutError(f"{where}: {error.reason}. {error.advice}")


class PlainValues:
    """Makes plain values of what one pickle describes.

    Args:
        budget: what is allocated is taken from it.
        most_bytes: the most that the whole value may take where it is copied.
        shared: ids of the containers and nodes that may have several parents; others have one.
        inside: reads a torch file that is a value of this one.
    """

    def __init__(
        self,
        budget: Budget,
        most_bytes: int,
        shared: set[int],
        inside: Callable[[bytes], Plain],
    ) -> None:
        self._budget = budget
        self._most_bytes = most_bytes
        self._shared = shared
        self._inside = inside
        self._done: dict[int, tuple[Any, Plain] | None] = {}

    def value(self, value: Any, where: str, depth: int = 0) -> Plain:
        """The plain value of one that was described; lists and dicts are changed in place.

        Raises RolloutError, naming `where` and the keys on the way, for what cannot be read.
        """
        kind = type(value)
        if kind in _SCALARS:
            return value, SLOT_BYTES
        if kind is str or kind is bytes:
            return value, TEXT_BYTES + len(value)
        if id(value) not in self._shared:
            return self._made(value, where, depth)
        if id(value) in self._done:
            known = self._done[id(value)]
            if known is None:
                raise RolloutError(f"{where}: the value holds itself. {AGAIN}")
            return known[1]
        self._done[id(value)] = None
        made = self._made(value, where, depth)
        self._done[id(value)] = value, made  # with the value, so that its id stays its own
        return made

    def _made(self, value: Any, where: str, depth: int) -> Plain:
        maker = _MAKERS.get(type(value))
        if depth > MOST_DEPTH:
            raise RolloutError(
                f"{where}: lists or dicts are nested more than {MOST_DEPTH} deep. Write each "
                "rollout as one flat dict."
            )
        try:
            if maker is not None:
                made = maker(self, value, where, depth)
            elif isinstance(value, np.generic):
                made = value, TEXT_BYTES + value.nbytes
            else:
                raise Undescribed(f"a value is {short(value)}")
            if made[1] > self._most_bytes:
                raise TooLarge(f"it holds more than {self._most_bytes} bytes, with what it repeats")
        except Refused as error:
            raise refusal(error, where) from None
        return made

    # Containers ----------------------------------------------------------------------------------

    def _list(self, items: list[Any], where: str, depth: int) -> Plain:
        return items, CONTAINER_BYTES + self._items(items, items, where, depth)

    def _tuple(self, items: tuple[Any, ...], where: str, depth: int) -> Plain:
        return self._list(list(items), where, depth)

    def _items(self, items: list[Any], into: Any, where: str, depth: int) -> int:
        """Puts the plain value of each item at its position; gives what they take."""
        kinds = set(map(type, items))
        if kinds <= _ATOMS:
            if into is not items:
                into[:] = items
            size_bytes = SLOT_BYTES * len(items)
            if kinds - _SCALARS:
                lengths = (len(item) for item in items if type(item) in (str, bytes))
                size_bytes += sum(TEXT_BYTES + length for length in lengths)
            return size_bytes
        size_bytes = 0
        for position, item in enumerate(items):
            into[position], taken = self.value(item, where, depth + 1)
            size_bytes += taken + SLOT_BYTES
            if size_bytes > self._most_bytes:
                raise TooLarge(f"it holds more than {self._most_bytes} bytes, with what it repeats")
        return size_bytes

    def _dict(self, entries: dict[Any, Any], where: str, depth: int) -> Plain:
        size_bytes = CONTAINER_BYTES
        for key, entry in entries.items():
            size_bytes += ENTRY_BYTES
            if type(key) is str or type(key) is bytes:
                size_bytes += len(key)
            if type(entry) is str:
                size_bytes += TEXT_BYTES + len(entry)
            elif type(entry) not in _SCALARS:
                entries[key], taken = self.value(entry, f"{where}, {_shown(key)}", depth + 1)
                size_bytes += taken
            if size_bytes > self._most_bytes:
                raise TooLarge(f"it holds more than {self._most_bytes} bytes, with what it repeats")
        return entries, size_bytes

    def _set(self, items: Any, *_: Any) -> Plain:
        if any(isinstance(item, Node) for item in items):
            raise Undescribed(f"a set is {short(items)}")
        texts = sum(len(item) for item in items if type(item) in (str, bytes))
        return items, CONTAINER_BYTES + ENTRY_BYTES * len(items) + texts

    # Arrays --------------------------------------------------------------------------------------

    def _array(self, array: Array, where: str, depth: int) -> Plain:
        if not array.holds_objects:
            return array.numbers(), NODE_BYTES + array.size_bytes
        flat = array.objects()
        assert isinstance(array.data, list)
        taken = self._items(array.data, flat, where, depth)
        return flat.reshape(array.shape), NODE_BYTES + taken  # numpy lists objects in C's order

    def _made_before(self, array: np.ndarray[Any, Any], *_: Any) -> Plain:
        return array, NODE_BYTES + array.nbytes

    def _dtype(self, dtype: Dtype, *_: Any) -> Plain:
        return str(dtype.made()), TEXT_BYTES

    def _name(self, name: Name, *_: Any) -> Plain:
        if name.full not in DTYPE_NAMES:
            raise Undescribed(f"a value is {name.full}, and not an object of it")
        return name.full, TEXT_BYTES

    def _tensor(self, tensor: Tensor, *_: Any) -> Plain:
        array = tensor.made(self._budget)
        return array, NODE_BYTES + array.nbytes

    def _rows(self, nested: Jagged | Nested | Other, *_: Any) -> Plain:
        return _with_size(nested.made(self._budget))

    # Dumps ---------------------------------------------------------------------------------------

    def _tensordict(self, data: TensorDict, where: str, depth: int) -> Plain:
        tensors = data.state.get("_tensordict") if type(data.state) is dict else None
        if type(tensors) is not dict:
            raise Malformed("a TensorDict has no tensors")
        return self.value(tensors, where, depth + 1)

    def _fields(self, fields: Fields, where: str, depth: int) -> Plain:
        match fields.state:  # a pair where the class has slots
            case (None | dict() as own, None | dict() as slots):
                parts = [own or {}, slots or {}]
            case dict() as own:
                parts = [own]
            case _:
                raise Malformed("an object of a trainer has no fields")
        named: dict[Any, Any] = {}
        for part in parts:
            self._budget.take(ENTRY_BYTES * len(part))
            named.update(part)
        return self._dict(named, where, depth)

    def _data_proto(self, data: DataProto, where: str, depth: int) -> Plain:
        if type(data.state) is not tuple or len(data.state) != 3:
            raise Malformed("a DataProto has no tensors, arrays and settings")
        tensors, others, settings = data.state
        if type(tensors) is bytes:
            batch = self._inside(tensors)
        elif type(tensors) is tuple:  # VERL_DATAPROTO_SERIALIZATION_METHOD=numpy
            batch = self._raw_tensors(tensors)
        else:
            batch = self.value(tensors, where, depth + 1)
        parts = {
            "batch": batch,
            "non_tensor_batch": self.value(others, where, depth + 1),
            "meta_info": self.value(settings, where, depth + 1),
        }
        return {key: part[0] for key, part in parts.items()}, sum(p[1] for p in parts.values())

    def _raw_tensors(self, tensors: tuple[Any, ...]) -> Plain:
        """Tensors as (batch size, device, what there is of each by name)."""
        if len(tensors) != 3 or type(tensors[2]) is not dict:
            raise Malformed("a DataProto has no tensors by name")
        made, size_bytes = {}, CONTAINER_BYTES
        for name, entry in tensors[2].items():
            match entry:
                case (str(), list(rows)):  # the layout of a nested tensor, and its rows
                    made[name], taken = _with_size([self._raw_tensor(row) for row in rows])
                case _:
                    made[name] = self._raw_tensor(entry)
                    taken = NODE_BYTES + made[name].nbytes
            size_bytes += ENTRY_BYTES + taken
        return made, size_bytes

    def _raw_tensor(self, entry: Any) -> np.ndarray[Any, Any]:
        """A tensor as its dtype's name, its shape and its bytes."""
        match entry:
            case (dtype, tuple(shape), Array(data=bytes(data)) | bytes(data)):
                self._budget.take(NODE_BYTES)
                return self._of_bytes(memoryview(data), dtype_of(dtype), shape)
        raise Malformed("a tensor of a DataProto is no dtype, shape and bytes")

    def _of_bytes(self, data: memoryview, dtype: str, shape: Any) -> np.ndarray[Any, Any]:
        declared = math.prod(checked_shape(shape)) * entry_bytes(dtype)
        if declared != len(data):
            raise Malformed(f"a tensor declares {declared} bytes, and has {len(data)}")
        array = checked(np.frombuffer(data, f"<{DTYPES[dtype]}"))
        if dtype == BFLOAT16:
            self._budget.take(2 * len(data))
            array = widened(array)
        return array.reshape(shape)

    def _consolidated(self, data: Consolidated, where: str, depth: int) -> Plain:
        if type(data.storage) is not Tensor or data.storage.storage.big:
            raise Malformed("a TensorDict has no storage")
        flat = data.storage.made(self._budget)
        if flat.dtype != np.uint8 or flat.ndim != 1 or not flat.flags.c_contiguous:
            raise Malformed("the storage of a TensorDict is no row of bytes")
        return self._leaves(data.metadata, flat.data, where, depth)

    def _leaves(self, metadata: Any, storage: memoryview, where: str, depth: int) -> Plain:
        """The tensors that metadata describe, and those of TensorDicts inside."""
        if depth > MOST_DEPTH or type(metadata) is not dict or id(metadata) in self._shared:
            raise Malformed("a TensorDict has no metadata of its own, or is nested too deep")
        leaves, others = metadata.get("leaves"), metadata.get("non_tensors")
        if type(leaves) is not dict or type(others) is not dict:
            raise Malformed("the metadata of a TensorDict name no tensors")
        found = {name: self._leaf(leaf, storage) for name, leaf in leaves.items()}
        made: dict[Any, Plain] = {}
        for name, array in found.items():
            if type(name) is not str or not name.startswith((_VALUES, _LENGTHS)):
                made[name] = array, NODE_BYTES + array.nbytes
        for name in [name for name in made if type(name) is str and name.startswith(_OFFSETS)]:
            offsets, _ = made.pop(name)
            plain = name.removeprefix(_OFFSETS)
            values, lengths = found.get(_VALUES + plain), found.get(_LENGTHS + plain)
            if values is None or not values.ndim:
                raise Malformed(f"the nested tensor {short(plain)} has no values")
            made[plain] = _with_size(jagged(values, offsets, lengths, self._budget))
        for name, entry in others.items():
            if type(entry) is not tuple or not entry:
                raise Malformed(f"{short(name)} of a TensorDict has no value")
            made[name] = self.value(entry[0], where, depth + 1)
        for name in [name for name in metadata if name not in _METADATA]:
            made[name] = self._leaves(metadata[name], storage, where, depth + 1)
        size_bytes = CONTAINER_BYTES + sum(ENTRY_BYTES + part[1] for part in made.values())
        return {name: part[0] for name, part in made.items()}, size_bytes

    def _leaf(self, leaf: Any, storage: memoryview) -> np.ndarray[Any, Any]:
        """A tensor: its dtype, shape, perhaps a device, where it lies, and padding after it."""
        self._budget.take(NODE_BYTES)
        match leaf:
            case (dtype, list() | tuple() as shape, None | str(), int(begin), int(end), *_):
                pass
            case (dtype, list() | tuple() as shape, int(begin), int(end), *_):
                pass
            case _:
                raise Malformed("a tensor of a TensorDict has no dtype, shape or place")
        dtype, shape = dtype_of(dtype), checked_shape(tuple(shape[: MOST_DIMENSIONS + 1]))
        size_bytes = math.prod(shape) * entry_bytes(dtype)
        if not 0 <= begin <= begin + size_bytes <= end <= len(storage):
            raise Malformed(
                f"a tensor of a TensorDict declares {size_bytes} bytes at {begin}:{end} of "
                f"{len(storage)}"
            )
        return self._of_bytes(storage[begin : begin + size_bytes], dtype, shape)


def _shown(key: Any) -> str:
    plain = type(key) is str and len(key) < 80 and key.isprintable()
    return key if plain else short(key)


def _with_size(rows: list[Any]) -> Plain:
    return rows, CONTAINER_BYTES + sum(NODE_BYTES + row.nbytes for row in rows)


_MAKERS: dict[type, Callable[[PlainValues, Any, str, int], Plain]] = {
    list: PlainValues._list,
    tuple: PlainValues._tuple,
    dict: PlainValues._dict,
    set: PlainValues._set,
    frozenset: PlainValues._set,
    np.ndarray: PlainValues._made_before,
    Array: PlainValues._array,
    Dtype: PlainValues._dtype,
    Name: PlainValues._name,
    Tensor: PlainValues._tensor,
    Jagged: PlainValues._rows,
    Nested: PlainValues._rows,
    Other: PlainValues._rows,
    Consolidated: PlainValues._consolidated,
    TensorDict: PlainValues._tensordict,
    Fields: PlainValues._fields,
    DataProto: PlainValues._data_proto,
}
