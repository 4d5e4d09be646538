"""Pickles and torch files that are not read."""

import io
import pickle
import zipfile
from typing import Any

import numpy as np
import torch

from bad_inputs.kind import file_kind

CODE = (
    " Only arrays, tensors and plain containers are loaded. Write these alone; a verl batch with "
    'torch.save({"batch": dict(data.batch.items()), "non_tensor_batch": data.non_tensor_batch, '
    '"meta_info": data.meta_info}, path).'
)
SYSTEM = b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00truetR."
ARRAY = pickle.dumps({"uid": np.array(["a"], object)}, 2)
FORGED = ARRAY.replace(b"K?", b"K\x00")  # the flags of objects
LAUGHS = b"\x80\x02]q\x00(NNNNNNNNNNe" + b"".join(
    b"](" + b"h%c" % n * 10 + b"eq%c" % (n + 1) for n in range(12)
)
LAUGHS += b"\x87" * 6 + b"."


def saved(value: Any) -> bytes:
    """A torch file."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def compressed() -> bytes:
    """A torch file whose entries are compressed."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bad/data.pkl", pickle.dumps([], 2))
        archive.writestr("bad/data/0", np.random.default_rng(0).bytes(4000))
    return content.getvalue()


def _nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


PICKLES = (
    file_kind(
        "A pickle that names a function",
        SYSTEM,
        message=f"bad.pkl is a pickle that could run code: it names posix.system.{CODE}",
        means="A pickle is a program, and Python's own reader runs it. Here it is read without "
        "running it: a name that is not on the list of what rollouts are made of is refused.",
        remedy="Write arrays, tensors, lists and dicts, or one of the trainers' files. If the file "
        "came from elsewhere, do not load it with Python's pickle to find out.",
        file="bad.pkl",
    ),
    file_kind(
        "A pickle with a forged dtype",
        FORGED,
        message="bad.pkl is a pickle that could run code: it has a dtype O8 with a state that "
        f"numpy does not write.{CODE}",
        means="With such a dtype numpy takes bytes of the file for addresses of objects.",
        remedy="Write the file again. If it came from elsewhere, do not load it with Python's "
        "pickle to find out.",
        file="bad.pkl",
    ),
    file_kind(
        "A pickle of dates, structures or long doubles",
        pickle.dumps({"when": np.array(["2025-01-01"], "M8[D]")}, 2),
        message="bad.pkl is a pickle that could run code: it has a dtype 'M8'; arrays of booleans, "
        f"integers and floats of up to 64 bits, text and objects are read.{CODE}",
        means="Only dtypes that are a plain code and a byte order are made, so that nothing else "
        "of a file reaches numpy's dtypes.",
        remedy="Leave the column out, or convert it with .astype(np.int64).",
        file="bad.pkl",
    ),
    file_kind(
        "A pickle that is cut short",
        ARRAY[:-20],
        message="bad.pkl cannot be read as a pickle: it ends before the pickle does. Copy or write "
        "the file again.",
        means="The end of the program is missing, or its middle is damaged.",
        remedy="Copy it again; close the file before it is read.",
        file="bad.pkl",
    ),
    file_kind(
        "Several pickles in one file",
        pickle.dumps([1], 2) + pickle.dumps([2], 2),
        message="bad.pkl cannot be read as a pickle: 9 bytes follow the end of the pickle. Write "
        "one pickle to a file; several batches can be a list.",
        means="pickle.dump was called on the same file several times; the first batch alone would "
        "be read.",
        remedy="Collect the batches in a list and dump that, or write one file for each.",
        file="bad.pkl",
    ),
    file_kind(
        "A pickle that holds more than it has bytes for",
        LAUGHS,
        message="bad.pkl: it holds more than 671088316 bytes, with what it repeats. Raise the "
        "limit (memory_limit=, --memory-limit), or write several files.",
        means="The file names the same lists again and again, and rollouts are copies.",
        remedy="Write every sample once.",
        file="bad.pkl",
    ),
    file_kind(
        "A pickle that is nested too deeply",
        _nested(70),
        message="bad.pkl: lists or dicts are nested more than 64 deep. Write each rollout as one "
        "flat dict.",
        means="A batch is a dict of columns, and a sample a dict of its fields.",
        remedy="Look at what wrote the file.",
        file="bad.pkl",
    ),
    file_kind(
        "A pickle of a value that holds itself",
        b"\x80\x02]q\x00h\x00a.",
        message="bad.pkl: the value holds itself. Copy or write the file again.",
        means="A list or dict is an item of its own.",
        remedy="Look at what wrote the file.",
        file="bad.pkl",
    ),
    file_kind(
        "A torch file whose entries are compressed",
        compressed(),
        message="bad.pt: bad/data.pkl in it is compressed or encrypted. torch.save does neither; "
        "write it again.",
        means="torch.save stores its entries as they are, so that the file bounds their size.",
        remedy="Write it with torch.save, and compress the whole file where it is kept.",
        file="bad.pt",
    ),
    file_kind(
        "A sparse tensor",
        saved({"prompt_ids": torch.eye(2).to_sparse()}),
        message="bad.pt, prompt_ids: a tensor is torch.sparse_coo; dense ones can be read. Leave "
        "it out, or write it as another kind.",
        means="Columns of rollouts are rows of numbers.",
        remedy="Write it with .to_dense().",
        file="bad.pt",
    ),
    file_kind(
        "A tensor of a dtype that is not read",
        saved({"values": torch.zeros(2, dtype=torch.float8_e4m3fn)}),
        message="bad.pt cannot be read as a torch file: a tensor is of 'torch.float8_e4m3fn'; read "
        "are bool, uint8, int8, int16, int32, int64, uint16, uint32, uint64, float16, float32, "
        "float64, bfloat16. Leave it out, or write it as another kind.",
        means="Numbers of rollouts are booleans, integers or floats of 16 to 64 bits.",
        remedy="Write it with .float().",
        file="bad.pt",
    ),
    file_kind(
        "A tensor of many rows out of a few numbers",
        saved({"prompt_ids": torch.zeros(1, 1, dtype=torch.int64).expand(1 << 20, 4)}),
        message="bad.pt, prompt_ids: a tensor declares 4194304 entries in 1048576 rows, and holds "
        "1 numbers that it repeats; at most 65536 rows are read of such a tensor. Write it with "
        ".contiguous().",
        means="A tensor made by .expand() has few numbers in the file and any number of rows; each "
        "row would become a rollout.",
        remedy="Write it with .contiguous() if it is meant.",
        file="bad.pt",
    ),
)
