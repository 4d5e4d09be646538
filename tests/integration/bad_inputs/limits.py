"""Files that inflate, or take more memory than they may."""

import gzip
import json
import struct
from pathlib import Path

import zstandard

from bad_inputs.kind import GOOD, Kind, file_kind
from forkpoint import load_rollouts
from forkpoint.errors import ConfigError, RolloutError
from made_parquet import DOUBLE, flat, parquet, repeated

MIB = 1 << 20


def line_feeds(size: int) -> bytes:
    """A zstd frame of blocks that repeat a line feed 128 KiB times, in four bytes each."""
    block = 1 << 17
    count = size // block
    blocks = (
        (block << 3 | 1 << 1 | (n == count - 1)).to_bytes(3, "little") + b"\n" for n in range(count)
    )
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)


def wide() -> bytes:
    """A zstd frame that declares a window of 1 GiB and holds nothing."""
    return b"\x28\xb5\x2f\xfd\x00\xa0" + (1).to_bytes(3, "little")


def header(**tensor: object) -> bytes:
    """A safetensors file of one tensor of 64 bytes, of which the header says this."""
    entry = {"dtype": "I64", "shape": [8], "data_offsets": [0, 64], **tensor}
    text = json.dumps({"token_ids": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def long_rollout() -> bytes:
    """A rollout of 100,000 tokens, which parquet has as two numbers and how often each comes."""
    columns = [repeated("token_ids", 1, 100_000), repeated("loss_mask", 1, 100_000, 0)]
    return parquet([*columns, flat("advantage", DOUBLE, struct.pack("<d", 0.5), 1)], 1)


LIMITS = (
    file_kind(
        "A file that inflates",
        line_feeds(100 * MIB),
        file="bad.jsonl.zst",
        message="bad.jsonl.zst inflates: the first 1.0 KiB of it give 32.4 MiB of content, and by "
        "default a file gives at most 32.0 MiB and 128 times what is read. Where it is meant to, "
        "set a limit on memory (memory_limit=, --memory-limit), such as 4GB, which is then the "
        "only one.",
        means="A few bytes stand for very many. Real rollouts that share long prompts are "
        "compressed 20 to 40 times.",
        remedy="Look at what wrote it. Where many long rollouts are the same, give a limit.",
    ),
    Kind(
        name="Rollouts that take more memory than they may",
        error=RolloutError,
        message="bad.jsonl needs more memory than it may take: line 1 needs 3.5 KiB, and "
        "memory_limit is 1000 bytes, as given. Where the file is meant to be so large, raise the "
        "limit (memory_limit=, --memory-limit), for example to 8GB; limit= or --limit reads fewer "
        "rollouts.",
        means="What is read, and the rollouts that are kept, are charged to the limit before they "
        "are allocated. By default it is 640 MiB, or 16 times what the file has on disk.",
        remedy="Raise the limit to what the machine has, or read a part of the file.",
        prepare=lambda _: Path("bad.jsonl").write_text(GOOD),
        call=lambda: load_rollouts("bad.jsonl", memory_limit="1kB"),
        argv=("plan", "bad.jsonl", "--memory-limit", "1kB"),
    ),
    Kind(
        name="A memory limit that is no size",
        error=ConfigError,
        message="memory_limit is '8 gigs'; it takes a number of bytes of at least 1, or text such "
        "as '8GB', '512MiB'. Leave it out for the default.",
        means="kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024.",
        remedy="Write 8GB.",
        call=lambda: load_rollouts("ok.jsonl", memory_limit="8 gigs"),
        argv=("plan", "ok.jsonl", "--memory-limit", "8 gigs"),
    ),
    file_kind(
        "A zstd window that is too large",
        wide(),
        file="bad.jsonl.zst",
        message="bad.jsonl.zst declares a zstd window of 1.0 GiB, and by the limit on memory "
        "(640.0 MiB) at most 160.0 MiB are taken. Raise it (memory_limit=, --memory-limit) to "
        "four times the window, or compress the file again without --long.",
        means="To decompress takes a buffer as large as the window.",
        remedy="zstd --long=27 needs no more than 128 MiB.",
    ),
    file_kind(
        "A file that is compressed twice",
        gzip.compress(zstandard.compress(GOOD.encode()), mtime=0),
        file="bad.jsonl.gz",
        message="bad.jsonl.gz is compressed twice: what it holds is compressed as well. Decompress "
        "it once.",
        means="One layer of gzip or zstd is undone while it is read.",
        remedy="gunzip, or zstd -d, leaves a file that can be read.",
    ),
    file_kind(
        "A tensor whose shape is not that of its bytes",
        header(shape=[2**40]),
        file="bad.safetensors",
        message="bad.safetensors is no whole safetensors file: invalid shape of 'token_ids': "
        "[1099511627776] of I64 has 1099511627776 x 8 bytes, and data_offsets have 64. Copy or "
        "write the file again.",
        means="The header says how many bytes each tensor has, and where they lie.",
        remedy="Write the file again; nothing of it is known to be right.",
    ),
    Kind(
        name="A small file that a model would run for long",
        error=ConfigError,
        message="bad.parquet inflates: it has 440 bytes, and the model would run 100,000 tokens of "
        "it; from so small a file at most 65,536 are run. Take fewer rollouts (--limit), or, where "
        "it is meant to be so, set a memory limit (--memory-limit), such as 8GB.",
        means="More than 16 tokens for each byte are not in a file of real rollouts, and "
        "attention takes time to their square.",
        remedy="Give --memory-limit where it is meant.",
        prepare=lambda _: Path("bad.parquet").write_bytes(long_rollout()),
        argv=("replay", "bad.parquet", "--model", "ok.json"),
    ),
)
