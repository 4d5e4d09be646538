"""The stack machine of pickles, which builds plain values and calls nothing that a file names.

A pickle is a program (PEP 307, 3154 and 574; the opcodes are those of CPython's `pickletools`).
This machine runs the opcodes that Python 3 writes in protocols 2 to 5. They build None, numbers,
text, bytes, lists, tuples, dicts and sets. A global becomes an inert `Name`. A call of one runs the
builder of that name, which is a function of forkpoint that checks its arguments. Every other global
and opcode is refused by its name.
"""

import struct
from collections.abc import Callable
from typing import Any

from forkpoint.formats.budget import Budget, Malformed, Unsafe
from forkpoint.formats.pickle_nodes import (
    ATOMS,
    CONTAINER_BYTES,
    ENTRY_BYTES,
    NODE_BYTES,
    NUMBER_BYTES,
    SLOT_BYTES,
    TEXT_BYTES,
    Name,
    Names,
    Node,
    check_keys,
    kind_of,
)
from forkpoint.rollouts import short

MOST_NAME_BYTES = 256
MOST_INTEGER_BYTES = 255
MOST_ARGUMENTS = 16
_SLICE_BYTES = 1 << 12
"""Bytes of opcodes whose cost is taken from the budget at once."""
_INT4 = struct.Struct("<i").unpack_from
_SIZE4 = struct.Struct("<I").unpack_from
_SIZE8 = struct.Struct("<Q").unpack_from
_FLOAT8 = struct.Struct(">d").unpack_from

_CALLS = {
    0x50: "PERSID",
    0x69: "INST",
    0x6F: "OBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x92: "NEWOBJ_EX",
}
"""Opcodes that make objects in ways that no writer of rollouts uses."""
_OTHERS = {
    0x30: "POP",
    0x31: "POP_MARK",
    0x32: "DUP",
    0x46: "FLOAT",
    0x49: "INT",
    0x4C: "LONG",
    0x53: "STRING",
    0x54: "BINSTRING",
    0x55: "SHORT_BINSTRING",
    0x56: "UNICODE",
    0x64: "DICT",
    0x67: "GET",
    0x6C: "LIST",
    0x70: "PUT",
    0x80: "PROTO",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}


