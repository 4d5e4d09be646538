"""Rows with images in forkpoint's engines, beside verl's own FSDP2 engine, on CPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

import torch
from harness import (
    SHARED,
    STOCK,
    VOCABULARY,
    Case,
    both,
    difference,
    first_step,
    padded_rows,
    rows_of,
    save_multimodal,
)
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.images import INPUTS, SECONDS
from forkpoint.integrations.verl.rows import media_of_rows
from forkpoint.rollouts.media import KINDS, MediaKind
from multimodal_models import tiny_multimodal
from parallel.processes import RankFailed, run_ranks

MOST = 2e-6
"""Of gradients in float32, relative to their norm."""
CASES = [
    ("qwen3_vl", "image"),
    pytest.param("qwen3_vl", "video", marks=pytest.mark.slow),
    ("qwen2_5_vl", "video"),
    pytest.param("qwen2_5_vl", "image", marks=pytest.mark.slow),
    pytest.param("qwen3_5", "image", marks=pytest.mark.slow),
    ("internvl", "image"),
    pytest.param("llava", "image", marks=pytest.mark.slow),
    pytest.param("mistral3", "image", marks=pytest.mark.slow),
    pytest.param("smolvlm", "image", marks=pytest.mark.slow),
]
OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Tensor]]] = {
    "internvl": ((1, 3, 16, 16), {}),
    "llava": ((1, 3, 8, 8), {}),
    "mistral3": ((1, 3, 8, 8), {"image_sizes": torch.tensor([[8, 8]])}),
    "smolvlm": ((1, 1, 3, 16, 16), {"pixel_attention_mask": torch.ones(1, 1, 16, 16).bool()}),
}
"""Of families without grids: the shape of an image of four tokens, and inputs beside it."""


def image_rows(
    family: str, case: Case, *, kind: MediaKind = "image", alike: bool = True, texts: int = 0
) -> dict[str, Any]:
    """Rows whose prompts have an image, or a video, of four tokens.

    alike: one image for each group, instead of one for each row.
    texts: so many groups at the end have text alone.
    """
    rows = padded_rows(case)
    width = rows["prompts"].shape[1]
    seen = (case.groups - texts) * case.size
    names, place = INPUTS[kind], VOCABULARY + KINDS.index(kind)
    for name in ("prompts", "input_ids"):
        rows[name][:seen, width - 6 : width - 2] = place
    types = (rows["input_ids"] == place) * (1 + KINDS.index(kind))
    grid = torch.tensor([[1, 4, 4]])
    seconds = {SECONDS: torch.tensor([0.5])} if kind == "video" and family == "qwen2_5_vl" else {}
    media: list[dict[str, Any]] = [{} for _ in range(len(types))]
    for number in range(seen):
        generator = torch.Generator().manual_seed(number // case.size if alike else number)
        if family in OTHERS:
            shape, more = OTHERS[family]
            media[number] = {"pixel_values": torch.randn(shape, generator=generator), **more}
            continue
        pixels = torch.randn(16, 96, generator=generator)
        media[number] = {names[0]: pixels, names[1]: grid, "images_seqlens": grid[0], **seconds}
    rows["multi_modal_inputs"] = np.array(media, dtype=object)
    if family in OTHERS:
        return rows
    index: Any = tiny_multimodal(family, vocab_size=VOCABULARY + 3).model.get_rope_index
    mask = rows["attention_mask"]
    text = (mask.cumsum(1) - 1).clamp(min=0)
    given = {names[1]: grid.expand(seen, 3), **{k: v.expand(seen) for k, v in seconds.items()}}
    axes, _ = index(rows["input_ids"], types, attention_mask=mask, **given)
    rows["position_ids"] = torch.cat([text[None], axes * mask]).transpose(0, 1).contiguous()
    return rows


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_first_gradients_are_those_of_stock(
    family: str, kind: MediaKind, tmp_path: Path
) -> None:
    save_multimodal(family, tmp_path, tied=family == "llava")
    case, most = Case(), 5 * MOST if family == "qwen3_5" else MOST  # recurrences round more
    (found,) = run_ranks(1, both, case, tmp_path, [image_rows(family, case, kind=kind)])
    assert found["error"] <= most
    computed, given = found["shared"]["tokens"]
    assert computed < 0.7 * given
    # Of other images prompts are shared up to the image alone.
    apart_rows = image_rows(family, case, kind=kind, alike=False)
    (apart,) = run_ranks(1, both, case, tmp_path, [apart_rows])
    assert apart["error"] <= most and apart["shared"]["tokens"][0] > computed


@pytest.mark.slow
def test_images_that_verl_cannot_encode(tmp_path: Path) -> None:
    """verl shards embeddings within those of LLaVA's encoder, unless the head is tied."""
    save_multimodal("llava", tmp_path)
    case = Case()
    for vendor in (STOCK, SHARED):
        with pytest.raises(RankFailed, match=r"embedding\.default got mixed"):
            run_ranks(1, first_step, case, tmp_path, vendor, [image_rows("llava", case)])


