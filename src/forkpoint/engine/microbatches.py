"""A plan's microbatches as tensors: tokens, positions, attention tables, and inputs of the head."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.engine.host_cache import Rows
from forkpoint.engine.prefix_cache import Capture, PrefixCache, RecurrentStates, joined
from forkpoint.ops.attention import AttentionTable, CacheSlice
from forkpoint.ops.recurrence import ConvolutionTable, StateTable
from forkpoint.parallel.topology import ALL_PLACES, Places
from forkpoint.plan.entries import entries_of
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree import (
    Microbatch,
    convolution_layout,
    full_table,
    state_layout,
    token_steps,
    windowed_table,
)
from forkpoint.tree.forest import IntArray


@dataclass(frozen=True, eq=False)
class MediaRows:
    """The m tokens of a microbatch that stand for images and videos."""

    places: Tensor
    """int64 [m]: their indices among the microbatch's tokens, ascending."""
    parts: tuple[tuple[int, Tensor], ...]
    """For each medium that is read: its index in the batch, and indices of its tokens."""
    order: Tensor
    """int64 [m]: for each of `places`, the index of its token in the concatenation of all parts."""


@dataclass(frozen=True, eq=False)
class MicrobatchInputs:
    """Inputs of the model for this rank's part of one microbatch (`Topology.places`): t of its T
    tokens, m of the n entries of the head."""

    microbatch: Microbatch
    part: Microbatch
    """The segments whose attention this rank computes: all, or those that were dealt to it
    whole."""
    input_ids: Tensor
    """int64 [1, t]"""
    position_ids: Tensor
    """int64 [1, t]: positions along each token's path; [A, 1, t] if positions of images have
    several axes; the first is the path's."""
    head_index: Tensor
    """int64 [m]: indices among the t tokens of those whose next token is trained, ascending. A
    token occurs once for each temperature at which its next token is trained."""
    head_labels: Tensor
    """int64 [m]"""
    head_temperatures: Tensor | None
    """[m], or None if all are 1."""
    trained_tokens: IntArray
    """The microbatch's trained tokens, as positions in the batch's flat tokens, ascending."""
    trained_entry: IntArray
    """For each of them, the index of its entry among the n. Rollouts of one temperature that share
    a trained token share its entry."""
    tokens: IntArray
    """Positions of the t tokens in the batch's flat tokens, without padding at the end. A token of
    several rollouts has its position in one of them."""
    segments: IntArray
    """Segment of each of these tokens in the plan's forest."""
    entries: int = 0
    """n"""
    own_entries: Tensor | None = None
    """int64 [m]: indices of this rank's entries among the n; None: all entries."""
    media: MediaRows | None = None
    """The tokens that stand for images and videos; None if there are none."""


