"""Damaged, wrong and malicious dumps: each is an error that names file, record and field."""

import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dumps
from dumps import rows_of, tensors, truth, write_json, write_parquet, write_torch
from forkpoint import ForkpointError, RolloutError, load_rollouts
from forkpoint.traces import open_rollouts

ROW = 4
"""The row that is damaged, so that others remain."""


def edited(make: Callable[[Any], dict[str, Any]], edit: Callable[[dict[str, Any]], None]) -> Any:
    """A writer of a torch file of a table with one edit."""

    def write(folder: Path) -> Path:
        table = make(truth())
        edit(table)
        return write_torch(folder / "x.pt", tensors(table))

    return write


def at(name: str, position: Any, value: Any, dtype: Any = None) -> Callable[[dict], None]:
    """Sets one entry of the damaged row of a column, in another dtype if asked for."""

    def edit(table: dict[str, Any]) -> None:
        if dtype is not None:
            table[name] = table[name].astype(dtype)
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


def whole(name: str, value: Any) -> Callable[[dict], None]:
    def edit(table: dict[str, Any]) -> None:
        table[name] = value

    return edit


def without(name: str) -> Callable[[dict], None]:
    def edit(table: dict[str, Any]) -> None:
        del table[name]

    return edit


def cut(name: str, entries: int = 1) -> Callable[[dict], None]:
    """Takes the last entries of every row of a column away."""

    def edit(table: dict[str, Any]) -> None:
        table[name] = table[name][:, :-entries]

    return edit


def shorter(name: str) -> Callable[[dict], None]:
    """Takes the last row of a column away."""

    def edit(table: dict[str, Any]) -> None:
        table[name] = table[name][:-1]

    return edit


COUNT = len(truth())
ROW_4 = f"x.pt, row {ROW}"
VERL, TRL, OPENRLHF, NEMO = dumps.verl, dumps.trl, dumps.openrlhf, dumps.nemo_rl
PRIME, SLIME = dumps.prime_rl, dumps.slime


