"""When an offloaded microbatch is fetched: during the backward before its own, as that gives back
memory.

Earlier than that memory is fullest, with all that the microbatch before has saved; later the copy
would be waited for. Gradients are those of microbatches that are kept, bit for bit.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch
from steps import gradients as gradients_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.engine.offload import LAYERS_ALIVE, FreedMemory, OffloadStats
from forkpoint.engine.staging import PlainTransfers, Staging
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import OPERATIONS
from forkpoint.testing import tiny_model
from lanes import slow_besides_pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample", "without_lists")

LAYERS = 12
GROUP = Config(sharing="group", boundary="across", max_microbatch_tokens=24)
POLICIES = ("none", "selective", "full")


def waves_batch(prompt: int = 24, response: int = 10) -> RolloutBatch:
    """A prompt and four responses, which take two microbatches where microbatches have 24
    tokens."""
    rng = np.random.default_rng(0)
    shared, mask = rng.integers(0, 61, prompt).tolist(), [0] * prompt + [1] * response
    return RolloutBatch(
        Rollout([*shared, n, *rng.integers(0, 61, response - 1).tolist()], mask, 1.0 - n)
        for n in range(4)
    )


def is_event(entry: str) -> bool:
    """Whether an entry of the log is an event of the step, such as "forward leaf 1"."""
    return entry.partition(" ")[0] in OPERATIONS


def microbatch_of(event: str) -> str:
    return event.partition(" ")[2]


@dataclass
class Log:
    """Record of a step, in order: its events, and within them layers and fetches."""

    entries: list[str] = field(default_factory=list)
    inputs: dict[str, list[StorageWeakRef]] = field(default_factory=dict)
    """Of the MLPs, which these save, by the event that they are made in."""
    freed: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By microbatch, at each fetch before its own backward: the share of those of the running
    microbatch that was free, and the bytes of all fetches up to this one."""

    def event(self) -> str:
        return next(filter(is_event, reversed(self.entries)))

    def within(self, event: str) -> list[str]:
        begin = self.entries.index(event) + 1
        steps = (i for i, e in enumerate(self.entries) if i >= begin and is_event(e))
        return self.entries[begin : next(steps, None)]

    def fetched_in(self, microbatch: str) -> list[str]:
        """The backwards in which storages of a microbatch were fetched."""
        events, found = "", []
        for entry in self.entries:
            if is_event(entry):
                events = entry
            elif entry == f"fetch {microbatch}" and events not in found:
                found.append(events)
        return found


class Logged(PlainTransfers):
    def __init__(self, log: Log) -> None:
        super().__init__(torch.device("cpu"))
        self.log = log
        self.microbatch_at: dict[int, str] = {}

    def out(self, source: Tensor, host: Tensor) -> None:
        self.microbatch_at[host.data_ptr()] = microbatch_of(self.log.event())
        return super().out(source, host)

    def back(self, host: Tensor, after: None) -> tuple[Tensor, None]:
        microbatch, running = self.microbatch_at[host.data_ptr()], self.log.event()
        if microbatch_of(running) != microbatch:
            inputs = self.log.inputs[f"forward {microbatch_of(running)}"]
            free = sum(ref.expired() for ref in inputs) / len(inputs)
            fetches = self.log.freed.setdefault(microbatch, [])
            fetches.append((free, len(host) + (fetches[-1][1] if fetches else 0)))
        self.log.entries.append(f"fetch {microbatch}")
        return super().back(host, after)


def logged_step(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    config: Config,
    batch: RolloutBatch,
    plan: Callable[[Plan], Plan] = lambda plan: plan,
) -> tuple[Log, OffloadStats | None, dict[str, Tensor | None], Plan]:
    log, policy = Log(), wrap(model, config)
    policy.model_state.staging = Staging(Logged(log))
    policy.observer = lambda event: log.entries.append(event.text)
    layer_of = {layer.mlp: index for index, layer in enumerate(model.model.layers)}
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward

    @functools.wraps(forward)
    def watched(module: nn.Module, x: Tensor) -> Tensor:
        if not log.event().startswith("backward"):
            log.inputs.setdefault(log.event(), []).append(StorageWeakRef(x.untyped_storage()))
            x.register_hook(lambda _: log.entries.append(f"layer {layer_of[module]}"))
        return forward(module, x)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", watched)
        clear_gradients(model)
        chosen = plan(policy.plan(batch))
        stats = policy.forward_backward(batch, losses.GRPO(), plan=chosen)
    assert policy.model_state.staging.used_bytes == 0
    return log, stats.offload, gradients_of(model), chosen


