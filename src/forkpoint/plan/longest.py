"""The longest prompt of one group that fits a memory budget. Imports no torch.

The planner finds a plan within a budget if the plan with the least memory fits. That plan has the
shortest microbatches, recomputes all activations, and has prefix caches in host memory. So the
search makes one such plan, without prices, for each length, sharing and boundary. It needs only the
lengths of the rollouts.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from forkpoint.config import AUTO, Config
from forkpoint.errors import PlanError
from forkpoint.plan.builder import (
    BOUNDARIES,
    checkpointed,
    least_microbatch_tokens,
    most_host_bytes,
    pack,
    policies_to_try,
    with_host_layers,
    with_storage,
)
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.plan import LongestPrompt, Plan
from forkpoint.plan.predict import peak_bytes
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import meter_of
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import SortedRollouts, build_forest

STEP_TOKENS = 1024
MOST_TOKENS = 1 << 21
"""Lengths that are tried: multiples of STEP_TOKENS up to MOST_TOKENS."""


@dataclass(frozen=True)
class LongestSearch:
    """Search for the longest prompt of one group for which the planner finds a plan."""

    responses: tuple[int, ...]
    """Lengths of the group's responses, which share nothing."""
    shape: ModelShape
    config: Config
    capabilities: Capabilities
    calibration: Calibration | None
    """Calibration whose measured bytes replace counted bytes."""
    budget_bytes: int
    """Limit for activations and prefix cache, in bytes."""

    def __call__(self) -> LongestPrompt:
        tokens = longest(lambda prompt: self.plan(prompt) is not None)
        plan = self.plan(tokens) if tokens else None
        host_bytes = 0 if plan is None else plan.host_cache_bytes
        return LongestPrompt(tokens, self.responses, host_bytes, MOST_TOKENS)

    def plan(self, prompt: int) -> Plan | None:
        """A plan without prices that fits with a prompt of this length; None if none fits."""
        config, limit = self.config, self.config.max_microbatch_tokens
        # An edge reads a token. The edge that reads the last token of the prompt belongs to a
        # response.
        rollout = prompt - 1 + max(self.responses)
        sharings = ("tree", "none") if config.sharing == AUTO else (config.sharing,)
        boundaries = BOUNDARIES if config.boundary == AUTO else (config.boundary,)
        for sharing, boundary in product(sharings, boundaries):
            # Microbatches shorter than the least length need little less memory, and there would be
            # thousands. Whole rollouts and whole groups need less memory if checkpoints are smaller
            # than the cache.
            least = least_microbatch_tokens(rollout, boundary)
            lengths = [rollout, prompt + sum(self.responses)]
            if boundary != "within":
                lengths = [least, *(max(least, length) for length in lengths)]
            for tokens in sorted({min(length, limit or length) for length in lengths}):
                try:
                    plan = self._least_memory(prompt - 1, sharing, boundary, tokens)
                except PlanError:
                    continue  # a rollout exceeds its microbatch
                if plan.fits:
                    return plan
        return None

    def _least_memory(self, shared: int, sharing: str, boundary: str, tokens: int) -> Plan:
        """The plan with the least memory, with microbatches of at most `tokens` tokens.

        `shared`: edges of the prompt.
        """
        config, shape = self.config, self.shape
        responses = np.asarray(self.responses)
        if boundary != "within":
            # Only one of the rollouts that are cut is open at a time, so the longest determines the
            # peak.
            cut = responses + (shared if sharing == "none" else 0) > tokens
            responses = np.append(responses[~cut], responses[cut].max(initial=0))
            responses = responses[responses > 0]
        count = len(responses)
        order = SortedRollouts(
            rollouts=np.arange(count),
            edges=shared + responses,
            shared_edges=np.where(np.arange(count) > 0, shared, 0),
        )
        if sharing == "none":
            order = order.cut(np.ones(count, bool))
        forest, packed = pack(boundary, order, lambda: build_forest(order, count), count, tokens)
        end = forest.start + forest.length
        trained_S = np.maximum(0, end - np.maximum(forest.start, shared))
        microbatches = with_storage(
            packed,
            trained_S,
            "recompute" if config.activations == AUTO else config.activations,
            keeps_logits=config.head_logits == "keep" and self.capabilities.keeps_logits,
        )
        # Counts of work and tokens are left out, because only prices use them.
        plan = Plan(
            sharing,
            boundary,
            tokens,
            forest,
            tuple(microbatches),
            capabilities=self.capabilities,
            memory_budget_bytes=self.budget_bytes,
            host_memory_bytes=most_host_bytes(config),
            shape=shape,
        ).with_program(scores=False)
        plan = checkpointed(plan, policies_to_try(config, shape, self.capabilities)[-1])
        meter = meter_of(plan, self.calibration)
        if config.prefix_cache != "device":
            plan = with_host_layers(plan, meter, config, self.budget_bytes)
        return replace(plan, predicted_peak_bytes=peak_bytes(plan, meter))


def longest(
    fits: Callable[[int], bool], *, step: int = STEP_TOKENS, most: int = MOST_TOKENS
) -> int:
    """Find the largest multiple of `step` up to `most` for which `fits` is true; 0 if there is
    none.

    `fits` is true up to some length and false beyond.
    """
    end = 1
    while end * step <= most and fits(end * step):
        end *= 2
    begin = end // 2 + 1
    between = range(begin, min(end, most // step + 1))
    return step * (begin - 1 + bisect_left(between, True, key=lambda n: not fits(n * step)))


def responses_of(batch: RolloutBatch) -> tuple[int, ...]:
    """Lengths of the responses in the group of the longest rollout. A response begins at the first
    trained token. Rollouts without trained tokens are left out."""
    if not len(batch):
        return ()
    group = batch.group_index[int(batch.lengths.argmax())]
    members = np.flatnonzero(batch.group_index == group)
    lengths = (batch.lengths - batch.prompt_lengths)[members]
    return tuple(lengths[lengths > 0].tolist())
