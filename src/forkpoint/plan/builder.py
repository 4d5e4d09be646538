"""Plans of one combination of sharing and boundary, with microbatches that fit the limits."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product

import numpy as np

from forkpoint.config import AUTO, Config
from forkpoint.errors import PlanError
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.dealing import deal
from forkpoint.plan.device_memory import LEAST_BYTES
from forkpoint.plan.entries import segment_entries
from forkpoint.plan.host_cache import LAYERS_HERE, layer_cache_bytes, most_host_layers
from forkpoint.plan.media import planned_media
from forkpoint.plan.packing import (
    microbatches_across,
    microbatches_mixed,
    microbatches_of_whole_paths,
)
from forkpoint.plan.plan import Plan, fingerprint
from forkpoint.plan.predict import (
    drop_activations,
    keep_logits,
    microbatches_to_drop,
    offloaded_bytes,
    peak_bytes,
    plan_cost,
    standing_bytes,
)
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import CHUNK, ModelShape, Work, dense_work, forest_work
from forkpoint.plan.pricing.meters import EFFICIENT_TOKENS, NOISE, Meter, meter_of
from forkpoint.plan.routing import RouterDemand
from forkpoint.plan.runs import LeftOut, labels_run, run_lengths, sort_running
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree import Microbatch
from forkpoint.tree.forest import Forest, IntArray, SortedRollouts, build_forest
from forkpoint.units import exactly

SHARINGS = ("none", "group", "tree")
BOUNDARIES = ("within", "mixed", "across")
Combination = tuple[str, str]
"""Sharing and boundary."""
DEFAULT_MICROBATCH_TOKENS = 16_384
# Under a memory budget, microbatches are as long as it allows, up to this. Each microbatch reads
# and writes all gradients, and a group within one microbatch needs no prefix cache.
LARGEST_MICROBATCH_TOKENS = 65_536
# A plan that moves data to host memory must cost less by this part than one that does not. On an
# H200, steps of Llama3-8B that offload a prompt of 2,000 tokens take up to 1.09 times as long as
# predicted, and 1.00 times with 16,000 tokens. The first step that offloads those also pins memory
# for 26 s (benchmarks/history/plan-preference-h200.jsonl).
MOVING_MUST_SAVE = 0.05
# Lengths are reduced by an eighth for plans of at most FEW_MICROBATCHES, and by a quarter for
# others. Below the first length that fits, SHORTER_TRIED shorter ones are tried.
FEW_MICROBATCHES = 16
SHORTER_TRIED = 4
# Checkpointing is preferred to microbatches much shorter than this. A microbatch adds to all
# gradients, which takes as long as a few hundred tokens (8 bytes a parameter, two FLOPs a parameter
# and token, on a device of 200 FLOPs a byte).
FILLING_TOKENS = 4096
NEAR_THE_LEAST = 1.25
# Longer microbatches are preferred to shorter ones, and simpler combinations of sharing and
# boundary to others, that are predicted to cost less by at most this part. Meters do not count all
# costs of a microbatch (benchmarks/results/step-grid-h200.jsonl, 6144/6144 N=4: 2.61 s of two
# microbatches were 2.75 s of four). In 11 measured batches for which limits of 0.5%, 1% and 3%
# choose different combinations, these are slower than the fastest one by 2.4%, 0.4% and 0.9% in the
# mean, and by at most 15%, 1.2% and 2.4%.
SIMPLER_IS_WORTH = 0.01
# A fork below a fork can add a launch of attention to each layer of a microbatch, which takes a
# GPU's host 0.7 to 1.3 ms in both directions (`host_launch_ms` of the calibrations behind
# benchmarks/results/defaults-fa4-h200.jsonl). In groups of airline.jsonl and rag.jsonl, limits of
# 64 to 512 edges give the same plans.
SHORT_SEGMENT = 64
# Logits are kept within this part of a measured budget. Kept logits are the only tensors of some
# gigabytes, and free memory can be in smaller parts: a step with 101 of 120 GB predicted failed
# (benchmarks/history/log.md, 2026-11-30).
LOGITS_ROOM = 0.9
# Microbatches are cut no shorter than this to fit a budget.
LEAST_MICROBATCH_TOKENS = 64
MOST_MICROBATCHES = 128
"""Largest number of microbatches that the longest rollout is divided into. Shorter microbatches
save little memory compared with the prefix cache of such a prompt, and planning takes longer.
"""


class BudgetError(PlanError):
    """Microbatches that do not fit a memory budget that was set.

    Attributes:
        needed_bytes: The least predicted peak of the plans that were tried.
        remedy: What to do if the budget cannot be raised.
    """

    def __init__(self, message: str, needed_bytes: int, remedy: str) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.remedy = remedy


@dataclass(frozen=True)
class _Packing:
    """Packed microbatches, and the plans of them."""

    plan: Plan
    """Without checkpoints or a price."""
    meter: Meter
    ways: dict[tuple[str, bool, int | None], list[Plan]] = field(default_factory=dict)
    """Plans with prices, by the `policy` and `moves` of `Builder._priced_ways`, and the budget."""


@dataclass(eq=False)
class Builder:
    """Builds plans of one batch. Intermediate results that plans have in common are kept.

    The fields are the arguments of `make_plan`.
    """

    batch: RolloutBatch
    shape: ModelShape | None = None
    config: Config = field(default_factory=Config)
    coupling: IntArray | None = None
    calibration: Calibration | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    budget_bytes: int | None = None
    uses_temperature: bool = True
    routers: RouterDemand | None = None
    prompts: tuple[PlannedPrompt, ...] | None = None
    runs: IntArray | None = None
    least_segment: int = 0
    """Fewest edges of a segment below a root that rollouts share; 0 means no limit."""
    _orders: dict[str, SortedRollouts] = field(default_factory=dict)
    _forests: dict[str, Forest] = field(default_factory=dict)
    _built: dict[Combination, Plan] = field(default_factory=dict)
    _num_loss_entries: dict[object, IntArray] = field(default_factory=dict)
    _packings: dict[object, _Packing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.calibration is not None:
            if self.shape is None:
                raise PlanError(
                    f"a calibration is set ({self.calibration.describe()}), but without a model "
                    "shape plans are priced in tokens; name the model, or give no calibration."
                )
            self.calibration.check_shape(self.shape)
        given = self.config.memory_budget_bytes
        if given is not None and self.shape is None:
            raise PlanError(
                f"memory_budget is {exactly(given)}, but without a model shape bytes cannot be "
                "predicted; name the model, or limit max_microbatch_tokens instead."
            )
        if self.config.prefix_cache == "host" and self.shape is None:
            raise PlanError(
                "prefix_cache is 'host', but without a model shape the number of layers is "
                "unknown; name the model, or leave prefix_cache to the planner."
            )
        self.soft: bool = self.config.memory_budget == AUTO
        """Whether plans beyond the budget are made where nothing fits."""
        self.tries_few: bool = self.soft
        """Whether the first length of microbatches that fits ends the search, because each step of
        a training run plans in this way."""
        if self.budget_bytes is None or self.shape is None:
            self.budget_bytes = given
        self.last_tokens: bool = self.routers is not None and self.routers.last_tokens
        if self.runs is None:
            self.runs = run_lengths(self.batch, whole=True, last_tokens=self.last_tokens)
        self.left_out: LeftOut = LeftOut.of(self.batch, self.runs)
        every = sort_running(self.batch, run_lengths(self.batch, whole=True))
        firsts = np.unique(self.batch.token_ids[self.batch.offsets[:-1]])
        self.unique_tokens: int = int(every.new_edges.sum()) + len(firsts)
        running = every
        if self.last_tokens or self.left_out.tokens:
            running = sort_running(self.batch, self.runs, last_tokens=self.last_tokens)
        self.tree_order: SortedRollouts = running.grouped(
            self._classes(np.zeros(len(self.batch), np.int64))
        )
        self.longest: int = int(self.tree_order.edges.max(initial=1))

    @cached_property
    def dense_work(self) -> Work:
        """Work without sharing."""
        assert self.runs is not None
        runs = labels_run(self.batch.offsets, self.runs)
        return dense_work(self.runs, int((self.batch.loss_mask & runs).sum()), self._windows)

    @cached_property
    def _policies(self) -> tuple[str, ...]:
        return policies_to_try(self.config, self.shape, self.capabilities)

    @property
    def _windows(self) -> tuple[int, ...]:
        return self.shape.windows if self.shape else ()

    def _classes(self, classes: IntArray) -> IntArray:
        """[N] class of each rollout; only rollouts of one class may share. Rollouts of an exchanged
        prompt are one class."""
        found = classes.copy()
        for prompt in self.prompts or ():
            found[list(prompt.rollouts)] = -1 - prompt.number
        return found

    def _order(self, sharing: str) -> SortedRollouts:
        if sharing not in self._orders:
            order = self.tree_order
            if sharing == "none":
                order = order.cut(np.ones(len(order.rollouts), bool))
            elif sharing == "group":
                order = order.grouped(self._classes(self.batch.group_index))
            if self.least_segment:
                order = order.with_segments_of(self.least_segment)
            self._orders[sharing] = order
        return self._orders[sharing]

    @cached_property
    def _groups_share_all(self) -> bool:
        """Whether rollouts of different groups share nothing, so that sharing over the batch equals
        sharing within groups."""
        group, tree = (self._order(sharing).new_edges.sum() for sharing in ("group", "tree"))
        return bool(group == tree)

    def _forest(self, sharing: str) -> Forest:
        """The forest of an order, cut only at ends of prompts. It does not depend on the lengths of
        microbatches."""
        if sharing not in self._forests:
            forest = build_forest(self._order(sharing), len(self.batch))
            # Rollouts of a prompt share no token with others, so its first segment is a root.
            ends = {p.segments(forest)[-1]: p.edges for p in self.prompts or ()}
            self._forests[sharing] = forest.split(ends)
        return self._forests[sharing]

    # Plans within the limits
    # ------------------------------------------------------------

    def build(self, sharing: str, boundary: str) -> Plan:
        """One combination within the limits of the configuration, with its price."""
        combination = self._first_name(sharing), boundary
        if combination not in self._built:
            plan = self._fitting(*combination)
            # Responses to one prompt often have equal first tokens by chance.
            fewer = self.without_short_segments(*combination)
            if fewer is not None and fewer.fits:
                most = cost_with_preference(plan) * (1 - NOISE)
                plan = fewer if not plan.fits or cost_with_preference(fewer) < most else plan
            self._built[combination] = plan
        return replace(self._built[combination], sharing=sharing)

    def _first_name(self, sharing: str) -> str:
        """The first sharing that gives the same plans."""
        return "group" if sharing == "tree" and self._groups_share_all else sharing

    def with_every_length(self) -> "Builder":
        """The builder that tries shorter microbatches too."""
        found = copy(self)
        found.tries_few, found._built = False, {}
        vars(found).pop("_longer", None)
        return found

    def with_all_kept(self, plan: Plan) -> Plan:
        """The plan with microbatches so short that all activations and logits fit the budget. The
        same plan if that does not cost less."""
        if self.budget_bytes is None or not plan.fits or self._keeps_everything(plan):
            return plan
        if plan.least_segment != self.least_segment and self._longer is not None:
            return self._longer.with_all_kept(plan)
        least = max(FILLING_TOKENS, least_microbatch_tokens(self.longest, plan.boundary))
        sharing = self._first_name(plan.sharing)
        policy = self._policies[0]
        make = partial(self._priced_ways, sharing, plan.boundary, policy=policy, moves=False)
        longer, _, meter = make(plan.max_microbatch_tokens)
        tokens = max(least, self._tokens_that_keep_all(longer, meter))
        if tokens >= plan.max_microbatch_tokens:
            return plan
        _, ways, _ = make(tokens)
        fitting = [self._dealt_if_faster(way) for way in ways if way.fits]
        best = min(fitting, key=cost_with_preference, default=plan)
        if cost_with_preference(best) * (1 + SIMPLER_IS_WORTH) >= cost_with_preference(plan):
            return plan
        return replace(best, sharing=plan.sharing)

    def without_short_segments(self, sharing: str, boundary: str) -> Plan | None:
        """The plan in which rollouts share no short segments; None if it is impossible, not
        compared, or the same."""
        if self._longer is None or sharing == "none":
            return None
        every, fewer = (builder._order(sharing) for builder in (self, self._longer))
        if np.array_equal(every.shared_edges, fewer.shared_edges):
            return None
        try:
            return self._longer.build(sharing, boundary)
        except PlanError:
            return None

    @cached_property
    def _longer(self) -> "Builder | None":
        """The builder of plans without short segments; None if such plans are not compared."""
        asked = self.config.sharing != AUTO
        if self.least_segment or asked or not self.capabilities.runs_ahead:
            return None
        found = copy(self)
        found.least_segment = SHORT_SEGMENT
        found._orders, found._forests, found._packings = {}, {}, {}
        found._built = {}
        return found

    def _fitting(self, sharing: str, boundary: str) -> Plan:
        if self.budget_bytes is None:
            tokens = self._first_tokens(sharing, boundary)
            plan = self._priced_ways(sharing, boundary, tokens, self._policies[0], moves=False)[0]
            return self._dealt_if_faster(plan)
        found: list[Plan] = []
        tried: list[Plan] = []
        for moves in (False, True):
            if moves and not self._may_move(tried, found):
                break
            for policy in self._policies:
                ways = list(self._ways(sharing, boundary, policy, moves=moves))
                tried += ways
                fitting = [self._dealt_if_faster(way) for way in ways if way.fits]
                if not fitting:
                    continue
                # In order of their microbatches' lengths, the longest first.
                most = min(map(cost_with_preference, fitting)) * (1 + SIMPLER_IS_WORTH)
                found.append(next(way for way in fitting if cost_with_preference(way) <= most))
                # Repeated forwards save nothing if microbatches that fill the device fit without
                # them, unless these are too short to hold a group, and so compute its prompt again.
                shared = min(way.computed_tokens for way in tried) * (1 + SIMPLER_IS_WORTH)
                if any(
                    _keeps_all(way) and _fills(way) and way.computed_tokens <= shared
                    for way in fitting
                ):
                    break
        if found:
            return min(found, key=cost_with_preference)
        if self.soft:
            unlimited = [
                self._with_price(plan, meter_of(plan, self.calibration))
                for plan in _near_the_least(tried)
            ]
            return self._dealt_if_faster(min(unlimited, key=cost_with_preference))
        plan = min(tried, key=lambda plan: (peak_of(plan), plan.max_microbatch_tokens))
        peak = peak_of(plan)
        raise BudgetError(
            f"microbatches of {plan.max_microbatch_tokens} tokens are predicted to need "
            f"{exactly(peak)} and memory_budget is {exactly(self.budget_bytes)}",
            peak,
            self._remedy(plan),
        )

    def enough_bytes(self, sharing: str, boundary: str, needed: int) -> int:
        """A budget that suffices instead of the one that was refused. It can exceed the peak that
        was predicted, because a budget determines the lengths that are tried.

        `needed`: the least predicted peak.
        """
        within, peaks = copy(self), list[int]()
        within.budget_bytes = needed
        can_move = self.config.prefix_cache == AUTO and self.prompts is None
        # Plans with the least memory first, because one that fits is enough. A search that finds no
        # longer microbatches that fit tries the shortest ones.
        for moves, policy in product((True, False) if can_move else (False,), self._policies[::-1]):
            shortest = within._shortest(sharing, boundary, policy)
            _, ways, _ = within._priced_ways(sharing, boundary, shortest, policy, moves=moves)
            for way in chain(ways, within._ways(sharing, boundary, policy, moves=moves)):
                if way.fits:
                    return needed
                peaks.append(peak_of(way))
        return self.enough_bytes(sharing, boundary, min(peaks))

    def _first_tokens(self, sharing: str, boundary: str) -> int:
        """Length of microbatches that is tried first."""
        given = self.config.max_microbatch_tokens
        if given:
            return given
        most = max(least_microbatch_tokens(self.longest, boundary), self._most_tokens())
        tokens = min(most, max(DEFAULT_MICROBATCH_TOKENS, self.longest))
        if self.budget_bytes is None:
            return tokens
        # Long microbatches first: fewer microbatches take less host time and fewer additions to all
        # gradients.
        every = int(self._order(sharing).new_edges.sum())
        return max(tokens, min(LARGEST_MICROBATCH_TOKENS, every, most))

    def _shortest(self, sharing: str, boundary: str, policy: str) -> int:
        """Length of microbatches that is tried last. Microbatches too short to fill the device are
        tried only with the policy that keeps least."""
        least = least_microbatch_tokens(self.longest, boundary)
        if policy == self._policies[-1]:
            return least
        return max(least, min(self._first_tokens(sharing, boundary), FILLING_TOKENS))

    def _most_tokens(self) -> int:
        """Most tokens of a microbatch that fast kernels of recurrent layers run on a GPU.

        They keep a state for each chunk, and are not given more elements than 32-bit indices allow
        (`ops.delta_rule.kernel.is_large`). Each segment has up to one chunk more.
        """
        if not (self.shape and self.shape.recurrent_layers and self.capabilities.runs_ahead):
            return sys.maxsize
        chunks = (1 << 31) // max(1, self.shape.state_elements // self.shape.context)
        return max(1, CHUNK * (chunks - chunks // 16))

    def _may_move(self, tried: Sequence[Plan], found: Sequence[Plan]) -> bool:
        """Whether to try plans with prefix caches in host memory.

        They are tried if no tried plan fits with all caches on the device. If some fit (`found`),
        they are tried only if a calibration prices the copies, and if each found plan does not keep
        all activations, checkpoints more than necessary, or has microbatches too short to fill the
        device.
        """
        if self.config.prefix_cache != AUTO or self.prompts is not None:
            return False
        if not any(plan.cache_tokens for plan in tried):
            return False
        if not found:
            return True
        # The rate of copies to a folder is not measured.
        if self.calibration is None or self.config.offload_folder is not None:
            return False
        # Context-parallel ranks can run leaves by responses only with caches on the device.
        if self.shape is not None and self.shape.context > 1:
            return False
        return not any(
            _keeps_all(plan)
            and _fills(plan)
            and plan.microbatches[0].checkpointing == self._policies[0]
            for plan in found
        )

    def _ways(self, sharing: str, boundary: str, policy: str, *, moves: bool) -> Iterator[Plan]:
        """Plans with microbatches of decreasing length, including plans that exceed the budget.

        `moves`: whether prefix caches may be moved to host memory.

        If `tries_few`, they end with the first plan that fits, after few steps. Otherwise they end
        when shorter microbatches no longer help, or at `max_microbatch_tokens` if that fits.
        """
        assert self.budget_bytes is not None
        tokens = self._first_tokens(sharing, boundary)
        least = self._shortest(sharing, boundary, policy)
        found = False
        shorter = 0
        asked = self.config.max_microbatch_tokens
        while True:
            plan, ways, meter = self._priced_ways(sharing, boundary, tokens, policy, moves=moves)
            yield from ways
            needed = min(map(peak_of, ways))
            if tokens <= least:
                return
            if self.tries_few:
                if needed <= self.budget_bytes:
                    return
                longest = max(microbatch.tokens for microbatch in plan.microbatches)
                # This length fits if all bytes are activations of the longest microbatch.
                tokens = max(least, min(tokens * 3 // 4, longest * self.budget_bytes // needed))
                continue
            found |= needed <= self.budget_bytes
            few = len(plan.microbatches) <= FEW_MICROBATCHES
            # Slightly shorter microbatches may divide the work more evenly. With many microbatches
            # this makes no difference. Microbatches too short to fill the device cost more than
            # kept activations save.
            if peak_of(plan) <= self.budget_bytes:
                shorter += 1
                if shorter > SHORTER_TRIED or not few or tokens == asked:
                    return
            elif found and tokens <= EFFICIENT_TOKENS:
                return
            next_tokens = tokens * (7 if few else 6) // 8
            # No plan fits until its longest microbatch alone fits.
            longest = max(plan.microbatches, key=meter.kept_bytes, default=None)
            kept = 0 if longest is None else meter.kept_bytes(longest)
            if longest is not None and not found and kept > self.budget_bytes:
                next_tokens = min(next_tokens, int(longest.tokens * self.budget_bytes / kept) + 1)
            tokens = max(least, next_tokens)

    def _keeps_everything(self, plan: Plan) -> bool:
        """Whether nothing is computed again that the configuration leaves to the planner."""
        logits = self._logits_room is not None
        return _keeps_all(plan) and all(
            m.checkpointing == self._policies[0]
            and (m.keeps_logits or m.children or not m.num_loss_entries or not logits)
            for m in plan.microbatches
        )

    def _tokens_that_keep_all(self, plan: Plan, meter: Meter) -> int:
        """Estimate the length of microbatches whose activations and logits all fit the budget.

        `plan`: a plan that keeps all activations. The result is its length if all of it fits.
        """
        room, limit = self.budget_bytes, self._logits_room
        assert room is not None
        if limit is not None:
            room, plan = limit, keep_logits(plan, meter, sys.maxsize)
        needed, standing = peak_bytes(plan, meter), standing_bytes(plan)
        if needed <= room:
            return plan.max_microbatch_tokens
        longest = max(microbatch.tokens for microbatch in plan.microbatches)
        return int(longest * (room - standing) / (needed - standing))

    def _priced_ways(
        self, sharing: str, boundary: str, tokens: int, policy: str, *, moves: bool
    ) -> tuple[Plan, list[Plan], Meter]:
        """A plan with its price, the plans of `_fitted`, and the meter of their microbatches.

        `moves`: whether prefix caches may be moved to host memory.
        """
        packing = self._packing(sharing, boundary, tokens)
        meter, asked = packing.meter, (policy, moves, self.budget_bytes)
        if asked not in packing.ways:
            first = checkpointed(packing.plan, policy)
            if self.shape is not None and (moves or self.config.prefix_cache == "host"):
                first = with_host_layers(first, meter, self.config, self.budget_bytes)
            first = self._priced(first, meter)
            packing.ways[asked] = [first, *self._fitted(first, meter)]
        first, *ways = (
            replace(way, sharing=sharing, boundary=boundary, max_microbatch_tokens=tokens)
            for way in packing.ways[asked]
        )
        return first, ways, meter

    def _packing(self, sharing: str, boundary: str, tokens: int) -> _Packing:
        """Microbatches of at most `tokens` tokens.

        Many combinations and lengths give the same microbatches, which are priced once.
        """
        asked = sharing, boundary, tokens
        if asked not in self._packings:
            order, prompts = self._order(sharing), self.prompts or ()
            make = partial(self._forest, sharing)
            forest, microbatches = pack(boundary, order, make, len(self.batch), tokens, prompts)
            packed = tuple((m.parent, m.segments, m.shared_prompt) for m in microbatches)
            key = _key_of_forest(forest), packed
            if key not in self._packings:
                plan = self._plan_of(forest, microbatches, *asked)
                self._packings[key] = _Packing(plan, meter_of(plan, self.calibration))
            self._packings[asked] = self._packings[key]
        return self._packings[asked]

    def _remedy(self, plan: Plan) -> str:
        """A remedy if all plans exceed the budget. `plan`: the one with the least peak."""
        config, shape = self.config, self.shape
        if config.boundary == "within":
            return "use boundary='across', which cuts rollouts into chains of microbatches"
        if config.activations == "keep":
            return "leave activations to the planner (activations='auto')"
        checkpointed = shape is not None and shape.checkpointed
        if config.checkpointing not in ("full", AUTO) and not checkpointed:
            return "checkpoint activations"
        for name, value in (("prefix_cache", "device"), ("head_logits", "keep")):
            if getattr(config, name) == value:
                return f"leave {name} to the planner ({name}='auto')"
        if shape and most_host_layers(plan.cache_tokens, shape, plan.host_memory_bytes) < (
            shape.attention_layers
        ):
            return "raise host_memory, which limits prefix caches in host memory"
        # Microbatches of the least length need the memory of the longest rollout's prefix cache,
        # however many rollouts there are.
        return "use shorter rollouts"

    def _fitted(self, plan: Plan, meter: Meter) -> list[Plan]:
        """The plan and, if it does not fit and activations is auto, plans that drop activations to
        fit."""
        if self.budget_bytes is None or self.config.activations != "auto" or plan.fits:
            return [plan]
        # Without a measured bandwidth a copy has no price.
        priced = meter.copy(1, out=True) is not None
        microbatches = microbatches_to_drop(plan, meter, self.budget_bytes)
        found = [drop_activations(plan, microbatches, "recompute")]
        if priced:
            offloaded = drop_activations(plan, microbatches, "offload")
            # Those that do not fit in host memory are recomputed.
            here = offloaded_bytes(offloaded, meter)
            beyond = (i for i, b in here.items() if b < meter.kept_bytes(plan.microbatches[i]))
            found.append(drop_activations(offloaded, frozenset(beyond), "recompute"))
        return [self._priced(each, meter) for each in found]

    def _dealt_if_faster(self, plan: Plan) -> Plan:
        """The plan with leaves by responses on context-parallel ranks, if that is predicted to be
        faster and fits."""
        if plan.shape is None or plan.shape.context == 1:
            return plan
        dealt, why_not = plan, ""
        if plan.host_layers:
            why_not = "prefix caches are in host memory"
        elif not self.capabilities.deals_segments:
            why_not = "some layers carry a state"
        elif (dealt := self._deal(plan)) is plan:
            why_not = "no leaf has as many trees as there are ranks"
        else:
            meter = meter_of(dealt, self.calibration)
            dealt = self._with_price(self._with_logits(dealt, meter), meter)
            if dealt.cost >= plan.cost * (1 - NOISE):
                why_not = f"predicted {dealt.cost / plan.cost:.2f}x faster than by responses"
            elif not dealt.fits:
                why_not = "by responses they do not fit the memory budget"
        if why_not:
            return replace(plan, dealing=f"leaves split by heads: {why_not}")
        ratio = plan.cost / dealt.cost
        return replace(
            dealt,
            dealing=f"leaves split by responses: predicted {ratio:.2f}x faster than by heads",
        )

    def _deal(self, plan: Plan) -> Plan:
        """The plan with leaves by responses. Leaves exchange trees unless that requires other
        passes."""
        entries_S = self._entries_of_segments(plan.forest)
        found = deal(plan, entries_S)
        if self._first_passes(found) != self._first_passes(plan):
            found = deal(plan, entries_S, pooled=False)
        if found is plan or not plan.media:
            return found
        # Leaves exchange the media of the trees too.
        return replace(found, media=planned_media(self.batch, found.forest, found.microbatches))

    def _first_passes(self, plan: Plan) -> tuple[bool, bool]:
        """Whether a pass must count experts for the router loss, and whether the loss needs a pass
        of scores."""
        routers, coupling = self.routers, self.coupling
        counts = routers is not None and routers.spans(plan.forest, plan.microbatches)
        return counts, coupling is not None and plan.splits(self.batch, coupling)

    # Prices
    # ------------------------------------------------------------

    def _priced(self, plan: Plan, meter: Meter) -> Plan:
        """The plan with its price within the budget, and with logits kept according to the
        configuration."""
        return self._with_price(self._with_logits(plan, meter), meter, self.budget_bytes)

    def _with_logits(self, plan: Plan, meter: Meter) -> Plan:
        """The plan with kept logits according to the configuration."""
        room = self._logits_room
        return plan if room is None else keep_logits(plan, meter, room)

    @property
    def _logits_room(self) -> int | None:
        """Largest peak of plans that keep logits; None if the planner does not choose logits to
        keep."""
        budget = self.budget_bytes
        chosen = self.config.head_logits == "auto" and self.capabilities.keeps_logits
        if not chosen or budget is None:
            return None
        if not self.soft:
            return budget
        # A measured budget is at least LEAST_BYTES, even if less memory is free.
        return None if budget == LEAST_BYTES else int(budget * LOGITS_ROOM)

    def _with_price(self, plan: Plan, meter: Meter, budget: int | None = None) -> Plan:
        """The plan with its cost and its peak. The cost is inf if the peak exceeds `budget`."""
        peak = None if self.shape is None else peak_bytes(plan, meter)
        beyond = peak is not None and self.budget_bytes is not None and peak > self.budget_bytes
        if beyond and plan.media and not plan.encodes_again and self.shape is not None:
            plan = replace(plan, encodes_again=self.capabilities.trains_encoder)
            peak = peak_bytes(plan, meter)
        fits = budget is None or peak is None or peak <= budget
        cost = plan_cost(plan, meter) if fits else math.inf
        return replace(
            plan,
            cost=cost,
            cost_unit=meter.unit,
            predicted_ms=cost if self.calibration else None,
            predicted_peak_bytes=peak,
            memory_budget_bytes=self.budget_bytes,
            rests_on=self.calibration.describe() if self.calibration else "",
        )

    def _entries_of_segments(self, forest: Forest) -> IntArray:
        """[S] how many entries the head computes for each segment's edges."""
        key = _key_of_forest(forest)
        if key not in self._num_loss_entries:
            found = segment_entries(forest, self.batch, uses_temperature=self.uses_temperature)
            self._num_loss_entries[key] = found
        return self._num_loss_entries[key]

    def _plan_of(
        self,
        forest: Forest,
        packed: Sequence[Microbatch],
        sharing: str,
        boundary: str,
        max_microbatch_tokens: int,
    ) -> Plan:
        """The plan of packed microbatches, without checkpoints or a price."""
        config = self.config
        entries_S = self._entries_of_segments(forest)
        asked = "keep" if config.activations == "auto" else config.activations
        keeps_logits = config.head_logits == "keep" and self.capabilities.keeps_logits
        microbatches = with_storage(packed, entries_S, asked, keeps_logits=keeps_logits)
        num_loss_entries = int(entries_S.sum())
        received = [s for m in microbatches if m.shared_prompt == "received" for s in m.segments]
        plan = Plan(
            sharing=sharing,
            boundary=boundary,
            max_microbatch_tokens=max_microbatch_tokens,
            least_segment=self.least_segment,
            forest=forest,
            microbatches=tuple(microbatches),
            rollouts=len(self.batch),
            logical_tokens=int(self.batch.offsets[-1]),
            unique_tokens=self.unique_tokens,
            media=planned_media(self.batch, forest, microbatches),
            left_out=self.left_out,
            last_tokens=self.last_tokens,
            num_loss_entries=num_loss_entries,
            dense=self.dense_work,
            shared=forest_work(forest, num_loss_entries, self._windows, received),
            split="" if self.prompts is None else "exchange",
            fingerprint=fingerprint(self.batch),
            capabilities=self.capabilities,
            host_memory_bytes=most_host_bytes(config),
            shape=self.shape,
        )
        counts_first, scores = self._first_passes(plan)
        plan = replace(plan, counts_first=counts_first)
        return plan.with_program(scores=counts_first or scores)


