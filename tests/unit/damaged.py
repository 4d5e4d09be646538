"""Dumps that are damaged or malicious, as a whole or in a record, and what is said of them."""

import json
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import dumps
from dumps import rows_of, tensors, truth, write_json, write_parquet, write_torch

ROW = 4
"""The row that is damaged, so that others remain."""


def edited(make: Callable[[Any], dict[str, Any]], edit: Callable[[dict[str, Any]], object]) -> Any:
    """A writer of a torch file of a table with one edit."""

    def write(folder: Path) -> Path:
        table = make(truth())
        edit(table)
        return write_torch(folder / "x.pt", tensors(table))

    return write


def at(name: str, position: Any, value: Any) -> Callable[[dict], None]:
    """Sets one entry of the damaged row of a column."""

    def edit(table: dict[str, Any]) -> None:
        if isinstance(table[name], np.ndarray):
            table[name][ROW, position] = value
        else:
            table[name][ROW][position] = value

    return edit


def put(name: str, value: Any) -> Callable[[dict], None]:
    """Sets the damaged row of a column of lists or numbers."""

    def edit(table: dict[str, Any]) -> None:
        table[name][ROW] = value

    return edit


COUNT = len(truth())
VERL, TRL, OPENRLHF, NEMO = dumps.verl, dumps.trl, dumps.openrlhf, dumps.nemo_rl
SLIME = dumps.slime


