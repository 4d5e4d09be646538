"""A further library of models needs an entry, and nothing else of forkpoint knows of it."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from steps import forked_batch, gradients, relative_distance
from toy_library import LAYERS, TOYS, Toy

from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, wrap
from forkpoint.config import Boundary
from forkpoint.hosts import libraries
from forkpoint.losses import GRPO
from forkpoint.plan.stages import Stage
from forkpoint.rollouts.media import Media
from forkpoint.verify.dense import dense_run

BATCH, LOSS = forked_batch(), GRPO(clip=0.2)


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(libraries, "library_of", lambda _: TOYS)
    yield


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double()


@pytest.mark.parametrize("boundary", ["within", "across"])
def test_gradients_are_dense_ones(boundary: Boundary) -> None:
    model = toy()
    dense = dense_run(model, BATCH, LOSS).gradients
    config = Config(sharing="tree", boundary=boundary, max_microbatch_tokens=20)
    wrap(model, config).forward_backward(BATCH, LOSS)
    assert relative_distance(gradients(model), dict(dense)) < 1e-12


def test_verify_and_scores() -> None:
    policy = wrap(toy(), Config(sharing="tree"))
    assert policy.verify(BATCH, LOSS).passed
    assert policy.score(BATCH).logprobs.isfinite().all()


def test_what_the_library_lacks_is_refused() -> None:
    medium = Media("image", {"pixel_values": np.zeros((4, 3))}, 2)
    types = np.array([0, 1, 1, 0, 0])
    rollout = Rollout(range(5), [0, 0, 0, 1, 1], 1.0, media=(medium,), media_types=types)
    with pytest.raises(UnsupportedError, match=r"have media.*text alone"):
        wrap(toy()).score(RolloutBatch([rollout]))
    with pytest.raises(UnsupportedError, match="this library's models"):
        wrap(toy()).host.entry.stage.hold(Stage(0, 2, 0, 1, LAYERS))
    with pytest.raises(UnsupportedError, match="no toy"):
        wrap(torch.nn.Linear(2, 2))
