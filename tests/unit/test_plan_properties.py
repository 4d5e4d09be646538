"""Properties of every plan: thousands of random batches, every combination, small microbatches.

What is expected is written out from the tokens alone: an edge is a tuple of a rollout's tokens up
to the edge's label, and who owns it is a set.
"""

from collections import defaultdict
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint import Config, Plan, PlanError, RolloutBatch
from forkpoint.plan import make_plan
from programs import check_program
from strategies import COMBINATIONS, batches, naming

EXAMPLES = settings(max_examples=30, derandomize=True, deadline=None)

Prefix = tuple[int, ...]


@EXAMPLES
@given(batch=batches(), max_microbatch_tokens=st.integers(1, 60))
def test_plans(batch: RolloutBatch, max_microbatch_tokens: int) -> None:
    for sharing, boundary in COMBINATIONS:
        config = Config(
            sharing=sharing, boundary=boundary, max_microbatch_tokens=max_microbatch_tokens
        )
        with naming(config):
            check_plan(batch, config, max_microbatch_tokens)


def check_plan(batch: RolloutBatch, config: Config, max_microbatch_tokens: int) -> None:
    longest = int(batch.lengths.max()) - 1
    if config.boundary == "within" and longest > max_microbatch_tokens:
        with pytest.raises(
            PlanError, match=rf"has {longest} tokens .* at most {max_microbatch_tokens}:"
        ):
            make_plan(batch, config=config)
        return
    plan = make_plan(batch, config=config)
    check_microbatches(plan)
    check_paths(plan, batch)
    check_counts(plan, batch)
    check_schedule(plan)


def ids_of(batch: RolloutBatch, rollout: int) -> list[int]:
    return batch.token_ids[batch.offsets[rollout] : batch.offsets[rollout + 1]].tolist()


def prefixes_of(plan: Plan, batch: RolloutBatch, segment: int) -> list[Prefix]:
    """A segment's edges, read off its first owner."""
    ids = ids_of(batch, int(plan.forest.order[plan.forest.owner_begin[segment]]))
    first = int(plan.forest.start[segment])
    ends = range(first + 2, first + int(plan.forest.length[segment]) + 2)
    return [tuple(ids[:end]) for end in ends]


def microbatches_of_segments(plan: Plan) -> dict[int, int]:
    """Every segment's microbatch; each lies in exactly one."""
    placed = [
        (segment, microbatch.index)
        for microbatch in plan.microbatches
        for segment in microbatch.segments
    ]
    assert sorted(segment for segment, _ in placed) == list(range(len(plan.forest)))
    return dict(placed)


def sharing_classes(plan: Plan, batch: RolloutBatch) -> list[Hashable]:
    """Equal for rollouts that compute what they have in common once."""
    microbatch_of = microbatches_of_segments(plan)
    classes: list[Hashable] = []
    for rollout in range(len(batch)):
        shares = {"none": rollout, "group": int(batch.group_index[rollout]), "tree": 0}[
            plan.sharing
        ]
        leaf = int(plan.forest.leaf[rollout])
        microbatch = microbatch_of.get(leaf) if plan.boundary == "within" else None
        classes.append((shares, microbatch))
    return classes


def check_microbatches(plan: Plan) -> None:
    """Microbatches hold their segments back to back within the budget, forks where the boundary
    says."""
    microbatch_of = microbatches_of_segments(plan)
    for index, microbatch in enumerate(plan.microbatches):
        lengths = plan.forest.length[list(microbatch.segments)].tolist()
        assert microbatch.index == index
        assert microbatch.tokens == sum(lengths)
        assert microbatch.tokens <= plan.max_microbatch_tokens
        assert microbatch.segment_begin == tuple(np.cumsum([0, *lengths])[:-1].tolist())
        above = {int(plan.forest.parent[s]) for s in microbatch.segments} - {-1}
        microbatches_above = {microbatch_of[segment] for segment in above}
        if plan.boundary == "within":
            assert microbatches_above <= {index}
        elif plan.boundary == "across":
            assert index not in microbatches_above


def check_paths(plan: Plan, batch: RolloutBatch) -> None:
    """Every rollout is one path, and every edge is computed once, for exactly its owners."""
    forest = plan.forest
    classes = sharing_classes(plan, batch)
    owners: dict[tuple[Hashable, Prefix], set[int]] = defaultdict(set)
    for rollout, cls in enumerate(classes):
        ids = ids_of(batch, rollout)
        for end in range(2, len(ids) + 1):
            owners[cls, tuple(ids[:end])].add(rollout)
    computed = []
    for segment in range(len(forest)):
        begin, end = forest.owner_begin[segment], forest.owner_end[segment]
        through = set(forest.order[begin:end].tolist())
        cls = classes[min(through)]
        edges = [(cls, prefix) for prefix in prefixes_of(plan, batch, segment)]
        assert all(owners[edge] == through for edge in edges)
        assert forest.multiplicity[segment] == len(through)
        computed += edges
    assert len(computed) == len(set(computed)) == len(owners) == forest.edges

    first = forest.segment_tokens(batch.offsets)
    token_edges = forest.token_edges(batch.offsets)
    for rollout, cls in enumerate(classes):
        ids = ids_of(batch, rollout)
        inputs, labels = [], []
        for segment in forest.path(int(forest.leaf[rollout])):
            assert forest.start[segment] == len(inputs)
            begin, end = int(first[segment]), int(first[segment] + forest.length[segment])
            inputs += batch.token_ids[begin:end].tolist()
            labels += batch.token_ids[begin + 1 : end + 1].tolist()
        assert (inputs, labels) == (ids[:-1], ids[1:])
        begin, end = batch.offsets[rollout], batch.offsets[rollout + 1]
        assert token_edges[begin] == -1
        assert [computed[edge] for edge in token_edges[begin + 1 : end]] == [
            (cls, tuple(ids[: position + 2])) for position in range(len(ids) - 1)
        ]