def critic(make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """The table of the same rollouts with what a critic gave."""
    return lambda rollouts: make(dumps.with_critic(rollouts))


VERL_CRITIC, OPENRLHF_CRITIC = critic(dumps.verl_critic), critic(dumps.openrlhf_critic)
NEMO_CRITIC, SLIME_CRITIC = critic(dumps.nemo_rl_critic), critic(dumps.slime_critic)

# name: (writer, parts of the message, the field it counts as when skipped or None where it is of
# the whole file)
RECORDS: dict[str, tuple[Any, list[str], str]] = {
    # ids
    "an id beyond int32": (edited(TRL, at("completion_ids", 0, 2**40)), [str(2**40)],
                           "completion_ids"),
    "no ids": (edited(SLIME, put("tokens", None)), ["there is no tokens"], "tokens"),
    "no mask": (edited(lambda r: {"samples": rows_of(dumps.own(r))},
                       lambda t: t["samples"][ROW].pop("loss_mask")), ["has no loss_mask"],
                "loss_mask"),
    # masks
    "a mask of 2": (edited(VERL, at("response_mask", 0, 2)), ["response_mask[0] is 2"],
                    "response_mask"),
    "trained padding": (edited(VERL, lambda t: t.update(
        response_mask=np.ones((COUNT, 6), int))),
                        ["response_mask[", "padding"], "response_mask"),
    "a hole in the prompt": (edited(TRL, at("prompt_mask", -2, 0)), ["0 between tokens"],
                             "prompt_mask"),
    "a trained first token": (edited(NEMO, at("token_mask", 0, 1)), ["loss_mask[0] is 1"],
                              "token_mask"),
    # numbers
    "an advantage of NaN": (edited(TRL, put("advantages", np.nan)), ["advantages is nan"],
                            "advantages"),
    "an infinite reward": (edited(OPENRLHF, put("rewards", np.inf)), ["rewards is inf"], "rewards"),
    "a value of NaN": (edited(VERL_CRITIC, at("values", 0, np.nan)),
                       ["old_values[", "nan", "the record's values"], "values"),
    "returns for fewer tokens (slime)": (edited(SLIME_CRITIC, put("returns", [0.5])),
                                         ["returns has 1 entries, but the response has"],
                                         "returns"),
    # lengths
    "log-probs too short": (edited(SLIME, put("rollout_log_probs", [-1.0])),
                            ["rollout_log_probs has 1 entries"], "rollout_log_probs"),
    "a response longer than all": (edited(SLIME, put("response_lengths", 99)),
                                   ["response_lengths is 99"], "response_lengths"),
    "a length beyond the row": (edited(NEMO, put("input_lengths", 999)), ["input_lengths is 999"],
                                "input_lengths"),
    # other fields
    "positions that begin again": (edited(VERL, at("position_ids", -6, 0)), ["position_ids"],
                                   "position_ids"),
    "positions of three axes": (edited(VERL, lambda t: t.update(
        position_ids=np.repeat(t["position_ids"][:, None], 3, 1))), ["position_ids has 2 dim"],
        "position_ids"),
    "a group that is no name": (edited(VERL, put("uid", 0.5)), ["uid is 0.5"], "uid"),
    "images": (edited(VERL, lambda t: t.update(multi_modal_inputs=np.array(
        [{"pixel_values": 1} if n == ROW else None for n in range(COUNT)], object))),
        ["multi_modal_inputs has media"], "multi_modal_inputs"),
    "a mask of another trainer": (edited(OPENRLHF, lambda t: t.update(
        loss_mask=[[1] * 12 if n == ROW else None for n in range(COUNT)])),
        ["there is a loss_mask in addition to action_mask"], "loss_mask"),
    "a reward of NaN among several": (edited(dumps.skyrl, put("rewards", [np.nan, *[1.0] * 4])),
                                      ["rewards is nan at token"], "rewards"),
    "rewards for more tokens": (edited(dumps.skyrl, put("rewards", [0.0] * 99)),
                                ["rewards has 99 entries, but response_ids has"], "rewards"),
    "a step of a trajectory": (edited(dumps.skyrl, lambda t: t.update(
        is_last_step=[n != ROW for n in range(COUNT)])), ["is_last_step is false", "as one record"],
        "is_last_step"),
    "several rewards": (edited(lambda r: dumps.slime_samples(r),
                               lambda t: t["samples"][ROW].update(reward={"a": 1, "b": 2})),
                        ["reward is {'a': 1, 'b': 2}"], "reward"),
}  # fmt: skip
EVERY_ROW = {"trained padding", "positions of three axes"}


# Files ------------------------------------------------------------------------------------------


class Bad:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


class Made:
    """The result of a function that is called on unpickling, and the state that it gets."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


def huge_tensor(size: tuple[int, ...], stride: tuple[int, ...]) -> Made:
    """A tensor of that size, of which the file holds four numbers."""
    storage = torch.zeros(4, dtype=torch.int64).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.int64, _internal=True)
    return Made(torch._utils._rebuild_tensor_v2, (typed, 0, size, stride, False, OrderedDict()))


def inflating(folder: Path) -> Path:
    """A torch file whose ids are compressed zeros."""
    path = torch_file(folder)
    with zipfile.ZipFile(path) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data + bytes(1 << 25) if name.endswith("data/0") else data)
    return path


def declaring(folder: Path, **changes: Any) -> Path:
    """A safetensors file of one array whose header says something else of it."""
    entry = {"dtype": "I64", "shape": [8], "data_offsets": [0, 64], **changes}
    header = json.dumps({"prompt_ids": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(64)
    return raw(folder, "x.safetensors", content)


def flipped(path: Path, position: int) -> Path:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)
    return path


def truncated(path: Path, share: float = 0.6) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def torch_file(folder: Path) -> Path:
    return write_torch(folder / "x.pt", tensors(TRL(truth())))


def safe(folder: Path) -> Path:
    return dumps.write_safetensors(folder / "x.safetensors", TRL(truth()))


def parquet(folder: Path) -> Path:
    return write_parquet(folder / "x.parquet", dumps.own(truth()))


def lines(folder: Path, suffix: str) -> Path:
    return write_json(folder / f"x{suffix}", rows_of(dumps.own(truth())))


def flip_token(folder: Path) -> Path:
    """One bit of one id in the storage of a tensor, of which the archive has a checksum."""
    path = torch_file(folder)
    marker = TRL(truth())["completion_ids"].tobytes()
    return flipped(path, path.read_bytes().index(marker) + 8)


def column_twice(folder: Path) -> Path:
    ids, path = pyarrow.array([[1, 2]]), folder / "x.parquet"
    table = pyarrow.Table.from_arrays([ids, ids], names=["token_ids", "token_ids"])
    pyarrow.parquet.write_table(table, path)
    return path


def booleans(folder: Path) -> Path:
    table = tensors(TRL(truth()))
    table["completion_mask"] = (table["completion_mask"] * 2).to(torch.uint8).view(torch.bool)
    return write_torch(folder / "x.pt", table)


def endless() -> list[Any]:
    found: list[Any] = []
    found += [found, found]
    return found


def raw(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "torch with a flipped token": (flip_token, ["x.pt is damaged", "checksum"]),
    "torch that runs code": (lambda f: write_torch(f / "x.pt", {"a": Bad(f / "ran")}),
                             ["x.pt is not read by", "it names exec", "torch.save"]),
    "torch of arrays": (lambda f: write_torch(f / "x.pt", {"uid": np.array(["a"], object)}),
                        ["it names numpy", "as lists"]),
    "a tensor larger than its storage": (lambda f: write_torch(f / "x.pt", {
        **tensors(TRL(truth())), "prompt_ids": huge_tensor((2**33, 2), (2, 1))}), ["again"]),
    "torch that inflates": (inflating, ["x.pt is a zip archive, but not as torch.save"]),
    "booleans that are none": (booleans, ["x.pt, completion_mask has a boolean whose byte"]),
    "torch of a list that holds itself": (lambda f: write_torch(f / "x.pt", endless()),
                                          ["nested more than 64 deep"]),
    "safetensors of a shape that is not there": (
        lambda f: declaring(f, shape=[2**40]), ["x.safetensors", "invalid shape"]),
    "parquet with a column twice": (column_twice, ["x.parquet has the column 'token_ids' more"]),
    "lines with a NUL byte": (lambda f: raw(f, "x.jsonl", b'{"a": [1, 2, 3]}\n\0\0'),
                              ["unknown file type", "and has a NUL byte at position 17"]),
    "a device": (lambda _: Path(os.devnull), ["is a pipe or a device"]),
    "rows of another number": (edited(TRL, lambda t: t.update(
        advantages=t["advantages"][:-1])),
                               [f"'advantages' has {COUNT - 1} rows, but completion_ids has"]),
    "prompts and responses of another width": (edited(VERL, lambda t: t.update(
        input_ids=t["input_ids"][:, :-1])),
                                               ["input_ids has", "7 + 6"]),
    "no attention mask": (edited(VERL, lambda t: t.pop("attention_mask")),
                          ["there is no attention_mask"]),
    "a part of a batch that is no dict": (
        lambda f: write_torch(f / "x.pt", {"batch": tensors(TRL(truth())), "meta_info": [2]}),
        ["x.pt: meta_info is [2]", "it takes a dict"]),
    "keys that are no text": (edited(VERL, lambda t: t.update({1: t.pop("attention_mask")})),
                              ["there is no attention_mask; the record has ['advantages'"]),
    "a signalling NaN": (edited(TRL, lambda t: t["old_per_token_logps"].view(np.uint32).fill(
        0x7FA00000)), ["x.pt, row 0: ", "old_logprobs[5] is nan"]),
    "a tensor alone": (lambda f: write_torch(f / "x.pt", torch.ones(3)), ["a batch is a dict"]),
}  # fmt: skip
