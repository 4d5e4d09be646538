"""The loop of the demo: sample from the policy, reward, compare both gradients, take a step.

Each step computes the dense and the shared gradient from the same weights and rollouts. The
optimizer applies the shared gradient. The trained policy samples the rollouts, so GRPO's ratio of
new to old probabilities is 1.
"""

import copy
import math
import statistics
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from forkpoint.apps.demo.task import make_prompt, reward
from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.losses import GRPO
from forkpoint.policy import Policy, StepStats
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.rollouts.synthetic import normalised
from forkpoint.verify.comparison import VerifyReport
from forkpoint.wrapping import wrap

ENTROPY_BONUS = 0.03
"""Entropy coefficient of GRPO. Without it the policy repeats one word, so that responses become
equal and are shared whole."""
DENSE_ROLLOUTS_PER_ROW = (1, 4, None)
"""Lengths of microbatches that dense tries; None leaves the length to the planner."""
TRIALS = 2


class Sampled(NamedTuple):
    """Rollouts of one step, with rewards in their extras."""

    batch: RolloutBatch
    ms: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """Measurements of one step."""

    step: int
    """From 1."""
    reward: float
    """Mean reward of all responses."""
    gradient_difference: float
    """Norm of (shared gradient - dense gradient), relative to the norm of the dense gradient."""
    sampling_ms: float
    shared_ms: float
    """Time of planning, forward and backward."""
    dense_ms: float
    """The same."""
    logical_tokens: int
    computed_tokens: int
    shared_flops: float
    dense_flops: float


