"""The loss of a step as its microbatches compute it, part by part."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.config import Config
from forkpoint.device import on_device
from forkpoint.engine.gathered_scores import LossInputs
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.loss_calls import called, names_of
from forkpoint.engine.loss_gradients import LossGradients, LossPart
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.engine.token_values import shown_rollouts
from forkpoint.losses.base import Loss, LossBatch, LossOutputs
from forkpoint.losses.views import LossViews, outputs_of
from forkpoint.plan.plan import Plan
from forkpoint.tree.forest import IntArray

MicrobatchLoss = Callable[[MicrobatchInputs, HeadOutputs], LossPart | None]
"""Gives a microbatch's part of the loss; None where it has none."""


class MicrobatchLosses:
    """One step's loss, for the views of the batch that a plan shows to it."""

    def __init__(
        self, host: Host, config: Config, loss: Loss, views: LossViews, gradients: LossGradients
    ) -> None:
        self.host = host
        self.config = config
        self.loss = loss
        self.views = views
        self.gradients = gradients

    def by_tokens(self) -> MicrobatchLoss:
        """Token-additive: each microbatch's trained tokens, once for every rollout that owns
        them."""

        def of(inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
            if not len(inputs.trained_tokens):
                return None
            view = self.views.of_tokens(inputs.trained_tokens)
            return self._part(inputs.trained_entry, view, outputs.per_token)

        return of

    def shown(self, plan: Plan) -> NDArray[np.bool_]:
        """Rollouts that the loss is shown: bool [N]."""
        batch = self.views.batch
        return shown_rollouts(plan, batch, self.loss.coupling(batch))

    def by_rollouts(
        self, plan: Plan, prepared: list[MicrobatchInputs]
    ) -> tuple[MicrobatchLoss, Callable[[], Tensor]]:
        """Coupled rollouts together, in the microbatch that holds all of their trained tokens.

        Also returns a function that computes the part of the loss of classes that train on
        nothing.
        """
        views, shown = self.views, self.shown(plan)
        coupling = self.loss.coupling(views.batch)
        owners = {i.microbatch.index: views.rollout_of[i.trained_tokens] for i in prepared}
        trained_classes = {n: np.unique(coupling[of[shown[of]]]) for n, of in owners.items()}

        def of(inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
            index = inputs.microbatch.index
            if not len(trained_classes[index]):
                return None
            view, tokens = views.of_rollouts(np.isin(coupling, trained_classes[index]))
            entries = np.full(len(tokens), -1, np.int64)
            here = shown[owners[index]]
            places = np.searchsorted(tokens, inputs.trained_tokens[here])
            entries[places] = inputs.trained_entry[here]
            return self._part(entries, view, outputs.per_token)

        every = np.concatenate([*trained_classes.values(), np.zeros(0, np.int64)])
        return of, partial(self._of_untrained, ~np.isin(coupling, every) & shown)

    def _of_untrained(self, rollouts: np.ndarray) -> Tensor:
        """The loss of rollouts (bool [N]) without trained tokens.

        It is no function of log-probs, and may be one of other tensors.
        """
        zero = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
        if not rollouts.any():
            return zero
        view, tokens = self.views.of_rollouts(rollouts)
        names = names_of(self.host.head, self.config, self.loss.needs_entropy)
        nothing = {name: zero.new_zeros(len(tokens)) for name in names}
        part = self.gradients.of(lambda per_token: self._called(per_token, view), nothing)
        return part.value.to(zero.dtype)

    def of_scores(self, given: LossInputs) -> LossPart:
        """The loss of the whole batch, and its gradients by the values of each token.

        given: scores of this rank's batch, or of those of all ranks; the gradients are by this
            rank's.
        """
        view, tokens = given.views.of_rollouts(given.shown)
        at = on_device(tokens, self.host.device)
        scores = {name: x_T.detach().requires_grad_() for name, x_T in given.per_token.items()}

        def loss(per_token: Mapping[str, Tensor]) -> Tensor:
            return self._called({name: x_T[at] for name, x_T in per_token.items()}, view)

        part = self.gradients.of(loss, scores, counts=given.counts)
        value = part.value if given.counts else torch.zeros_like(part.value)
        own = {name: gradient_T[given.own] for name, gradient_T in part.gradients.items()}
        return replace(part, value=value, gradients=own)

    def _part(
        self, entries: IntArray, view: LossBatch, per_token: Mapping[str, Tensor]
    ) -> LossPart:
        index = on_device(entries, self.host.device)

        def loss(copies: Mapping[str, Tensor]) -> Tensor:
            return called(self.loss, outputs_of(copies, index), view, self.host.head)

        return self.gradients.of(loss, per_token)

    def _called(self, per_token: Mapping[str, Tensor], view: LossBatch) -> Tensor:
        return called(self.loss, LossOutputs(**per_token), view, self.host.head)


def weighted(weights: Mapping[str, Tensor | None]) -> MicrobatchLoss:
    """The sum of weight * value over a microbatch's trained tokens.

    weights: [T] for each name that the head gives, None for those without a gradient.
    """

    def of(inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
        if not len(inputs.trained_tokens):
            return None
        total, gradients = None, {}
        for name, weight_T in weights.items():
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
                gradients[name] = zeros_n.index_add_(0, entries, weights_t.to(values_n.dtype))
        return None if total is None else LossPart(total, gradients)

    return of
