"""Prices of prompt exchanges between ranks, for placements.

If ranks have rollouts of one group, each runs the prompt, or one rank runs it and sends its prefix
cache to the others (`forkpoint.plan.shared_prompts`). With an exchange, all ranks run the prompts
that they own, then exchange, then run the rest. A step uses the alternative that is predicted to be
faster, so placements are compared by the cheaper of the two.
"""

from dataclasses import dataclass, replace

import numpy as np

from forkpoint.parallel.placement.items import Priced
from forkpoint.parallel.placement.paths import Rates
from forkpoint.parallel.placement.slots import lockstep_cost
from forkpoint.plan.gathering import GATHER_TOKENS, prices_of
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import LINEAR_BACKWARD, ModelShape
from forkpoint.tree.forest import IntArray, build_forest

NOWHERE = 1 << 62
"""Cost of an exchange without prompts."""


@dataclass(frozen=True)
class ExchangePrices:
    """Prices of sending prompts, in the unit of `Rates` (FLOPs or ms)."""

    token: float
    """Sending the prefix cache of one token, and its gradients back."""
    prompt: float
    """Sending the recurrent states of one prompt."""
    step: float
    """Latency of all transfers of a step."""

    @classmethod
    def of(
        cls, shape: ModelShape | None, rates: Rates, calibration: Calibration | None = None
    ) -> "ExchangePrices | None":
        """Prices of a model, from the calibration's measured link if there is one. None without a
        shape."""
        if shape is None:
            return None
        link = prices_of(calibration, shape)
        if link is None:
            byte, transfer = GATHER_TOKENS * rates.token / (1 + LINEAR_BACKWARD), 0.0
            byte /= 2 * shape.linear_parameters
        else:
            byte, transfer = link.byte, link.transfer
        states, step = byte * shape.state_bytes, 4 * shape.layers * transfer
        return cls(byte * shape.exchanged_token_bytes, states, step)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts of some groups, and the rollouts without these prompts."""

    priced: Priced
    """The rollouts without these prompts."""
    group: IntArray
    """[P] group of each prompt."""
    edges: IntArray
    """[P]"""
    cost: IntArray
    """[P] cost of running each prompt."""

    @classmethod
    def of(cls, priced: Priced, groups: IntArray, *, left: float = 0.0) -> "Prompts":
        """Find the prompts of these groups: the edges that their rollouts share before any trained
        token.

        Rollouts of such a group share nothing with other groups, as in the plans of a step. The
        fraction `left` of a prompt's cost stays in `priced`.
        """
        paths, order = priced.paths, priced.paths.order.grouped(priced.paths.groups)
        of_entry = paths.groups[order.rollouts]
        # Number of leading edges that neither read nor predict a trained token, and that each
        # rollout shares with the previous one of its group.
        begin = paths.mask_begin[order.rollouts]
        trained = np.searchsorted(paths.trained_before, paths.trained_before[begin], side="right")
        edges = np.clip(trained - begin - 2, 0, order.edges)
        follows = np.append(False, of_entry[1:] == of_entry[:-1])
        edges[follows] = np.minimum(edges, order.shared_edges)[follows]
        group, first = np.unique(of_entry, return_index=True)
        edges = np.minimum.reduceat(edges, first)
        some = np.isin(group, groups) & (edges > 0)
        group, edges = group[some], edges[some]
        cost = priced.path_cost(order.rollouts[first[some]], edges)
        # The prompt of each group, or -1. Groups with -1 share as before.
        prompt_of = np.full(int(paths.groups.max()) + 1, -1)
        prompt_of[group] = np.arange(len(group))
        order = paths.order.grouped(prompt_of[paths.groups])
        forest = build_forest(order, len(paths))
        found = Priced.of(replace(paths, order=order), forest, priced.rates)
        # All rollouts of a group share its prompt, so it is within the first segment.
        length, rest = forest.length.copy(), found.cost.copy()
        roots = np.flatnonzero(forest.parent < 0)
        prompt = prompt_of[paths.groups[forest.order[forest.owner_begin[roots]]]]
        roots, prompt = roots[prompt >= 0], prompt[prompt >= 0]
        length[roots] -= edges[prompt]
        rest[roots] -= (cost - (cost * left).astype(np.int64))[prompt]
        without = replace(found, forest=replace(forest, length=length), cost=rest)
        return cls(without, group, edges, cost)

    def step_cost(self, rank: IntArray, ranks: int, capacity: int, prices: ExchangePrices) -> int:
        """Predicted cost of a step in which ranks exchange common prompts.

        Args:
            rank: int64 [N] the rank of each rollout.
            capacity: tokens of a microbatch.
        """
        if not len(self.group):
            return NOWHERE
        unit = self.priced.rates.unit_cost
        load = self.priced.items(rank, ranks).whole
        out, back = np.zeros((2, ranks))
        owned: list[list[int]] = [[] for _ in range(ranks)]
        groups = self.priced.paths.groups
        order = np.argsort(groups, kind="stable")
        bounds = np.searchsorted(groups[order], np.stack([self.group, self.group + 1]))
        readers = [np.unique(rank[order[a:b]]) for a, b in bounds.T.tolist()]
        # Assigns owners as `shared_prompts` does.
        tokens = np.zeros(ranks, np.int64)
        counts = np.asarray([len(own) for own in readers])
        for prompt in np.lexsort((counts, -self.edges)).tolist():
            own = readers[prompt]
            owner = int(own[np.lexsort((load[own], tokens[own]))[0]])
            tokens[owner] += self.edges[prompt]
            owned[owner].append(int(self.cost[prompt]))
            sent = (prices.token * int(self.edges[prompt]) + prices.prompt) / unit
            out[owner] += sent * (len(own) - 1)
            back[own] += np.where(own == owner, 0.0, sent)
        most = max(map(len, owned))
        slots = [max(own[at] for own in owned if len(own) > at) for at in range(most)]
        link = float(max(out.max(), back.max()))
        link += prices.step / unit * (link > 0)
        return sum(slots) + int(link) + lockstep_cost(self.priced, rank, ranks, capacity)


def split_groups(groups: IntArray, rank: IntArray) -> IntArray:
    """The groups that have rollouts on several ranks, ascending."""
    pairs = np.unique(np.stack([groups, rank]), axis=1)[0]
    return np.flatnonzero(np.bincount(pairs) > 1)
