"""Media in files of rollouts and in traces: round trips, and every damage named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from forkpoint import Media, Rollout, RolloutBatch, load_rollouts, record, save_rollouts
from forkpoint.errors import RolloutError, TraceError
from forkpoint.plan import make_plan
from forkpoint.rollouts.traces import open_rollouts, open_trace

TYPES = [0, 1, 1, 1, 1, 0, 0, 0]
BESIDE = ".media.safetensors"


def image(seed: int, digest: str | None = None) -> Media:
    pixels = np.random.default_rng(seed).normal(size=(16, 24)).astype(np.float32)
    inputs = {"pixel_values": pixels, "image_grid_thw": np.array([[1, 4, 4]])}
    return Media("image", inputs, 4, digest)


def rollout(last: int, *media: Media, types: Any = None, **fields: Any) -> Rollout:
    types = TYPES if media and types is None else types
    tokens, mask = [1, 9, 9, 9, 9, 2, 3, last], [0] * 6 + [1, 1]
    return Rollout(tokens, mask, 0.5, media=media, media_types=types, **fields)


def every() -> list[Rollout]:
    """A group, another image of equal tokens, text, a digest that was given, a video, and text with
    the types of its tokens."""
    shared = image(0)
    frames = torch.arange(2 * 16 * 6).reshape(32, 6).to(torch.bfloat16)
    odd = {
        "pixel_values_videos": frames,
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "second_per_grid_ts": np.array([0.1], ">f4"),
        "flags": np.array([True, False]),
        "lowest": np.array(-(2**63)),
        "unknown": np.array([np.nan, 1.0]),
    }
    both = [1, 1, 2, 1, 1, 2, 0, 0]
    return [
        rollout(5, shared),
        rollout(6, image(0)),
        rollout(5, image(1)),
        rollout(5),
        rollout(5, image(0, "a")),
        rollout(5, Media("video", odd, 2), shared, types=both),
        rollout(7, types=[0] * 8),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_rollouts_come_back_with_their_media(suffix: str, tmp_path: Path) -> None:
    path, rollouts = tmp_path / f"r{suffix}", every()
    save_rollouts(path, rollouts)
    found = load_rollouts(path)
    assert found == rollouts
    assert [r.media_types is None for r in found] == [r == rollout(5) for r in rollouts]
    assert found[0].media[0] is found[1].media[0]
    assert found[0].media[0] != found[4].media[0]
    shared, video = found[0].media[0].inputs, found[5].media[0].inputs
    assert shared["pixel_values"].dtype == np.float32
    assert (shared["pixel_values"] == rollouts[0].media[0].inputs["pixel_values"]).all()
    assert (shared["image_grid_thw"] == [[1, 4, 4]]).all()
    assert video["second_per_grid_ts"].tolist() == np.array([0.1], np.float32).tolist()
    assert video["flags"].tolist() == [True, False] and video["lowest"] == -(2**63)
    assert np.isnan(video["unknown"][0]) and video["pixel_values_videos"][31, 5] == 191
    # Pixels are there once, and equal rollouts make equal files.
    stored = safetensors.numpy.load_file(str(path) + BESIDE)
    assert sum(name.endswith("pixel_values") for name in stored) == 2
    content = [Path(f"{path}{end}").read_bytes() for end in ("", BESIDE)]
    save_rollouts(path, found)
    assert content == [Path(f"{path}{end}").read_bytes() for end in ("", BESIDE)]


def test_a_plan_needs_no_pixels(tmp_path: Path) -> None:
    path, rollouts = tmp_path / "r.jsonl", every()
    save_rollouts(path, rollouts)
    (tmp_path / f"r.jsonl{BESIDE}").unlink()
    found = open_rollouts(path, pixels=False).read()
    assert found == rollouts
    assert [m.is_absent for m in found[0].media] == [True]
    one, two = (make_plan(RolloutBatch(each)) for each in (rollouts, found))
    assert one.fingerprint == two.fingerprint and one.media == two.media
    with pytest.raises(RolloutError, match="without its pixels"):
        save_rollouts(path, found)
    with pytest.raises(RolloutError, match=r"r\.jsonl\.media\.safetensors does not exist"):
        load_rollouts(path)


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("others", "renames", "new"),
    [
        *(([rollout(5, image(0)), rollout(6, image(2))], n, n == 2) for n in range(3)),
        ([rollout(5)], 0, False),
    ],
    ids=["pixels", "lines", "pixels again", "lines without media"],
)
def test_a_killed_process_leaves_rollouts_with_their_pixels(
    others: list[Rollout], renames: int, new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before one of the renames, and removes nothing after that."""
    path, other = tmp_path / "r.jsonl", tmp_path / "other.jsonl"
    old = every()
    save_rollouts(path, old)
    save_rollouts(other, others)
    replace, left = Path.replace, [renames]

    def replace_or_end(self: Path, target: Path) -> Path:
        if not left[0]:
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            raise Killed
        left[0] -= 1
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", replace_or_end)
        save_rollouts(path, others)
    assert load_rollouts(path) == (others if new else old)
    save_rollouts(path, others)
    assert beside(path) == beside(other)


