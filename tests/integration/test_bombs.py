"""Small files that stand for much: each is read or refused in limited memory.

One process reads all of them. `make test` tries a few, `make test-slow` the others.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lanes import slow_besides

MIB, GIB = 1 << 20, 1 << 30
GOOD = b'{"token_ids":[1,2,3],"loss_mask":[0,1,1],"advantage":1}\n'
MOST_BYTES = 3 * GIB // 2
"""Of address space. What takes more ends in an error that says so, which is none of those below."""
READ = """
import json, resource, sys
import pyarrow.parquet, zstandard
import forkpoint, forkpoint.rollouts.formats.limits as limits
limits.host_memory_bytes = lambda: 2**30
resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
for line in sys.stdin:
    try:
        found = len(forkpoint.load_rollouts(json.loads(line)))
    except forkpoint.ForkpointError as error:
        found = str(error)
    print(json.dumps(found))
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")


def packed(chunks: Iterable[bytes]) -> bytes:
    """Compressed with zstd, without the content in memory."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return b"".join(map(compressor.compress, chunks)) + compressor.flush()


def times(chunk: bytes, count: int) -> Iterator[bytes]:
    return (chunk for _ in range(count))


def long_rollout(tokens: int) -> Iterator[bytes]:
    step = 1 << 20
    yield b'{"token_ids":[1'
    yield from (b",1" * min(step, tokens - begin) for begin in range(1, tokens, step))
    yield b'],"loss_mask":[0'
    yield from (b",1" * min(step, tokens - begin) for begin in range(1, tokens, step))
    yield b'],"advantage":1}\n'


def with_value(value: str) -> bytes:
    """A rollout with one more field, which is text of JSON."""
    return GOOD[:-2] + f',"x":{value}}}\n'.encode()


def parquet(column: str, values: pyarrow.Array) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({column: values}), sink)
    return sink.getvalue().to_pybytes()


def one_row(tokens: int) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays([0, tokens], np.ones(tokens, np.int8))


def one_text(size: int, rows: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int8), ["y" * size])


def safetensors(shape: list[int]) -> bytes:
    entry = {"dtype": "I64", "shape": shape, "data_offsets": [0, 32]}
    header = json.dumps({"token_ids": entry}).encode()
    return len(header).to_bytes(8, "little") + header + np.arange(4).tobytes()


# By name: the content, and how many rollouts there are or a part of the refusal.
BOMBS: dict[str, tuple[Callable[[], bytes], int | str]] = {
    "zeros in zstd": (lambda: packed(times(bytes(MIB), 200)), "line 1 takes"),
    "zeros in gzip": (lambda: gzip.compress(bytes(60 * MIB)), "line 1 takes"),
    "line feeds": (lambda: packed(times(b"\n" * MIB, 2)), "holds no rollouts"),
    "rollouts that are all the same": (
        lambda: packed(times((GOOD[:-2] + b',"x":"' + b"y" * 90_000 + b'"}\n') * 10, 2000)),
        "memory_limit is 640.0 MiB",
    ),
    "a rollout of 100 million tokens": (
        lambda: packed(long_rollout(10**8)), "line 1 takes"),
    "a rollout of 2 million tokens": (lambda: packed(long_rollout(2 * 10**6)), 1),
    "a window of 1 GiB": (
        lambda: b"\x28\xb5\x2f\xfd\x00\xa0" + (1).to_bytes(3, "little"), "too much memory"),
    "empty frames": (lambda: zstandard.compress(b"") * 100_000 + zstandard.compress(GOOD), 1),
    "empty members": (lambda: gzip.compress(b"") * 20_000 + gzip.compress(GOOD), 1),
    "empty lists": (lambda: with_value("[" + "[]," * 100_000 + "[]]"), 1),
    "empty lists on a long line": (
        lambda: packed([with_value("[" + "[]," * 14_000_000 + "[]]")]), "line 1 takes"),
    "brackets": (lambda: with_value("[" * 5_000_000), "nested too deep"),
    "a number of a million digits": (lambda: with_value("9" * 10**6), "limit (4300 digits)"),
    "a large exponent": (lambda: with_value("1e999999999"), 1),  # an infinity, among the extras
    "the same key over and over": (
        lambda: b"{" + b",".join([b'"a":0'] * 500_000) + b"}\n", "the key 'a' twice"),
    "a parquet row of 50 million tokens": (
        lambda: parquet("token_ids", one_row(50 * 10**6)), "row group 0 takes"),
    "a parquet text of 2 MiB for 20,000 rows": (
        lambda: parquet("x", one_text(2 * MIB, 20_000)), "no known format"),
    "parquet without metadata": (lambda: b"PAR1" + bytes(1000) + b"PAR1", "cannot be read as parq"),
    "safetensors of 2**62 entries": (lambda: safetensors([2**62]), "cannot be read as safetensors"),
}  # fmt: skip
FEW = ("zeros in zstd", "brackets", "parquet without metadata")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], int | str]:
    """The result of reading a file; all files of a lane are read by one process."""

    @cache
    def outcomes(few: bool) -> dict[str, int | str]:
        names = [name for name in BOMBS if (name in FEW) == few]
        folder = tmp_path_factory.mktemp("bombs")
        paths = [folder / str(n) for n in range(len(names))]
        for name, path in zip(names, paths, strict=True):
            path.write_bytes(BOMBS[name][0]())
        done = subprocess.run(
            [sys.executable, "-c", READ.replace("MOST", str(MOST_BYTES))],
            input="".join(json.dumps(str(path)) + "\n" for path in paths),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))

    return lambda name: outcomes(name in FEW)[name]


@pytest.mark.parametrize("name", slow_besides(FEW, BOMBS))
def test_a_file_is_read_or_refused(name: str, outcome: Callable[[str], int | str]) -> None:
    found, wanted = outcome(name), BOMBS[name][1]
    if isinstance(wanted, int):
        assert found == wanted
    else:
        assert isinstance(found, str) and wanted in found and len(found) < 1000
