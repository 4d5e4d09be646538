"""Time of a plan if each kind of its work ran at the rates that dense training reaches.

The counted bound takes every FLOP to cost the same. They do not: attention reaches fewer a second
than matrix products, and the head makes its logits twice. A shared step has more visible pairs and
more labelled tokens for each token that it runs than a dense one, so that even where everything is
as fast as densely it stays below the counted bound. How far is computed here from a dense step's
profile, and what is left is ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import visible_pairs

ATTENTION = "attention"


@dataclass(frozen=True)
class Amounts:
    """How much work of each kind a plan runs; a row without labels ends within its last layer."""

    tokens: float
    """Tokens times layers."""
    pairs: float
    """Visible pairs (query, key) times layers."""
    num_loss_entries: int

    @classmethod
    def of(cls, plan: Plan) -> "Amounts":
        """Work of a plan that has a shape."""
        shape, forest = plan.shape, plan.forest
        assert shape is not None
        tokens = pairs = 0.0
        for row in plan.microbatches:
            ends_early = not row.num_loss_entries
            tokens += row.tokens * (shape.layers - ends_early)
            segments = list(row.segments)
            windows = shape.windows[:-1] if ends_early else shape.windows
            each = {
                w: visible_pairs(forest.start[segments], forest.length[segments], w)
                for w in set(windows)
            }
            pairs += sum(each[w] for w in windows)
        return cls(tokens, pairs, plan.num_loss_entries)


def at_dense_rates(
    dense: tuple[Amounts, Mapping[str, float]],
    few_labels: tuple[Amounts, Mapping[str, float]],
    wanted: Amounts,
) -> dict[str, float]:
    """Milliseconds of each kind for `wanted`, at the rates of a dense step.

    Args:
        dense: what a dense step runs, and milliseconds of its kinds of kernels, one of them
            "attention".
        few_labels: the same of a step on the same tokens with fewer labels; what the two differ by
            is the head's.
        wanted: what the other plan runs.
    """
    (amounts, spent), (less, without) = dense, few_labels
    assert amounts.tokens == less.tokens and amounts.num_loss_entries > less.num_loss_entries
    found: dict[str, float] = {}
    for kind, ms in spent.items():
        head = (ms - without[kind]) / (amounts.num_loss_entries - less.num_loss_entries)
        rest = ms - head * amounts.num_loss_entries
        if kind == ATTENTION:
            found[kind] = ms * wanted.pairs / amounts.pairs
        else:
            found[kind] = rest * wanted.tokens / amounts.tokens + head * wanted.num_loss_entries
    return found
