"""Pickles and torch files that attack their reader, and a part of what is said of each.

FILES holds whole files. FIELDS holds values, each of which becomes a field of a harmless batch: one
that is read ("uid") and one that is not ("other").
"""

import struct

from pickle_writer import (
    FORGED,
    INT64,
    array,
    array_state,
    call,
    data,
    dtype,
    dumped,
    empty_array,
    listed,
    made,
    name,
    number,
    program,
    row,
    sizes,
    storage,
    stream,
    stream_storage,
    text,
    torch_file,
)

import dumps
from dumps import truth

TABLE = {key: value for key, value in dumps.verl(truth()).items() if key != "uid"}
COUNT = len(truth())
POINTERS = data(b"\x41" * 8 * COUNT)
ROWS = row(number(COUNT))
_IN_BYTES = "torch.storage._load_from_bytes"
UNSAFE = "could run code"


def batch(field: str, value: bytes) -> bytes:
    """A batch of verl with one more field, whose memo begins at 0."""
    return program(dumped(TABLE) + text(field) + value + b"s", 2)


def nested(depth: int, begin: bytes, end: bytes) -> bytes:
    """None inside of so many values."""
    return begin * depth + b"N" + end * depth


def laughs(begin: bytes, end: bytes, levels: int = 40, times: int = 10) -> bytes:
    """Containers, each of which holds the one before it ten times."""
    opcodes = b"(" + begin + text("ha") * times + end + b"\x94"
    for level in range(levels):
        opcodes += begin + (b"h" + bytes([level])) * times + end + b"\x94"
    return opcodes + b"t"


def colliding(count: int) -> bytes:
    """A dict of whole numbers with one hash, which is taken modulo 2**61 - 1."""
    keys = b"".join(number(n * (2**61 - 1)) + b"N" for n in range(1, count + 1))
    return b"}(" + keys + b"u"


def inside(body: bytes) -> bytes:
    """A pickle whose storage is a torch file of its own."""
    return call(_IN_BYTES, data(stream(body)))


def deep_inside(levels: int) -> bytes:
    body = dumped(1)
    for _ in range(levels):
        body = inside(body)
    return body


# Values ------------------------------------------------------------------------------------------

_STATE = (3, "<", None, None, None, -1, -1, 0)
_OBJECTS = dtype("O8", 3, "|", None, None, None, -1, -1, 63)
_KEYS = [n.to_bytes(4, "little") for n in range(200_000)]
_NOT_ALLOWED = (
    "os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.getattr",
    "builtins.__import__", "subprocess.Popen", "copyreg._reconstructor", "copyreg.__newobj__",
    "copyreg.__newobj_ex__", "functools.partial", "pickle.loads", "operator.attrgetter",
    "numpy.load", "numpy.fromfile", "torch.load", "torch.hub.load",
    "torch._utils._rebuild_wrapper_subclass", "torch._utils._rebuild_device_tensor_from_numpy",
    "torch.storage.TypedStorage", "collections.Counter", "collections.defaultdict",
)  # fmt: skip
_SAMPLE = "trl.experimental.async_grpo.async_rollout_worker.RolloutSample"


def _void(fields: bytes, size: int) -> bytes:
    state = row(
        number(3), text("|"), b"N", row(text("a")), fields, number(size), number(1), b"K\x00"
    )
    return dtype("V8", build=False) + state + b"b"