def critic(make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """The table of the same rollouts with what a critic gave."""
    return lambda rollouts: make(dumps.with_critic(rollouts))


VERL_CRITIC, OPENRLHF_CRITIC = critic(dumps.verl_critic), critic(dumps.openrlhf_critic)

# name: (writer, parts of the message, the field it counts as when skipped or None where it is of
# the whole file)
RECORDS: dict[str, tuple[Any, list[str], str]] = {
    # ids
    "an id below 0": (edited(TRL, at("completion_ids", 0, -3)), ["-3"], "completion_ids"),
    "an id beyond int32": (edited(TRL, at("completion_ids", 0, 2**40)), [str(2**40)],
                           "completion_ids"),
    "ids of bits flipped": (edited(VERL, at("input_ids", -6, 2**20 + 7)), ["input_ids["],
                            "input_ids"),
    "an id that is true": (edited(PRIME, at("token_ids", 1, True)), ["token_ids[1] is True"],
                           "token_ids"),
    "an id that is text": (edited(PRIME, at("token_ids", 1, "7")), ["token_ids[0]"], "token_ids"),
    "an id that is missing": (edited(PRIME, at("token_ids", 1, None)), ["token_ids[1] is None"],
                              "token_ids"),
    "ids that are nested": (edited(PRIME, put("token_ids", [[1, 2], [3]])), ["token_ids is"],
                            "token_ids"),
    "no ids": (edited(PRIME, put("token_ids", None)), ["there is no token_ids"], "token_ids"),
    "no mask": (edited(lambda r: {"samples": rows_of(dumps.own(r))},
                       lambda t: t["samples"][ROW].pop("loss_mask")), ["has no loss_mask"],
                "loss_mask"),
    # masks
    "a mask of 2": (edited(VERL, at("response_mask", 0, 2)), ["response_mask[0] is 2"],
                    "response_mask"),
    "a mask of a half": (edited(NEMO, at("token_mask", 0, 0.5, float)), ["token_mask[0] is 0.5"],
                         "token_mask"),
    "trained padding": (edited(VERL, whole("response_mask", np.ones((COUNT, 6), int))),
                        ["response_mask[", "padding"], "response_mask"),
    "trained padding (OpenRLHF)": (edited(OPENRLHF, at("action_mask", -1, True)),
                                   ["action_mask[", "padding"], "action_mask"),
    "trained padding (NeMo RL)": (edited(NEMO, at("token_mask", -1, 1)),
                                  ["token_mask[", "input_lengths"], "token_mask"),
    "a hole in the prompt": (edited(TRL, at("prompt_mask", -2, 0)), ["0 between tokens"],
                             "prompt_mask"),
    "a prompt padded right": (edited(TRL, at("prompt_mask", -1, 0)), ["padded on the left"],
                              "prompt_mask"),
    "a response padded left": (edited(TRL, at("completion_mask", 0, 0)),
                               ["padded on the right"], "completion_mask"),
    "a hole in the row": (edited(OPENRLHF, at("attention_mask", 1, 0)), ["0 between tokens"],
                          "attention_mask"),
    "a trained first token": (edited(PRIME, at("mask", 0, True)), ["loss_mask[0] is 1", "mask"],
                              "mask"),
    # numbers
    "an advantage of NaN": (edited(TRL, put("advantages", np.nan)), ["advantages is nan"],
                            "advantages"),
    "an advantage of NaN among the trained": (edited(VERL, at("advantages", 0, np.nan)),
                                              ["advantage[", "nan"], "advantages"),
    "a log-prob of NaN": (edited(VERL, at("old_log_probs", 0, np.nan)), ["nan"], "old_log_probs"),
    "a log-prob above 0": (edited(VERL, at("old_log_probs", 0, 0.5)), ["at most 0"],
                           "old_log_probs"),
    "an infinite reference": (edited(NEMO, at("reference_policy_logprobs", 4, -np.inf)), ["-inf"],
                              "reference_policy_logprobs"),
    "an infinite reward": (edited(OPENRLHF, put("rewards", np.inf)), ["rewards is inf"], "rewards"),
    "a temperature of 0": (edited(PRIME, put("temperatures", [0.0] * 12)), ["temperature"],
                           "temperatures"),
    "two temperatures": (edited(PRIME, at("temperatures", -1, 0.5)), ["0.5", "has one"],
                         "temperatures"),
    "a value of NaN": (edited(VERL_CRITIC, at("values", 0, np.nan)),
                       ["old_values[", "nan", "the record's values"], "values"),
    "an infinite value": (edited(OPENRLHF_CRITIC, at("values", 0, np.inf)),
                          ["old_values[", "inf", "the record's values"], "values"),
    "a return of NaN": (edited(VERL_CRITIC, at("returns", 0, np.nan)), ["returns[", "nan"],
                        "returns"),
    "an infinite return": (edited(OPENRLHF_CRITIC, at("returns", 6, -np.inf)),
                           ["returns[", "-inf"], "returns"),
    "values for one token too few": (edited(lambda r: dumps.listed(VERL_CRITIC(r)), put(
        "values", [0.5] * 5)), ["values has 5 entries, but responses has 6"], "values"),
    # lengths
    "log-probs too short": (edited(PRIME, put("logprobs", [-1.0])), ["logprobs has 1 entries"],
                            "logprobs"),
    "a mask too long": (edited(SLIME, put("loss_masks", [1] * 99)), ["loss_masks has 99"],
                        "loss_masks"),
    "a response longer than all": (edited(SLIME, put("response_lengths", 99)),
                                   ["response_lengths is 99"], "response_lengths"),
    "a length of a half": (edited(NEMO, lambda t: t.update(
        input_lengths=t["input_lengths"] - np.eye(COUNT)[ROW] / 2)), ["input_lengths is"],
        "input_lengths"),
    "a length beyond the row": (edited(NEMO, put("input_lengths", 999)), ["input_lengths is 999"],
                                "input_lengths"),
    # other fields
    "positions that begin again": (edited(VERL, at("position_ids", -6, 0)), ["position_ids"],
                                   "position_ids"),
    "positions of three axes": (edited(VERL, lambda t: t.update(
        position_ids=np.repeat(t["position_ids"][:, None], 3, 1))), ["several axes"],
        "position_ids"),
    "a group that is no name": (edited(VERL, put("uid", 0.5)), ["uid is 0.5"], "uid"),
    "images": (edited(VERL, lambda t: t.update(multi_modal_inputs=np.array(
        [{"pixel_values": 1} if n == ROW else None for n in range(COUNT)], object))),
        ["multi_modal_inputs holds media"], "multi_modal_inputs"),
    "several rewards": (edited(lambda r: dumps.slime_samples(r),
                               lambda t: t["samples"][ROW].update(reward={"a": 1, "b": 2})),
                        ["reward is {'a': 1, 'b': 2}"], "reward"),
}  # fmt: skip
EVERY_ROW = {"trained padding", "positions of three axes"}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_named_and_can_be_skipped(name: str, tmp_path: Path) -> None:
    write, said, field = RECORDS[name]
    path = write(tmp_path)
    with pytest.raises(RolloutError) as caught:
        load_rollouts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, ") and len(message) < 700
    where = re.match(r".*?, (row|item) (\d+)", message)
    assert where is not None
    assert name in EVERY_ROW or int(where[2]) == ROW
    for part in [*said, field]:
        assert part in message, f"{part!r} is not in {message!r}"
    if name in EVERY_ROW:
        return
    reader = open_rollouts(path, on_error="skip")
    assert len(reader.read()) == COUNT - 1
    assert reader.skipped.fields == {field: 1}


class Bad:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


class Made:
    """What the call of a function gives when it is unpickled, and the state put into that."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


def huge_tensor(size: tuple[int, ...], stride: tuple[int, ...]) -> Made:
    """A tensor of that size, of which the file holds four numbers."""
    storage = torch.zeros(4, dtype=torch.int64).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.int64, _internal=True)
    return Made(torch._utils._rebuild_tensor_v2, (typed, 0, size, stride, False, OrderedDict()))


def huge_array(dtype: Any, data: Any, begin: tuple[int, ...] = (0,)) -> Made:
    """An array that declares 2**27 entries, of which `data` are there."""
    made = np._core.multiarray._reconstruct, (np.ndarray, begin, b"b")
    return Made(*made, (1, (2**27,), np.dtype(dtype), False, data))


def inflating(folder: Path) -> Path:
    """A torch file whose ids are compressed zeros."""
    path = torch_file(folder)
    with zipfile.ZipFile(path) as archive:
        content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data + bytes(1 << 25) if name.endswith("data/0") else data)
    return path


def in_storage(folder: Path) -> Path:
    """A pickle of a tensor, whose storage is a torch file of its own that inflates."""
    content = inflating(folder).read_bytes()
    return pickled(folder, {"a": Made(torch.storage._load_from_bytes, (content,))})


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


def torch_file(folder: Path, make: Any = TRL) -> Path:
    return write_torch(folder / "x.pt", tensors(make(truth())))


def pickled(folder: Path, value: Any) -> Path:
    path = folder / "x.pkl"
    path.write_bytes(pickle.dumps(value))
    return path


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


def flip_page(folder: Path) -> Path:
    path = parquet(folder)
    return flipped(path, path.stat().st_size // 5)


def raw(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def bad_inside(folder: Path) -> Path:
    """A harmless DataProto whose tensors are a torch file that runs code."""
    inner = io.BytesIO()
    torch.save({"x": Bad(folder / "ran")}, inner)
    proto = dumps.stand_ins()["DataProto"]((inner.getvalue(), {}, {}))
    return pickled(folder, proto)


def legacy(folder: Path, value: Any) -> Path:
    path = folder / "x.pt"
    torch.save(value, path, _use_new_zipfile_serialization=False)
    return path


FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "torch cut short": (lambda f: truncated(torch_file(f)), ["x.pt", "again"]),
    "torch with a flipped token": (flip_token, ["x.pt is damaged", "checksum"]),
    "torch that runs code": (lambda f: write_torch(f / "x.pt", {"a": Bad(f / "ran")}),
                             ["could run code", "exec", "torch.save"]),
    "old torch that runs code": (lambda f: legacy(f, {"a": Bad(f / "ran")}), ["could run code"]),
    "a pickle that runs code": (lambda f: pickled(f, [1, Bad(f / "ran")]), ["could run code",
                                                                            "exec"]),
    "a pickle inside a DataProto that runs code": (bad_inside, ["could run code"]),
    "a pickle of a class": (lambda f: pickled(f, {"a": ForkpointError("x")}),
                            ["it names forkpoint.errors.ForkpointError"]),
    "a pickle of a function": (lambda f: pickled(f, eval), ["it names builtins.eval"]),
    "a pickle cut short": (lambda f: truncated(pickled(f, dumps.trl(truth()))), ["x.pkl", "again"]),
    "a tensor of a class of its own that runs code": (
        lambda f: pickled(f, {"prompt_ids": Made(getattr, (Bad(f / "ran"), "x"))}),
        ["could run code", "builtins."]),
    "a tensor larger than its storage": (lambda f: write_torch(f / "x.pt", {
        **tensors(TRL(truth())), "prompt_ids": huge_tensor((2**33, 2), (2, 1))}), ["again"]),
    "a tensor that is one number everywhere": (lambda f: write_torch(f / "x.pt", {
        **tensors(TRL(truth())), "prompt_ids": huge_tensor((2**33, 2), (0, 1))}),
        ["x.pt, prompt_ids: ", f"{2**34} entries", "holds 4 numbers", ".contiguous()"]),
    "an old torch file of more than there is": (lambda f: legacy(f, {
        **tensors(TRL(truth())), "prompt_ids": huge_tensor((2**22, 2), (2, 1))}), ["again"]),
    "a pickle of a tensor larger than the file": (lambda f: pickled(f, {
        "prompt_ids": huge_tensor((2**22, 2), (2, 1))}),
        ["x.pkl, prompt_ids: ", f"declares {2**26} bytes, and the file has"]),
    "torch that inflates": (inflating, ["x.pt: x/data/0 in it declares 33", "the whole file has"]),
    "a pickle of a tensor that inflates": (in_storage, ["x.pkl: ", "data/0 in it declares 33"]),
    "an array of objects that are not there": (
        lambda f: pickled(f, {"uid": huge_array(object, ["a"])}),
        ["x.pkl", "134217728 entries of object, and there are 1'"]),
    "an array of objects in torch": (
        lambda f: write_torch(f / "x.pt", {"uid": huge_array(object, ["a"])}),
        ["x.pt", "134217728 entries of object, and there are 1'"]),
    "an array of numbers that are not there": (
        lambda f: pickled(f, {"prompt_ids": huge_array(np.int64, bytes(8))}), ["there are 1"]),
    "an array of bytes that would be objects": (
        lambda f: pickled(f, {"uid": huge_array(object, bytes(2**20))}),
        ["x.pkl", "134217728 entries of object, and there are 131072'"]),
    "an array that begins large": (lambda f: pickled(f, {"prompt_ids": huge_array(
        np.int64, bytes(8), begin=(2**27,))}), ["begins with the shape (134217728,)"]),
    "an array made by its class": (lambda f: pickled(f, {"prompt_ids": Made(
        np.ndarray, ((2**27,),))}), ["x.pkl", "made in another way"]),
    "safetensors of a shape that is not there": (
        lambda f: declaring(f, shape=[2**40]), ["x.safetensors", "invalid shape"]),
    "safetensors of bytes that are not there": (
        lambda f: declaring(f, shape=[2**40], data_offsets=[0, 2**43]), ["x.safetensors"]),
    "a sparse tensor": (lambda f: write_torch(f / "x.pt", {
        **tensors(TRL(truth())), "prompt_ids": torch.eye(COUNT).to_sparse()}),
                        ["x.pt, prompt_ids: a tensor is torch.sparse"]),
    "safetensors cut short": (lambda f: truncated(safe(f)), ["x.safetensors", "again"]),
    "safetensors cut in the header": (lambda f: truncated(safe(f), 0.05), ["x.safetensors"]),
    "safetensors with a flipped header": (lambda f: flipped(safe(f), 30), ["x.safetensors"]),
    "parquet cut short": (lambda f: truncated(parquet(f)), ["x.parquet", "again"]),
    "parquet with a flipped page": (flip_page, ["x.parquet", "again"]),
    "gzip cut short": (lambda f: truncated(lines(f, ".gz")), ["cut short or damaged"]),
    "zstd cut short": (lambda f: truncated(lines(f, ".zst")), ["cut short or damaged"]),
    "rows of another number": (edited(TRL, shorter("advantages")),
                               [f"advantages has {COUNT - 1} rows, but completion_ids has"]),
    "columns of another width": (edited(TRL, cut("completion_mask")),
                                 ["completion_mask has 5 entries, but completion_ids has 6"]),
    "log-probs of another width": (edited(VERL, cut("old_log_probs", 2)),
                                   ["old_log_probs has 4 entries, but responses has 6"]),
    "values of another width": (edited(VERL_CRITIC, cut("values")),
                                ["values has 5 entries, but responses has 6"]),
    "returns of another width": (edited(OPENRLHF_CRITIC, cut("returns", 2)),
                                 ["returns has 10 entries, but action_mask has 12"]),
    "values of fewer rows": (edited(VERL_CRITIC, shorter("values")),
                             [f"values has {COUNT - 1} rows, but responses has {COUNT}"]),
    "values that are whole rows": (edited(VERL_CRITIC, lambda t: t.update(
        values=t["values"][..., None])), ["values is 6 x 1"]),
    "returns that are text": (edited(lambda r: dumps.listed(VERL_CRITIC(r)), lambda t: t.update(
        returns=[["a"] * 6] * COUNT)), ["returns[0] is 'a'"]),
    "action arrays longer than rows": (edited(OPENRLHF, lambda t: t.update(
        action_mask=np.ones((COUNT, 99), bool))), ["action_mask has 99 entries, but sequences"]),
    "prompts and responses of another width": (edited(VERL, cut("input_ids")),
                                               ["input_ids has", "7 + 6"]),
    "no attention mask": (edited(VERL, without("attention_mask")), ["there is no attention_mask"]),
    "no completion mask": (edited(TRL, without("completion_mask")), ["is of no format"]),
    "no advantages": (edited(TRL, without("advantages")), ["there is no advantages"]),
    "ids of floats": (edited(TRL, lambda t: t.update(
        completion_ids=t["completion_ids"].astype(float))), ["completion_ids[0]", "float32"]),
    "ids of NaN": (edited(TRL, at("completion_ids", 0, np.nan, float)), ["completion_ids[0]"]),
    "ids of one dimension too many": (edited(TRL, lambda t: t.update(
        completion_ids=t["completion_ids"][..., None])), ["completion_ids is 6 x 1"]),
    "no rows": (edited(TRL, lambda t: t.update(
        {k: v[:0] for k, v in t.items() if isinstance(v, np.ndarray)})), ["holds no rollouts"]),
    "positions that jump": (edited(dumps.prime_rl_microbatch, lambda t: t["position_ids"].put(
        2, 7)), ["position_ids[2] is 7 after 1"]),
    "positions that do not begin": (edited(dumps.prime_rl_microbatch,
                                           lambda t: t["position_ids"].put(0, 1)),
                                    ["position_ids"]),
    "a packed column too short": (edited(dumps.prime_rl_microbatch, lambda t: t.update(
        loss_mask=t["loss_mask"][:-1])), ["loss_mask has"]),
    "things that are no batch": (lambda f: write_torch(f / "x.pt", [1, 2]), ["item 0: is 1"]),
    "a tensor alone": (lambda f: write_torch(f / "x.pt", torch.ones(3)), ["a batch is a dict"]),
    "unknown keys": (lambda f: write_json(f / "x.jsonl", [{"text": "a"}]),
                     ["line 1 is of no format that is known", "['text']", "verl"]),
    "nothing": (lambda f: raw(f, "x.jsonl", b""), ["holds no rollouts"]),
    "not a torch file": (lambda f: raw(f, "x.pt", b"hello"), ["is no pt file"]),
    "not a parquet file": (lambda f: raw(f, "x.parquet", b"hello"), ["is no parquet file"]),
    "a transport file": (lambda f: raw(f, "rollouts.bin", b"\x94\x01"), ["msgspec.structs.asdict"]),
    "not UTF-8": (lambda f: raw(f, "x.jsonl", b'{"token_ids": "\xe9"}'), ["not UTF-8"]),
    "a rollout_id twice": (lambda f: write_parquet(f / "x.parquet", {
        **dumps.own(truth()), "rollout_id": ["a", *"abcdefgh"]}),
        ["rollout_id 'a' is on row 0 and again on row 1"]),
    "an archive of something else": (lambda f: raw(f, "x.pt", b"PK\x03\x04" + bytes(60)), ["x.pt"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named(name: str, tmp_path: Path) -> None:
    write, said = FILES[name]
    path = write(tmp_path)
    with pytest.raises(RolloutError) as caught:
        load_rollouts(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and len(message) < 1500
    for part in said:
        assert part in message, f"{part!r} is not in {message!r}"
    assert not (tmp_path / "ran").exists(), "code of a pickle was run"


def test_an_expanded_tensor_is_no_damage(tmp_path: Path) -> None:
    """One number in the file, and a row of them in the tensor."""
    table = tensors(TRL(truth()))
    shape = table["old_per_token_logps"].shape
    table["old_per_token_logps"] = torch.tensor(-0.5).expand(shape)
    found = load_rollouts(write_torch(tmp_path / "x.pt", table))
    assert all((r.old_logprobs[r.loss_mask] == -0.5).all() for r in found)  # type: ignore


def test_there_are_thirty_kinds_and_more() -> None:
    assert len(RECORDS) + len(FILES) >= 30


# At random ---------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Path], Path]] = {
    "torch": torch_file,
    "old torch": lambda f: legacy(f, tensors(VERL(truth()))),
    "pickle": lambda f: pickled(f, VERL(truth())),
    "DataProto": lambda f: raw(f, "x.pkl", dumps.verl_pickle(truth(), "consolidated")),
    "DataProto of numpy": lambda f: raw(f, "x.pkl", dumps.verl_pickle(truth(), "numpy")),
    "safetensors": safe,
    "parquet": parquet,
    "gzip": lambda f: lines(f, ".gz"),
    "zstd": lambda f: lines(f, ".zst"),
    "JSON lines": lambda f: lines(f, ".jsonl"),
}
CHECKSUMMED = ("torch", "gzip")
"""In all of the file; parquet has checksums of pages, but none of its footer."""


@pytest.mark.filterwarnings("ignore")  # of torch and numpy about what is damaged
@pytest.mark.parametrize("container", WRITERS)
@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_damage_is_an_error_or_harmless(
    container: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Never an error of another kind; and with checksums, never other rollouts than were written.

    A flipped bit that another token, number or name has as well cannot be seen without one.
    """
    path = WRITERS[container](tmp_path_factory.mktemp("damage"))
    before = load_rollouts(path)
    size = path.stat().st_size
    if data.draw(st.booleans()):
        flipped(path, data.draw(st.integers(0, size - 1)))
    else:
        truncated(path, data.draw(st.floats(0, 1, exclude_max=True)))
    try:
        after = load_rollouts(path)
    except ForkpointError as error:
        assert str(path) in str(error)
        return
    if container in CHECKSUMMED:
        assert after == before


def test_a_cut_line_is_not_a_shorter_file(tmp_path: Path) -> None:
    path = lines(tmp_path, ".jsonl")
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    with pytest.raises(RolloutError, match=f"line {COUNT}, column"):
        load_rollouts(path)
