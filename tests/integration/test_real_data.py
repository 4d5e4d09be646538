"""Real rollouts: what plans make of whole files, and a tiny model on slices, exactly."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scenarios import with_logprobs
from steps import with_options
from transformers import PreTrainedModel
from yardstick import Truth, label, measure, own_logprobs, step_faults

from forkpoint import Config, Rollout, RolloutBatch, load_rollouts, wrap
from forkpoint.losses import GRPO, GSPO
from forkpoint.plan import make_plan
from forkpoint.testing import lifted_upcasts, tiny_model
from forkpoint.tree.forest import IntArray

VOCABULARY = 8192
LOSSES = {"grpo": GRPO(clip=0.2, kl=0.05), "gspo": GSPO(clip=0.02)}
CONFIGS = (
    Config(sharing="tree", boundary="mixed", max_microbatch_tokens=320),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=100),
    Config(sharing="group", boundary="within"),
)

Find = Callable[[str], Path]


@pytest.mark.parametrize(
    ("file", "logical", "once_by_group", "unique", "edges"),
    [
        ("airline.jsonl", 378_424, 281_171, 249_844, 249_843),
        ("rag.jsonl", 705_578, 91_343, 91_222, 91_221),
    ],
)
def test_token_counts_of_whole_files(
    shared_data: Find, file: str, logical: int, once_by_group: int, unique: int, edges: int
) -> None:
    batch = RolloutBatch(load_rollouts(shared_data(file)))
    firsts = batch.token_ids[batch.offsets[:-1]]
    assert len(set(firsts.tolist())) == 1
    by_group = sum(len(set(firsts[members].tolist())) for members in batch.groups())
    for boundary in ("mixed", "across"):
        tree = make_plan(batch, config=Config(sharing="tree", boundary=boundary))
        assert (tree.logical_tokens, tree.unique_tokens) == (logical, unique)
        assert tree.computed_tokens == edges == unique - 1
        # A first token is the label of no edge, so each group's comes on top of its edges.
        group = make_plan(batch, config=Config(sharing="group", boundary=boundary))
        assert group.computed_tokens + by_group == once_by_group
        dense = make_plan(batch, config=Config(sharing="none", boundary=boundary))
        assert dense.computed_tokens == logical - len(batch)


def take(rollout: Rollout, tokens: IntArray) -> Rollout:
    """The rollout with only the tokens at these positions."""
    return Rollout(
        rollout.token_ids[tokens],
        rollout.loss_mask[tokens],
        rollout.advantage,
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
    )


def slice_of(path: Path, groups: set[str], *, drop: tuple[int, int], most: int) -> RolloutBatch:
    """The rollouts of some groups without the positions `drop`, in all of which they are equal, and
    then cut to `most` tokens. Neither moves a fork off the tokens at which it was."""
    rollouts = [rollout for rollout in load_rollouts(path) if rollout.group_id in groups]
    for rollout in rollouts:
        begin, end = 0, drop[1] + 1
        same = np.array_equal(rollout.token_ids[begin:end], rollouts[0].token_ids[begin:end])
        assert same, "only what all of them share may be dropped"
    return RolloutBatch(
        take(rollout, np.delete(np.arange(len(rollout)), slice(*drop))[:most])
        for rollout in rollouts
    )


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3", num_hidden_layers=2, vocab_size=VOCABULARY)


def check(model: PreTrainedModel, batch: RolloutBatch, loss: str) -> list[int]:
    """Compare every configuration with dense; returns how many microbatches each had."""
    with lifted_upcasts(model):
        own = own_logprobs(model, batch)
        expected: Truth = measure(model, with_logprobs(batch, own), LOSSES[loss])
        faults, microbatches = [], []
        policy = wrap(model)
        for config in CONFIGS:
            model.zero_grad()
            stats = with_options(policy, config).forward_backward(expected.batch, LOSSES[loss])
            name = label(config, stats.plan)
            faults += [f"{name}: {fault}" for fault in step_faults(model, stats, expected)]
            microbatches.append(len(stats.plan.microbatches))
    assert not faults, "\n".join(faults)
    return microbatches


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_answers_to_one_context(shared_data: Find, model: PreTrainedModel, loss: str) -> None:
    batch = slice_of(shared_data("rag.jsonl"), {"rag-3"}, drop=(30, 5900), most=400)
    forest = make_plan(batch, config=Config(sharing="group", boundary="mixed")).forest
    assert len(batch) == 8 and forest.depth.max() == 3
    assert forest.roots == 1 and forest.length[0] == 176 and forest.multiplicity[0] == 8
    most_owners = forest.multiplicity[forest.depth > 0].max()
    assert most_owners >= 2, "no trained token is shared"
    check(model, batch, loss)
