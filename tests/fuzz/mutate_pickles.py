"""Mutations of pickles and torch files, by bytes and by what they are made of. Imports no torch.

A pickle is mutated as a list of opcodes, a torch file as the entries of its archive, and a torch
file inside a pickle as a file of its own. What was mutated is put together again with right lengths
and checksums, so that mutations get past those.
"""

import io
import pickletools
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from pickle_writer import archive, data, name, number

_ARCHIVE = b"PK\x03\x04"
STREAM = b"l\xfc\x9cF\xf9 j\xa8P\x19"
_INTEGERS = (
    *range(-3, 20), 63, 64, 127, 128, 255, 256, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32,
    1 << 40, 1 << 48, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 2000, -1 << 31, -1 << 63,
)  # fmt: skip
_TEXTS = (
    "", "i8", "O8", "V8", "M8", "S1", "U1", "b1", "f2", "|", "<", ">", "=", "latin1", "zlib", "cpu",
    "storage", "little", "big", "0", "1", "C", "F", "K", "int64", "bfloat16", "torch.int64", "uid",
    "samples", "batch", "rollout_data", "leaves", "_tensordict", "values", "offsets", "numpy",
    "\ud800", "a" * 300, "é", "torch.sparse_coo", "<NJT_VALUES>a", "<NJT_OFFSETS>a",
)  # fmt: skip
_FOREIGN = (
    "posix.system", "os.system", "builtins.eval", "builtins.exec", "builtins.getattr",
    "subprocess.Popen", "copyreg._reconstructor", "numpy.memmap", "torch.load", "codecs.open",
    "functools.partial", "numpy.core.multiarray.fromfile", "builtins.open",
)  # fmt: skip
_CODES = [ord(op.code) for op in pickletools.opcodes if op.arg is None]
_PUTS = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
_PUSHING = (b"N", b"\x88", b"\x89", b")", b"}", b"]", number(7))


