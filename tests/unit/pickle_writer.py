"""Pickles and torch files written opcode by opcode, so that they can be what no pickler writes."""

import io
import pickle
import struct
import warnings
import zipfile
from typing import Any

MAGIC = 0x1950A86A20F9469CFC6C


def program(body: bytes, protocol: int = 4) -> bytes:
    """A whole pickle."""
    return b"\x80" + bytes([protocol]) + body + b"."


def dumped(value: Any) -> bytes:
    """The opcodes of a plain value, without its beginning and end, and without a memo."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 2)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def data(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def row(*parts: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


def listed(*parts: bytes) -> bytes:
    return b"](" + b"".join(parts) + b"e"


def table(**entries: bytes) -> bytes:
    return b"}(" + b"".join(text(name) + value for name, value in entries.items()) + b"u"


def name(full: str) -> bytes:
    module, _, attribute = full.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(full: str, *args: bytes) -> bytes:
    return name(full) + row(*args) + b"R"


def made(full: str, state: bytes) -> bytes:
    """An object of a class, with a state."""
    return name(full) + b")\x81" + state + b"b"


def dtype(code: str, *state: Any, build: bool = True) -> bytes:
    """numpy's dtype, with a state that is given or numpy's own for numbers."""
    opcodes = call("numpy.dtype", text(code), b"\x89", b"\x88")
    if not build:
        return opcodes
    return opcodes + dumped(state or (3, "<", None, None, None, -1, -1, 0)) + b"b"


INT64 = dtype("i8")
FORGED = dtype("O8", 3, "|", None, None, None, -1, -1, 0)
"""Objects, by flags that say numbers: its bytes would be taken for pointers."""


def empty_array(kind: str = "numpy.ndarray", shape: bytes | None = None) -> bytes:
    return call(
        "numpy.core.multiarray._reconstruct",
        name(kind),
        shape or row(number(0)),
        data(b"b"),
    )


def array_state(shape: bytes, of: bytes, content: bytes) -> bytes:
    return row(number(1), shape, of, b"\x89", content)


def array(shape: bytes, of: bytes, content: bytes) -> bytes:
    return empty_array() + array_state(shape, of, content) + b"b"


# Torch -------------------------------------------------------------------------------------------


def storage(kind: str = "torch.LongStorage", key: str = "0", count: int = 4, *view: bytes) -> bytes:
    """The persistent id of a storage; in a stream with None as `view`."""
    return row(text("storage"), name(kind), text(key), text("cpu"), number(count), *view) + b"Q"


def sizes(values: Any) -> bytes:
    return row(*map(number, values))


def tensor(
    of: bytes | None = None, offset: int = 0, size: Any = (4,), stride: Any = (1,), *more: bytes
) -> bytes:
    return call(
        "torch._utils._rebuild_tensor_v2",
        of or storage(),
        number(offset),
        sizes(size),
        sizes(stride),
        b"\x89",
        call("collections.OrderedDict"),
        *more,
    )


def entries(body: bytes, **storages: bytes) -> dict[str, bytes]:
    """The entries of a torch file, with storages of four int64 where none are given."""
    content = storages or {"0": bytes(32)}
    return {
        "x/data.pkl": program(body, 2),
        "x/byteorder": b"little",
        **{f"x/data/{key}": raw for key, raw in content.items()},
        "x/version": b"3\n",
    }


def archive(content: dict[str, bytes] | list[tuple[str, bytes]], method: int = 0) -> bytes:
    """A zip archive of these entries, in any order and any number of times."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as made:
        warnings.simplefilter("ignore")  # of an entry that is there twice
        for path, raw in content.items() if isinstance(content, dict) else content:
            made.writestr(zipfile.ZipInfo(path), raw, method)  # of a fixed date
    return file.getvalue()


def torch_file(body: bytes, **storages: bytes) -> bytes:
    return archive(entries(body, **storages))


def stream(body: bytes, keys: Any = (), *storages: bytes) -> bytes:
    """A torch file as before 1.6."""
    head = pickle.dumps(MAGIC, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    return head + program(body, 2) + pickle.dumps(list(keys), 2) + b"".join(storages)


def stream_storage(count: int, raw: bytes) -> bytes:
    return struct.pack("<q", count) + raw
