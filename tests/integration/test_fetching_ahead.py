"""When an offloaded microbatch is fetched: during the backward before its own, as that gives back
memory.

Earlier than that memory is fullest, with all that the microbatch before has saved; later the copy
would be waited for. Gradients are those of microbatches that are kept, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.engine.offload import LAYERS_ALIVE, SavedTensors
from forkpoint.engine.staging import PlainTransfers, Staging
from forkpoint.testing import tiny_model
from lanes import slow_besides
from watched import watched

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample", "without_lists")

LAYERS = 12
GROUP = Config(sharing="group", boundary="across", max_microbatch_tokens=24)


def waves_batch(prompt: int = 24, response: int = 10) -> RolloutBatch:
    """A prompt and four responses, which take two microbatches where microbatches have 24
    tokens."""
    rng = np.random.default_rng(0)
    shared, mask = rng.integers(0, 61, prompt).tolist(), [0] * prompt + [1] * response
    return RolloutBatch(
        Rollout([*shared, n, *rng.integers(0, 61, response - 1).tolist()], mask, 1.0 - n)
        for n in range(4)
    )


class Alive:
    """Bytes on the device of what microbatches save and of what is fetched, by weak references."""

    def __init__(self) -> None:
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages.append((StorageWeakRef(storage), storage.nbytes()))

    def nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self.storages if not reference.expired())


@pytest.mark.parametrize(
    ("checkpointing", "lengths"),
    slow_besides(
        [("none", (64, 32)), ("full", (256, 16))],
        # Prompt and response: one prefix above two leaves, and a chain of prefixes.
        product(["none", "full"], [(64, 32), (256, 16)]),
    ),
)
def test_memory_gets_no_fuller_than_when_the_wave_s_backward_begins(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], checkpointing: str
) -> None:
    """With what is saved and what is fetched; two layers of a microbatch may come on top."""
    prompt, response = lengths
    model, batch = tiny_model("llama", num_hidden_layers=LAYERS), waves_batch(prompt, response)
    config = replace(
        GROUP, activations="offload", checkpointing=checkpointing, max_microbatch_tokens=64
    )
    policy, saved, fetched, pack = wrap(model, config), Alive(), Alive(), SavedTensors.pack
    entries: list[tuple[str, int, int]] = []

    def note(what: str) -> None:
        entries.append((what, saved.nbytes() + fetched.nbytes(), fetched.nbytes()))

    def counted(freed: SavedTensors, tensor: Tensor) -> object:
        before = freed.saved_bytes
        found = pack(freed, tensor)
        if freed.saved_bytes > before:
            saved.add(tensor)
        return found

    class Counted(PlainTransfers):
        def bring(self, pairs: Sequence[tuple[Tensor, Tensor]], after: None) -> None:
            super().bring(pairs, after)
            fetched.add(pairs[0][1])
            note("fetch")

    monkeypatch.setattr(SavedTensors, "pack", counted)
    policy.model_state.staging = Staging(Counted(torch.device("cpu")))
    plan = policy.plan(batch)
    with watched(note):
        stats = policy.forward_backward(batch, losses.GRPO(), plan=plan)
    assert stats.offload is not None and stats.offload.on_demand == 0
    parents = [microbatch for microbatch in plan.microbatches if microbatch.children]
    assert all(microbatch.activations == "offload" for microbatch in parents)
    assert len(parents) == (4 if prompt == 256 else 1)
    leaves = {
        f"backward {plan.microbatch_names[microbatch.index]}"
        for microbatch in plan.microbatches
        if not microbatch.children
    }
    layers_alive = LAYERS_ALIVE * stats.offload.out_bytes / len(parents) / LAYERS
    begins = 0
    for what, held, of_fetched in entries:
        if what in leaves:
            begins = held
        elif what == "fetch":
            # Two layers are at work, and two of each of two microbatches are fetched in any case.
            assert held <= begins + layers_alive or of_fetched <= 3 * layers_alive
    # Nor is room left unused.
    ends = next(
        i
        for i, (what, *_) in enumerate(entries)
        if what == f"backward {plan.microbatch_names[parents[-1].index]}"
    )
    if checkpointing == "none":
        assert entries[ends][2] > 0.7 * stats.offload.out_bytes / len(parents)


# The count by itself ------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    """Asks for what it saved two times."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        assert ctx.saved_tensors[0] is not None and ctx.saved_tensors[0] is not None
        return gradients[0]


def test_storages_count_once_when_half_has_been_asked_for() -> None:
    told: list[tuple[int, int]] = []
    weight = torch.ones(1000, requires_grad=True)
    freed = SavedTensors(
        lambda x: x.shape == (1000,),
        10**9,
        then=lambda free: told.append((freed.asked_bytes, free)),
    )
    with torch.autograd.graph.saved_tensors_hooks(freed.pack, freed.unpack):
        x = weight[:40].clone()
        for _ in range(4):
            x = Twice.apply(x)
        y = (weight * torch.ones(1000)).sum() + x.exp().sum() + (x[:20] * x[20:]).sum()
    # 4 times 40 floats, the output of exp, nothing of the weight and of what it is multiplied by,
    # and of the views nothing more: the last of the four is theirs.
    assert freed.saved_bytes == 5 * 160 + 160
    y.backward()
    assert freed.asked_bytes == freed.saved_bytes
    assert told[0] == (3 * 160, 3 * 160) and told[-1] == (6 * 160, 6 * 160)
    assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_what_is_free_is_told_as_it_grows() -> None:
    """Ten layers that save a tensor each, of which two layers' may be alive still."""
    layers, size = 10, 400
    told: list[tuple[int, int]] = []
    freed = SavedTensors(
        lambda _: False,
        layers,
        then=lambda free: told.append((freed.asked_bytes // size, free // size)),
    )
    with torch.autograd.graph.saved_tensors_hooks(freed.pack, freed.unpack):
        x = torch.ones(100, requires_grad=True)
        y = x
        for _ in range(layers):
            y = y.exp()
    y.sum().backward()
    assert told == [(asked, asked - LAYERS_ALIVE) for asked in range(5, layers + 1)]


def test_counting_keeps_nothing_alive() -> None:
    """A node's own output that it saves is free when the graph is, with or without a backward."""
    x = torch.ones(10, requires_grad=True)
    for backward in (False, True):
        freed = SavedTensors(lambda _: False, 1, then=lambda _: None)
        with torch.autograd.graph.saved_tensors_hooks(freed.pack, freed.unpack):
            y = (x * 2).exp()
        saved = StorageWeakRef(y.untyped_storage())
        if backward:
            y.sum().backward()
        del y
        assert freed.saved_bytes > 0 and saved.expired()
