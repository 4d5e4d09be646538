"""The loop: sample from the policy, reward, take both gradients, compare them, step.

In every step the dense and the shared gradient are taken from the same weights on the same rollouts
and then compared; the optimizer applies the shared one. Each batch of rollouts gives one step, so
the policy that samples is the policy that is trained. GRPO's ratio of new to old probabilities is
then exactly 1, its old log-probs being those of the training forward itself. The sampler's would
add the rounding of another order of additions to the ratio; that difference is measured instead.
"""

import copy
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint.apps.demo.sampling import sample
from forkpoint.apps.demo.task import make_prompt, reward
from forkpoint.config import Config
from forkpoint.losses import GRPO
from forkpoint.policy import Policy, StepStats
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.rollouts.synthetic import normalised
from forkpoint.tree.forest import IntArray
from forkpoint.verify.comparison import VerifyReport
from forkpoint.wrapping import wrap

ENTROPY_BONUS = 0.03
"""GRPO's entropy coefficient. It keeps the policy from repeating one word, where responses become
the same and are shared whole."""
DENSE_ROLLOUTS_PER_ROW = (1, 4, None)
"""Row lengths that dense is tried with; None is the planner's own."""
TRIALS = 2
STANDARD_ERRORS = 3.0
"""A rise of the reward that is no more than this many is called noise."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How much is sampled in a step."""

    groups: int
    rollouts_per_group: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as it was measured."""

    step: int
    """From 1."""
    reward: float
    """The mean over all responses."""
    group_rewards: tuple[float, ...]
    gradient_norm: float
    """Of the dense gradient, over all parameters."""
    gradient_difference: float
    """The norm of shared less dense, relative to `gradient_norm`."""
    sampler_logprob_difference: float
    """The largest between what the sampler drew a token with and the training forward's."""
    sampling_ms: float
    shared_ms: float
    """Planning, forward and backward."""
    dense_ms: float
    """The same."""
    shared_first: bool
    logical_tokens: int
    computed_tokens: int
    shared_flops: float
    dense_flops: float


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Samples of one step."""

    batch: RolloutBatch
    rewards_GN: np.ndarray
    logprobs_GNR: Tensor
    prompt: IntArray
    """Of the first group, with its first response."""
    response: IntArray
    ms: float


class Loop:
    """A policy and its rollouts. Deterministic for a seed except for the times."""

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, task: Task, seed: int
    ) -> None:
        self.model: PreTrainedModel = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.task: Task = task
        self.loss: GRPO = GRPO(entropy=ENTROPY_BONUS)
        # Log-probs of all rollouts are compared with the sampler's.
        self.shared: Policy = wrap(model, Config(all_logprobs=True))
        self.dense: Policy = wrap(model, Config(sharing="none", all_logprobs=True))
        self._random = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def rollouts(self) -> Rollouts:
        """Sample responses to new prompts from the policy as it is, and reward them.

        Advantages are the rewards, normalised within each group.
        """
        began = time.perf_counter()
        task = self.task
        prompts = [make_prompt(task.prompt_tokens, self._random) for _ in range(task.groups)]
        token_ids_GNR, logprobs_GNR = sample(
            self.model,
            torch.from_numpy(np.stack(prompts)),
            responses=task.rollouts_per_group,
            tokens=task.response_tokens,
            generator=self._generator,
        )
        responses_GNR = token_ids_GNR.numpy()
        rewards_GN = np.array(
            [[reward(p, r) for r in group] for p, group in zip(prompts, responses_GNR, strict=True)]
        )
        batch = RolloutBatch(
            Rollout(
                token_ids=np.concatenate([prompt, response]),
                loss_mask=np.repeat([0, 1], [len(prompt), len(response)]),
                advantage=float(advantage),
                group_id=f"g{g}",
                rollout_id=f"g{g}-r{n}",
            )
            for g, prompt in enumerate(prompts)
            for n, (response, advantage) in enumerate(
                zip(responses_GNR[g], normalised(rewards_GN[g]), strict=True)
            )
        )
        return Rollouts(
            batch=batch,
            rewards_GN=rewards_GN,
            logprobs_GNR=logprobs_GNR,
            prompt=prompts[0],
            response=responses_GNR[0, 0],
            ms=(time.perf_counter() - began) * 1e3,
        )

    def warm_up(self, batch: RolloutBatch) -> None:
        """Run both policies untimed, and choose the row length that dense is fastest with.

        The trials run the batch's first group.
        """
        self._gradient(self.shared, batch)
        group = batch.select(batch.groups()[0].tolist())
        longest = int(np.diff(group.offsets).max())
        limits = [None if n is None else n * longest for n in DENSE_ROLLOUTS_PER_ROW]
        tried = [self.dense.with_config(max_microbatch_tokens=n) for n in limits]
        self._gradient(tried[0], group)
        times = [[self._gradient(policy, group)[1] for policy in tried] for _ in range(TRIALS)]
        self.dense = tried[int(np.min(times, axis=0).argmin())]

    def exact_report(self, rollouts: Rollouts) -> VerifyReport:
        """The first group's gradients, shared and dense, on a float64 copy of the model."""
        group = rollouts.batch.select(rollouts.batch.groups()[0].tolist())
        return wrap(copy.deepcopy(self.model).double()).verify(group, self.loss)

    def step(self, number: int, rollouts: Rollouts) -> Step:
        """Take both gradients from the same weights, and one optimizer step with the shared one."""
        batch = rollouts.batch
        shared_first = number % 2 == 0
        policies = (self.shared, self.dense) if shared_first else (self.dense, self.shared)
        runs = {policy: self._gradient(policy, batch) for policy in policies}
        _, dense_ms, expected = runs[self.dense]
        stats, shared_ms, gradients = runs[self.shared]
        norm, difference = _norm(expected), _norm(gradients, less=expected)
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        plan = stats.plan
        assert plan.shape is not None
        trained = stats.logprobs[torch.from_numpy(batch.loss_mask.astype(bool))]
        return Step(
            step=number,
            reward=float(rollouts.rewards_GN.mean()),
            group_rewards=tuple(rollouts.rewards_GN.mean(1).tolist()),
            gradient_norm=norm,
            gradient_difference=difference / norm if norm else math.inf if difference else 0.0,
            sampler_logprob_difference=float(
                (trained - rollouts.logprobs_GNR.flatten()).abs().max()
            ),
            sampling_ms=rollouts.ms,
            shared_ms=shared_ms,
            dense_ms=dense_ms,
            shared_first=shared_first,
            logical_tokens=plan.logical_tokens,
            computed_tokens=plan.computed_tokens,
            shared_flops=plan.shared.step_flops(plan.shape),
            dense_flops=plan.dense.step_flops(plan.shape),
        )

    def _gradient(
        self, policy: Policy, batch: RolloutBatch
    ) -> tuple[StepStats, float, list[Tensor | None]]:
        """One gradient and its time in ms; leaves `.grad` None."""
        began = time.perf_counter()
        stats = policy.forward_backward(batch, self.loss)
        ms = (time.perf_counter() - began) * 1e3
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.optimizer.zero_grad(set_to_none=True)
        return stats, ms, gradients


