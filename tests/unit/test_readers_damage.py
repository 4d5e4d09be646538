"""Damaged, wrong and malicious dumps: each is an error that names file, record and field."""

import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import damaged
import pytest
import torch
from damaged import COUNT, FILES, RECORDS, lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dumps import tensors, truth, write_torch
from forkpoint import ForkpointError, RolloutError, load_rollouts
from forkpoint.rollouts.traces import open_rollouts
from lanes import slow_besides


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
    assert name in damaged.EVERY_ROW or int(where[2]) == damaged.ROW
    for part in [*said, field]:
        assert part in message, f"{part!r} is not in {message!r}"
    if name in damaged.EVERY_ROW:
        return
    reader = open_rollouts(path, on_error="skip")
    assert len(reader.read()) == COUNT - 1
    assert reader.skipped.fields == {field: 1}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # which must change nothing
    write, said = FILES[name]
    path = write(tmp_path)
    with pytest.raises(RolloutError) as caught:
        load_rollouts(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and len(message) < 1500
    for part in said:
        assert part in message, f"{part!r} is not in {message!r}"
    assert not (tmp_path / "ran").exists(), "code of the file was run"


def test_an_expanded_tensor_is_no_damage(tmp_path: Path) -> None:
    """One number in the file, and a row of them in the tensor."""
    table = tensors(damaged.TRL(truth()))
    shape = table["old_per_token_logps"].shape
    table["old_per_token_logps"] = torch.tensor(-0.5).expand(shape)
    found = load_rollouts(write_torch(tmp_path / "x.pt", table))
    assert all((r.old_logprobs[r.loss_mask] == -0.5).all() for r in found)  # type: ignore


# At random ---------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Path], Path]] = {
    "torch": damaged.torch_file,
    "safetensors": damaged.safe,
    "parquet": damaged.parquet,
    "gzip": lambda f: lines(f, ".gz"),
    "zstd": lambda f: lines(f, ".zst"),
    "JSON lines": lambda f: lines(f, ".jsonl"),
}
CHECKSUMMED = ("torch", "gzip")
"""In all of the file; parquet has checksums of pages, but none of its footer."""


KEPT = ("torch", "safetensors", "parquet", "gzip", "JSON lines")


@pytest.mark.filterwarnings("ignore")  # of torch and numpy about what is damaged
@pytest.mark.parametrize("container", slow_besides(KEPT, WRITERS))
@given(data=st.data())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
        damaged.flipped(path, data.draw(st.integers(0, size - 1)))
    else:
        damaged.truncated(path, data.draw(st.floats(0, 1, exclude_max=True)))
    try:
        after = load_rollouts(path)
    except ForkpointError as error:
        assert str(path) in str(error)
        return
    if container in CHECKSUMMED:
        assert after == before


def test_changed_objects_of_a_torch_file_are_an_error_or_harmless(tmp_path: Path) -> None:
    """The archive keeps a right checksum, so that the reader gets to the changed program."""
    source = random.Random(5)
    table = tensors(damaged.VERL(truth()))
    table["prompts"] = torch.nested.as_nested_tensor(list(table["prompts"]), layout=torch.jagged)
    path = write_torch(tmp_path / "x.pt", table)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    for _ in range(300):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                changed = bytearray(content)
                if name.endswith("/data.pkl"):
                    changed[source.randrange(len(changed))] = source.randrange(256)
                archive.writestr(name, changed)
        try:
            load_rollouts(path)
        except ForkpointError as error:
            assert str(path) in str(error) and len(str(error)) < 1500


def test_a_cut_line_is_not_a_shorter_file(tmp_path: Path) -> None:
    path = lines(tmp_path, ".jsonl")
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    with pytest.raises(RolloutError, match=f"line {COUNT} is not JSON"):
        load_rollouts(path)