def beside(path: Path) -> bytes | None:
    """The pixels of a file of rollouts."""
    pixels = Path(f"{path}{BESIDE}")
    return pixels.read_bytes() if pixels.exists() else None


def test_an_error_leaves_both_files(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    save_rollouts(path, every())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    strange = Media("image", {"pixel_values": np.ones((99, 2)), "empty": np.ones((0, 3))}, 4)
    with pytest.raises(RolloutError, match=r"position 1.*'empty' is an array of"):
        save_rollouts(path, [rollout(5, image(2)), rollout(5, strange)])
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.parametrize("pixels", [True, False])
def test_a_digest_of_two_images_is_refused(tmp_path: Path, *, pixels: bool) -> None:
    """Rollouts would share the features of the first."""
    path = tmp_path / "r.jsonl"
    inputs = [{"pixel_values": np.full((99, 2), n)} for n in (1.0, 2.0, 1.0)]
    media = [Media("image", each, 4, digest="d") for each in inputs]
    save_rollouts(path, [rollout(5, media[0]), rollout(6, media[2])])
    assert len(list(open_rollouts(path, pixels=pixels))) == 2
    save_rollouts(path, [rollout(5, media[0]), rollout(6, media[1])])
    with pytest.raises(RolloutError, match=r"line 2: media\[0\]\.digest is 'd', as of a medium"):
        list(open_rollouts(path, pixels=pixels))


Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Damages the first line's entry and the arrays of the pixels."""
CHANGES: dict[str, tuple[str, Change]] = {
    "other pixels": (
        "sha256 is .* belong to another file, or have been changed",
        lambda _, arrays: [x.fill(1) for x in arrays.values()],
    ),
    "no such pixels": ("has no array '1{9}", lambda entry, _: entry.update(sha256="1" * 64)),
    "another shape": (
        r"of shape \[16, 24\] and dtype float32, and the rollout says \[16, 25\]",
        lambda entry, _: entry["inputs"]["pixel_values"].update(shape=[16, 25]),
    ),
    "another dtype": (
        "and the rollout says .* and float64",
        lambda entry, _: entry["inputs"]["pixel_values"].update(dtype="float64"),
    ),
    "a dtype of none": (
        r"media\[0\]\.inputs\.pixel_values\.dtype is 'object'",
        lambda entry, _: entry["inputs"]["pixel_values"].update(dtype="object"),
    ),
    "too few values": (
        r"image_grid_thw\.values are \[1, 4\], which are not int64 of the shape \[1, 3\]",
        lambda entry, _: entry["inputs"]["image_grid_thw"].update(values=[1, 4]),
    ),
    "a value beyond its dtype": (
        r"values are \[256, 4, 4\], which are not uint8",
        lambda entry, _: entry["inputs"]["image_grid_thw"].update(
            values=[256, 4, 4], dtype="uint8"
        ),
    ),
    "text for a value": (
        "values are",
        lambda entry, _: entry["inputs"]["image_grid_thw"].update(values=[1, "a", [4]]),
    ),
    "many dimensions": (
        "values are",
        lambda entry, _: entry["inputs"]["image_grid_thw"].update(shape=[3] + [1] * 99),
    ),
    "other tokens": ("sha256 is .*, and its inputs have", lambda entry, _: entry.update(tokens=3)),
    "a kind of none": ("kind is 'sound'", lambda entry, _: entry.update(kind="sound")),
    "a field too few": ("sha256 is missing", lambda entry, _: entry.pop("sha256")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damaged_media_are_named(name: str, tmp_path: Path) -> None:
    said, change = CHANGES[name]
    path, beside = tmp_path / "r.jsonl", tmp_path / f"r.jsonl{BESIDE}"
    save_rollouts(path, [rollout(5, image(0)), rollout(6)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    arrays = safetensors.numpy.load_file(beside)
    change(lines[0]["media"][0], arrays)
    safetensors.numpy.save_file(arrays, beside)
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(RolloutError, match=rf"line 1: .*{said}"):
        load_rollouts(path)
    reader = open_rollouts(path, on_error="skip")
    assert len(reader.read()) == 1 and reader.skipped.fields == {"media": 1}


def test_pixels_that_cannot_be_read_end_the_reading(tmp_path: Path) -> None:
    path, beside = tmp_path / "r.jsonl", tmp_path / f"r.jsonl{BESIDE}"
    save_rollouts(path, [rollout(5, image(0)), rollout(6)])
    with pytest.raises(RolloutError, match=r"has pixels of rollouts.* the rollouts, r\.jsonl\."):
        load_rollouts(beside)
    large = Media("image", {"pixel_values": np.ones((1024, 24), np.float32)}, 4)
    save_rollouts(tmp_path / "large.jsonl", [rollout(5, large), rollout(6)])
    with pytest.raises(RolloutError, match=r"the array .* takes 96\.0 KiB.*memory_limit is"):
        load_rollouts(tmp_path / "large.jsonl", memory_limit=64_000, on_error="skip")
    whole = beside.read_bytes()
    for content in (whole[:-1], b"", b"x" * 40):
        beside.write_bytes(content)
        with pytest.raises(RolloutError, match=r"media\.safetensors cannot be read as safetensors"):
            load_rollouts(path, on_error="skip")
    beside.unlink()
    with pytest.raises(RolloutError, match="does not exist, and rollouts have images"):
        load_rollouts(path, on_error="skip")


def test_a_trace_keeps_media(tmp_path: Path) -> None:
    folder, batch = tmp_path / "t", RolloutBatch(every())
    with record(folder) as trace:
        trace.add(batch)
        trace.add(RolloutBatch(every()[3:4]))
    found = open_trace(folder)
    assert list(found[0].batch) == list(batch) and not found[1].batch.media
    stored = safetensors.numpy.load_file(folder / "batch-000000.safetensors")
    assert sum(name.endswith("pixel_values") for name in stored) == 2
    named = load_rollouts(folder)
    assert [r.media for r in named[:7]] == [r.media for r in batch]


def test_reading_a_batch_again_takes_no_more_memory(tmp_path: Path) -> None:
    with record(tmp_path) as trace:
        trace.add([rollout(5, image(0))])
    found = open_trace(tmp_path, memory_limit="20KB")
    assert all(found[0].batch.media for _ in range(9))


@pytest.mark.parametrize("change", ["missing", "another dtype", "other pixels"])
def test_damaged_media_of_a_trace_are_named(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    with record(folder) as trace:
        trace.add([rollout(5, image(0))])
    (file,) = folder.glob("batch-*")
    arrays = safetensors.numpy.load_file(file)
    name = next(name for name in arrays if name.endswith("pixel_values"))
    if change == "missing":
        del arrays[name]
    else:
        arrays[name] = arrays[name].astype("f8") if "dtype" in change else arrays[name] + 1
    safetensors.numpy.save_file(arrays, file)
    said = "is missing" if change == "missing" else "sha256 is"
    with pytest.raises(TraceError, match=rf"is not a batch of a trace: .*{said}"):
        open_trace(folder)[0]


def test_a_url_brings_its_pixels(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    save_rollouts(path, every())
    assert load_rollouts(f"file://{path}") == every()
    shutil.copy(path, tmp_path / "alone.jsonl")
    url = f"file://{tmp_path / 'alone.jsonl'}"
    with pytest.raises(RolloutError, match=r"alone\.jsonl\.media\.safetensors does not exist"):
        load_rollouts(url)
    assert open_rollouts(url, pixels=False).read() == every()