def summary(steps: list[Step]) -> dict[str, Any]:
    """Sums over the steps, and their lists; ready for JSON."""

    def every(name: str) -> list[Any]:
        return [getattr(step, name) for step in steps]

    values: dict[str, Any] = {
        "steps": len(steps),
        "logical_tokens": sum(every("logical_tokens")),
        "computed_tokens": sum(every("computed_tokens")),
        "rewards": every("reward"),
        **rise(every("reward")),
        "max_gradient_difference": max(every("gradient_difference")),
        "max_sampler_logprob_difference": max(every("sampler_logprob_difference")),
        "bound": sum(every("dense_flops")) / sum(every("shared_flops")),
        "speedup": sum(every("dense_ms")) / sum(every("shared_ms")),
        "median_speedup": statistics.median(step.dense_ms / step.shared_ms for step in steps),
    }
    for name in ("sampling", "shared", "dense"):
        ms = every(f"{name}_ms")
        values[f"{name}_ms"] = sum(ms)
        values[f"{name}_median_ms"] = statistics.median(ms)
        values[f"{name}_step_ms"] = ms
    return values


def rise(rewards: list[float]) -> dict[str, Any]:
    """Mean reward of the first and of the last quarter of the steps, and whether it rose.

    It rose if the last quarter's mean is above the first's by more than `STANDARD_ERRORS` times the
    standard error of their difference, as the spread between steps gives it. With fewer than two
    steps in a quarter there is no spread, and `reward_rose` is None.
    """
    few = max(1, len(rewards) // 4)
    first, last = rewards[:few], rewards[-few:]
    means = statistics.fmean(first), statistics.fmean(last)
    rose = None
    if few > 1:
        error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / few)
        rose = means[1] - means[0] > STANDARD_ERRORS * error
    names = ("first_quarter_reward", "last_quarter_reward", "reward_rose")
    return dict(zip(names, (*means, rose), strict=True))


def _norm(gradients: list[Tensor | None], less: list[Tensor | None] | None = None) -> float:
    """Norm over all parameters, of the gradients or of their difference from others."""
    squares = 0.0
    for gradient, other in zip(gradients, less or [None] * len(gradients), strict=True):
        present = [g.double() for g in (gradient, other) if g is not None]
        if present:
            difference = present[0] - present[1] if len(present) == 2 else present[0]
            squares += float(difference.square().sum())
    return math.sqrt(squares)
