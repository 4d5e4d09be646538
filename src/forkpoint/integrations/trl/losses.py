"""TRL's losses as losses of forkpoint's steps.

TRL's own code computes a loss from all log-probs at once. A step with this code needs an additional
forward before the forwards and backwards that train. If the loss is a sum over tokens with factors
that are known before, the terms in this module have the same gradients, token by token. Each step
first compares them with TRL's code on random log-probs (`agrees`). After the step TRL's code
computes the logged loss and all metrics.

On several ranks the gradients of TRL's losses are averaged over ranks. Context-parallel ranks run
the sum of their losses, so their steps divide by the number of these ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl.calls import PackedRows
from forkpoint.losses.base import (
    Decomposition,
    FunctionLoss,
    Loss,
    LossBatch,
    LossFunction,
    LossOutputs,
)
from forkpoint.losses.router import RouterLoss
from forkpoint.policy import Policy, StepStats

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Values of `loss_type` that clip the ratio on both sides."""
STREAMED = (*CLIPPED, "cispo", "sapo")
TOLERANCE = 1e-4
"""Largest relative difference of gradients with respect to log-probs, which are computed in
float32."""


def streams(trainer: Any) -> bool:
    """Whether the loss of a GRPOTrainer has such terms, by its options."""
    return (
        trainer.loss_type in STREAMED
        and trainer.importance_sampling_level == "token"
        and trainer.top_entropy_quantile == 1.0
        and trainer.off_policy_mask_threshold is None
        and not trainer.use_adaptive_entropy
    )


