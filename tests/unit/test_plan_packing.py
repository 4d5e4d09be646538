"""How microbatches are filled: first-fit decreasing, whole paths, subtrees, order within a
microbatch."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_forest import forest_of

from forkpoint import Config, Plan, Rollout, RolloutBatch
from forkpoint.plan import ModelShape, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.packing import breadth_or_depth, first_fit_decreasing


def plan_of(lists: list[list[int]], **options) -> Plan:
    batch = RolloutBatch(Rollout(ids, [0] * len(ids), 0.0, group_id="g") for ids in lists)
    return make_plan(batch, config=Config(**options))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 25))
def test_bins_hold_everything_once_and_no_two_could_be_one(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(item for found in bins for item in found) == list(range(len(sizes)))
    used = [sum(sizes[item] for item in found) for found in bins]
    for found, total in zip(bins, used, strict=True):
        assert total <= capacity or len(found) == 1
    for one in range(len(bins)):
        for other in range(one):
            assert used[one] + used[other] > capacity


def test_a_microbatch_of_one_tree_is_depth_first_and_one_of_several_breadth_first() -> None:
    deep = forest_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 6, 8]])
    assert deep.parent.tolist() == [-1, 0, 1, 1, 0, 4, 4]
    # Breadth first needs 3 rectangles (each level below each above), depth first one a fork: 3.
    assert breadth_or_depth(deep, list(range(7))) == [0, 1, 2, 3, 4, 5, 6]
    more = forest_of([[1, 2, side, leaf] for side in (3, 4, 5) for leaf in (6, 7)])
    assert more.parent.tolist() == [-1, 0, 1, 1, 0, 4, 4, 0, 7, 7]
    assert breadth_or_depth(more, list(range(10))) == [0, 1, 4, 7, 2, 3, 5, 6, 8, 9]
    one_sided = forest_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]])
    assert one_sided.parent.tolist() == [-1, 0, 1, 1, 0]
    assert breadth_or_depth(one_sided, list(range(5))) == [0, 1, 2, 3, 4]
    groups = forest_of([[group, 0, 0, leaf] for group in (1, 2, 3) for leaf in (5, 6)])
    assert groups.parent.tolist() == [-1, 0, 0, -1, 3, 3, -1, 6, 6]
    assert breadth_or_depth(groups, list(range(9))) == [0, 3, 6, 1, 2, 4, 5, 7, 8]
    assert breadth_or_depth(groups, [5, 4, 1]) == [1, 4, 5]


def test_layers_with_a_state_limit_microbatches_on_a_gpu() -> None:
    """Their kernels keep a state for each 64 tokens, with fewer than 2^31 elements in all."""
    shape = ModelShape.from_config({
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 256, "linear_num_value_heads": 512, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 256, "linear_value_head_dim": 256,
        "layer_types": ["linear_attention", "full_attention"],
    })  # fmt: skip
    chunks = (1 << 31) // shape.state_elements
    prompt = [n % 60 for n in range(64 * chunks)]
    batch = RolloutBatch(
        Rollout([*prompt, n], [0] * len(prompt) + [1], 1.0, group_id="g") for n in (61, 62)
    )
    for boundary in ("within", "mixed", "across"):
        for runs_ahead in (False, True):
            for budget in (None, 1 << 50):
                plan = make_plan(
                    batch,
                    shape,
                    Config(sharing="group", boundary=boundary),
                    capabilities=Capabilities(runs_ahead=runs_ahead),
                    budget_bytes=budget,
                )
                states = max(m.tokens // 64 + len(m.segments) for m in plan.microbatches)
                # Whole rollouts are longer than that.
                assert (states < chunks) == (boundary != "within" and runs_ahead)