class Machine:
    """Runs one pickle.

    Args:
        data: the bytes that hold it.
        begin: where in `data` it begins.
        names: the globals that it may name.
        budget: what it may take; all that it builds is taken from it.
        persistent: the value of a persistent id; None refuses such ids.

    Attributes:
        at: after `run`, where in `data` the pickle ended.
        shared: after `run`, the ids of the containers and nodes that may have several parents.
    """

    def __init__(
        self,
        data: bytes,
        names: Names,
        budget: Budget,
        *,
        begin: int = 0,
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data = data
        self.at = begin
        self.shared: set[int] = set()
        self._names = names
        self._budget = budget
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """The value that the pickle builds. Raises Refused."""
        head = self.data[self.at : self.at + 2]
        if len(head) < 2 or head[0] != 0x80 or not 2 <= head[1] <= 5:
            raise Malformed(f"a pickle begins with {short(head)}; protocols 2 to 5 are read")
        self.at += 2
        try:
            return self._run()
        except (IndexError, struct.error):
            raise Malformed(
                "it ends in the middle, or takes a value that it did not write"
            ) from None

    def _run(self) -> Any:
        data, stack, memo, at = self.data, self._stack, self._memo, self.at
        push, handlers, costs, end = self._stack.append, _HANDLERS, _COSTS, len(self.data)
        while at < end:
            stop, taken = min(at + _SLICE_BYTES, end), 0
            while at < stop:
                code = data[at]
                if code == 0x4B:  # BININT1
                    push(data[at + 1])
                    at += 2
                    taken += SLOT_BYTES
                elif code == 0x4D:  # BININT2
                    push(data[at + 1] | data[at + 2] << 8)
                    at += 3
                    taken += NUMBER_BYTES
                elif code == 0x4A:  # BININT
                    push(_INT4(data, at + 1)[0])
                    at += 5
                    taken += NUMBER_BYTES
                elif code == 0x47:  # BINFLOAT
                    push(_FLOAT8(data, at + 1)[0])
                    at += 9
                    taken += NUMBER_BYTES
                elif code == 0x94:  # MEMOIZE
                    memo.append(stack[-1])
                    at += 1
                    taken += SLOT_BYTES
                elif code == 0x2E:  # STOP
                    self.at: int = at + 1
                    self._budget.take(taken)
                    return self._result()
                else:
                    handler = handlers[code]
                    if handler is None:
                        raise _opcode(code)
                    taken += costs[code]
                    at = handler(self, at + 1)
            self._budget.take(taken)
        raise Malformed("it ends before the pickle does")

    def _result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise Malformed(f"the pickle ends with {len(self._stack)} values; it has one")
        return self._stack.pop()

    # Lengths and marks ---------------------------------------------------------------------------

    def _end(self, at: int, size_bytes: int) -> int:
        """Where a payload ends. Raises Malformed where the data end before it."""
        if size_bytes > len(self.data) - at:
            raise Malformed(
                f"it declares {size_bytes} bytes, and {max(0, len(self.data) - at)} are left"
            )
        return at + size_bytes

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        if mark > len(self._stack):
            raise Malformed("it takes a value from below a mark")
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _mark(self, at: int) -> int:
        self._marks.append(len(self._stack))
        return at

    def _frame(self, at: int) -> int:
        size_bytes = _SIZE8(self.data, at)[0]
        self._end(at + 8, size_bytes)
        return at + 8

    # Atoms ---------------------------------------------------------------------------------------

    def _none(self, at: int) -> int:
        self._stack.append(None)
        return at

    def _true(self, at: int) -> int:
        self._stack.append(True)
        return at

    def _false(self, at: int) -> int:
        self._stack.append(False)
        return at

    def _long1(self, at: int) -> int:
        return self._integer(at + 1, self.data[at])

    def _long4(self, at: int) -> int:
        return self._integer(at + 4, _SIZE4(self.data, at)[0])

    def _integer(self, at: int, size_bytes: int) -> int:
        if size_bytes > MOST_INTEGER_BYTES:
            raise Malformed(
                f"an integer of {size_bytes} bytes; at most {MOST_INTEGER_BYTES} are read"
            )
        end = self._end(at, size_bytes)
        self._budget.take(2 * size_bytes)
        self._stack.append(int.from_bytes(self.data[at:end], "little", signed=True))
        return end

    def _short_text(self, at: int) -> int:
        return self._text(at + 1, self.data[at])

    def _text4(self, at: int) -> int:
        return self._text(at + 4, _SIZE4(self.data, at)[0])

    def _text8(self, at: int) -> int:
        return self._text(at + 8, _SIZE8(self.data, at)[0])

    def _text(self, at: int, size_bytes: int) -> int:
        end = self._end(at, size_bytes)
        raw = self.data[at:end]
        self._budget.take(size_bytes if raw.isascii() else 4 * size_bytes)
        try:
            self._stack.append(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise Malformed(
                f"a text has the byte {raw[error.start]:#04x}, which is not UTF-8"
            ) from None
        return end

    def _short_bytes(self, at: int) -> int:
        return self._bytes(at + 1, self.data[at])

    def _bytes4(self, at: int) -> int:
        return self._bytes(at + 4, _SIZE4(self.data, at)[0])

    def _bytes8(self, at: int) -> int:
        return self._bytes(at + 8, _SIZE8(self.data, at)[0])

    def _bytes(self, at: int, size_bytes: int) -> int:
        end = self._end(at, size_bytes)
        self._budget.take(size_bytes)
        self._stack.append(self.data[at:end])
        return end

    # Containers ----------------------------------------------------------------------------------

    def _empty_tuple(self, at: int) -> int:
        self._stack.append(())
        return at

    def _tuple1(self, at: int) -> int:
        self._stack[-1] = (self._stack[-1],)
        return at

    def _tuple2(self, at: int) -> int:
        second, first = self._stack.pop(), self._stack.pop()
        self._stack.append((first, second))
        return at

    def _tuple3(self, at: int) -> int:
        third, second, first = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append((first, second, third))
        return at

    def _tuple(self, at: int) -> int:
        items = self._since_mark()
        self._budget.take(SLOT_BYTES * len(items))
        self._stack.append(tuple(items))
        return at

    def _empty_list(self, at: int) -> int:
        self._stack.append([])
        return at

    def _append(self, at: int) -> int:
        value = self._stack.pop()
        self._target(list).append(value)
        return at

    def _appends(self, at: int) -> int:
        items = self._since_mark()
        self._budget.take(SLOT_BYTES * len(items))
        self._target(list).extend(items)
        return at

    def _empty_dict(self, at: int) -> int:
        self._stack.append({})
        return at

    def _set_item(self, at: int) -> int:
        value, key = self._stack.pop(), self._stack.pop()
        return self._insert([key], [value], at)

    def _set_items(self, at: int) -> int:
        items = self._since_mark()
        if len(items) % 2:
            raise Malformed("a key of a dict has no value")
        return self._insert(items[::2], items[1::2], at)

    def _insert(self, keys: list[Any], values: list[Any], at: int) -> int:
        target = self._target(dict)
        self._budget.take(ENTRY_BYTES * len(keys))
        if set(map(type, keys)) != {str}:
            check_keys(keys, len(target))
        before = len(target)
        target.update(zip(keys, values, strict=True))
        if len(target) != before + len(keys):
            raise Malformed("a key is twice in one dict")
        return at

    def _empty_set(self, at: int) -> int:
        self._stack.append(set())
        return at

    def _add_items(self, at: int) -> int:
        items = self._since_mark()
        target = self._target(set)
        self._budget.take(ENTRY_BYTES * len(items))
        check_keys(items, len(target), of_set=True)
        target.update(items)
        return at

    def _frozen_set(self, at: int) -> int:
        items = self._since_mark()
        self._budget.take(ENTRY_BYTES * len(items))
        check_keys(items, 0, of_set=True)
        self._stack.append(frozenset(items))
        return at

    def _target(self, kind: type) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise Malformed(f"it adds to {kind_of(target)} as to a {kind.__name__}")
        return target

    # The memo ------------------------------------------------------------------------------------

    def _get1(self, at: int) -> int:
        return self._get(self.data[at], at + 1)

    def _get4(self, at: int) -> int:
        return self._get(_SIZE4(self.data, at)[0], at + 4)

    def _get(self, index: int, at: int) -> int:
        if index >= len(self._memo):
            raise Malformed(f"it reads entry {index} of a memo of {len(self._memo)}")
        value = self._memo[index]
        if type(value) not in ATOMS and id(value) not in self.shared:
            self._budget.take(ENTRY_BYTES)
            self.shared.add(id(value))
        self._stack.append(value)
        return at

    def _put1(self, at: int) -> int:
        return self._put(self.data[at], at + 1)

    def _put4(self, at: int) -> int:
        return self._put(_SIZE4(self.data, at)[0], at + 4)

    def _put(self, index: int, at: int) -> int:
        if index != len(self._memo):
            raise Malformed(
                f"it writes entry {index} of a memo of {len(self._memo)}; writers number in order"
            )
        self._memo.append(self._stack[-1])
        return at

    # Names and calls -----------------------------------------------------------------------------

    def _global(self, at: int) -> int:
        module, at = self._line(at)
        name, at = self._line(at)
        return self._named(module, name, at)

    def _line(self, at: int) -> tuple[str, int]:
        end = self.data.find(b"\n", at, at + MOST_NAME_BYTES)
        if end < 0:
            raise Malformed(f"a name has no end within {MOST_NAME_BYTES} bytes")
        return self.data[at:end].decode("utf-8", "replace"), end + 1

    def _stack_global(self, at: int) -> int:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Malformed(f"it names {kind_of(name)} of {kind_of(module)}; names are text")
        if max(len(name), len(module)) > MOST_NAME_BYTES:
            raise Unsafe(f"it names {short(f'{module[:40]}.{name[:40]}')}...")
        return self._named(module, name, at)

    def _named(self, module: str, name: str, at: int) -> int:
        full = f"{module}.{name}"
        if full not in self._names:
            raise Unsafe(f"it names {full if full.isprintable() else ascii(full)}")
        self._stack.append(Name(full))
        return at

    def _call(self, at: int) -> int:
        args, name = self._stack.pop(), self._stack.pop()
        builder = self._names[name.full] if type(name) is Name else None
        if builder is None:
            raise Unsafe(f"it calls {kind_of(name)}")
        if type(args) is not tuple or len(args) > MOST_ARGUMENTS:
            raise Malformed(f"it calls {kind_of(name)} with {kind_of(args)} as its arguments")
        self._stack.append(builder(args, self._budget))
        return at

    def _build(self, at: int) -> int:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, Node):
            raise Unsafe(f"it sets the state of {kind_of(target)}")
        target.build(state)
        return at

    def _persistent_id(self, at: int) -> int:
        if self._persistent is None:
            raise Unsafe("it names an object outside the file by a persistent id")
        self._stack.append(self._persistent(self._stack.pop()))
        return at


def _opcode(code: int) -> Exception:
    if code in _CALLS:
        return Unsafe(f"it has the opcode {_CALLS[code]}")
    if code in _OTHERS:
        return Malformed(
            f"it has the opcode {_OTHERS[code]}, which Python 3 does not write in protocols 2 to 5 "
            "of arrays and plain containers"
        )
    return Malformed(f"it has the opcode {code:#04x}, which does not exist")


_HANDLERS: list[Callable[[Machine, int], int] | None] = [None] * 256
_COSTS = [0] * 256
"""Bytes of memory that an opcode takes besides those of its payload or its items."""
for _cost, _handlers in {
    0: {
        0x62: Machine._build,
        0x65: Machine._appends,
        0x73: Machine._set_item,
        0x75: Machine._set_items,
        0x90: Machine._add_items,
        0x95: Machine._frame,
    },
    SLOT_BYTES: {
        0x29: Machine._empty_tuple,
        0x4E: Machine._none,
        0x61: Machine._append,
        0x68: Machine._get1,
        0x6A: Machine._get4,
        0x71: Machine._put1,
        0x72: Machine._put4,
        0x88: Machine._true,
        0x89: Machine._false,
    },
    NUMBER_BYTES: {
        0x28: Machine._mark,
        0x8A: Machine._long1,
        0x8B: Machine._long4,
    },
    TEXT_BYTES: {
        0x42: Machine._bytes4,
        0x43: Machine._short_bytes,
        0x58: Machine._text4,
        0x8C: Machine._short_text,
        0x8D: Machine._text8,
        0x8E: Machine._bytes8,
        0x96: Machine._bytes8,  # BYTEARRAY8
    },
    CONTAINER_BYTES: {
        0x5D: Machine._empty_list,
        0x74: Machine._tuple,
        0x7D: Machine._empty_dict,
        0x85: Machine._tuple1,
        0x86: Machine._tuple2,
        0x87: Machine._tuple3,
    },
    NODE_BYTES: {
        0x51: Machine._persistent_id,
        0x52: Machine._call,  # REDUCE
        0x63: Machine._global,
        0x81: Machine._call,  # NEWOBJ
        0x8F: Machine._empty_set,
        0x91: Machine._frozen_set,
        0x93: Machine._stack_global,
    },
}.items():
    for _code, _handler in _handlers.items():
        _HANDLERS[_code], _COSTS[_code] = _handler, _cost