class CacheView:
    """The running microbatch's access to the prefix cache, and its tables, which are made when a
    layer first asks for them.

    A plain object: FSDP copies dataclasses that it meets in call arguments, and captured tensors
    would land in the copy.
    """

    def __init__(
        self, plan: Plan, microbatch: Microbatch, cache: PrefixCache, *, captures: bool = True
    ) -> None:
        """`captures` is False for a recomputation, which must not write to the cache after other
        microbatches have read it."""
        self.cache = cache
        self.capture: Capture | None = None
        if runs := _capture_runs(plan, microbatch):
            self.capture = Capture(cache, runs, open=captures)
        self._plan = plan
        self._microbatch = microbatch
        self._tables: dict[tuple[int, bool], AttentionTable] = {}
        self._states: dict[int, RecurrentStates] = {}
        inside = set(microbatch.segments)
        parents = {int(plan.forest.parent[segment]) for segment in microbatch.segments}
        self._reads_cache = any(parent >= 0 for parent in parents - inside)

    def table(self, window: int, device: torch.device, *, chunked: bool = False) -> AttentionTable:
        """The launches of layers with this window (0 sees all), built once.

        chunked: the window is the length of a chunk; see `windowed_table`.
        """
        if (window, chunked) not in self._tables:
            arguments = self._plan.forest, self._microbatch, self._plan.cache_of
            table = (
                windowed_table(*arguments, window, chunked=chunked)
                if window
                else full_table(*arguments)
            )
            self._tables[window, chunked] = AttentionTable(table, device=device)
        return self._tables[window, chunked]

    def ancestors(self, module: Hashable) -> "LayerAncestors | None":
        """K and V of ancestors in other microbatches, for an attention module; None without
        ancestors."""
        return LayerAncestors(self.cache, module) if self._reads_cache else None

    @cached_property
    def _rows(self) -> Rows:
        plan, runs = self._plan, self.capture.runs if self.capture is not None else ()
        above = plan.ancestors_of(self._microbatch)
        read = sorted(cache_run(plan, segment) for segment in above)
        return Rows(tuple(joined(read)), tuple((at, at + end - begin) for begin, end, at in runs))

    def begin(self, *, backward: bool) -> None:
        """Begin the microbatch's forward or backward."""
        if self.cache.host is not None:
            self.cache.host.begin(self._rows, backward=backward)

    def states(self, width: int, device: torch.device) -> RecurrentStates:
        """States and tables of layers that carry a state, with a convolution of `width`, built
        once."""
        if width not in self._states:
            arguments = self._plan.forest, self._microbatch, self._plan.state_of
            self._states[width] = RecurrentStates(
                self.cache,
                self.capture,
                StateTable(state_layout(*arguments), device=device),
                ConvolutionTable(convolution_layout(*arguments, width), device=device),
            )
        return self._states[width]

    def end_forward(self) -> None:
        """Note the end of the forward: any later forward of this microbatch is a recomputation."""
        if self.capture is not None:
            self.capture.open = False
        self.cache.end()


@dataclass(eq=False)
class LayerAncestors:
    """K and V of a microbatch's ancestors in other microbatches, in one attention module.

    They may be in host memory until they are opened.
    """

    cache: PrefixCache
    module: Hashable

    def open(self) -> CacheSlice:
        """K and V, and their boundary gradients. They are valid until the next module is opened."""
        k, grad_k = self.cache.read((self.module, "k"))
        v, grad_v = self.cache.read((self.module, "v"))
        return CacheSlice(k, v, grad_k, grad_v)

    def close(self) -> None:
        """Store the boundary gradients after a backward has added to them."""
        if self.cache.host is not None:
            self.cache.host.close(self.module)


def cache_run(plan: Plan, segment: int) -> tuple[int, int]:
    """The first cache slot of a segment, and one past its last."""
    begin = plan.cache_of[segment]
    return begin, begin + int(plan.forest.length[segment])


def _capture_runs(plan: Plan, microbatch: Microbatch) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for segment, place in zip(microbatch.segments, microbatch.segment_begin, strict=True):
        if segment not in plan.cache_of:
            continue
        at = plan.cache_of[segment]
        end = place + int(plan.forest.length[segment])
        if runs and runs[-1][1] == place and runs[-1][2] + place - runs[-1][0] == at:
            runs[-1] = (runs[-1][0], end, runs[-1][2])
        else:
            runs.append((place, end, at))
    return runs