FIELDS: dict[str, tuple[bytes, str]] = {
    "objects with the flags of numbers": (array(ROWS, FORGED, POINTERS), UNSAFE),
    "objects with the flags of numbers, as a scalar": (
        call("numpy.core.multiarray.scalar", FORGED, data(b"\x41" * 8)), UNSAFE),
    "objects with the flags of numbers, in tuples": (row(row(row(FORGED))), UNSAFE),
    "objects with the flags of numbers, as a key": (b"}" + FORGED + b"Ns", UNSAFE),
    "objects in a buffer": (
        call("numpy._core.numeric._frombuffer", POINTERS, FORGED, ROWS, text("C")), UNSAFE),
    "a void with a field beyond its size": (
        array(ROWS, _void(b"}" + text("a") + row(INT64, number(1 << 20)) + b"s", 8), POINTERS),
        UNSAFE),
    "a void with a field of objects": (
        array(ROWS, _void(b"}" + text("a") + row(_OBJECTS, number(0)) + b"s", 8), POINTERS),
        UNSAFE),
    "a void": (array(ROWS, dtype("V8", 3, "|", None, None, None, 8, 1, 0), POINTERS), UNSAFE),
    "a date": (array(ROWS, dtype("M8", 4, "<", None, None, None, -1, -1, 0,
                                 ({}, (b"ns", 1, 1, 1))), POINTERS), UNSAFE),
    "a difference of dates": (array(ROWS, dtype("m8"), POINTERS), UNSAFE),
    "a structure by its code": (array(ROWS, dtype("i4,O"), POINTERS), UNSAFE),
    "a structure by its code, with a shape": (array(ROWS, dtype("(2,)i4"), POINTERS), UNSAFE),
    "a dtype by its class": (
        array(ROWS, call("numpy.dtype", name("builtins.object"), b"\x89", b"\x88"), POINTERS),
        UNSAFE),
    "a long double": (array(ROWS, dtype("f16"), data(bytes(16 * COUNT))), UNSAFE),
    "a number of another size": (
        array(ROWS, dtype("i8", 3, "<", None, None, None, 1 << 40, 1, 0), POINTERS), UNSAFE),
    "a number with the flags of objects": (
        array(ROWS, dtype("i8", 3, "<", None, None, None, -1, -1, 63), POINTERS), UNSAFE),
    "a number with names": (
        array(ROWS, dtype("i8", 3, "<", None, ("a",), {}, -1, -1, 0), POINTERS), UNSAFE),
    "a number with metadata": (
        array(ROWS, dtype("i8", *_STATE, {"a": 1}), POINTERS), UNSAFE),
    "a number of no byte order": (
        array(ROWS, dtype("i8", 3, "=", None, None, None, -1, -1, 0), POINTERS), UNSAFE),
    "a number in a base dtype": (
        array(ROWS, dtype("i8", 3, "<", ("O", (1,)), None, None, -1, -1, 0), POINTERS), UNSAFE),
    "text of another size": (
        array(ROWS, dtype("S8", 3, "|", None, None, None, 1 << 40, 1, 0), POINTERS), UNSAFE),
    "text of a billion characters": (
        array(ROWS, dtype("U1000000000", 3, "<", None, None, None, 4000000000, 4, 8), POINTERS),
        UNSAFE),
    "a dtype whose state is set twice": (
        array(ROWS, INT64 + dumped(_STATE) + b"b", POINTERS), UNSAFE),
    "a dtype whose state is never set": (array(ROWS, dtype("i8", build=False), POINTERS), UNSAFE),
    "a dtype that is forged after its array": (
        b"(" + array(ROWS, INT64 + b"\x94", POINTERS) + b"h\x00"
        + dumped((3, "|", None, None, None, -1, -1, 63)) + b"bt", UNSAFE),
    "an array whose state is set twice": (
        array(ROWS, INT64, POINTERS) + array_state(ROWS, INT64, POINTERS) + b"b", UNSAFE),
    "an array of a subclass": (empty_array("numpy.matrix"), UNSAFE),
    "an array by its class": (
        call("numpy.ndarray", ROWS, text("O"), POINTERS), "in another way than numpy's"),
    "a new array of its class": (
        name("numpy.ndarray") + row(ROWS, text("O"), POINTERS) + b"\x81",
        "in another way than numpy's"),
    "a negative shape": (array(row(number(-1)), INT64, POINTERS), "the shape (-1,)"),
    "a shape whose product overflows": (
        array(sizes((2**32, 2**32)), INT64, data(b"")), "18446744073709551616 entries"),
    "a shape of floats": (array(dumped((1.0,)), INT64, POINTERS), "the shape (1.0,)"),
    "a shape of booleans": (array(dumped((True,)), INT64, POINTERS), "the shape (True,)"),
    "a shape of an integer of thousands of bits": (
        array(row(number(1 << 1900)), INT64, POINTERS), "the shape ("),
    "rows of nothing": (array(sizes((2**40, 0)), INT64, data(b"")), "rows of nothing"),
    "too few bytes": (array(ROWS, INT64, data(b"")), f"{COUNT} entries of int64, and there are 0"),
    "too many bytes": (array(ROWS, INT64, data(bytes(8 * COUNT + 1))), f"there are {COUNT}"),
    "a boolean that is two": (
        array(ROWS, dtype("b1", 3, "|", None, None, None, -1, -1, 0), data(b"\x02" * COUNT)),
        "boolean is 2"),
    "text that is no character": (
        array(row(number(1)), dtype("U1", 3, "<", None, None, None, 4, 4, 8), data(b"\xff" * 4)),
        "0xffffffff"),
    "a scalar of another length": (
        call("numpy.core.multiarray.scalar", INT64, data(bytes(9))), "1 entries of int64"),
    "a scalar of objects": (
        call("numpy.core.multiarray.scalar", _OBJECTS, data(b"\x41" * 8)), UNSAFE),
    "zlib": (call("_codecs.encode", data(b"x"), text("zlib")), UNSAFE),
    "rot13": (call("_codecs.encode", text("x"), text("rot13")), UNSAFE),
    "hex of hex of hex": (
        call("_codecs.encode", call("_codecs.encode", data(b"x"), text("hex")), text("hex")),
        UNSAFE),
    "text as UTF-32": (call("_codecs.encode", text("x"), text("utf-32")), UNSAFE),
    "text that is not Latin-1": (
        call("_codecs.encode", text("ሴ"), text("latin1")), "beyond 255"),
    "bytes by their number": (call("builtins.bytes", number(1 << 40)), UNSAFE),
    "a bytearray by its number": (call("builtins.bytearray", number(1 << 40)), UNSAFE),
    **{full: (call(full, text("true")), f"it names {full}") for full in _NOT_ALLOWED},
    "a name of a name": (call("torch._tensor._rebuild_from_type_v2.__globals__", b"N"), UNSAFE),
    "a name with control characters": (name("os.sys\x1b[2Jtem"), "os.sys\\x1b[2Jtem"),
    "a name of megabytes": (b"c" + b"a" * (1 << 20) + b"\nb\n", "256 bytes"),
    "a name on the stack of megabytes": (
        text("a" * (1 << 20)) + text("b") + b"\x93", "it names 'aaaa"),
    "a name on the stack that is no text": (b"NN\x93", "names are text"),
    "a class that is called": (call("torch.Tensor", number(1 << 40)), "it calls torch.Tensor"),
    "a storage that is called": (
        call("torch.FloatStorage", number(1 << 40)), "it calls torch.FloatStorage"),
    "text that is called": (text("a") + b")R", "it calls a str"),
    "arguments that are no tuple": (name("numpy.dtype") + b"]R", "it calls numpy.dtype"),
    "a function of a tensor that is another": (
        call("torch._tensor._rebuild_from_type_v2", name("numpy.dtype"), name("torch.Tensor"),
             row(text("O")), b"N"), "a tensor is made of"),
    "an OrderedDict of arguments": (
        call("collections.OrderedDict", listed(listed(text("a"), b"N"))), "of arguments"),
    "a dict whose state is set": (b"}}b", "the state of a dict"),
    "a function whose state is set": (name("numpy.dtype") + b"}b", "the state of numpy.dtype"),
    "a class as a value": (name("verl.protocol.DataProto"), "is verl.protocol.DataProto"),
    "a storage that runs code": (inside(call("os.system", text("true"))), "it names os.system"),
    "a storage that is none": (inside(dumped(1)), "a storage holds 1"),
    "a storage in a storage": (
        deep_inside(2), "it names torch.storage._load_from_bytes"),
    "a storage that names numpy": (inside(INT64), "it names numpy.dtype"),
    "a dtype with more arguments": (
        call("numpy.dtype", text("i8"), b"\x89", b"\x88", b"N"), "it makes a dtype of"),
    "an array whose state is no tuple": (empty_array() + b"Nb", "has the state None"),
    "an array of another version": (
        empty_array() + row(number(2), ROWS, INT64, b"\x89", POINTERS) + b"b", "has the state (2"),
    "an array of no order": (
        empty_array() + row(number(1), ROWS, INT64, b"N", POINTERS) + b"b", "has the order None"),
    "an array without its state": (empty_array(), "its state is never set"),
    "an array of text": (
        call("numpy.core.multiarray._reconstruct", text("a"), row(number(0)), data(b"b")),
        "it makes an array of"),
    "a buffer of objects": (
        call("numpy._core.numeric._frombuffer", listed(b"N"), _OBJECTS, row(number(1)), text("C")),
        "in a buffer"),
    "a buffer of another order": (
        call("numpy._core.numeric._frombuffer", POINTERS, INT64, ROWS, text("A")),
        "of 4 arguments"),
    "a buffer with an axis twice": (
        call("numpy._core.numeric._frombuffer", POINTERS, INT64, sizes((COUNT, 1)), text("K"),
             sizes((0, 0))), "has the axes (0, 0)"),
    "a buffer with an axis too many": (
        call("numpy._core.numeric._frombuffer", POINTERS, INT64, ROWS, text("K"), sizes((0, 1))),
        "has the axes (0, 1)"),
    "a buffer with axes of text": (
        call("numpy._core.numeric._frombuffer", POINTERS, INT64, ROWS, text("K"), text("a")),
        "has the axes 'a'"),
    "a sample of arguments": (call(_SAMPLE, b"N"), "it makes a Fields of 1"),
    "a sample whose state is set twice": (name(_SAMPLE) + b")\x81}b}b", "of a Fields twice"),
    "a sample without fields": (made(_SAMPLE, text("a")), "has no fields"),
    "a TensorDict of text": (
        call("tensordict._reductions._make_td", text("a"), b"}"), "a TensorDict has no state"),
    "a TensorDict without tensors": (made("tensordict._td.TensorDict", b"}"), "has no tensors"),
    "a TensorDict of one argument": (
        call("tensordict._reductions._rebuild_tensordict_files_consolidated", b"}"),
        "a TensorDict is made of 1"),
    "a TensorDict without a storage": (
        call("tensordict._reductions._rebuild_tensordict_files_consolidated", b"}", b"N"),
        "a TensorDict has no storage"),
    "a DataProto of two parts": (
        made("verl.protocol.DataProto", row(b"N", b"N")), "a DataProto has no tensors"),
    "a DataProto without tensors by name": (
        made("verl.protocol.DataProto", row(row(b"N"), b"N", b"N")), "no tensors by name"),
    "a DataProto of a tensor that is none": (
        made("verl.protocol.DataProto", dumped((((), None, {"a": 1}), {}, {}))), "no dtype, shape"),
    "a set of arguments": (call("builtins.set", b"N", b"N"), "a set is made of 2"),
    "a storage of text": (call(_IN_BYTES, text("a")), "a storage is made of 1"),
    "a size of a number": (call("torch.Size", number(1)), "a size is made of 1"),
    "a device of a number": (call("torch.device", number(1)), "a device or layout of 1"),
    "an object of arguments": (
        call("torch._dynamo.decorators._DimRange", b"N"), "an object of 1 arguments"),
    "an object as a key": (
        b"}" + call("torch._dynamo.decorators._DimRange") + b"Ns", "an opaque is a key"),
    "a parameter of text": (
        call("torch._utils._rebuild_parameter", text("a"), b"N", b"N"), "a tensor is made of"),
    "a nested tensor of nothing": (
        call("torch.nested._internal.nested_tensor._rebuild_njt", b"N"), "has no fields"),
    "a nested tensor of three arguments": (
        call("torch._utils._rebuild_nested_tensor", b"N", b"N", b"N"), "of 3 arguments"),
    "INST": (b"(" + text("true") + b"ios\nsystem\n", "opcode INST"),
    "OBJ": (b"(" + name("numpy.dtype") + text("O") + b"o", "opcode OBJ"),
    "EXT1": (b"\x82\x01", "opcode EXT1"),
    "EXT2": (b"\x83\x01\x00", "opcode EXT2"),
    "EXT4": (b"\x84\x01\x00\x00\x00", "opcode EXT4"),
    "NEWOBJ_EX": (name("numpy.dtype") + b")}\x92", "opcode NEWOBJ_EX"),
    "PERSID": (b"Pa\n", "opcode PERSID"),
    "BINPERSID": (row(text("storage"), name("torch.LongStorage")) + b"Q", "persistent id"),
    "NEXT_BUFFER": (b"\x97", "opcode NEXT_BUFFER"),
    "READONLY_BUFFER": (data(b"a") + b"\x98", "opcode READONLY_BUFFER"),
    "DUP": (b"N2" + b"\x86", "opcode DUP"),
    "POP": (b"NN0", "opcode POP"),
    "a text number of a million digits": (b"L" + b"9" * (1 << 20) + b"L\n", "opcode LONG"),
    "a number of a million bytes": (
        b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20), "1048576 bytes"),
    "a number of a negative length": (b"\x8b\xff\xff\xff\xff", "4294967295 bytes"),
    "an opcode that does not exist": (b"\xff", "opcode 0xff"),
    "a second beginning": (b"\x80\x04N", "opcode PROTO"),
    "a text longer than the file": (b"\x8d" + struct.pack("<Q", 1 << 62), "4611686018427387904"),
    "bytes longer than the file": (b"\x8e" + struct.pack("<Q", 1 << 40), "1099511627776 bytes"),
    "a bytearray longer than the file": (
        b"\x96" + struct.pack("<Q", 1 << 34), "17179869184 bytes"),
    "a frame longer than the file": (b"\x95" + struct.pack("<Q", (1 << 64) - 1) + b"N", "bytes"),
    "text that is not UTF-8": (b"\x8c\x01\xff", "not UTF-8"),
    "an entry of the memo far away": (b"Nr\xff\xff\xff\xff", "entry 4294967295 of a memo"),
    "an entry of the memo that is not there": (b"j\xff\xff\xff\xff", "entry 4294967295 of a memo"),
    "lists in lists in lists": (laughs(b"](", b"e"), "bytes, with what it repeats"),
    "tuples in tuples in tuples": (laughs(b"(", b"t"), "bytes, with what it repeats"),
    "tuples of one tuple twice": (
        laughs(b"", b"\x86", levels=60, times=2), "bytes, with what it repeats"),
    "arrays of objects in arrays of objects": (
        laughs(empty_array() + b"(" + number(1) + row(number(10)) + _OBJECTS + b"\x89](", b"etb"),
        "bytes, with what it repeats"),
    "tuples in tuples as a key": (
        b"}" + laughs(b"", b"\x86", levels=60, times=2) + b"Ns", "a tuple is a key"),
    "an array a million times": (
        b"(" + array(row(number(1 << 10)), INT64, data(bytes(1 << 13))) + b"\x94"
        + b"h\x00" * 1_000_000 + b"t", "bytes, with what it repeats"),
    "a text a million times": (
        b"(" + text("a" * (1 << 13)) + b"\x94" + b"h\x00" * 1_000_000 + b"t",
        "bytes, with what it repeats"),
    "a list in itself": (b"]\x94h\x00a", "the value holds itself"),
    "a dict in itself": (b"}\x94" + text("a") + b"h\x00s", "the value holds itself"),
    "a tuple in a list in itself": (b"]\x94h\x00\x85a", "the value holds itself"),
    "an array in itself": (
        empty_array() + b"\x94" + array_state(row(number(1)), _OBJECTS, listed(b"h\x00")) + b"b",
        "the value holds itself"),
    "a sample in itself": (
        name(_SAMPLE) + b")\x81\x94}" + text("a") + b"h\x00sb", "the value holds itself"),
    "a list of objects that grows later": (
        b"(" + array(row(number(1)), _OBJECTS, b"]\x94Na") + b"h\x00Nat", "there are 2"),
    "a list two hundred thousand deep": (nested(200_000, b"]", b"a"), "nested more than"),
    "a tuple two hundred thousand deep": (b"N" + b"\x85" * 200_000, "nested more than"),
    "a tuple two hundred thousand deep as a key": (
        b"}N" + b"\x85" * 200_000 + b"Ns", "a tuple is a key"),
    "samples in samples": (
        nested(50_000, name(_SAMPLE) + b")\x81}" + text("a"), b"sb"), "nested more than"),
    "arrays in arrays": (
        nested(20_000, empty_array() + b"(" + number(1) + row(number(1)) + _OBJECTS + b"\x89]",
               b"atb"), "nested more than"),
    "a list as a key": (b"}]Ns", "a list is a key"),
    "an array as a key": (b"}" + array(ROWS, INT64, POINTERS) + b"Ns", "an array is a key"),
    "a list in a set": (b"\x8f(]\x90", "a list is a key"),
    "numbers of one hash": (colliding(100_000), "4096 entries"),
    "a key twice": (b"}(" + text("a") + b"N" + text("a") + b"Nu", "twice in one dict"),
    "a key without a value": (b"}(" + text("a") + b"u", "has no value"),
    "entries of a tuple": (b")(" + text("a") + b"Nu", "as to a dict"),
    "items of a dict": (b"}(Ne", "as to a list"),
    "a mark below another value": (b"NN(\x86e", "below a mark"),
}  # fmt: skip
"""Values that a pickle is refused for, whether their field is read or not."""