def entries_of_microbatches(plan: Plan, batch: RolloutBatch) -> list[int]:
    """How many pairs of a trained edge and a temperature each microbatch has."""
    microbatch_of = microbatches_of_segments(plan)
    segment_of_edge = np.repeat(np.arange(len(plan.forest)), plan.forest.length)
    token_edges = plan.forest.token_edges(batch.offsets)
    rollout_of = np.repeat(np.arange(len(batch)), batch.lengths)
    pairs = {
        (int(token_edges[token]), float(batch.temperatures[rollout_of[token]]))
        for token in np.flatnonzero(batch.loss_mask)
    }
    found = [0] * len(plan.microbatches)
    for edge, _ in pairs:
        found[microbatch_of[int(segment_of_edge[edge])]] += 1
    return found


def check_counts(plan: Plan, batch: RolloutBatch) -> None:
    """The counts that the plan claims, and that microbatches of whole paths repeat no tree that
    fits. A trained edge counts once for each temperature, in the microbatch that holds it."""
    classes = [cls[:1] for cls in sharing_classes(plan, batch) if isinstance(cls, tuple)]
    trees: dict[Hashable, set[Prefix]] = defaultdict(set)
    trained: set[Hashable] = set()
    unique: set[Prefix] = set()
    for rollout, cls in enumerate(classes):
        ids = ids_of(batch, rollout)
        unique |= {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
        trees[cls, tuple(ids[:2])] |= {tuple(ids[:end]) for end in range(2, len(ids) + 1)}
        mask = batch.loss_mask[batch.offsets[rollout] :]
        temperature = float(batch.temperatures[rollout])
        trained |= {(cls, temperature, tuple(ids[: at + 1])) for at in range(len(ids)) if mask[at]}
    once = sum(map(len, trees.values()))
    assert plan.rollouts == len(batch)
    assert plan.logical_tokens == batch.logical_tokens
    assert plan.unique_tokens == len(unique)
    assert plan.dense.tokens == (batch.lengths - 1).sum()
    assert plan.dense.num_loss_entries == batch.loss_mask.sum()
    assert plan.computed_tokens == plan.forest.edges == plan.shared.tokens
    assert plan.shared.num_loss_entries == plan.num_loss_entries
    assert [m.num_loss_entries for m in plan.microbatches] == entries_of_microbatches(plan, batch)
    if plan.boundary != "within":
        assert plan.computed_tokens == once
        assert plan.num_loss_entries == len(trained)
        return
    assert once <= plan.computed_tokens <= plan.dense.tokens
    assert len(trained) <= plan.num_loss_entries <= plan.dense.num_loss_entries
    microbatches: dict[Hashable, set[int]] = defaultdict(set)
    for microbatch in plan.microbatches:
        for segment in microbatch.segments:
            if plan.forest.parent[segment] < 0:
                owner = int(plan.forest.order[plan.forest.owner_begin[segment]])
                microbatches[classes[owner], tuple(ids_of(batch, owner)[:2])].add(microbatch.index)
    for tree, edges in trees.items():
        if edges and len(edges) <= plan.max_microbatch_tokens:
            assert len(microbatches[tree]) == 1


def check_schedule(plan: Plan) -> None:
    """Forwards and backwards are brackets, and a microbatch runs between those of all that it
    reads."""
    microbatch_of = microbatches_of_segments(plan)
    opened: list[int] = []
    forwards, closed = [], []
    for operation, slot, index, *_ in plan.program.instructions:
        assert slot == index
        if operation == "backward":
            assert opened.pop() == index
            closed.append(index)
            continue
        microbatch = plan.microbatches[index]
        assert microbatch.parent == (opened[-1] if opened else -1)
        assert microbatch.parent < 0 or index in plan.microbatches[microbatch.parent].children
        above = {
            microbatch_of[s] for segment in microbatch.segments for s in plan.forest.path(segment)
        }
        assert above - {index} <= set(opened)
        opened.append(index)
        forwards.append(index)
    assert not opened
    assert forwards == list(range(len(plan.microbatches))), "microbatches lie in visiting order"
    assert sorted(closed) == forwards
    scored = [(i.operation, i.microbatch) for i in plan.score_program.instructions]
    assert scored == [("score", index) for index in forwards]
    assert len(set(plan.events())) == len(plan.events()) == len(plan.program.instructions)
    check_program(plan)
