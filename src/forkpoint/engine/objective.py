"""The loss of a step: parts by microbatch, their gradients, and values per token.

A loss is computed from copies of the head's values, and its backward runs at once. The gradients at
the copies are where a microbatch's backward starts. A loss may read other trainable tensors:
parameters of the model (a pull to the start weights), or leaves outside of it (a learned
coefficient). These get their gradients from the same backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forkpoint.config import Config
from forkpoint.device import on_device
from forkpoint.engine.distributed import ModelHolder, holder_of
from forkpoint.engine.gradients import GradientGuard
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.losses.base import Loss, LossBatch, LossOutputs
from forkpoint.losses.leaves import leaves_of
from forkpoint.losses.missing import computed
from forkpoint.losses.views import LossViews, outputs_of
from forkpoint.parallel.step import RankStep, SingleProcessStep
from forkpoint.plan.plan import Plan
from forkpoint.plan.runs import labels_run
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray

PerTokenLoss = Callable[[Mapping[str, Tensor]], Tensor]
"""Gives a scalar from values of the head by name."""


@dataclass(frozen=True, eq=False)
class LossPart:
    """A loss of some rollouts or tokens, and its gradients."""

    value: Tensor
    """Without a graph."""
    gradients: Mapping[str, Tensor]
    """By name, at the values of the head that it was computed from, times the step's factors; none
    for values that it does not depend on."""


MicrobatchLoss = Callable[[MicrobatchInputs, HeadOutputs], LossPart | None]
"""Gives a microbatch's part of the loss; None where it has none."""


# Values per token
# ------------------------------------------------------------


class TokenValues:
    """Values of the head at trained tokens, [T] by name: 0 at other tokens, NaN at trained ones
    that the plan leaves out."""

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
        """Take those of a microbatch."""
        if not len(inputs.trained_tokens):
            return
        device = inputs.input_ids.device
        tokens = on_device(inputs.trained_tokens, device)
        entries = on_device(inputs.trained_entry, device)
        for name, values_T in self.by_name.items():
            values_T[tokens] = outputs.per_token[name].detach()[entries]


def names_of(head: str, config: Config, entropy: bool) -> tuple[str, ...]:
    """Names of a step's values per token; `head`: of those that a loss is computed from.

    Raises ConfigError where a critic is asked for numbers of a distribution.
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
    """The part of T that is this rank's."""
    shown: NDArray[np.bool_]
    """Rollouts that the loss is shown."""
    counts: bool = True
    """Whether this rank's value of the loss counts. All ranks compute the same, of which one
    counts."""


def loss_inputs(
    ranks: RankStep,
    per_token: Mapping[str, Tensor],
    views: LossViews,
    shown: NDArray[np.bool_],
) -> LossInputs:
    """This rank's scores or, where the step gathers rollouts, those of all ranks. Collective then.

    Args:
        ranks: of the step.
        per_token: [T] by name, this rank's scores.
        views: of this rank's batch.
        shown: bool [N], rollouts of this rank that the loss is shown.
    """
    if isinstance(ranks, SingleProcessStep) or not ranks.parts:
        return LossInputs(views, per_token, slice(None), shown)
    found = ranks.gather({name: x_T.cpu() for name, x_T in per_token.items()})
    # Ranks of one batch have the same scores, and are one part.
    batches = ranks.ranks.batches
    found = [found[batches.index(batch)] for batch in range(len(ranks.parts))]
    index = batches[ranks.ranks.index]
    begin = sum(part.logical_tokens for part in ranks.parts[:index])
    joined = _joined(ranks.parts)
    return LossInputs(
        LossViews(joined, views.denominators, views.device, views.dtype),
        {name: torch.cat([each[name] for each in found]).to(views.device) for name in per_token},
        own=slice(begin, begin + ranks.parts[index].logical_tokens),
        # No rank leaves out rollouts that those of another may be coupled with.
        shown=np.ones(len(joined), bool),
        counts=index == 0,
    )