class Mutations:
    """Mutations of files, each the same for the same seed.

    Args:
        files: what is mutated, by name.
        names: the globals that a pickle may name.
        attacks: opcodes that push a value of an attack.
    """

    def __init__(
        self, files: Mapping[str, bytes], names: Sequence[str], attacks: Sequence[bytes]
    ) -> None:
        self.files, self._names, self._attacks = files, names, attacks
        self._random = Random(0)

    def draw(self, seed: str) -> tuple[str, bytes]:
        """The name of a file, and its mutation."""
        self._random = Random(seed)
        path = self._random.choice(sorted(self.files))
        content = self.files[path]
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 6))):
            try:
                by_bytes = self._random.random() < 0.2
                content = self._by_bytes(content) if by_bytes else self._by_structure(content)
            except Exception:  # what was mutated before is no file any more
                content = self._by_bytes(content)
        return path, content

    # Bytes ---------------------------------------------------------------------------------------

    def _by_bytes(self, content: bytes) -> bytes:
        random, raw = self._random, bytearray(content)
        for _ in range(random.choice((1, 1, 2, 8))):
            at = random.randrange(len(raw) + 1)
            end = min(len(raw), at + random.choice((1, 1, 2, 4, 8, 64)))
            what = random.randrange(6)
            if what == 0 and at < len(raw):
                raw[at] ^= 1 << random.randrange(8)
            elif what == 1:
                raw[at:end] = random.randbytes(end - at)
            elif what == 2:
                raw[at:end] = random.choice((b"\0", b"\xff")) * (end - at)
            elif what == 3:
                del raw[at:end]
            elif what == 4:
                raw[at:at] = random.choice((raw[at:end], random.randbytes(2)))
            else:
                width = random.choice((1, 2, 4, 8))
                value = random.choice(_INTEGERS) % (1 << 8 * width)
                raw[at : at + width] = value.to_bytes(width, "little")
        return bytes(raw if random.random() < 0.95 else raw[: random.randrange(len(raw) + 1)])

    # Structure -----------------------------------------------------------------------------------

    def _by_structure(self, content: bytes) -> bytes:
        if content.startswith(_ARCHIVE):
            return self._archive(content)
        return self._stream(content) if STREAM in content[:64] else self._pickle(content)

    def _archive(self, content: bytes) -> bytes:
        random = self._random
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            entries = [(entry.filename, file.read(entry)) for entry in file.infolist()]
        at, what = random.randrange(len(entries)), random.random()
        if what < 0.75:
            at = [path.endswith("data.pkl") for path, _ in entries].index(True)
            entries[at] = entries[at][0], self._pickle(entries[at][1])
        elif what < 0.9:
            entries[at] = entries[at][0], self._by_bytes(entries[at][1])
        elif what < 0.93:
            del entries[at]
        elif what < 0.96:
            entries.insert(random.randrange(len(entries)), entries[at])
        else:
            path = random.choice(("../x", "x/data/0", entries[0][0], "a/constants.pkl", "data.pkl"))
            entries[at] = path, entries[at][1]
        method = zipfile.ZIP_DEFLATED if random.random() < 0.03 else zipfile.ZIP_STORED
        made = archive(entries, method)
        if random.random() < 0.05:  # the directory, which no checksum covers
            begin = made.index(b"PK\x01\x02")
            made = made[:begin] + self._by_bytes(made[begin:])
        return made

    def _stream(self, content: bytes) -> bytes:
        """One of the pickles of a stream, most often that of the values."""
        file, ends = io.BytesIO(content), [0]
        for _ in range(5):
            list(pickletools.genops(file))
            ends.append(file.tell())
        which = self._random.choice((0, 1, 2, 3, 3, 3, 3, 3, 3, 4))
        begin, end = ends[which : which + 2]
        return content[:begin] + self._pickle(content[begin:end]) + content[end:]

    def _pickle(self, content: bytes) -> bytes:
        """Opcodes of a pickle: changed, moved, repeated, left out, or others in their place."""
        random = self._random
        found = list(pickletools.genops(content))
        ends = [at for _, _, at in found[1:]] + [len(content)]
        parts = [
            (op.name, arg, content[at:end])
            for (op, arg, at), end in zip(found, ends, strict=True)
            if op.name != "FRAME"
        ]
        # Entries of the memo are put without their numbers, which would no longer be in order.
        codes = [b"\x94" if op in _PUTS else code for op, _, code in parts]
        inner = [n for n, (_, arg, _) in enumerate(parts) if _is_file(arg)]
        at, what = random.randrange(1, len(codes)), random.random()
        end = min(len(codes) - 1, at + random.choice((1, 1, 1, 2, 5)))
        if inner and random.random() < 0.6:
            at = random.choice(inner)
            raw = parts[at][1]
            codes[at] = data(self._by_structure(raw.encode("latin1") if type(raw) is str else raw))
        elif what < 0.08:
            del codes[at:end]
        elif what < 0.14:
            codes[at:at] = codes[at:end]
        elif what < 0.2:
            other = random.randrange(1, len(codes))
            codes[at], codes[other] = codes[other], codes[at]
        elif what < 0.25:
            codes.insert(at, self._anything())
        elif what < 0.3:
            other = random.randrange(1, len(codes))
            codes[at:end] = codes[other : other + end - at]
        elif what < 0.5:
            codes[at] = self._anything()
        else:
            codes[at] = self._other(*parts[at])
        return b"".join(codes)

    def _other(self, op: str, arg: object, code: bytes) -> bytes:
        """Another opcode in place of one: of the same kind where it pushes a value."""
        random = self._random
        if op in _PUTS:
            return random.choice((code, b"\x94", b"r" + random.randbytes(4)))
        if op in ("BINGET", "LONG_BINGET"):
            return b"j" + struct.pack("<I", max(0, int(str(arg)) + random.randrange(-9, 10)))
        if op == "GLOBAL":
            return name(random.choice(self._names if random.random() < 0.9 else _FOREIGN))
        if isinstance(arg, bool) or op in ("NONE", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST"):
            return random.choice(_PUSHING)
        if isinstance(arg, int):
            near = random.randrange(-2, 3) + arg
            return number(random.choice((*_INTEGERS, near, near)))
        if isinstance(arg, str):
            other = random.choice((*_TEXTS, arg[:-1], arg * 2, random.choice(self._names)))
            raw = other.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(raw)) + raw
        if isinstance(arg, bytes):
            return data(self._by_bytes(arg))
        return bytes([random.choice(_CODES)])

    def _anything(self) -> bytes:
        """Opcodes that push a value: of an attack, a name, a number, or what the memo holds."""
        random, what = self._random, self._random.randrange(8)
        if what < 4:
            return random.choice(self._attacks)
        if what == 4:
            return name(random.choice((*self._names, *_FOREIGN)))
        if what == 5:
            return number(random.choice(_INTEGERS))
        if what == 6:
            return b"h" + bytes([random.randrange(256)])
        return bytes([random.choice(_CODES)])


def _is_file(arg: object) -> bool:
    """Whether an argument is a torch file."""
    if isinstance(arg, str):
        arg = arg[:64].encode("latin1", "replace")
    return isinstance(arg, bytes) and (arg.startswith(_ARCHIVE) or STREAM in arg[:64])
