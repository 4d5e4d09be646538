"""The loss of a step, its gradients in each microbatch, and values per token.

A loss is computed from copies of the head's values, and its backward runs at once. A microbatch's
backward starts from the gradients at these copies. A loss that reads other trainable tensors is
refused: no gradient would reach them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.config import Config
from forkpoint.device import on_device
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.errors import ConfigError
from forkpoint.losses.base import Loss, LossBatch, LossOutputs, coupling_of
from forkpoint.losses.evaluate import check_leaves, evaluate_loss
from forkpoint.losses.views import LossViews, outputs_of
from forkpoint.parallel.step import RankStep
from forkpoint.plan.plan import Plan
from forkpoint.plan.runs import labels_run
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray


@dataclass(frozen=True, eq=False)
class LossPart:
    """The loss of some rollouts or tokens, and its gradients."""

    value: Tensor
    """Value of the loss, without a graph."""
    gradients: Mapping[str, Tensor]
    """Gradients with respect to the outputs of the head, by name, times the factors of the step.
    Outputs that the loss does not depend on are missing."""


MicrobatchLoss = Callable[[MicrobatchInputs, HeadOutputs], LossPart | None]
"""Computes a microbatch's part of the loss; None if it has none."""


# Values per token
# ------------------------------------------------------------