class PreparedMicrobatches:
    """Inputs of every microbatch of a plan, made when each is first read, so that the device runs
    a microbatch while the host makes the inputs of the next. Copies to the device are asynchronous.
    """

    def __init__(
        self,
        plan: Plan,
        batch: RolloutBatch,
        device: torch.device,
        *,
        uses_temperature: bool = True,
        split: Places = ALL_PLACES,
        axes_AT: IntArray | None = None,
    ) -> None:
        """
        Args:
            uses_temperature: whether the head's outputs depend on temperatures, as a critic's do
                not.
            split: which places of a microbatch this rank runs.
            axes_AT: positions of the batch's tokens (`Host.positions`); None: positions on paths.
        """
        self._plan, self._batch, self._device = plan, batch, device
        self._split, self._axes_AT = split, axes_AT
        self._made: list[MicrobatchInputs | None] = [None] * len(plan.microbatches)
        forest = plan.forest
        token_edge = forest.token_edges(batch.offsets)
        entries = entries_of(forest.edges, token_edge, batch, uses_temperature=uses_temperature)
        self._entries, trained = entries, entries.trained
        self._temperature: NDArray[np.float64] | None = None
        """Temperature of each entry; None if all are 1."""
        if uses_temperature and bool((batch.temperatures != 1.0).any()):
            self._temperature = np.ones(entries.numbers)
            rollout_of = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
            self._temperature[entries.of_trained] = batch.temperatures[rollout_of[trained]]
        self._label = np.zeros(entries.numbers, np.int64)
        self._label[entries.of_trained] = batch.token_ids[trained]
        self._place_of_entry = np.full(entries.numbers, -1, np.int64)
        """Place of each entry among those of its microbatch, if that has been made."""
        self._first_token = forest.segment_tokens(batch.offsets)
        microbatch_of_segment = np.zeros(len(forest.length), np.int64)
        for microbatch in plan.microbatches:
            microbatch_of_segment[list(microbatch.segments)] = microbatch.index
        microbatch_of_edge = np.repeat(microbatch_of_segment, forest.length)
        of_trained = microbatch_of_edge[token_edge[trained]]
        self._by_microbatch = np.argsort(of_trained, kind="stable")
        """Places in `trained`, by microbatch."""
        bounds = np.arange(len(plan.microbatches) + 1)
        self._bounds = np.searchsorted(of_trained[self._by_microbatch], bounds)

    def __iter__(self) -> Iterator[MicrobatchInputs]:
        return (self[n] for n in range(len(self._made)))

    def __getitem__(self, index: int) -> MicrobatchInputs:
        found = self._made[index]
        if found is None:
            found = self._made[index] = self._make(self._plan.microbatches[index])
        return found

    def _make(self, microbatch: Microbatch) -> MicrobatchInputs:
        forest, entries = self._plan.forest, self._entries
        batch, device = self._batch, self._device
        segment, step = token_steps(forest, microbatch)
        tokens = self._first_token[segment] + step
        axes_AT = self._axes_AT
        positions = forest.start[segment] + step if axes_AT is None else axes_AT[:, tokens]
        places, numbers = entries.at(forest.edge_offsets[segment] + step)
        self._place_of_entry[numbers] = np.arange(len(numbers))
        here = self._by_microbatch[slice(*self._bounds[microbatch.index : microbatch.index + 2])]
        of = self._split.of(microbatch)
        own, entries_here = of.own(len(tokens)), of.own_entries(places)
        count, padding = len(numbers), 0
        if own is not None:
            padding = of.padding(len(tokens))
            segment, tokens, positions = segment[own], tokens[own], positions[..., own]
        length = len(tokens) - padding
        if entries_here is not None:
            numbers, places = numbers[entries_here[0]], entries_here[1]
        temperature = self._temperature
        return MicrobatchInputs(
            microbatch=microbatch,
            part=microbatch.parts[self._split.rank] if microbatch.parts else microbatch,
            input_ids=on_device(batch.token_ids[tokens][None], device),
            position_ids=on_device(np.expand_dims(positions, -2), device),
            head_index=on_device(places, device),
            head_labels=on_device(self._label[numbers], device),
            head_temperatures=(
                None if temperature is None else on_device(temperature[numbers], device)
            ),
            trained_tokens=entries.trained[here],
            trained_entry=self._place_of_entry[entries.of_trained[here]],
            tokens=tokens[:length],
            segments=segment[:length],
            entries=count,
            own_entries=None if entries_here is None else on_device(entries_here[0], device),
            media=_media_rows(batch, tokens, device),
        )


def _media_rows(batch: RolloutBatch, tokens: IntArray, device: torch.device) -> MediaRows | None:
    """Media of a microbatch. `tokens`: its tokens as positions in the batch's flat tokens."""
    if batch.media_of is None or batch.media_row is None:
        return None
    (places,) = np.nonzero(batch.media_of[tokens] >= 0)
    if not len(places):
        return None
    medium, row = batch.media_of[tokens[places]], batch.media_row[tokens[places]]
    by_medium = np.argsort(medium, kind="stable")
    return MediaRows(
        places=on_device(places, device),
        parts=tuple((n, on_device(row[medium == n], device)) for n in np.unique(medium).tolist()),
        order=on_device(np.argsort(by_medium, kind="stable"), device),
    )