def same_bits(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[n]) for n, x in a.items() if x is not None)  # type: ignore[arg-type]


def layers_before_fetch(log: Log, event: str, microbatch: str) -> int:
    within = log.within(event)
    assert f"fetch {microbatch}" in within, f"nothing of {microbatch} is fetched in {event}"
    before = within[: within.index(f"fetch {microbatch}")]
    return sum(entry.startswith("layer") for entry in before)


@pytest.mark.parametrize("checkpointing", POLICIES)
def test_the_last_wave_fetches_into_what_it_gives_back(
    monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    model, batch = tiny_model("llama", num_hidden_layers=LAYERS), waves_batch()
    config = replace(GROUP, checkpointing=checkpointing)
    _, _, kept, _ = logged_step(monkeypatch, model, replace(config, activations="keep"), batch)
    log, stats, found, plan = logged_step(
        monkeypatch, model, replace(config, activations="offload"), batch
    )
    events = tuple(filter(is_event, log.entries))
    assert (
        events
        == plan.events()
        == (
            *("forward prefix 0", "forward leaf 1", "backward leaf 1"),
            *("forward leaf 2", "backward leaf 2", "backward prefix 0"),
        )
    )
    assert log.fetched_in("prefix 0") == ["backward leaf 2", "backward prefix 0"]
    # What head and last norm save is asked for first; beside inputs of blocks alone that is much.
    least = 1 if checkpointing == "full" else LAYERS_ALIVE + 1
    assert least <= layers_before_fetch(log, "backward leaf 2", "prefix 0") <= LAYERS // 2 + 1
    assert stats is not None and stats.on_demand == 0 and stats.prefetched > 0
    assert same_bits(found, kept)
    if checkpointing != "none":
        return
    prompt, last = plan.microbatches[0], plan.microbatches[-1]
    had_bytes = stats.back_bytes * last.tokens / prompt.tokens
    layer = stats.back_bytes / LAYERS
    for free, fetched in log.freed["prefix 0"]:
        assert fetched <= max(2 * layer, free * had_bytes) + layer / 4
    # Much of it is back before its own backward begins, and of that only the rest is fetched.
    assert log.freed["prefix 0"][-1][1] > 0.5 * had_bytes


@pytest.mark.parametrize("checkpointing", POLICIES)
def test_whatever_becomes_of_the_microbatch_before(
    monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    """Microbatches below an offloaded one that are kept, recomputed or offloaded themselves."""
    layers = 6
    model, batch = tiny_model("llama", num_hidden_layers=layers), forked_batch()
    config = replace(ACROSS, checkpointing=checkpointing)
    _, _, kept, _ = logged_step(monkeypatch, model, replace(config, activations="keep"), batch)
    pairs = set()
    for ways in (("keep", "offload"), ("offload", "recompute"), ("recompute", "keep")):

        def chosen(plan: Plan, ways: tuple[str, ...] = ways) -> Plan:
            """Residencies in turn by depth, and every root offloaded."""
            microbatches, depths = [], []
            for microbatch in plan.microbatches:
                depths.append(depths[microbatch.parent] + 1 if microbatch.parent >= 0 else 0)
                way = ("offload", *ways)[depths[-1] % 3]
                microbatches.append(
                    replace(microbatch, activations=way if microbatch.children else "keep")
                )
            return plan.with_microbatches(microbatches)

        offloading = replace(config, activations="offload")
        log, stats, found, plan = logged_step(monkeypatch, model, offloading, batch, chosen)
        assert same_bits(found, kept), ways
        assert stats is not None and stats.on_demand == 0, ways
        for one, then in pairwise(plan.program.instructions):
            microbatch, after = one.microbatch, then.microbatch
            if then.operation != "backward" or plan.microbatches[after].activations != "offload":
                continue
            assert one.operation == "backward"
            event, name = plan.event(one), plan.microbatch_names[after]
            assert log.fetched_in(name) in ([event], [event, f"backward {name}"]), ways
            before = layers_before_fetch(log, event, name)
            # A microbatch that had more on its way than it saves itself gives back at its first
            # layer.
            least = (
                0
                if plan.microbatches[microbatch].activations == "offload" or checkpointing == "full"
                else 2
            )
            assert least <= before < layers, (ways, event, before)
            pairs.add(plan.microbatches[microbatch].activations)
    assert pairs == {"keep", "offload", "recompute"}


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
    ("exist", "checkpointing", "lengths"),
    slow_besides_pairs(
        [True, False],
        ["none", "full"],
        # Prompt and response: one prefix above two leaves, and a chain of prefixes.
        [(64, 32), (256, 16)],
    ),
)
def test_memory_gets_no_fuller_than_when_the_wave_s_backward_begins(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], checkpointing: str, exist: bool
) -> None:
    """With what is saved, what is fetched, and gradients; two layers of a microbatch may come on
    top."""
    prompt, response = lengths
    model, batch = tiny_model("llama", num_hidden_layers=LAYERS), waves_batch(prompt, response)
    config = replace(
        GROUP, activations="offload", checkpointing=checkpointing, max_microbatch_tokens=64
    )
    policy, saved, fetched, new = wrap(model, config), Alive(), Alive(), FreedMemory._is_new
    entries: list[tuple[str, int, int]] = []

    def note(what: str) -> None:
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        entries.append((what, saved.nbytes() + fetched.nbytes() + gradients, fetched.nbytes()))

    def counted(freed: FreedMemory, tensor: Tensor) -> bool:
        found = new(freed, tensor)
        if found:
            saved.add(tensor)
        return found

    class Counted(PlainTransfers):
        def back(self, host: Tensor, after: None) -> tuple[Tensor, None]:
            found = super().back(host, after)
            fetched.add(found[0])
            note("fetch")
            return found

    monkeypatch.setattr(FreedMemory, "_is_new", counted)
    policy.model_state.staging = Staging(Counted(torch.device("cpu")))
    policy.observer = lambda event: note(event.text)
    clear_gradients(model)
    if exist:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    plan = policy.plan(batch)
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
    # Nor is room left unused where gradients take none of it.
    ends = next(
        i
        for i, (what, *_) in enumerate(entries)
        if what == f"backward {plan.microbatch_names[parents[-1].index]}"
    )
    if checkpointing == "none" and response > 8 and (exist or response == 32):
        assert entries[ends][2] > 0.7 * stats.offload.out_bytes / len(parents)


