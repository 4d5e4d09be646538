"""Placements that know nothing of shared tokens, to compare with. All are int64 [N], by rollout."""

import numpy as np

from forkpoint.tree.forest import IntArray


def in_order(groups: IntArray, ranks: int, *, whole_groups: bool = False) -> IntArray:
    """Ranks get equally many rollouts in the order given, or equally many groups."""
    if not whole_groups:
        return np.arange(len(groups)) * ranks // len(groups)
    return groups * ranks // (int(groups.max()) + 1)


def by_tokens(groups: IntArray, lengths: IntArray, ranks: int) -> IntArray:
    """Groups by the sum of their rollouts' tokens, the longest first, each to the emptiest rank.

    Args:
        groups: [N] the group of each rollout.
        lengths: [N] its tokens.
        ranks: how many ranks there are.
    """
    tokens = np.zeros(int(groups.max()) + 1, np.int64)
    np.add.at(tokens, groups, lengths)
    load, rank = np.zeros(ranks, np.int64), np.zeros(len(tokens), np.int64)
    for group in np.argsort(-tokens, kind="stable").tolist():
        rank[group] = load.argmin()
        load[rank[group]] += tokens[group]
    return rank[groups]
