"""Media of rollouts: what is stored and refused, and which rollouts share."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint import Config, Media, Rollout, RolloutBatch
from forkpoint.errors import RolloutError
from forkpoint.parallel.agreement import group_digests
from forkpoint.parallel.copies import contents_of
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.plan.align import align
from forkpoint.plan.media import CommonEncoders, PlannedMedium
from forkpoint.plan.predict import plan_cost
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.plan.pricing.totals import EncoderTotals
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import prompts_of
from forkpoint.plan.stage_sizes import choose_size, offers_of
from forkpoint.plan.stages import stages_of_shape
from forkpoint.rollouts.media import MediumOutline
from programs import equal_costs

SHAPE = ModelShape.from_config(MODELS["qwen3-8b"])
TYPES = [0, 0, 1, 1, 1, 0, 0, 0]


def image(seed: int, tokens: int = 3, **fields: Any) -> Media:
    pixels = np.random.default_rng(seed).normal(size=(4 * tokens, 6)).astype(np.float32)
    return Media("image", {"pixel_values": pixels}, tokens, **fields)


def rollout(medium: Media | None, last: int = 5, **fields: Any) -> Rollout:
    """Two tokens, an image of three, a token, and a response of two."""
    if medium is not None:
        fields = {"media": (medium,), "media_types": TYPES} | fields
    return Rollout([1, 2, 9, 9, 9, 3, 4, last], [0] * 6 + [1, 1], 1.0, **fields)


def edges(*rollouts: Rollout, sharing: str = "tree") -> int:
    """Edges that a plan of these rollouts runs."""
    config = Config(sharing=sharing)  # pyright: ignore[reportArgumentType]
    return make_plan(RolloutBatch(rollouts), SHAPE, config).forest.edges


def test_equal_media_are_shared_and_no_others() -> None:
    one = image(0)
    alike = {
        "one object": one,
        "equal bytes": image(0),
        "a tensor pickled": pickle.loads(pickle.dumps(one)),
    }
    for name, other in alike.items():
        assert edges(rollout(one), rollout(other, 6)) == 8, name
    # The token before the image is shared, with the image's first as its label.
    assert edges(rollout(one), rollout(image(1), 6)) == 7 + 5
    assert edges(rollout(one), rollout(None, 6)) == 7 + 5
    given = image(0, digest="a")
    assert edges(rollout(given), rollout(image(1, digest="a"), 6)) == 8
    assert edges(rollout(given), rollout(image(0, digest="b"), 6)) == 7 + 5
    # A digest that was given is no digest of bytes, and shapes are compared besides it.
    assert given != one
    assert given != image(0, 2, digest="a")


def test_ranks_in_lockstep_run_encoders_equally_often() -> None:
    config = Config(sharing="tree", boundary="across", max_microbatch_tokens=5)
    outline = MediumOutline.of(image(0))
    batches = [
        RolloutBatch([rollout(image(0), 5), rollout(image(0), 6), rollout(image(1), 5)]),
        RolloutBatch([rollout(image(2), 5)]),
        RolloutBatch([rollout(None, 5), rollout(None, 6)]),
    ]
    plans = [make_plan(batch, SHAPE, config) for batch in batches]
    programs = [plan.program for plan in plans]
    programs = align(programs, equal_costs(programs))
    media = [plan.media for plan in plans]
    common = CommonEncoders.of(programs, media, trains=True, idle=outline.medium())
    ran = [
        plan.with_encoders(program.training, training=True, common=common)
        for plan, program in zip(plans, programs, strict=True)
    ]
    first, *others = [[(i.operation, i.slot) for i in each] for each in ran]
    assert all(each == first for each in others)
    counts = [sum(i.operation == "encode backward" and bool(i.media) for i in each) for each in ran]
    assert counts == [2, 1, 0]
    assert [i.media for i in ran[2] if i.operation == "encode"] == [(), ()]
    assert not any(i.keeps_graph for each in ran for i in each if i.operation == "encode")
    frozen = replace(common, trains=False)
    for plan, program in zip(plans, programs, strict=True):
        found = plan.with_encoders(program.training, training=True, common=frozen)
        assert sum(i.operation == "encode" for i in found) == 2
        assert not any(i.operation == "encode backward" for i in found)


@pytest.mark.parametrize("trained", [True, False])
def test_the_first_stage_has_the_time_and_memory_of_encoders(trained: bool) -> None:
    """Each distinct image is encoded once in scores and once in training, and has one backward; a
    recomputed forward does not encode again."""
    config = Config(
        sharing="tree", boundary="across", max_microbatch_tokens=5, activations="recompute"
    )
    batch = RolloutBatch([rollout(image(0), 5), rollout(image(0), 6), rollout(image(1), 5)])
    text = make_plan(batch, SHAPE, config).with_program(scores=True)
    plan = text.with_encoder(EncoderShape(10**9, 2, 8, 4.0, 100, 200, trained=trained))
    stages = stages_of_shape(SHAPE, 2)
    without, found = (choose_size([offers_of([each])], stages) for each in (text, plan))
    once = 2 * (2e9 * 12 + 4 * 2 * 8 * 12 * 12)
    extra = found.work.forward - without.work.forward
    assert extra[0].sum() == pytest.approx(once) and (extra[0] > 0).sum() == 2
    assert (found.work.backward - without.work.backward)[0].sum() == pytest.approx(
        2 * once * trained
    )
    assert (found.scores - without.scores)[0].sum() == pytest.approx(once)
    for name in ("forward", "backward", "working"):
        assert np.array_equal(getattr(found.work, name)[1], getattr(without.work, name)[1])
    assert np.array_equal(found.scores[1], without.scores[1])
    # The prompts follow one another, so the features of one image are held at a time, or of both.
    (more,) = set((found.work.working - without.work.working)[0].tolist())
    # They are also held in slots that only another data rank runs.
    others = RolloutBatch([Rollout([first] * 8, [0] * 4 + [1] * 4, 1.0) for first in range(3, 8)])
    longer = make_plan(others, SHAPE, config).with_program(scores=True)
    both = choose_size([offers_of([plan]), offers_of([longer])], stages).work
    assert both.slots > found.work.slots and both.working[0].min() >= more
    features, kept = 3 * 100 * (2 + 4 * trained), 12 * 200 * 2 * trained
    assert more in (features + kept, 2 * (features + kept))
    assert sum(found.busy) - sum(without.busy) == pytest.approx(once * (2 + 2 * trained))
    simulated = plan_cost(plan, meter_of(plan)) - plan_cost(text, meter_of(text))
    assert simulated == pytest.approx(once * (2 + 2 * trained))


def test_flops_of_encoders_counted_by_hand() -> None:
    """Patches see those of their own frame; a medium that no microbatch reads counts in dense
    training alone."""
    shape = EncoderShape(10, 2, 8, 4.0, 100, 200)
    video = PlannedMedium("video", 6, (0,), frames=3)
    assert shape.forward_flops(video) == 2 * 10 * 24 + 4 * 2 * 8 * 24 * 24 / 3
    batch = RolloutBatch([rollout(image(0), 5), rollout(image(0), 6), rollout(image(1), 5)])
    plan = make_plan(batch, SHAPE).with_encoder(shape)
    first, second = plan.media
    totals = EncoderTotals()
    totals.add(replace(plan, media=(first, replace(second, readers=()))))
    step = shape.step_flops(first)
    assert (totals.flops, totals.dense_flops, totals.places) == (step, 3 * step, 3)


def test_an_outline_makes_a_medium_of_ones() -> None:
    grid = np.array([[1, 4, 4]])
    inputs = {"pixel_values": torch.zeros(16, 6), "image_grid_thw": grid}
    found = MediumOutline.of(Media("image", inputs, 4)).medium()
    assert (found.kind, found.tokens) == ("image", 4)
    assert found.inputs["pixel_values"].shape == (16, 6)
    assert found.inputs["pixel_values"].dtype == np.float32
    assert (found.inputs["pixel_values"] == 1).all()
    assert (found.inputs["image_grid_thw"] == grid).all()


def test_media_of_one_kind_are_in_order() -> None:
    video = Media("video", {"pixel_values_videos": torch.ones(2, 3)}, 2)
    types = [2, 0, 1, 1, 1, 2, 0, 1, 1, 1, 0]
    one, two = image(0), image(1)
    made = Rollout(range(11), [0] * 10 + [1], 1.0, media=(one, video, two), media_types=types)
    batch = RolloutBatch([rollout(two), made])
    assert batch.media == (two, one, video)
    assert batch.media_of is not None and batch.media_row is not None
    assert batch.media_of[8:].tolist() == [2, -1, 1, 1, 1, 2, -1, 0, 0, 0, -1]
    assert batch.media_row[8:].tolist() == [0, 0, 0, 1, 2, 1, 0, 0, 1, 2, 0]
    alone = batch.select([1])
    assert alone.media == (one, two, video)
    assert alone[0] == replace(made, rollout_id="1")
    assert alone[0] != replace(made, rollout_id="1", media=(two, video, one))
    assert batch.share_index is not None and RolloutBatch([rollout(None)]).share_index is None


def test_routed_experts_and_media_both_part_rollouts() -> None:
    routes = np.zeros((8, 1, 1), np.int16)
    other = routes.copy()
    other[1] = 1
    one, two = (rollout(image(0), 5 + n, routed_experts=r) for n, r in enumerate((routes, other)))
    assert edges(one, two) == 7 + 6
    assert edges(one, rollout(image(1), 6, routed_experts=routes)) == 7 + 5
    assert edges(one, rollout(image(0), 6, routed_experts=routes)) == 8


def test_groups_and_prompts_of_ranks_know_media() -> None:
    def found(*rollouts: Rollout) -> tuple[Any, ...]:
        batch = RolloutBatch(rollouts)
        prompts = prompts_of(batch, run_lengths(batch, None))
        contents = contents_of(batch, [], [])
        return list(prompts), group_digests(batch).tolist(), contents.rollouts

    one, copy, other = image(0), image(0), image(1)
    prompts, groups, contents = found(rollout(one), rollout(copy, 6))
    assert len(prompts) == len(groups) == 1
    # Numbers of media in a batch are no part of it.
    again = found(rollout(other), rollout(one, 6))
    assert len(again[0]) == len(again[1]) == 2
    assert prompts[0] in again[0] and groups[0] in again[1]
    assert found(rollout(copy), rollout(one, 6))[2] == contents != again[2]
    text = found(rollout(None))
    assert not set(text[0]) & set(again[0]) and not set(text[1]) & set(again[1])
    # In one group, the prompt ends where its images differ.
    batch = RolloutBatch([rollout(one, group_id="a"), rollout(other, group_id="a")])
    assert [p.edges for p in prompts_of(batch, run_lengths(batch, None)).values()] == [1]


def test_a_plan_is_of_its_media() -> None:
    one, other = image(0), image(1)
    plan = make_plan(RolloutBatch([rollout(one), rollout(one, 6)]), SHAPE)
    plan.check_batch(RolloutBatch([rollout(other), rollout(other, 6)]))
    with pytest.raises(Exception, match="batch"):
        plan.check_batch(RolloutBatch([rollout(one), rollout(other, 6)]))


@pytest.mark.parametrize(
    "fields",
    [
        {"media_types": None},
        {"media_types": TYPES[:-1]},
        {"media_types": [0] * 8},
        {"media_types": [0, 1, *TYPES[2:]]},
        {"media_types": [0, 0, 2, 2, 2, 0, 0, 0]},
        {"media_types": [0, 0, 3, 3, 3, 0, 0, 0]},
        {"media_types": [0, 0, 0, 0, 0, 1, 1, 1]},  # trained
        {"media": ()},
        {"media": image(0)},
        {"media": ("image",)},
    ],
)
def test_tokens_that_do_not_fit_their_media_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match="media"):
        rollout(image(0), **fields)


@pytest.mark.parametrize(
    ("kind", "inputs", "tokens", "digest"),
    [
        ("sound", {"x": np.ones(1)}, 1, None),
        ("image", {}, 1, None),
        ("image", {"x": [1.0]}, 1, None),
        ("image", {3: np.ones(1)}, 1, None),
        ("image", {"x": np.ones(1, np.longdouble)}, 1, None),
        ("image", {"x": np.array(["1"])}, 1, None),
        ("image", {"x": np.ma.masked_array([1.0], [True])}, 1, None),
        ("image", {"x": torch.ones(1, device="meta")}, 1, None),
        ("image", {"x": torch.ones(1).to_sparse()}, 1, None),
        ("image", {"x": torch.ones(1, requires_grad=True)}, 1, None),
        ("image", {"x": torch.ones(1, dtype=torch.complex64)}, 1, None),
        ("image", {"x": np.ones(1)}, 0, None),
        ("image", {"x": np.ones(1)}, 1, ""),
    ],
)
def test_media_that_are_none_are_refused(
    kind: Any, inputs: Any, tokens: int, digest: str | None
) -> None:
    with pytest.raises(RolloutError, match="medium"):
        Media(kind, inputs, tokens, digest)
