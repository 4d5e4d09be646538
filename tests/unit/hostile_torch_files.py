"""Torch files, and files of several pickles, that attack their reader: what is said of each."""

import io
import pickle
import struct
import zipfile
from typing import Any

import numpy as np
from pickle_writer import (
    archive,
    call,
    dumped,
    entries,
    made,
    name,
    number,
    program,
    row,
    storage,
    stream,
    stream_storage,
    table,
    tensor,
    text,
    torch_file,
)

_CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
_BYTES = tensor(storage("torch.ByteStorage", count=32), 0, (32,), (1,))
_TWO = {"0": bytes(32), "1": bytes(32)}


def overlapping() -> bytes:
    """An archive whose second storage begins inside of its first."""
    body = table(a=tensor(), b=tensor(storage(key="1")))
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("x/data/1", bytes(32))
    member = inner.getvalue()[: 30 + len("x/data/1") + 32]
    raw = bytearray(archive(entries(body, **{"0": member, "1": bytes(32)})))
    at = raw.index(b"x/data/0") + len("x/data/0")  # where the inner entry begins
    directory = raw.rindex(b"x/data/1") - 46
    raw[directory + 42 : directory + 46] = struct.pack("<I", at)
    return bytes(raw)


def edited_directory(path: str, at: int, value: bytes) -> bytes:
    """A torch file with other bytes in an entry of its directory."""
    raw = bytearray(torch_file(table(a=tensor())))
    begin = raw.rindex(path.encode()) - 46 + at
    raw[begin : begin + len(value)] = value
    return bytes(raw)


def edited_end(at: int, value: bytes) -> bytes:
    """A torch file with other bytes in the end of its directory."""
    raw = bytearray(torch_file(table(a=tensor())))
    raw[len(raw) - 22 + at : len(raw) - 22 + at + len(value)] = value
    return bytes(raw)


def jagged(offsets: list[int], lengths: bytes = b"N") -> bytes:
    """A torch file of a nested tensor of four numbers."""
    own = table(
        values=tensor(),
        offsets=tensor(storage(key="1", count=len(offsets)), 0, (len(offsets),), (1,)),
        lengths=lengths,
        _ragged_idx=number(1),
    )
    body = call("torch.nested._internal.nested_tensor._rebuild_njt", own)
    raw = np.array(offsets, np.int64).tobytes()
    return torch_file(table(a=body), **{"0": bytes(32), "1": raw})


def _nested(buffer: bytes = b"", strides: bytes = b"") -> bytes:
    """A nested tensor of rows in a buffer."""
    parts = buffer or tensor(), tensor(None, 0, (2, 1), (1, 1))
    strides = strides or tensor(None, 0, (2, 1), (1, 1))
    full = "torch._utils._rebuild_nested_tensor"
    return call(full, *parts, strides, tensor(None, 0, (2,), (1,)))


def _consolidated(leaves: dict[str, Any], others: dict[str, Any] | None = None) -> bytes:
    """A torch file of a TensorDict in one storage of 32 bytes."""
    metadata = {"cls": "", "non_tensors": others or {}, "leaves": leaves, "cls_metadata": {}}
    return torch_file(call(_CONSOLIDATED, dumped(metadata), _BYTES))


def consolidated(*leaf: object) -> bytes:
    return _consolidated({"a": leaf})


NAMED = table(a=tensor())
NAMED_FILE = torch_file(NAMED)
HEAD = stream(dumped(1))[: -len(program(dumped(1), 2) + pickle.dumps([], 2))]


def _changed(path: str, value: bytes) -> bytes:
    return archive(entries(NAMED) | {path: value})


