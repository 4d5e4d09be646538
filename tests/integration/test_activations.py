"""Wherever a microbatch's activations are between its forward and its backward, the step is the
same; and what is moved is what may be moved."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scenarios import CHAIN, LOSSES, TIGHT
from steps import ACROSS, clear_gradients, forked_batch, relative_distance, with_options
from steps import gradients as gradients_of
from torch.multiprocessing.reductions import StorageWeakRef
from yardstick import Variant, label, step_faults, truth

from forkpoint import Config, losses, wrap
from forkpoint.engine import offload
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.offload import Activations
from forkpoint.engine.staging import PlainTransfers, Staging
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import heads
from forkpoint.ops.head import token_outputs
from forkpoint.plan.program import Instruction
from forkpoint.testing import ReadOnlyHook, dense_run, lifted_upcasts, tiny_model
from hybrids import tiny_hybrid

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample", "without_lists")

RESIDENCIES = ("keep", "offload", "recompute")
IN_CHAINS = Config(sharing="tree", boundary="across", max_microbatch_tokens=CHAIN)
MIXED = Config(sharing="tree", boundary="mixed", max_microbatch_tokens=TIGHT)
STEPS = [
    (Config(sharing="group", boundary="across"), "keep", "full"),
    (replace(IN_CHAINS, sharing="none"), "offload", "none"),
    (IN_CHAINS, "recompute", "selective"),
    (MIXED, "keep", "none"),
    (IN_CHAINS, "offload", "selective"),
    (MIXED, "recompute", "full"),
]


def test_steps_are_those_of_dense_training() -> None:
    """With prefix cache on the device, and in turn in the host's memory."""
    variant = Variant("qwen3", window=7, sinks=True)
    expected, model = truth(variant, "grpo"), variant.build()
    faults, moved = [], set()
    with lifted_upcasts(model):
        policy = wrap(model)
        for number, (config, activations, checkpointing) in enumerate(STEPS):
            hosted = number % 2 == 1
            changed = replace(
                config,
                activations=activations,
                checkpointing=checkpointing,
                prefix_cache="host" if hosted else "device",
            )
            model.zero_grad()
            stats = with_options(policy, changed).forward_backward(expected.batch, LOSSES["grpo"])
            name = f"{label(changed, stats.plan)}, {activations}, {checkpointing}"
            faults += [f"{name}: {fault}" for fault in step_faults(model, stats, expected)]
            step = stats.plan.events()
            assert stats.events == step, name
            assert ("recompute" in " ".join(step)) == (activations == "recompute"), name
            moved |= {
                microbatch.activations
                for microbatch in stats.plan.microbatches
                if microbatch.children
            }
            assert (stats.offload is not None) == (activations == "offload" or hosted), name
            assert not stats.offload or stats.offload.back_bytes > 0, name
    assert not faults, f"{len(faults)} differences from dense:\n" + "\n".join(faults[:20])
    assert moved == set(RESIDENCIES)


@pytest.mark.parametrize("activations", RESIDENCIES[1:])
def test_under_autocast(activations: str) -> None:
    """The same step as with microbatches kept: the second forward runs under autocast, too."""
    model, found = tiny_model("qwen3", dtype=torch.float32), []
    for each in ("keep", activations):
        clear_gradients(model)
        with torch.autocast("cpu", torch.bfloat16):
            policy = wrap(model, replace(ACROSS, activations=each))
            policy.forward_backward(forked_batch(), losses.GRPO())
        found.append(gradients_of(model))
    assert relative_distance(found[1], found[0]) < 1e-6