class TokenTerms:
    """Loss of a window as a sum over tokens. A step calls it for each view."""

    def __init__(self, trainer: Any, inputs: Sequence[dict[str, Any]], packed: PackedRows) -> None:
        """`inputs`: arguments of TRL's loss, for each micro-batch of the window."""
        self._trainer = trainer
        self._packed = packed
        counts = [_counted(trainer, one) for one in inputs]
        self._advantages = self._flat(inputs, [_column(one["advantages"]) for one in inputs])
        self._old = self._optional(inputs, "old_per_token_logps")
        self._reference = None
        if trainer.beta != 0.0:
            self._reference = self._optional(inputs, "ref_per_token_logps")
        self._factors = self._flat(inputs, [count[0] for count in counts])
        self._bonus = self._flat(inputs, [count[1] for count in counts])
        self._ratios = None
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            self._ratios = self._flat(inputs, [one["importance_sampling_ratio"] for one in inputs])

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        assert outputs.entropies is not None
        return self.total(outputs.logprobs, outputs.entropies, batch.token_index)

    def total(self, logprobs_T: Tensor, entropies_T: Tensor, at_T: Tensor) -> Tensor:
        """Sum of the terms of some tokens, a scalar. `at_T`: int64, positions of these tokens in
        the batch."""
        trainer, args = self._trainer, self._trainer.args
        old_T = logprobs_T.detach() if self._old is None else self._old[at_T]
        advantages_T, factors_T = self._advantages[at_T], self._factors[at_T]
        ratio_T = (logprobs_T - old_T).exp()
        if trainer.loss_type in CLIPPED:
            clipped_T = ratio_T.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
            bounded_T = ratio_T if args.delta is None else ratio_T.clamp(max=args.delta)
            terms_T = -torch.minimum(bounded_T * advantages_T, clipped_T * advantages_T)
        elif trainer.loss_type == "cispo":
            weights_T = ratio_T.clamp(max=trainer.epsilon_high).detach()
            terms_T = -weights_T * advantages_T * logprobs_T
        else:
            positive, negative = args.sapo_temperature_pos, args.sapo_temperature_neg
            tau_T = torch.where(advantages_T > 0, positive, negative)
            terms_T = -torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T * advantages_T
        if self._ratios is not None:
            terms_T = terms_T * self._ratios[at_T]
        if self._reference is not None:
            apart_T = self._reference[at_T] - logprobs_T
            kl_T = apart_T.exp() - apart_T - 1
            corrected_T = kl_T * ratio_T if args.use_bias_correction_kl else kl_T
            terms_T = terms_T + trainer.beta * corrected_T
        # A factor of 0 must hide values that are not finite, such as a ratio at a token of a tool.
        total = torch.where(factors_T != 0, terms_T * factors_T, 0).sum()
        if trainer._entropy_bonus_enabled:
            total = total - (entropies_T * self._bonus[at_T]).sum()
        return total

    def agrees(self, theirs: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """Whether the gradients equal those of TRL's loss, at random log-probs and entropies.

        theirs: computes TRL's loss from log-probs and entropies [t] of this rank's rows.
        """
        tokens = self._packed.tokens
        count, device = len(self._packed.cells), self._packed.cells.device
        generator = torch.Generator().manual_seed(0)
        noise_2t = torch.randn(2, count, generator=generator).to(device)
        middle_t = torch.full_like(noise_2t[0], -2.0) if self._old is None else self._old[tokens]
        scored_t = self._packed.flat([rows.scored for rows in self._packed.calls])
        logprobs_t = torch.where(scored_t, middle_t + 0.3 * noise_2t[0], 0).detach()
        entropies_t = noise_2t[1].abs()
        own = partial(self.total, at_T=torch.arange(tokens.start, tokens.stop, device=device))
        found = []
        for function in (theirs, own):
            leaves = [x.clone().requires_grad_() for x in (logprobs_t, entropies_t)]
            value = function(*leaves)
            grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
            found.append(torch.cat(grads))
        wanted, reached = found
        # A NaN of one row, such as that of a float16 overflow, says nothing about the formulas.
        finite = wanted.isfinite()
        error = (wanted - reached)[finite].norm()
        near = error <= TOLERANCE * wanted[finite].norm()
        return bool(near) and not bool(reached[~finite].isfinite().any())

    def _optional(self, inputs: Sequence[dict[str, Any]], name: str) -> Tensor | None:
        """Per-token constants of completions; None if the micro-batches have none."""
        if inputs[0].get(name) is None:
            return None
        return self._flat(inputs, [one[name] for one in inputs])

    def _flat(self, inputs: Sequence[dict[str, Any]], values: Sequence[Tensor]) -> Tensor:
        """Values of the batch's tokens from values of completions, [B, C] or [B, 1] each: [T]."""
        padded = []
        for one, value_BC in zip(inputs, values, strict=True):
            length = one["completion_ids"].shape[1]
            wide_BC = value_BC.expand(-1, length).float()
            padded.append(torch.nn.functional.pad(wide_BC, (one["prompt_ids"].shape[1], 0)))
        return self._packed.joined(self._packed.flat(padded))


def _column(values: Tensor) -> Tensor:
    """Advantages of rows or of tokens, as [B, 1] or [B, C]."""
    return values.unsqueeze(1) if values.dim() == 1 else values


def _counted(trainer: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Factors [B, C] of a micro-batch's tokens in the policy's loss, and in the entropy bonus."""
    mask_BC = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask_BC = mask_BC * inputs["tool_mask"]
    mask_BC = mask_BC.float()
    rows, steps = len(mask_BC), trainer.current_gradient_accumulation_steps
    if trainer.loss_type in ("grpo", "sapo"):
        factors_BC = mask_BC / mask_BC.sum(-1, keepdim=True).clamp(min=1.0) / rows / steps
    elif trainer.loss_type == "bnpo":
        factors_BC = mask_BC / mask_BC.sum().clamp(min=1.0) / steps
    elif trainer.loss_type == "dr_grpo":
        factors_BC = mask_BC / (rows * trainer.max_completion_length) / steps
    elif trainer.loss_type == "luspo":
        factors_BC = mask_BC / rows / steps
    else:
        items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        factors_BC = mask_BC / (items * steps / trainer.args.steps_per_generation)
    bonus_BC = mask_BC * (trainer.entropy_coef / steps) / mask_BC.sum().clamp(min=1.0)
    return factors_BC, bonus_BC


# Steps
# ----------------------------------------------------------------


def ranks_of(policy: Policy) -> int:
    """Number of ranks with different rows."""
    return policy.host.group.ranks.size


@dataclass(frozen=True, repr=False)
class _PartsOfMean(Loss):
    """Mean over ranks of the loss of each, as one loss of all ranks. A step can combine it with a
    router loss, which is of all ranks too."""

    decomposition: ClassVar[Decomposition] = "token"

    function: LossFunction
    ranks: int
    needs_entropy: bool = True

    def __repr__(self) -> str:
        """Text that is equal on all ranks, which compare it."""
        return f"the mean over {self.ranks} ranks of each one's loss"

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return self.function(outputs, batch) / self.ranks


def additive(
    policy: Policy, function: LossFunction, router: RouterLoss | None, *, needs_entropy: bool = True
) -> Loss:
    """Convert a function that is a sum over tokens to a loss whose gradients are averaged over
    ranks."""
    if router is not None and not policy.host.group.ranks.is_alone:
        return _PartsOfMean(function, ranks_of(policy), needs_entropy)
    return FunctionLoss(function, decomposition="token", needs_entropy=needs_entropy)


def weighted_step(
    policy: Policy,
    packed: PackedRows,
    weights: Mapping[str, Tensor],
    *,
    scale: float = 1.0,
    router: RouterLoss | None = None,
    router_counts: Tensor | None = None,
) -> StepStats:
    """Run a step whose loss is the sum of log-probs and entropies times weights.

    `weights`: float [t] by name of output. If they are the gradients of a loss with respect to the
    outputs, the step adds the gradients of that loss.
    """
    joined = {name: packed.joined(weights_t) for name, weights_t in weights.items()}

    def weighted(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        at_T = batch.token_index
        parts = [(w_T[at_T] * outputs.per_token[n]).sum() for n, w_T in joined.items()]
        return torch.stack(parts).sum()

    loss = additive(policy, weighted, router, needs_entropy="entropies" in weights)
    return policy.forward_backward(
        packed.batch, loss, scale=scale / packed.ranks, router=router, router_counts=router_counts
    )


def in_two_halves(
    policy: Policy,
    packed: PackedRows,
    losses: Callable[[Mapping[str, Tensor]], Tensor],
    scale: float,
    router: RouterLoss | None,
) -> tuple[StepStats, Tensor]:
    """Run a step whose loss is computed between the scores and the backwards.

    TRL's metrics use collectives. So all ranks must compute them at the same point of the step,
    although their plans differ.
    """
    scores = policy.score(packed.batch, entropy=True, router=router)
    scored = packed.own(scores.per_token)
    names = ("logprobs", "entropies")
    leaves = [scored[name].requires_grad_() for name in names]
    with torch.enable_grad():
        value = losses(scored)
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    stats = weighted_step(
        policy,
        packed,
        dict(zip(names, found, strict=True)),
        scale=scale,
        router=router,
        router_counts=scores.rollout_expert_counts if router is not None else None,
    )
    return stats, value


# Load-balancing losses of routers ----------------------------------------------------------------
# TRL computes one statistic over all tokens of the rows of each micro-batch, and adds it to the
# loss with a factor. forkpoint computes the mean of these router losses over the micro-batches of
# all ranks, and passes it to TRL's code for each micro-batch. The window's loss, its gradient and
# the logged mean do not change.


def check_routers(trainer: Any, policy: Policy) -> None:
    """Raises UnsupportedError if the trainer adds a router loss that cannot be computed."""
    routers = policy.host.routers
    if getattr(trainer, "aux_loss_enabled", False) and not (
        routers.layers and routers.defines_loss
    ):
        raise UnsupportedError(
            f"{type(trainer.args).__name__} has router_aux_loss_coef="
            f"{trainer.args.router_aux_loss_coef!r}, so that TRL adds a load-balancing loss; "
            "transformers defines none for this model. Set router_aux_loss_coef=0.0."
        )


def router_loss(packed: PackedRows, factor: float) -> RouterLoss:
    """The mean of the load-balancing losses of the calls, times `factor`."""
    scope, begin = [], 0
    for rows in packed.calls:
        end = begin + len(rows.input_ids)
        scope.append(range(begin, end))
        begin = end
    return RouterLoss(load_balancing=factor, z=0.0, scope=scope)


def factor_of(
    losses: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    packed: PackedRows,
    names: tuple[str, ...],
) -> float:
    """Factor of a window's mean load-balancing loss in TRL's loss, which is linear in it.

    The factor is a gradient of TRL's code, at log-probs of 0.

    Args:
        losses: computes TRL's loss from per-token outputs by name, and from the mean.
        packed: the rows of the window.
        names: names of the per-token outputs.

    Raises:
        UnsupportedError: the factor is 0.
    """
    zeros_T = torch.zeros(len(packed.cells), device=packed.cells.device)
    mean = torch.zeros((), device=packed.cells.device, requires_grad=True)
    with torch.enable_grad():
        value = losses(dict.fromkeys(names, zeros_T), mean)
        (factor,) = torch.autograd.grad(value, mean, allow_unused=True, materialize_grads=True)
    found = float(factor)
    if not found:
        raise UnsupportedError(
            "the trainer asks its model for a load-balancing loss and does not add it to its own; "
            "set router_aux_loss_coef=0.0."
        )
    return found


def one_factor(what: str, factors: Iterable[Tensor], remedy: str) -> float:
    """The common factor of `what` in all micro-batches. Raises UnsupportedError if factors
    differ."""
    found = sorted({float(factor) for factor in factors})
    if len(found) > 1:
        raise UnsupportedError(
            f"{what} of one optimizer step's micro-batches have different factors, "
            f"{', '.join(f'{x:.6g}' for x in found)}, and a step takes one. {remedy}"
        )
    return found[0]