def _joined(parts: tuple[RolloutBatch, ...]) -> RolloutBatch:
    """The rollouts of all ranks. Names that occur on several ranks get the rank's number."""
    names = [name for part in parts for name in part.rollout_ids]
    if len(set(names)) == len(names):
        return RolloutBatch([rollout for part in parts for rollout in part.rollouts])
    return RolloutBatch(
        [
            replace(rollout, rollout_id=f"{rank}/{rollout.rollout_id}")
            for rank, part in enumerate(parts)
            for rollout in part.rollouts
        ]
    )


# Gradients
# ------------------------------------------------------------


def evaluate_loss(loss: Loss, outputs: LossOutputs, view: LossBatch, head: str) -> Tensor:
    """The loss of these outputs.

    Args:
        loss: of a step.
        outputs: of the head, for the trained tokens of `view`.
        view: a part of the batch.
        head: the name of the outputs that a loss is computed from.

    Raises ConfigError where it is no scalar, has no graph where the outputs have one, or reads what
    is None.
    """
    value = computed(loss, outputs, view)
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in outputs.per_token.values())
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        found = repr(value)
        if isinstance(value, Tensor):
            found = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ConfigError(
            f"the loss {loss!r} returned {found}; it must return a floating-point scalar tensor, "
            f"computed from outputs.{head}."
        )
    if graph and not value.requires_grad:
        raise ConfigError(
            f"the loss {loss!r} returned a scalar without a graph, so that nothing would be "
            "trained; it must be computed from outputs.logprobs, without detach(), item() or "
            "torch.no_grad()."
        )
    return value