def test_where_nothing_is_freed_the_microbatch_s_own_backward_begins_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = tiny_model("llama", num_hidden_layers=LAYERS), waves_batch()
    monkeypatch.setattr(FreedMemory, "_asked", lambda *_: None)
    log, stats, _, _ = logged_step(monkeypatch, model, replace(GROUP, activations="offload"), batch)
    assert log.fetched_in("prefix 0") == ["backward prefix 0"]
    assert log.within("backward prefix 0")[0] == "fetch prefix 0"
    assert stats is not None and stats.on_demand == 0 and stats.prefetched > 0


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
    freed = FreedMemory(
        lambda x: x.shape == (1000,),
        lambda free: told.append((freed.asked_bytes, free)),
    )
    with torch.autograd.graph.saved_tensors_hooks(*freed.hooks()):
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


@pytest.mark.parametrize(
    ("ahead", "grows", "first", "last"),
    [(None, 0, 5, 10), (None, 4, 5, 10), (2, 0, 5, 10), (20, 0, 5, 10), (20, 20, 5, 10)],
)
def test_what_is_free_is_told_as_it_grows(
    ahead: int | None, grows: int, first: int, last: int
) -> None:
    """Ten layers that save a tensor each, of which two layers' may be alive still."""
    layers, size = 10, 400
    told: list[tuple[int, int]] = []
    freed = FreedMemory(
        lambda _: False,
        lambda free: told.append((freed.asked_bytes // size, free // size)),
        layers=layers,
        ahead_bytes=None if ahead is None else lambda: ahead * size,
    )
    freed.new_gradient_bytes = grows * size
    with torch.autograd.graph.saved_tensors_hooks(*freed.hooks()):
        x = torch.ones(100, requires_grad=True)
        y = x
        for _ in range(layers):
            y = y.exp()
    y.sum().backward()
    # Of an offloaded microbatch what is at work is not among what is ahead.
    has = layers - LAYERS_ALIVE if ahead is None else ahead
    free = [has - (layers - asked) - grows for asked in range(layers + 1)]
    assert (told[0][0], told[-1][0]) == (first, last if free[-1] > 0 else first)
    assert all(found == max(0, free[asked]) for asked, found in told)
    assert [asked for asked, _ in told] == sorted({asked for asked, _ in told})


def test_counting_keeps_nothing_alive() -> None:
    """A node's own output that it saves is free when the graph is, with or without a backward."""
    x = torch.ones(10, requires_grad=True)
    for backward in (False, True):
        freed = FreedMemory(lambda _: False, lambda _: None)
        with torch.autograd.graph.saved_tensors_hooks(*freed.hooks()):
            y = (x * 2).exp()
        saved = StorageWeakRef(y.untyped_storage())
        if backward:
            y.sum().backward()
        del y
        assert freed.saved_bytes > 0 and saved.expired()
