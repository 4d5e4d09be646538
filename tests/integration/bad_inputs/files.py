"""Files of rollouts that cannot be read, or written."""

import gzip
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from tokenizers import Tokenizer, models

from bad_inputs.kind import GOOD, Kind, file_kind, with_field
from forkpoint import Rollout, load_rollouts, save_rollouts
from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.formats.tensors import RECIPE

ROLLOUT = Rollout([1, 2], [0, 1], 1.0, rollout_id="b")
OTHER = GOOD.replace('"a"', '"b"')
TWO = f"{GOOD}\n{OTHER}\n".encode()


def numpy_archive() -> bytes:
    content = io.BytesIO()
    np.savez(content, input_ids=np.ones(3, np.int64))
    return content.getvalue()


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
    return content.getvalue()


def words() -> None:
    """A tokenizer.json, with which ok.jsonl is read."""
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.save("tokenizer.json")


FILES = (
    Kind(
        name="A file that does not exist",
        error=RolloutError,
        message="none.jsonl does not exist. Give the path of a file of rollouts.",
        means="Nothing is at this path, seen from the present folder.",
        remedy="Look for a spelling mistake, or give an absolute path.",
        call=lambda: load_rollouts("none.jsonl"),
        argv=("plan", "none.jsonl"),
    ),
    Kind(
        name="A folder in place of a file",
        error=RolloutError,
        message="folder is a directory. Give the path of one file of rollouts in it, or the folder "
        "of a recorded trace.",
        means="Rollouts are read from one file at a time.",
        remedy="Name a file; rollouts of several files can be joined by concatenating the files.",
        call=lambda: load_rollouts("folder"),
        argv=("plan", "folder"),
        prepare=lambda _: Path("folder").mkdir(),
    ),
    file_kind(
        "An empty file",
        "\n  \r\n",
        message="bad.jsonl holds no rollouts: it is empty or has only blank lines. Look at what "
        "wrote it.",
        means="There is nothing to train on. Usually what wrote the file failed, or its filter "
        "took everything out.",
        remedy="Write the file again.",
    ),
    file_kind(
        "A line that is not JSON",
        f"{GOOD}\n{GOOD[:30]}",
        message="bad.jsonl, line 2, column 22: not JSON (Unterminated string starting at), at "
        "'\"loss_mas'. Each line holds one whole JSON object.",
        means="The line ends in the middle, or was never JSON.",
        remedy="Write the file again; an interrupted writer leaves such a last line.",
    ),
    file_kind(
        "An object over several lines",
        '{\n  "token_ids": [1, 2],\n',
        message="bad.jsonl, line 1, column 2: not JSON (Expecting property name enclosed in double "
        "quotes), at the end of the line. Each line holds one whole JSON object.",
        means="The format is JSON lines. Indented JSON has its objects on several lines.",
        remedy="Write each rollout with json.dumps without indent, or with save_rollouts.",
    ),
    file_kind(
        "A list of rollouts on one line",
        f"[{GOOD}]",
        message="bad.jsonl, line 1 is [{'advantage': 0.5, 'loss_mask': [...], 'rollout_id': "
        "'a', 'token_ids': [...]}]; each line holds one JSON object with the keys token_ids, "
        "loss_mask, advantage. Write the items of the list one a line.",
        means="The file is one JSON array, not JSON lines.",
        remedy="Write its entries one a line, without the brackets around them.",
    ),
    file_kind(
        "A key twice in one object",
        GOOD.replace('"advantage"', '"loss_mask"'),
        message="bad.jsonl, line 1: the key 'loss_mask' is there twice in one object. Leave one of "
        "the two out.",
        means="JSON readers keep the last one silently, and which was meant cannot be known.",
        remedy="Leave one of the two out where the line is written.",
    ),
    file_kind(
        "Keys that a rollout needs and the line has not",
        GOOD.replace("loss_mask", "mask").replace("advantage", "reward"),
        message="bad.jsonl, line 1: has no loss_mask, advantage; its keys are ['token_ids', "
        "'mask', 'reward', 'rollout_id']. A rollout needs token_ids, loss_mask, advantage; "
        "rename the keys or add them.",
        means="The names are those of forkpoint.Rollout. Others are kept in extras, where nothing "
        "looks for a mask.",
        remedy="Rename the keys; docs/rollouts.md has all names.",
    ),
    file_kind(
        "Text that is not UTF-8",
        GOOD.encode() + b'\n{"a": "\xe9"}',
        message="bad.jsonl, line 2: byte 8 is 0xe9, which is not UTF-8. Save the file as UTF-8, "
        "plain or compressed once with gzip or zstd.",
        means="The file is of another encoding, or of another format than JSON lines, gzip and "
        "zstd.",
        remedy='Write it with encoding="utf-8".',
    ),
    file_kind(
        "A byte order mark",
        "\ufeff" + GOOD,
        message="bad.jsonl, line 1 begins with a byte order mark. Save the file as UTF-8 without "
        "one.",
        means="Some editors put an invisible character before the first line, which is no JSON.",
        remedy='Save without it, or read with encoding="utf-8-sig" and write again.',
    ),
    file_kind(
        "A gzip file that is cut short",
        gzip.compress(TWO, mtime=0)[:-6],
        message="bad.jsonl.gz is cut short or damaged: Compressed file ended before the "
        "end-of-stream marker was reached. Copy or write the file again.",
        means="The end of the archive is missing, so rollouts may be missing as well.",
        remedy="Copy it again; close the writer before the file is read.",
        file="bad.jsonl.gz",
    ),
    file_kind(
        "A zstd file that is cut short",
        zstandard.compress(TWO)[:-6],
        message="bad.jsonl.zst is cut short or damaged: the last zstd frame has no end. Copy or "
        "write the file again.",
        means="The end of the archive is missing, so rollouts may be missing as well.",
        remedy="Copy it again; close the writer before the file is read.",
        file="bad.jsonl.zst",
    ),
    file_kind(
        "A damaged archive",
        gzip.compress(TWO, mtime=0) + b"rubbish",
        message="bad.jsonl.gz is cut short or damaged: Not a gzipped file (b'ru'). Copy or write "
        "the file again.",
        means="Bytes were changed or added since it was compressed.",
        remedy="Copy it again from where it was written.",
        file="bad.jsonl.gz",
    ),
    file_kind(
        "A file of another kind",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i8'}",
        message="bad.npy is of no kind that is read: it begins with b'\\x93NUMPY\\x01\\x00'. Give "
        "JSON lines (plain, gzip or zstd), parquet, safetensors or a torch file.",
        means="The file is binary, and of none of these kinds.",
        remedy="Write what it holds with torch.save or safetensors, under a trainer's names.",
        file="bad.npy",
    ),
    file_kind(
        "An archive of something else than a torch file",
        numpy_archive(),
        message="bad.npz is a zip archive of something else than a torch file: it holds "
        "['input_ids.npy']. Arrays are read from safetensors and from what torch.save writes.",
        means="Torch files are zip archives, and so are numpy's .npz and many others.",
        remedy="Write the arrays with torch.save or safetensors.",
        file="bad.npz",
    ),
    file_kind(
        "A torch file that is cut short",
        b"PK\x03\x04" + bytes(60),
        message="bad.pt cannot be read as a torch file: BadZipFile: File is not a zip file. Copy "
        "or write the file again.",
        means="The end of the archive is missing, and with it the list of what it holds.",
        remedy="Copy it again; look whether the disk was full when it was written.",
        file="bad.pt",
    ),
    file_kind(
        "A pickle",
        pickle.dumps([1]),
        message=f"bad.pkl is a pickle, which can run code when it is loaded, and is not read. "
        f"{RECIPE}",
        means="A pickle is a program, and loading it runs the program.",
        remedy="Convert files that you trust; docs/rollouts.md has the lines for each trainer. Do "
        "not load a pickle of a stranger to find out what is in it.",
        file="bad.pkl",
    ),
    file_kind(
        "A torch file that names code",
        saved(os.system),
        message="bad.pt is not read by torch.load(weights_only=True): it names posix.system. "
        f"{RECIPE}",
        means="Such a file could run code. Objects of trainers and numpy arrays name code as well.",
        remedy="Save tensors, lists, dicts, numbers and text alone: arrays with .tolist(), objects "
        "with vars().",
        file="bad.pt",
    ),
    file_kind(
        "A torch file whose entries are compressed",
        compressed(),
        message="bad.pt is an archive of compressed entries, and torch.save compresses none. Write "
        "it with torch.save, and compress the whole file where it is kept.",
        means="A small file could otherwise take any amount of memory.",
        remedy="Write it with torch.save.",
        file="bad.pt",
    ),
    file_kind(
        "A sparse tensor",
        saved({"prompt_ids": torch.eye(2).to_sparse()}),
        message="bad.pt, prompt_ids: the tensor is a Tensor of torch.float32, torch.sparse_coo, on "
        "cpu, whose numbers cannot be read. Give an ordinary tensor of this rollout alone: "
        ".to_dense() of a sparse one, .dequantize() of a quantized one, .full_tensor() of a "
        "distributed one, one part of a nested one.",
        means="Columns of rollouts are rows of numbers.",
        remedy="Write it with .to_dense().",
        file="bad.pt",
    ),
    Kind(
        name="A format that the file is not of",
        error=RolloutError,
        message="bad.jsonl, line 1: there is no prompts; the record has ['advantage', 'loss_mask', "
        "'rollout_id', 'token_ids']. It was read as 'verl', as asked, and by its keys it is "
        "'forkpoint'.",
        means="The keys are those of another trainer than the one that was named.",
        remedy="Leave the format out, or name the one that the message says.",
        prepare=lambda _: Path("bad.jsonl").write_text(GOOD),
        call=lambda: load_rollouts("bad.jsonl", format="verl"),
        argv=("plan", "bad.jsonl", "--format", "verl"),
    ),
    file_kind(
        "A rollout_id twice in a file",
        f"{GOOD}\n\n{GOOD}\n",
        message="bad.jsonl: rollout_id 'a' is on line 1 and again on line 3; each rollout needs "
        "its own. Rename one, or leave rollout_id out.",
        means="Results are named by rollout_id and could not be told apart.",
        remedy="Number the samples of a prompt, or leave rollout_id out: a batch fills in "
        "positions.",
    ),
    file_kind(
        "extras that are no object",
        with_field("extras", "[1]"),
        message="bad.jsonl, line 1: Rollout 'a': extras is [1]; it takes a dict or None.",
        means="extras carries named values through untouched.",
        remedy='Write {"extras": {"reward": 1}}, say, or the key itself on the line.',
    ),
    file_kind(
        "A key both on the line and in extras",
        with_field("extras", '{"reward":2},"reward":1'),
        message="bad.jsonl, line 1: 'reward' is a key of the line and of its extras. Unknown keys "
        "of a line are put into extras; rename or remove one of the two.",
        means="Both would be the same entry of extras.",
        remedy="Keep one of the two.",
    ),
    file_kind(
        "NaN in extras",
        with_field("reward", "NaN"),
        message="bad.jsonl, line 1: extras['reward'] is nan, but JSON has no NaN and no infinity. "
        "Write null or text instead.",
        means="Python writes NaN into JSON, which other readers refuse.",
        remedy="Write null where there is no number.",
    ),
    file_kind(
        "A number of thousands of digits",
        with_field("token_ids", f"[{'9' * 5000}]"),
        message="bad.jsonl, line 1: a number has more than 4300 digits. Numbers of a rollout have "
        "a few; look at what wrote the line.",
        means="Python refuses to read such numbers, and no token id has so many digits.",
        remedy="Look at what wrote the line: digits of several ids may have run together.",
    ),
    Kind(
        name="A limit of no rollouts",
        error=ConfigError,
        message="limit is 0; it takes a whole number of at least 1. Leave it out to read all "
        "rollouts.",
        means="A limit is how many rollouts are read at most.",
        remedy="Give 1 or more.",
        call=lambda: load_rollouts("ok.jsonl", limit=0),
        argv=("plan", "ok.jsonl", "--limit", "0"),
    ),
    Kind(
        name="Rollouts that take more memory than they may",
        error=RolloutError,
        message="bad.jsonl needs more memory than it may take: line 1 (its first 63 "
        "bytes) needs 1008 bytes, and memory_limit is 1000 bytes, as given. Where the file is "
        "meant to be so large, raise the limit (memory_limit=, --memory-limit), for example to "
        "8GB; limit= or --limit reads fewer rollouts.",
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
    Kind(
        name="Another suffix when saving",
        error=RolloutError,
        message="rollouts.txt ends in '.txt'; allowed are .jsonl, .gz, .zst. Rename the file.",
        means="The suffix chooses the format that is written.",
        remedy="End the name in .jsonl, .jsonl.gz or .jsonl.zst.",
        call=lambda: save_rollouts("rollouts.txt", [ROLLOUT]),
    ),
    Kind(
        name="A folder that does not exist when saving",
        error=RolloutError,
        message="The folder none does not exist. Create it before saving.",
        means="Folders are not made silently, for the name may be a mistake.",
        remedy="Path(...).mkdir(parents=True) makes it.",
        call=lambda: save_rollouts("none/rollouts.jsonl", [ROLLOUT]),
    ),
    Kind(
        name="A folder in place of a file when saving",
        error=RolloutError,
        message="folder.jsonl is a directory. Give the path of a file to write.",
        means="A folder has this name already.",
        remedy="Choose another name, or a file in that folder.",
        call=lambda: save_rollouts("folder.jsonl", [ROLLOUT]),
        prepare=lambda _: Path("folder.jsonl").mkdir(),
    ),
    Kind(
        name="No rollouts to save",
        error=RolloutError,
        message="There are no rollouts; a file takes at least one.",
        means="Such a file could not be read again.",
        remedy="Look for a filter that took everything out.",
        call=lambda: save_rollouts("rollouts.jsonl", []),
    ),
    Kind(
        name="A tokenizer for a file of token ids",
        error=ConfigError,
        message="ok.jsonl is of format 'forkpoint', which has token ids, and a tokenizer is for "
        "files that hold text. Leave it out (tokenizer=, --tokenizer).",
        means="Nothing would be made with it: the ids are those that were trained on.",
        remedy="Leave it out; where several files are given, read those of ids on their own.",
        prepare=lambda _: words(),
        call=lambda: load_rollouts("ok.jsonl", tokenizer="tokenizer.json"),
        argv=("plan", "ok.jsonl", "--tokenizer", "tokenizer.json"),
    ),
    Kind(
        name="extras that JSON cannot hold",
        error=RolloutError,
        message="Rollout 'b' (position 0): extras {'x': nan} cannot be written as JSON: Out of "
        "range float values are not JSON compliant. Keep only text, finite numbers, "
        "booleans, None, lists and dicts with text keys in extras.",
        means="The file would not give back what was saved.",
        remedy="Replace what has no place in JSON by text or null.",
        call=lambda: save_rollouts(
            "rollouts.jsonl", [Rollout([1], [0], 1.0, rollout_id="b", extras={"x": float("nan")})]
        ),
    ),
    Kind(
        name="extras that JSON would change",
        error=RolloutError,
        message="Rollout 'b' (position 0): extras {'x': (1, 2)} would come back from JSON changed. "
        "Keep only lists (no tuples) and dicts with text keys in extras.",
        means="Tuples come back as lists, and keys that are numbers as text.",
        remedy="Store lists, and text as keys.",
        call=lambda: save_rollouts(
            "rollouts.jsonl", [Rollout([1], [0], 1.0, rollout_id="b", extras={"x": (1, 2)})]
        ),
    ),
)