class TokenValues:
    """Outputs of the head, [T] by name: 0 at untrained tokens, NaN at trained tokens that are left
    out."""

    def __init__(
        self,
        names: Sequence[str],
        plan: Plan,
        batch: RolloutBatch,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        values = torch.zeros(plan.logical_tokens, dtype=dtype, device=device)
        left_out = np.flatnonzero(batch.loss_mask & ~labels_run(batch.offsets, plan.run_lengths))
        if len(left_out):
            values[on_device(left_out, device)] = torch.nan
        self.by_name: dict[str, Tensor] = {name: values.clone() for name in names}

    def collect(self, inputs: MicrobatchInputs, outputs: HeadOutputs) -> None:
        """Store the values of a microbatch."""
        if not len(inputs.trained_tokens):
            return
        device = inputs.input_ids.device
        tokens = on_device(inputs.trained_tokens, device)
        entries = on_device(inputs.trained_entry, device)
        for name, values_T in self.by_name.items():
            values_T[tokens] = outputs.per_token[name].detach()[entries]


def names_of(head: str, config: Config, entropy: bool) -> tuple[str, ...]:
    """Names of a step's values per token, the host's `head` first.

    Raises ConfigError if a critic is asked for statistics of a distribution.
    """
    others = config.head_statistics
    if others and head == "values":
        raise ConfigError(
            f"head_statistics is {others!r}, and the model is a critic, whose head gives a "
            "value and no distribution. Leave the option out."
        )
    return (head, *(("entropies",) if entropy else ()), *others)


@dataclass(frozen=True)
class LossInputs:
    """A batch and its scores: this rank's, or those of all ranks as one batch."""

    views: LossViews
    per_token: Mapping[str, Tensor]
    """[T] by name: "logprobs", "entropies", a critic's "values"."""
    own: slice
    """This rank's slice of T."""
    shown: NDArray[np.bool_]
    """bool [N]: rollouts that the loss is computed for."""
    counts: bool = True
    """Whether this rank reports the value of the loss. All ranks compute the same value, and one
    reports it."""


def loss_inputs(
    ranks: RankStep,
    per_token: Mapping[str, Tensor],
    views: LossViews,
    shown: NDArray[np.bool_],
) -> LossInputs:
    """This rank's scores, [T] by name, or those of all ranks if the step gathers rollouts.

    Collective if the step gathers rollouts. `shown`: bool [N], rollouts of this rank that the loss
    is computed for.
    """
    if not ranks.parts:
        return LossInputs(views, per_token, slice(None), shown)
    found = ranks.gather({name: x_T.cpu() for name, x_T in per_token.items()})
    # Ranks of one batch have the same scores, and are one part.
    batches, parts = ranks.ranks.batches, ranks.parts
    found = [found[batches.index(batch)] for batch in range(len(parts))]
    index = batches[ranks.ranks.index]
    begin = sum(part.logical_tokens for part in parts[:index])
    rollouts = [rollout for part in parts for rollout in part.rollouts]
    if len({rollout.rollout_id for rollout in rollouts}) < len(rollouts):
        # Names that occur on several ranks get the rank's number.
        rollouts = [
            replace(rollout, rollout_id=f"{rank}/{rollout.rollout_id}")
            for rank, part in enumerate(parts)
            for rollout in part.rollouts
        ]
    joined = RolloutBatch(rollouts)
    return LossInputs(
        LossViews(joined, views.denominators, views.device, views.dtype),
        {name: torch.cat([each[name] for each in found]).to(views.device) for name in per_token},
        own=slice(begin, begin + parts[index].logical_tokens),
        # No rank leaves out rollouts that those of another may be coupled with.
        shown=np.ones(len(joined), bool),
        counts=index == 0,
    )


# The loss and its gradients
# ------------------------------------------------------------


@dataclass(eq=False)
class MicrobatchLosses:
    """Computes the loss of a step for parts of the batch."""

    host: Host
    config: Config
    loss: Loss
    views: LossViews
    ranks: RankStep
    scale: float
    """The caller's factor on every gradient."""

    @cached_property
    def factor(self) -> float:
        """The factor on every gradient of the step."""
        return self.scale * self.host.group.factor(mean=self.ranks.mean)

    def of_tokens(self, inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
        """A microbatch's part of a loss that is a sum over tokens. A shared token counts once for
        each of its rollouts. This is a `MicrobatchLoss`."""
        if not len(inputs.trained_tokens):
            return None
        view = self.views.of_tokens(inputs.trained_tokens)
        return self.part(inputs.trained_entry, view, outputs.per_token)

    def shown(self, plan: Plan) -> NDArray[np.bool_]:
        """Rollouts that the loss is computed for: bool [N].

        Rollouts that the plan leaves out, and those coupled with them, are excluded: the loss has
        declared that their terms are 0.
        """
        batch = self.views.batch
        coupling = coupling_of(self.loss, batch)
        whole = batch.where_all_trained(labels_run(batch.offsets, plan.run_lengths))
        return ~np.isin(coupling, coupling[~whole])

    def of_untrained(self, rollouts: NDArray[np.bool_]) -> Tensor:
        """The loss of rollouts (bool [N]) without trained tokens. It does not depend on
        log-probs."""
        zero = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
        if not rollouts.any():
            return zero
        view, tokens = self.views.of_rollouts(rollouts)
        names = names_of(self.host.head, self.config, self.loss.needs_entropy)
        nothing = {name: zero.new_zeros(len(tokens)) for name in names}
        return self._differentiated(lambda x: LossOutputs(**x), view, nothing).value.to(zero.dtype)

    def of_scores(self, given: LossInputs) -> LossPart:
        """The loss of the whole batch, and its gradients with respect to this rank's values per
        token."""
        view, tokens = given.views.of_rollouts(given.shown)
        at = on_device(tokens, self.host.device)
        scores = {name: x_T.detach().requires_grad_() for name, x_T in given.per_token.items()}
        part = self._differentiated(
            lambda found: LossOutputs(**{name: x_T[at] for name, x_T in found.items()}),
            view,
            scores,
        )
        value = part.value if given.counts else torch.zeros_like(part.value)
        own = {name: gradient_T[given.own] for name, gradient_T in part.gradients.items()}
        return LossPart(value, own)

    def part(self, entries: IntArray, view: LossBatch, per_token: Mapping[str, Tensor]) -> LossPart:
        """The loss of a view. `entries`: index in `per_token` of each token of the view."""
        index = on_device(entries, self.host.device)
        return self._differentiated(lambda copies: outputs_of(copies, index), view, per_token)

    def _differentiated(
        self,
        outputs: Callable[[Mapping[str, Tensor]], LossOutputs],
        view: LossBatch,
        per_token: Mapping[str, Tensor],
    ) -> LossPart:
        """Compute a part of the loss, and its gradients with respect to `per_token`.

        `outputs` makes the argument of the loss from copies of `per_token`. Raises UnsupportedError
        if the loss reads other trainable tensors.
        """
        copies = {n: x.detach().requires_grad_(x.requires_grad) for n, x in per_token.items()}
        with torch.enable_grad():
            value = evaluate_loss(self.loss, outputs(copies), view, self.host.head)
        if not value.requires_grad:
            return LossPart(value.detach(), {})
        check_leaves(value, copies.values())
        inputs = [x for x in copies.values() if x.requires_grad]
        torch.autograd.backward(value, torch.full_like(value, self.factor), inputs=inputs)
        found = {name: x.grad for name, x in copies.items() if x.grad is not None}
        return LossPart(value.detach(), found)


class CoupledLosses:
    """Computes a loss that couples rollouts, in the microbatch that holds all trained tokens of
    coupled rollouts. This is a `MicrobatchLoss`."""

    def __init__(
        self, losses: MicrobatchLosses, plan: Plan, prepared: Iterable[MicrobatchInputs]
    ) -> None:
        """`prepared`: the inputs of all microbatches of the plan."""
        views = losses.views
        self._losses = losses
        self._shown = losses.shown(plan)
        self._coupling = coupling_of(losses.loss, views.batch)
        self._owners = {i.microbatch.index: views.rollout_of[i.trained_tokens] for i in prepared}
        self._trained = {
            number: np.unique(self._coupling[rollouts[self._shown[rollouts]]])
            for number, rollouts in self._owners.items()
        }
        """Numbers of the sets of coupled rollouts that a microbatch trains, by microbatch."""

    def __call__(self, inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
        trained = self._trained[inputs.microbatch.index]
        if not len(trained):
            return None
        view, tokens = self._losses.views.of_rollouts(np.isin(self._coupling, trained))
        entries = np.full(len(tokens), -1, np.int64)
        here = self._shown[self._owners[inputs.microbatch.index]]
        positions = np.searchsorted(tokens, inputs.trained_tokens[here])
        entries[positions] = inputs.trained_entry[here]
        return self._losses.part(entries, view, outputs.per_token)

    def of_untrained(self) -> Tensor:
        """The loss of coupled rollouts without trained tokens. It does not depend on log-probs."""
        every = np.concatenate([*self._trained.values(), np.zeros(0, np.int64)])
        return self._losses.of_untrained(~np.isin(self._coupling, every) & self._shown)


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """The sum of weight * value over trained tokens. A `MicrobatchLoss`."""

    weights: Mapping[str, Tensor | None]
    """[T] for each output of the head by name, or None if it has no gradient."""
    factor: float = 1.0
    """Factor on gradients, not on the value."""

    def __call__(self, inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
        if not len(inputs.trained_tokens):
            return None
        total, gradients = None, {}
        for name, weight_T in self.weights.items():
            if weight_T is None:
                continue
            values_n = outputs.per_token[name]
            entries = on_device(inputs.trained_entry, values_n.device)
            weights_t = weight_T[on_device(inputs.trained_tokens, values_n.device)]
            found = (weights_t * values_n.detach()[entries]).sum()
            total = found if total is None else total + found
            if values_n.requires_grad:
                # Several rollouts may read one entry.
                zeros_n = torch.zeros_like(values_n)
                weights_t = (weights_t * self.factor).to(values_n.dtype)
                gradients[name] = zeros_n.index_add_(0, entries, weights_t)
        return None if total is None else LossPart(total, gradients)