# What a plan may be
# ------------------------------------------------------------


def policies_to_try(
    config: Config, shape: ModelShape | None, capabilities: Capabilities
) -> tuple[str, ...]:
    """Checkpointing policies to try, in order of increasing recomputation."""
    if config.checkpointing != AUTO:
        return (config.checkpointing,)
    if shape is not None and shape.checkpointed:
        return ("none",)
    able = capabilities.checkpoints
    return tuple(policy for policy in ("none", "selective", "full") if policy in able)


def least_microbatch_tokens(longest: int, boundary: str) -> int:
    """Smallest limit of microbatches that is tried. `longest`: edges of the longest rollout."""
    if boundary == "within":
        # A microbatch of whole paths is at least as long as the longest path.
        return longest
    return max(LEAST_MICROBATCH_TOKENS, longest // MOST_MICROBATCHES)


def most_host_bytes(config: Config) -> int | None:
    """Limit of data that leave the device; None without a limit, or if files take the rest."""
    return config.host_memory_bytes if config.offload_folder is None else None


def with_host_layers(plan: Plan, meter: Meter, config: Config, budget: int | None) -> Plan:
    """The plan with prefix caches in host memory or in files: of as many layers as there is space
    for, or with prefix_cache="auto" of as few as fit the budget."""
    assert plan.shape is not None
    layer = layer_cache_bytes(plan.cache_tokens, plan.shape)
    if not layer:
        return plan
    most = most_host_layers(plan.cache_tokens, plan.shape, most_host_bytes(config))
    if config.prefix_cache == "host":
        return replace(plan, host_layers=most)
    assert budget is not None
    over = peak_bytes(plan, meter) - budget
    # Two layers in host memory free nothing, because two are on the device at a time.
    layers = min(most, -(-over // layer) + LAYERS_HERE)
    return replace(plan, host_layers=layers) if over > 0 and layers > LAYERS_HERE else plan


def pack(
    boundary: str,
    order: SortedRollouts,
    forest: Callable[[], Forest],
    rollouts: int,
    tokens: int,
    prompts: Sequence[PlannedPrompt] = (),
) -> tuple[Forest, Sequence[Microbatch]]:
    """Pack rollouts into microbatches of at most `tokens` tokens.

    Args:
        forest: makes the forest of the order. Boundary "within" does not call it.
        rollouts: number of rollouts of the batch.
    """
    if boundary == "within":
        return microbatches_of_whole_paths(order, rollouts, tokens)
    if boundary == "mixed":
        return microbatches_mixed(forest(), tokens, prompts)
    return microbatches_across(forest(), tokens)


def with_storage(
    packed: Sequence[Microbatch], entries_S: IntArray, activations: str, *, keeps_logits: bool
) -> list[Microbatch]:
    """Set the number of entries of microbatches, `activations` of those that others read, and kept
    logits of the others."""
    return [
        replace(
            microbatch,
            keeps_logits=keeps_logits and not microbatch.children,
            activations=activations if microbatch.children else "keep",
            num_loss_entries=int(entries_S[list(microbatch.segments)].sum()),
        )
        for microbatch in packed
    ]


def checkpointed(plan: Plan, policy: str) -> Plan:
    """The plan with this checkpointing policy, in the same order and with the same cache slots."""
    microbatches = (replace(microbatch, checkpointing=policy) for microbatch in plan.microbatches)
    return plan if policy == "none" else replace(plan, microbatches=tuple(microbatches))


def _key_of_forest(forest: Forest) -> tuple[bytes, ...]:
    """Key that is equal for forests of one batch with equal segments."""
    columns = (forest.parent, forest.start, forest.length, forest.owner_begin, forest.leaf)
    return tuple(column.tobytes() for column in columns)


def cost_with_preference(plan: Plan) -> float:
    """Cost of a plan, raised by MOVING_MUST_SAVE if it moves data to host memory."""
    moves = plan.host_layers or any(m.activations == "offload" for m in plan.microbatches)
    return plan.cost * (1 + MOVING_MUST_SAVE) if moves else plan.cost


def least_memory(plans: Sequence[Plan]) -> Plan:
    """The cheapest of the plans that need about the least memory, if no plan fits the budget."""
    return min(_near_the_least(plans), key=cost_with_preference)


def _near_the_least(plans: Sequence[Plan]) -> list[Plan]:
    """Plans that need about the least memory. The plan with the very least can take many times as
    long."""
    most = min(map(peak_of, plans)) * NEAR_THE_LEAST
    return [plan for plan in plans if peak_of(plan) <= most]


def _keeps_all(plan: Plan) -> bool:
    return all(microbatch.activations == "keep" for microbatch in plan.microbatches)


def _fills(plan: Plan) -> bool:
    """Whether microbatches can hold the whole batch, or are long enough to fill the device."""
    return plan.max_microbatch_tokens >= min(FILLING_TOKENS, plan.computed_tokens)


def peak_of(plan: Plan) -> int:
    """The predicted peak of a plan that has one."""
    assert plan.predicted_peak_bytes is not None
    return plan.predicted_peak_bytes
