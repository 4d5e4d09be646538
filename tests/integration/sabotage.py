"""Bugs of the kinds that sharing invites, each put in where it would be made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.engine import microbatches, objective, prefix_cache
from forkpoint.losses import LossOutputs, views
from forkpoint.ops.attention import operator, source
from forkpoint.ops.attention.merge import Part
from forkpoint.ops.attention.table import Launch
from forkpoint.tree import FROM_CACHE, Table

Sabotage = Callable[[pytest.MonkeyPatch], None]


def wrong_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-sum-exps of ancestors are 0.1 too large."""
    merge = operator.merge

    def wrong(parts: list[Part], *rest: Any) -> Any:
        own, *ancestors = parts
        return merge([own, *(part._replace(lse_HT=part.lse_HT + 0.1) for part in ancestors)], *rest)

    monkeypatch.setattr(operator, "merge", wrong)


def dropped_boundary_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that children leave in the cache never join their parent's backward."""
    monkeypatch.setattr(
        prefix_cache._Inject, "backward", staticmethod(lambda ctx, grad: (grad, None, None))
    )


def one_child_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a parent's children overwrites what the others have added."""
    add_grad = source.Source.add_grad

    def overwriting(self: Any, launch: Launch, part: Tensor, *rest: Any) -> None:
        if launch.source == FROM_CACHE and self._cache_grad is not None:
            self._cache_grad[launch.k_begin : launch.k_end] = part
        else:
            add_grad(self, launch, part, *rest)

    monkeypatch.setattr(source.Source, "add_grad", overwriting)


def restarted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment counts its positions from 0."""
    made = microbatches.MicrobatchInputs

    def restarted(*, microbatch: Any, position_ids: Tensor, **rest: Any) -> Any:
        ends = [*microbatch.segment_begin, microbatch.tokens]
        own = torch.from_numpy(np.concatenate([np.arange(n) for n in np.diff(ends)]))
        return made(microbatch=microbatch, position_ids=own[None].to(position_ids), **rest)

    monkeypatch.setattr(microbatches, "MicrobatchInputs", restarted)


def leak_between_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch is one causal sequence, so that segments see those before them in the
    microbatch."""
    full_table = microbatches.full_table

    def leaking(*args: Any) -> Table:
        table = full_table(*args)
        first, *others = table.launches
        whole = (sum(first.q_lengths),), (sum(first.k_lengths),)
        joined = first._replace(q_lengths=whole[0], k_lengths=whole[1])
        return replace(table, launches=(joined, *others))

    monkeypatch.setattr(microbatches, "full_table", leaking)


def one_owner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained token that several rollouts share is trained for the first of them alone."""
    outputs_of = objective.outputs_of

    def first_only(per_token: dict[str, Tensor], entries: Tensor) -> Any:
        found = outputs_of(per_token, entries)
        seen, first = set(), torch.zeros(len(entries), dtype=torch.bool)
        for position, entry in enumerate(entries.tolist()):
            first[position] = entry not in seen
            seen.add(entry)
        kept = torch.where(first, found.logprobs, found.logprobs.detach())
        return LossOutputs(logprobs=kept, entropies=found.entropies)

    assert objective.outputs_of is views.outputs_of
    monkeypatch.setattr(objective, "outputs_of", first_only)


ACROSS_MICROBATCHES: tuple[Sabotage, ...] = (
    wrong_lse,
    dropped_boundary_gradient,
    one_child_dropped,
    restarted_positions,
    leak_between_siblings,
)
"""Bugs that microbatches below other microbatches can have."""

WITHIN: tuple[Sabotage, ...] = (wrong_lse, restarted_positions, leak_between_siblings)
"""Bugs that a microbatch of whole paths can have."""