def test_autocast_leaves_float64_models_alone() -> None:
    for model in (tiny_model("qwen3"), tiny_hybrid("qwen3_5_text")):
        found = []
        for enabled in (False, True):
            clear_gradients(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                wrap(model, ACROSS).forward_backward(forked_batch(), losses.GRPO())
            found.append(gradients_of(model))
        assert relative_distance(found[1], found[0]) == 0


def test_autocast_s_copies_of_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast keeps them on the device: moving them would free nothing."""
    model, moved = tiny_model("qwen3", dtype=torch.float32), []
    policy = wrap(model, replace(ACROSS, activations="offload"))
    for told in (True, False):
        if not told:
            monkeypatch.setattr(offload, "is_copy_of_leaf", lambda _: False)
        with torch.autocast("cpu", torch.bfloat16):
            stats = policy.forward_backward(forked_batch(), losses.GRPO())
        assert stats.offload is not None
        moved.append(stats.offload.out_bytes)
    blocks = model.model.layers.parameters()
    assert moved[1] - moved[0] >= sum(p.numel() * 2 for p in blocks if p.dim() > 1)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_compiled_blocks() -> None:
    """Compiled for autograd once: no place of activations or of the cache compiles more."""
    model = tiny_model("qwen3", dtype=torch.float32, num_hidden_layers=2)
    batch, loss = forked_batch(), losses.GRPO()
    expected = dense_run(model, batch, loss).gradients
    graphs, found = [], []
    for activations, place in (*((each, "device") for each in RESIDENCIES), ("keep", "host")):
        config = replace(ACROSS, activations=activations, prefix_cache=place, compile_blocks=True)
        for seed in (0, 1):
            clear_gradients(model)
            other = forked_batch(seed=seed, stretch=seed + 1)
            wrap(model, config).forward_backward(other if seed else batch, loss)
            if not seed:
                found.append(gradients_of(model))
                assert relative_distance(found[-1], expected) < 1e-4
                assert relative_distance(found[-1], found[0]) == 0
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs


# What is moved ------------------------------------------------------------------------------------


class Watched(PlainTransfers):
    """Copies of a CPU that are remembered, with as much device memory as they are told."""

    def __init__(self, room: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.room = room
        self.out_bytes: list[int] = []
        self.asked = 0
        self.sources: list[StorageWeakRef] = []

    def out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.out_bytes.append(sum(len(host) for _, host in pairs))
        self.sources.append(StorageWeakRef(pairs[0][0].untyped_storage()))
        return super().out(pairs)

    def headroom_bytes(self) -> int | None:
        self.asked += 1
        return self.room


def watched_step(transfers: Watched, limit: int | None = None):
    """A step that offloads, in float64, and what its staging was."""
    staging = Staging(transfers)
    model = tiny_model("llama").train()
    policy = wrap(model, replace(ACROSS, activations="offload", host_memory=limit))
    policy.model_state.staging = staging
    with lifted_upcasts(model):
        stats = policy.forward_backward(forked_batch(), losses.GRPO())
        expected = dense_run(model, forked_batch(), losses.GRPO()).gradients
    assert relative_distance(gradients_of(model), expected) < 1e-10
    assert stats.offload is not None
    assert staging.used_bytes == 0, "host memory is in use after the step"
    return model, stats, staging


def test_what_is_offloaded_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = Watched()
    alive: list[float] = []
    begin = Activations.before

    def before(self: Activations, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        # The parents' own storages, as long as only children have run backwards.
        if not alive and instruction.operation == "backward":
            dead = sum(ref.expired() for ref in transfers.sources)
            alive.append(1 - dead / len(transfers.sources))
        return begin(self, instruction, inputs)

    monkeypatch.setattr(Activations, "before", before)
    model, stats, _ = watched_step(transfers)
    # What else holds a few: tensors that roots are, and the keys and values of what is running.
    assert alive[0] < 0.1
    weights = {p.untyped_storage().nbytes() for p in model.parameters() if p.dim() > 1}
    assert stats.offload.out_bytes == sum(transfers.out_bytes)
    assert not weights & set(transfers.out_bytes), "a weight was copied"
    assert stats.offload.back_bytes <= stats.offload.out_bytes
    # Everything but what the first layers share with all is under way before it is asked for.
    assert stats.offload.on_demand < 0.1 * stats.offload.prefetched


def test_without_room_nothing_is_fetched_ahead() -> None:
    transfers = Watched(room=0)
    _, stats, _ = watched_step(transfers)
    assert stats.offload.prefetched == 0 and stats.offload.held_back > 0
    assert stats.offload.on_demand > 0 and transfers.asked > 0


def test_beyond_the_host_s_limit_activations_stay() -> None:
    transfers = Watched()
    transfers.chunk_bytes = 4096
    _, stats, staging = watched_step(transfers, limit=3 * 4096)
    assert stats.offload.left_bytes > 0 and stats.offload.out_bytes > 0
    assert staging.held_bytes <= 3 * 4096
    assert stats.offload.host_bytes == staging.held_bytes


def test_host_memory_is_kept_from_step_to_step() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    policy = wrap(model, replace(ACROSS, activations="offload"))
    held, spent = [], []
    for _ in range(3):
        stats = policy.forward_backward(forked_batch(), losses.GRPO())
        assert policy.model_state.staging is not None and stats.offload is not None
        spent.append(stats.offload.allocation_ms)
        held.append(policy.model_state.staging.held_bytes)
    assert held[0] > 0 and len(set(held)) == 1
    assert spent[0] > 0 and spent[1:] == [0, 0]


def test_scores_keep_nothing() -> None:
    """Forward only: no microbatch has a graph, is offloaded or runs twice, whatever the plan
    says."""
    model, batch = tiny_model("llama", dtype=torch.float32), forked_batch()
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    for activations in RESIDENCIES:
        policy = wrap(model, replace(ACROSS, activations=activations))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            scores = policy.score(batch)
        assert scores.events == scores.plan.events(backward=False)
        assert policy.model_state.staging is None
    assert not saved


def test_a_model_that_checkpoints_itself_is_not_checkpointed_again() -> None:
    model = Variant("llama", checkpointed=True).build()
    policy = wrap(model, replace(ACROSS, checkpointing="full"))
    with pytest.raises(UnsupportedError, match=r"gradient_checkpointing.*checkpointing='full'"):
        policy.forward_backward(forked_batch(), losses.GRPO())
    assert all(p.grad is None for p in model.parameters())


def test_a_block_that_a_microbatch_leaves_early_is_not_run_again() -> None:
    """Its exception would pass through the checkpoint, and its backward needs no more of it."""
    model, batch = tiny_model("llama"), forked_batch()
    calls = []
    for layer in model.model.layers[-2:]:
        layer.self_attn.k_proj.register_forward_hook(ReadOnlyHook(lambda m, *_: calls.append(m)))
    stats = wrap(model, replace(ACROSS, checkpointing="full")).forward_backward(
        batch, losses.GRPO()
    )
    ends = [i.ends_at for i in stats.plan.program.instructions if i.operation == "forward"]
    before, last = (calls.count(layer.self_attn.k_proj) for layer in model.model.layers[-2:])
    assert before == 2 * len(ends)
    assert last == before - ends.count("boundary") < before


def test_logits_of_a_float32_head_are_kept_in_float32_models_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans count them in the dtype of the model."""
    seen = set()

    def watching(*args: Any, keep_logits: bool, **options: Any) -> Any:
        seen.add(keep_logits)
        return token_outputs(*args, keep_logits=keep_logits, **options)

    monkeypatch.setattr(heads, "in_float32", lambda head: True)  # as TRL sets it
    monkeypatch.setattr(heads, "token_outputs", watching)
    config = Config(sharing="group", boundary="within", head_logits="keep")
    for dtype, expected in ((torch.float32, {True}), (torch.bfloat16, {False})):
        seen.clear()
        policy = wrap(tiny_model("llama", dtype=dtype), config)
        plan = policy.forward_backward(forked_batch(), losses.GRPO()).plan
        assert seen == {m.keeps_logits for m in plan.microbatches} == expected