FILES: dict[str, tuple[bytes, str]] = {
    "protocol 1": (program(dumped({}), 1), "is no pt file"),
    "protocol 6": (program(dumped({}), 6), "is no pt file"),
    "nothing but a beginning": (b"\x80\x04", "ends before the pickle does"),
    "no value": (program(b""), "ends with 0 values"),
    "two values": (program(b"NN"), "ends with 2 values"),
    "a mark that is left": (program(b"(N"), "it has one"),
    "no mark": (program(b"]Ne"), "a value that it did not write"),
    "a second pickle": (program(dumped([{}])) * 2, "Write one pickle to a file"),
    # Tensors
    "a negative offset": (torch_file(table(a=tensor(offset=-1))), "offset -1"),
    "an offset beyond the storage": (
        torch_file(table(a=tensor(offset=1))), "x.pt, a: a tensor declares 40 bytes"),
    "a negative stride": (torch_file(table(a=tensor(stride=(-1,)))), "strides (-1,)"),
    "a stride beyond the storage": (
        torch_file(table(a=tensor(size=(2, 2), stride=(3, 1)))), "declares 40 bytes"),
    "a stride that overflows": (
        torch_file(table(a=tensor(size=(2,), stride=(1 << 64,)))), "strides (18446744073709551616"),
    "sizes whose product overflows": (
        torch_file(table(a=tensor(size=(1 << 40, 1 << 40), stride=(0, 0)))), "that it repeats"),
    "a row repeated a million times": (
        torch_file(table(a=tensor(size=(1 << 20, 4), stride=(0, 1)))), "in 1048576 rows"),
    "rows of nothing in a tensor": (
        torch_file(table(a=tensor(size=(1 << 40, 0), stride=(1, 1)))), "rows of nothing"),
    "a negative size": (torch_file(table(a=tensor(size=(-4,)))), "sizes (-4,)"),
    "a size without its stride": (torch_file(table(a=tensor(size=(2, 2)))), "sizes (2, 2)"),
    "a hundred dimensions": (
        torch_file(table(a=tensor(size=(1,) * 100, stride=(1,) * 100))), "sizes (1, 1"),
    "a storage longer than its bytes": (
        torch_file(table(a=tensor(storage(count=5)))), "declares 40 bytes, and has 32"),
    "a storage of a petabyte": (
        torch_file(table(a=tensor(storage(count=1 << 50)))), "1125899906842624 entries"),
    "a storage of negative length": (torch_file(table(a=tensor(storage(count=-4)))), "-4 entries"),
    "a storage of two kinds": (
        torch_file(table(a=tensor(), b=tensor(storage("torch.DoubleStorage")))), "of two kinds"),
    "a storage that is not there": (
        torch_file(table(a=tensor(storage(key="../../version")))), "is not in the archive"),
    "a storage of complex numbers": (
        torch_file(table(a=tensor(storage("torch.ComplexFloatStorage")))),
        "torch.ComplexFloatStorage"),
    "a storage of a class that is none": (
        torch_file(table(a=tensor(storage("torch.Size")))), "is of torch.Size"),
    "a module by a persistent id": (
        torch_file(table(a=row(text("module"), b"N", b"N", b"N") + b"Q")), "persistent id"),
    "a tensor that is lazily negative": (
        torch_file(table(a=tensor(None, 0, (4,), (1,), dumped({"neg": True})))), "lazily negative"),
    "a tensor of no storage": (
        torch_file(table(a=call("torch._utils._rebuild_tensor_v2", *[b"N"] * 6))),
        "a tensor is made of"),
    "a storage as a value": (torch_file(table(a=storage())), "a value is <storage>"),
    "a boolean tensor that is two": (
        torch_file(table(a=tensor(storage("torch.BoolStorage"))), **{"0": b"\1\0\2\0"}),
        "boolean is 2"),
    "a sparse tensor that runs code": (
        torch_file(table(a=call("torch._utils._rebuild_sparse_tensor", name("os.system"), b"N"))),
        "it names os.system"),
    "a layout with control characters": (
        torch_file(table(a=call("torch._utils._rebuild_sparse_tensor", text("\x1b[2J"), b"N"))),
        "no layout"),
    "a nested tensor that goes back": (jagged([0, 3, 2]), "3:2 of 4"),
    "a nested tensor that begins before it": (jagged([-1, 4]), "-1:4 of 4"),
    "a nested tensor that ends after it": (jagged([0, 1 << 62]), "4611686018427387904 of 4"),
    "a nested tensor of too many lengths": (
        jagged([0], tensor(storage(), 0, (4,), (1,))), "more lengths than offsets"),
    "a nested tensor of a million equal offsets": (
        torch_file(table(a=call(
            "torch.nested._internal.nested_tensor._rebuild_njt",
            table(values=tensor(), offsets=tensor(None, 0, (1 << 25,), (0,)), lengths=b"N")))),
        "bytes of memory"),
    "a nested tensor of text": (
        torch_file(table(a=call("torch.nested._internal.nested_tensor._rebuild_njt",
                                table(values=text("a"))))), "no values"),
    "rows of a nested tensor beyond it": (
        torch_file(
            table(a=call("torch._utils._rebuild_nested_tensor", tensor(),
                         *[tensor(storage(key="1", count=1), 0, (1, 1), (1, 1))] * 2,
                         tensor(storage(key="1", count=1), 0, (1,), (1,)))),
            **{"0": bytes(32), "1": struct.pack("<q", 9)}),
        "a: a tensor declares"),
    "a TensorDict beyond its storage": (consolidated("torch.int64", [5], 0, 40, 0), "0:40 of 32"),
    "a TensorDict before its storage": (consolidated("torch.int64", [1], -8, 8, 0), "-8:8 of 32"),
    "a TensorDict larger than its place": (
        consolidated("torch.int64", [1 << 40], 0, 32, 0), "declares 8796093022208 bytes"),
    "a TensorDict of another dtype": (consolidated("torch.nn", [1], 0, 8, 0), "'torch.nn'"),
    "a TensorDict of a dtype with a name of its own": (
        consolidated("torch.__builtins__", [1], 0, 8, 0), "__builtins__"),
    "a DataProto of tensors of objects": (
        program(made("verl.protocol.DataProto",
                     dumped((((1,), None, {"a": ("O", (1,), b"A" * 8)}), {}, {})))), "of 'O'"),
    "a DataProto of tensors of structures": (
        program(made("verl.protocol.DataProto",
                     dumped((((1,), None, {"a": ("i4,O", (1,), b"A" * 12)}), {}, {})))),
        "of 'i4,O'"),
    "a DataProto of too few bytes": (
        program(made("verl.protocol.DataProto",
                     dumped((((1,), None, {"a": ("int64", (1 << 40,), b"")}), {}, {})))),
        "declares 8796093022208 bytes"),
    "a nested tensor of float offsets": (
        torch_file(table(a=call("torch.nested._internal.nested_tensor._rebuild_njt", table(
            values=tensor(), offsets=tensor(storage("torch.DoubleStorage", "1"))))), **_TWO),
        "offsets or sizes"),
    "a nested tensor of a buffer with gaps": (
        torch_file(table(a=_nested(tensor(None, 0, (2,), (2,))))), "has gaps"),
    "a nested tensor of other sizes than strides": (
        torch_file(table(a=_nested(strides=tensor(None, 0, (1, 2), (2, 1))))), "no sizes, strides"),
    "a storage with a number as its key": (
        torch_file(table(a=row(text("storage"), name("torch.LongStorage"), number(0), text("cpu"),
                               number(4)) + b"Q")), "a storage has the key 0"),
    "a directory of 64 bits that has no end": (
        NAMED_FILE[:-22] + b"PK\x06\x07" + bytes(16) + NAMED_FILE[-22:], "has no end"),
    "a TensorDict in numbers": (
        torch_file(call(_CONSOLIDATED, dumped({}), tensor())), "is no row of bytes"),
    "a TensorDict without metadata": (torch_file(call(_CONSOLIDATED, b"N", _BYTES)), "no metadata"),
    "a TensorDict whose metadata are empty": (
        torch_file(call(_CONSOLIDATED, b"}", _BYTES)), "name no tensors"),
    "a TensorDict in itself": (
        torch_file(name(_CONSOLIDATED) + b"}\x94(" + text("leaves") + b"}" + text("non_tensors")
                   + b"}" + text("a") + b"h\x00u" + _BYTES + b"\x86R"), "of its own"),
    "a TensorDict of offsets alone": (
        _consolidated({"<NJT_OFFSETS>a": ("torch.int64", [1], 0, 8, 0)}), "'a' has no values"),
    "a TensorDict of float offsets": (
        _consolidated({"<NJT_VALUES>a": ("torch.int64", [1], 0, 8, 0),
                       "<NJT_OFFSETS>a": ("torch.float64", [1], 0, 8, 0)}), "offsets or sizes"),
    "a TensorDict of float lengths": (
        _consolidated({"<NJT_VALUES>a": ("torch.int64", [1], 0, 8, 0),
                       "<NJT_LENGTHS>a": ("torch.float64", [1], 0, 8, 0),
                       "<NJT_OFFSETS>a": ("torch.int64", [1], 0, 8, 0)}), "offsets or sizes"),
    "a TensorDict of a value that is none": (_consolidated({}, {"a": ()}), "'a' of a TensorDict"),
    "a TensorDict of a leaf that is none": (_consolidated({"a": 1}), "no dtype, shape or place"),
    # Archives
    "overlapping entries": (overlapping(), "not where the directory says"),
    "an entry twice": (
        archive([*entries(NAMED).items(), ("x/data/0", bytes(32))]), "is there twice"),
    "two torch files in one": (
        archive({**entries(NAMED), "y/data.pkl": program(NAMED)}), "something else"),
    "an entry outside of the folder": (
        archive({**entries(NAMED), "../../etc/passwd": b""}), "not where the directory says"),
    "compressed entries": (archive(entries(NAMED), zipfile.ZIP_DEFLATED), "is compressed"),
    "TorchScript": (_changed("x/constants.pkl", b""), "is a TorchScript archive"),
    "an order of bytes that is none": (_changed("x/byteorder", b"middle"), "'middle'"),
    "bytes after the pickle": (
        _changed("x/data.pkl", program(NAMED, 2) + b"N"), "1 bytes follow the end"),
    "a first pickle of another protocol": (
        _changed("x/data.pkl", b"\x80\x06."), "protocols 2 to 5"),
    "no first pickle": (_changed("x/data.pkl", b""), "protocols 2 to 5"),
    "a checksum that is wrong": (
        edited_directory("x/data/0", 16, b"\0\0\0\0"), "the checksum of"),
    "an encrypted entry": (edited_directory("x/data/0", 8, b"\x01"), "compressed or encrypted"),
    "an entry that inflates": (
        edited_directory("x/data/0", 24, b"\xff\xff\xff\x7f"), "declares 2147483647 bytes"),
    "an entry that begins elsewhere": (
        edited_directory("x/data/0", 42, b"\xff\xff\xff\x7f"), "not where the directory says"),
    "an entry of a long name": (edited_directory("x/data/0", 28, b"\xff\xff"), "fewer than"),
    "an entry that has no header": (edited_directory("x/data/0", 0, b"PK\x01\x03"), "fewer than"),
    "a directory of more entries": (edited_end(10, b"\xff\xff"), "declares 65535 entries"),
    "a directory of fewer entries": (edited_end(10, b"\x02\x00"), "more than 2 entries"),
    "a directory that is longer": (edited_end(12, b"\xff\xff\xff\x7f"), "in 2147483647 bytes"),
    "a directory that begins elsewhere": (edited_end(16, b"\0\0\0\0"), "its directory"),
    "a comment": (edited_end(20, b"\x05\x00"), "has no end"),
    "bytes after the archive": (torch_file(NAMED) + b"\0" * 9, "has no end"),
    # Streams, as before torch 1.6
    "a stream of another version": (
        HEAD.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2)), "torch writes 1001"),
    "a stream whose storage is not in it": (
        stream(table(a=tensor(storage("torch.LongStorage", "0", 4, b"N")))), "it lists the storag"),
    "a stream whose storage has another length": (
        stream(table(a=tensor(storage("torch.LongStorage", "0", 4, b"N"))), ["0"],
               stream_storage(5, bytes(40))), "has 5 entries, and declares 32 bytes"),
    "a stream without its storages": (stream(NAMED), "persistent id"),
    "a stream that lists other storages": (stream(dumped({}), ["0"]), "it lists the storages"),
    "a stream that lists what is no text": (stream(dumped({}), [[[]]]), "it lists the storages"),
    "a stream with bytes after it": (stream(dumped({})) + b"N", "1 bytes follow its last"),
    "a stream that ends early": (stream(dumped({}))[:-2], "ends"),
}  # fmt: skip
"""Whole files that are refused."""