@dataclass(eq=False)
class Loop:
    """A model with its dense and shared policies. For a given seed, all results except times are
    equal.

    Sizes are those of one step.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    groups: int
    rollouts_per_group: int
    prompt_tokens: int
    response_tokens: int
    seed: int

    def __post_init__(self) -> None:
        self.loss: GRPO = GRPO(entropy=ENTROPY_BONUS)
        self.shared: Policy = wrap(self.model)
        self.dense: Policy = wrap(self.model, Config(sharing="none"))
        self._random = np.random.default_rng(self.seed)

    def rollouts(self) -> Sampled:
        """Sample responses to new prompts from the policy, and reward them.

        Advantages are the rewards, normalised within each group.
        """
        began = time.perf_counter()
        prompts = [make_prompt(self.prompt_tokens, self._random) for _ in range(self.groups)]
        ids_GNR = sample(
            self.model,
            torch.from_numpy(np.stack(prompts)),
            responses=self.rollouts_per_group,
            tokens=self.response_tokens,
            seed=int(self._random.integers(2**63)),
        )
        rollouts: list[Rollout] = []
        for group, (prompt, responses) in enumerate(zip(prompts, ids_GNR.numpy(), strict=True)):
            rewards = np.array([reward(prompt, response) for response in responses])
            for n, advantage in enumerate(normalised(rewards)):
                rollouts.append(
                    Rollout(
                        token_ids=np.concatenate([prompt, responses[n]]),
                        loss_mask=np.repeat([0, 1], [len(prompt), len(responses[n])]),
                        advantage=float(advantage),
                        group_id=f"g{group}",
                        rollout_id=f"g{group}-r{n}",
                        extras={"reward": float(rewards[n])},
                    )
                )
        ms = (time.perf_counter() - began) * 1e3
        return Sampled(RolloutBatch(rollouts), ms)

    def warm_up(self, batch: RolloutBatch) -> None:
        """Run both policies without timing, and choose the fastest microbatch length of dense.

        Trials run the first group of the batch.
        """
        self._gradient(self.shared, batch)
        group = _first_group(batch)
        longest = int(group.lengths.max())
        limits = [None if n is None else n * longest for n in DENSE_ROLLOUTS_PER_ROW]
        tried = [self.dense.with_config(max_microbatch_tokens=n) for n in limits]
        self._gradient(tried[0], group)
        times = [[self._gradient(policy, group)[1] for policy in tried] for _ in range(TRIALS)]
        self.dense = tried[int(np.min(times, axis=0).argmin())]

    def exact_report(self, batch: RolloutBatch) -> VerifyReport:
        """Compare shared and dense gradients of the first group, on a float64 copy of the model."""
        return wrap(copy.deepcopy(self.model).double()).verify(_first_group(batch), self.loss)

    def step(self, number: int, sampled: Sampled) -> Step:
        """Compute both gradients from the same weights, and take an optimizer step with the shared
        one.

        The order of the two gradients alternates.
        """
        batch = sampled.batch
        order = (self.dense, self.shared) if number % 2 else (self.shared, self.dense)
        runs = {policy: self._gradient(policy, batch) for policy in order}
        (_, dense_ms, dense), (stats, shared_ms, shared) = runs[self.dense], runs[self.shared]
        norm, difference = (
            math.hypot(*(float(g.double().norm()) for g in gradients))
            for gradients in (dense, [a.double() - b for a, b in zip(shared, dense, strict=True)])
        )
        for parameter, gradient in zip(self.model.parameters(), shared, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        plan = stats.plan
        assert plan.shape is not None
        return Step(
            step=number,
            reward=statistics.fmean(rollout.extras["reward"] for rollout in batch),  # pyright: ignore[reportOptionalSubscript]
            gradient_difference=difference / norm if norm else math.inf if difference else 0.0,
            sampling_ms=sampled.ms,
            shared_ms=shared_ms,
            dense_ms=dense_ms,
            logical_tokens=plan.logical_tokens,
            computed_tokens=plan.computed_tokens,
            shared_flops=plan.shared.step_flops(plan.shape),
            dense_flops=plan.dense.step_flops(plan.shape),
        )

    def _gradient(
        self, policy: Policy, batch: RolloutBatch
    ) -> tuple[StepStats, float, list[Tensor]]:
        """Compute a gradient, and its time in ms. `.grad` is None afterwards."""
        began = time.perf_counter()
        stats = policy.forward_backward(batch, self.loss)
        ms = (time.perf_counter() - began) * 1e3
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return stats, ms, gradients


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompt_ids_GP: Tensor, *, responses: int, tokens: int, seed: int
) -> Tensor:
    """Sample responses of a fixed number of tokens, at temperature 1.

    Each prompt runs once. The cache of its keys and values is then repeated for its responses.

    Returns token ids, int64 [G, N, R].

    Raises:
        ConfigError: the logits of the model are not finite.
    """
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompt_ids_GP, past_key_values=cache, logits_to_keep=1).logits
    if not logits.isfinite().all():
        raise ConfigError(
            "the model's logits are not finite, because training has diverged. Use a lower "
            "learning rate."
        )
    cache.batch_repeat_interleave(responses)
    cache.crop(-1)  # generate would run the last token again
    generate: Any = model.generate
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        ids_SL = generate(
            prompts_SP := prompt_ids_GP.repeat_interleave(responses, 0),
            attention_mask=torch.ones_like(prompts_SP),
            generation_config=config,
            past_key_values=cache,
        )
    return ids_SL[:, -tokens:].unflatten(0, (-1, responses))


def _first_group(batch: RolloutBatch) -> RolloutBatch:
    return batch.select(batch.groups()[0].tolist())


def summary(steps: list[Step]) -> dict[str, Any]:
    """Sums over the steps and lists of their values, for JSON."""

    def every(name: str) -> list[Any]:
        return [getattr(step, name) for step in steps]

    few = max(1, len(steps) // 4)
    values: dict[str, Any] = {
        "steps": len(steps),
        "logical_tokens": sum(every("logical_tokens")),
        "computed_tokens": sum(every("computed_tokens")),
        "rewards": every("reward"),
        "first_quarter_reward": statistics.fmean(every("reward")[:few]),
        "last_quarter_reward": statistics.fmean(every("reward")[-few:]),
        "max_gradient_difference": max(every("gradient_difference")),
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