_AGAIN = b"h\x00h\x01\x86R"
"""A call of what the memo has as its first two entries."""
LARGE: dict[str, bytes] = {
    "marks": program(b"(" * 200_000),
    "lists": program(b"]" * 200_000),
    "dicts": program(b"}" * 200_000),
    "sets": program(b"\x8f" * 200_000),
    "tuples": program(b"N" + b"\x85" * 200_000),
    "empty tuples": program(b")" * 300_000),
    "None": program(b"N" * 300_000),
    "small numbers": program(b"K\x01" * 300_000),
    "large numbers": program(b"J\xff\xff\xff\x7f" * 200_000),
    "floats": program((b"G" + b"\x40" * 8) * 200_000),
    "texts": program(b"\x8c\x02ab" * 200_000),
    "texts of wide characters": program(text("\U0001f600") * 100_000),
    "bytes": program(b"C\x02ab" * 200_000),
    "names": program(name("numpy.dtype") * 100_000),
    "dtypes": program((call("numpy.dtype", text("i8"), b"\x89", b"\x88")) * 100_000),
    "empty arrays": program(empty_array() * 50_000),
    "entries of a memo": program(b"N" + b"\x94" * 300_000),
    "entries of a list": program(b"](" + b"N" * 200_000 + b"e"),
    "entries of a set": program(b"\x8f(" + b"".join(map(data, _KEYS)) + b"\x90"),
    "entries of a dict": program(b"}(" + b"".join(data(key) + b"N" for key in _KEYS) + b"u"),
    "a text encoded again and again": program(
        b"(" + text("a" * (1 << 20)) + b"\x94" + text("latin1") + b"\x94"
        + (name("_codecs.encode") + _AGAIN) * 5_000 + b"t"),
    "a storage read again and again": program(
        b"(" + data(stream(storage("torch.ByteStorage", "0", 1 << 20, b"N"), ["0"],
                           stream_storage(1 << 20, bytes(1 << 20))))
        + b"\x94" + (name(_IN_BYTES) + b"h\x00\x85R") * 5_000 + b"t"),
    "a DataProto read again and again": program(
        b"(" + data(torch_file(dumped({"a": [1] * 50_000}))) + b"\x94"
        + made("verl.protocol.DataProto", b"h\x00}}\x87") * 20_000 + b"t"),
    "a scalar of text again and again": program(
        b"(" + dtype("U1048576", 3, "<", None, None, None, 1 << 22, 4, 8) + b"\x94"
        + data(bytes(1 << 22)) + b"\x94"
        + (name("numpy.core.multiarray.scalar") + _AGAIN) * 5_000 + b"t"),
    "a size again and again": program(
        b"(" + listed(b"N" * 100_000) + b"\x94"
        + (name("torch.Size") + b"h\x00\x85R") * 5_000 + b"t"),
}  # fmt: skip
"""Files of which each opcode takes a little memory, or the same memory again."""