class LossGradients:
    """Computes parts of one step's loss, and their gradients."""

    def __init__(self, host: Host, guard: GradientGuard, ranks: RankStep, scale: float) -> None:
        """
        Args:
            host: the model.
            guard: of the step.
            ranks: of the step.
            scale: a factor on every gradient, that of the caller.
        """
        self.guard = guard
        self.ranks = ranks
        self.holder: ModelHolder = holder_of(host.group)
        self._reduced: float = self.holder.factor(mean=ranks.mean)
        """The factor for gradients that the wrapper reduces over ranks."""
        self.factor: float = scale * self._reduced

    def of(
        self, loss: PerTokenLoss, per_token: Mapping[str, Tensor], *, counts: bool = True
    ) -> LossPart:
        """Compute a part of the loss, and add the gradients of other leaves that it reads.

        Args:
            loss: gives a scalar, computed from copies of `per_token`.
            per_token: by name, values of the head.
            counts: whether this rank is the one that counts among those that compute the same loss
                from the values of all ranks.
        """
        copies = {n: x.detach().requires_grad_(x.requires_grad) for n, x in per_token.items()}
        with torch.enable_grad():
            value = loss(copies)
        if not value.requires_grad:
            return LossPart(value.detach(), {})
        heads = {id(x) for x in copies.values()}
        added, others = self._of_model([x for x in leaves_of(value) if id(x) not in heads])
        # Of the ranks that compute one loss, one adds to gradients that are summed over ranks.
        added = self._beside_twins(value, added) if counts else []
        inputs = [*(x for x in copies.values() if x.requires_grad), *added, *others]
        if inputs:
            self.guard.begin_loss(added)
            self.guard.others.begin(others)
            torch.autograd.backward(value, torch.full_like(value, self.factor), inputs=inputs)
            self.guard.others.end(others, float(counts) / self._reduced)
        found = {name: x.grad for name, x in copies.items() if x.grad is not None}
        return LossPart(value.detach(), found)

    def _beside_twins(self, value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Add gradients by parameters that twins stand for in forwards; returns the other leaves.

        Their own nodes are not run: a wrapper listens there (DistributedDataParallel).
        """
        sums = self.guard.sums
        if sums is None:
            return leaves
        summed = set(sums.parameters)
        held = [p for p in leaves if p in summed and p not in sums.leaves]
        if held:
            scale = torch.full_like(value, self.factor)
            found = torch.autograd.grad(value, held, scale, retain_graph=True)
            for parameter, gradient in zip(held, found, strict=True):
                assert isinstance(parameter, nn.Parameter)
                sums.add(parameter, gradient)
        return [leaf for leaf in leaves if all(leaf is not p for p in held)]

    def _of_model(self, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves that are parameters of the model, and the others, which no wrapper reduces.

        Raises UnsupportedError for parameters whose gradient would not be exact.
        """
        holder, ranks = self.holder, self.ranks
        known: set[Tensor] = set(self.guard.parameters)
        # Of split models; DistributedDataParallel defers all parameters.
        parts = set(holder.deferred_params(self.guard.parameters)) if holder.lockstep else set()
        for leaf in leaves:
            if leaf in parts:
                raise UnsupportedError(
                    "the loss reads a parameter of which every rank of a split model computes "
                    f"a part of the gradient (shape {tuple(leaf.shape)}), and the loss's own "
                    "would be counted on each. Run a backward of that term by itself."
                )
            if leaf in known and holder.reduces and not ranks.mean:
                raise UnsupportedError(
                    "the loss is one of all ranks, and reads a parameter of which this rank "
                    f"holds a shard (shape {tuple(leaf.shape)}): its gradient would be that of "
                    "this rank's part. Give the loss as a function, which is each rank's own, "
                    "or run a backward of that term by itself."
                )
        known |= set(holder.whole_parameters())
        if self.guard.sums is not None:
            known |= set(self.guard.sums.leaves)
        return [x for x in leaves if x in known], [x for x in leaves if x not in known]


# Parts by microbatch
# ------------------------------------------------------------


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
        """Token-additive: each microbatch's trained tokens, once for every rollout through them."""

        def of(inputs: MicrobatchInputs, outputs: HeadOutputs) -> LossPart | None:
            if not len(inputs.trained_tokens):
                return None
            view = self.views.of_tokens(inputs.trained_tokens)
            return self._part(inputs.trained_entry, view, outputs.per_token)

        return of

    def shown(self, plan: Plan) -> NDArray[np.bool_]:
        """Rollouts that the loss is shown: bool [N].

        All but those of which the plan leaves out trained tokens, and those coupled with them,
        whose terms the loss has declared to be 0.
        """
        batch = self.views.batch
        coupling = self.loss.coupling(batch)
        whole = batch.where_all_trained(labels_run(batch.offsets, plan.run_lengths))
        return ~np.isin(coupling, coupling[~whole])

    def by_rollouts(
        self, plan: Plan, prepared: list[MicrobatchInputs]
    ) -> tuple[MicrobatchLoss, Callable[[], Tensor]]:
        """Coupled rollouts together, in the microbatch that holds all of their trained tokens.

        Also returns a function that computes the loss of coupled rollouts that train on nothing.
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
            positions = np.searchsorted(tokens, inputs.trained_tokens[here])
            entries[positions] = inputs.trained_entry[here]
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
        part = self.gradients.of(lambda per_token: self._evaluated(per_token, view), nothing)
        return part.value.to(zero.dtype)

    def of_scores(self, given: LossInputs) -> LossPart:
        """The loss of the whole batch, and its gradients by this rank's values of each token."""
        view, tokens = given.views.of_rollouts(given.shown)
        at = on_device(tokens, self.host.device)
        scores = {name: x_T.detach().requires_grad_() for name, x_T in given.per_token.items()}

        def loss(per_token: Mapping[str, Tensor]) -> Tensor:
            return self._evaluated({name: x_T[at] for name, x_T in per_token.items()}, view)

        part = self.gradients.of(loss, scores, counts=given.counts)
        value = part.value if given.counts else torch.zeros_like(part.value)
        own = {name: gradient_T[given.own] for name, gradient_T in part.gradients.items()}
        return replace(part, value=value, gradients=own)

    def _part(
        self, entries: IntArray, view: LossBatch, per_token: Mapping[str, Tensor]
    ) -> LossPart:
        index = on_device(entries, self.host.device)

        def loss(copies: Mapping[str, Tensor]) -> Tensor:
            return evaluate_loss(self.loss, outputs_of(copies, index), view, self.host.head)

        return self.gradients.of(loss, per_token)

    def _evaluated(self, per_token: Mapping[str, Tensor], view: LossBatch) -> Tensor:
        return evaluate_loss(self.loss, LossOutputs(**per_token), view, self.host.head)


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