def test_two_ranks_with_images_and_text(tmp_path: Path) -> None:
    """fully_shard on two ranks with unequal numbers of images."""
    save_multimodal("qwen3_vl", tmp_path)
    case = Case()
    rows = image_rows("qwen3_vl", case, texts=1)
    parts = [rows_of(rows, [*range(6)]), rows_of(rows, [*range(6, 12)])]
    for found in run_ranks(2, both, case, tmp_path, parts):
        assert found["error"] <= MOST


def test_ulysses_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    """The reference is one process, because verl's own engine splits attention for CUDA only."""
    save_multimodal("qwen3_vl", tmp_path)
    case = Case()
    rows = image_rows("qwen3_vl", case, texts=1)
    (wanted,) = run_ranks(1, first_step, case, tmp_path, STOCK, [rows])
    over_ranks = replace(
        case, engine={"ulysses_sequence_parallel_size": 2}, model={"use_remove_padding": True}
    )
    for found in run_ranks(2, first_step, over_ranks, tmp_path, SHARED, [rows]):
        assert difference(found["gradients"], wanted["gradients"]) <= MOST


def test_positions_of_text_are_refused(tmp_path: Path) -> None:
    save_multimodal("qwen3_vl", tmp_path)
    rows = image_rows("qwen3_vl", Case())
    rows["position_ids"] = rows["position_ids"][:, :1].expand(-1, 4, -1).contiguous()
    with pytest.raises(RankFailed, match="get_rope_index"):
        run_ranks(1, both, Case(), tmp_path, [rows])


def check_two_images(row: dict[str, Any], ids: torch.Tensor, said: str) -> None:
    """A row of verl has two images of two tokens each, or is refused with an error of `said`."""
    data = TensorDict({"multi_modal_inputs": NonTensorStack(row)}, batch_size=[1])
    offsets = torch.tensor([0, len(ids)])
    if said:
        with pytest.raises(UnsupportedError, match=said):
            media_of_rows(data, ids, offsets, (VOCABULARY, VOCABULARY + 1))
        return
    media, types = media_of_rows(data, ids, offsets, (VOCABULARY, VOCABULARY + 1))
    assert media is not None and [m.tokens for m in media[0]] == [2, 2] and types.sum() == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pixel_values": torch.ones(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}, ""),
        ({"image_sizes": torch.ones(1, 2)}, "image_sizes"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4]] * 3)}, "do not fill them"),
    ],
)
def test_images_that_do_not_fill_their_tokens(changes: dict[str, Any], said: str) -> None:
    rows = image_rows("qwen3_vl", Case(groups=1, size=1))
    ids = rows["input_ids"][0]
    row = {**rows["multi_modal_inputs"][0], **changes}
    check_two_images(row, ids, said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"pixel_values": torch.ones(3, 3, 16, 16)}, "4 tokens of images, and 3 images"),
        ({"image_bound": torch.ones(1)}, "'image_bound'"),
        ({"no tokens": torch.ones(1)}, "0 tokens of images, and 2 images"),
    ],
)
def test_images_without_grids(changes: dict[str, Any], said: str) -> None:
    rows = image_rows("internvl", Case(groups=1, size=1))
    ids, row = rows["input_ids"][0], {"pixel_values": torch.ones(2, 3, 16, 16), **changes}
    if row.pop("no tokens", None) is not None:
        ids = ids.clamp(max=VOCABULARY - 1)
    check_two_images(row, ids, said)
