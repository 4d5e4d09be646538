"""Ordinary training on single rollouts, as a baseline for exactness.

It runs the forward of the stock model on one rollout at a time, with a log-softmax over its logits.
All exactness tests compare with it. It uses the views of losses (`losses.views`) and the recorder
of router outputs. It uses no plan, microbatch, kernel, head or schedule of the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter
from forkpoint.engine.routing import RouterOutputs, RouterTerms
from forkpoint.hosts.libraries import stock_of
from forkpoint.hosts.routers import record_routers
from forkpoint.losses.base import Denominators, Loss, LossOutputs
from forkpoint.losses.evaluate import check_leaves, evaluate_loss
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray


@dataclass(frozen=True, eq=False)
class DenseRun:
    """Results of ordinary training on a batch, one rollout at a time."""

    loss: float
    """Loss, without the router loss."""
    per_token: dict[str, Tensor]
    """Results [T] by name: "logprobs" and "entropies" of a language model, "values" of a critic."""
    gradients: dict[str, Tensor | None]
    """Gradients by name of parameter; None for a parameter without one."""
    router_loss: float | None = None
    """Router loss of a mixture of experts; None without one."""


@dataclass(frozen=True, eq=False)
class RouterSums:
    """Part of one rank in router statistics, before any backward."""

    statistics: int
    """Number of statistics of the rollouts of this rank."""
    counts_E: Tensor | None
    """float64 [E], on the CPU: number of choices of each expert, if one statistic covers the
    rollouts of all ranks; else None."""
    rows: int
    """Number of pairs of token and layer in the statistics."""


class DenseRouters:
    """Router loss of a stock model, with the graph of one rollout at a time.

    It follows the definitions of `losses.RouterLoss`. A first pass without a graph counts experts;
    counts have no gradient. In a second pass each rollout adds its term, which is linear in the
    probabilities. Between the passes, `counted` sums the counts over ranks.
    """

    def __init__(
        self,
        routers: Sequence[FoundRouter],
        terms: RouterTerms,
        changes: Changes,
        *,
        last_token: bool,
        joins: bool = False,
        gather: Callable[[RouterSums], Sequence[RouterSums]] | None = None,
    ) -> None:
        """
        Args:
            routers: routers of the model, in the order of its layers.
            changes: hooks that record their outputs are added to these changes, and removed when
                these are undone.
            last_token: whether last tokens of rollouts count.
            joins: whether one statistic covers the rollouts of all ranks.
            gather: collects the sums of all ranks; None for one process.
        """
        self.last_token: bool = last_token
        self._joins, self._gather, self._terms = joins, gather, terms
        self._parts = int(terms.parts.max(initial=-1)) + 1
        self._mean_over = self._parts
        """Number of statistics of all ranks, over which the loss is a mean."""
        self.outputs: RouterOutputs = RouterOutputs(len(routers))
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        """float64: counts [P, E], probabilities [P, E] and squared log-sum-exps [P]."""
        self._rows_P: list[int] = [0] * self._parts
        record_routers(routers, self.outputs.note, changes)

    @torch.no_grad()
    def count(self, rollout: int, dtype: torch.dtype) -> None:
        """Count the experts of a rollout's tokens. dtype: dtype of the loss."""
        part = int(self._terms.parts[rollout])
        for logits_TE, chosen_Tk in self.outputs.by_layer.values():
            x = logits_TE.to(dtype)
            experts = x.shape[-1]
            if self._sums is None:
                zeros = x.new_zeros(self._parts, experts, dtype=torch.float64)
                self._sums = zeros, zeros.clone(), zeros[:, 0].clone()
            counts_PE, probability_PE, z_P = self._sums
            counts_PE[part] += torch.bincount(chosen_Tk.flatten(), minlength=experts)
            probability_PE[part] += x.softmax(-1).double().sum(0)
            z_P[part] += x.logsumexp(-1).square().double().sum()
            self._rows_P[part] += len(x)
        self.outputs.take()

    def counted(self) -> None:
        """Finish counting, and add up the counts of all ranks. Collective on several ranks."""
        if self._gather is None:
            return
        sums = self._sums
        counts_E = sums[0][0].cpu() if self._joins and sums is not None else None
        every = self._gather(RouterSums(self._parts, counts_E, sum(self._rows_P)))
        if not self._joins:
            self._mean_over = sum(each.statistics for each in every)
            return
        self._mean_over = 1
        self._rows_P = [sum(each.rows for each in every)] * self._parts
        if sums is not None:
            found = [each.counts_E for each in every if each.counts_E is not None]
            self._sums = torch.stack(found).sum(0)[None].to(sums[0].device), *sums[1:]

    def value(self) -> float:
        """Router loss after all rollouts are counted.

        On several ranks it is the part of this rank. The parts of all ranks add up to the loss.
        """
        if self._sums is None:
            return 0.0
        total = 0.0
        for rows, counts_E, probability_E, z in zip(self._rows_P, *self._sums, strict=True):
            if rows:
                balance = (counts_E / rows * (probability_E / rows)).sum()
                total += self._terms.load_balancing * len(counts_E) * float(balance)
                total += self._terms.z * float(z) / rows
        return total / self._mean_over

    def term(self, rollout: int, dtype: torch.dtype) -> Tensor | None:
        """Term of one rollout in the router loss, with its graph.

        The terms of all rollouts add up to the loss, and their gradients to its gradient.
        """
        part, terms, total = int(self._terms.parts[rollout]), self._terms, None
        rows = self._rows_P[part]
        for logits_TE in self.outputs.take():
            assert self._sums is not None
            x = logits_TE.to(dtype)
            found = x.new_zeros(())
            if terms.load_balancing:
                share_E = (self._sums[0][part] / rows).to(dtype)
                found = found + terms.load_balancing * x.shape[-1] * (x.softmax(-1) * share_E).sum()
            if terms.z:
                found = found + terms.z * x.logsumexp(-1).square().sum()
            total = _added(total, found / (rows * self._mean_over))
        return total


def dense_run(
    model: nn.Module,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
    entering: Callable[[IntArray], None] | None = None,
    *,
    head_tokens: int | None = None,
    routers: DenseRouters | None = None,
) -> DenseRun:
    """Compute loss, log-probs, entropies and all gradients of ordinary training.

    For a critic (a token classifier with one label) the results are values instead of log-probs. A
    first pass computes them without a graph. The loss then gives gradients with respect to them. A
    second pass runs each rollout again and multiplies by these gradients, so that the graph of only
    one rollout exists at a time. If no token is trained, parameters that the forward reads get zero
    gradients. `.grad` is unchanged.

    Args:
        model: a stock model.
        batch: the rollouts.
        loss: the loss.
        denominators: counts that means divide by; None takes those of the batch.
        entering: callback before each forward, with the tokens that it runs: int64, positions in
            the flat tokens of the batch.
        head_tokens: number of tokens whose logits exist at a time; None is all of a rollout. It has
            no effect for a critic, which has one logit per token.
        routers: a router loss, whose gradients are added. All rollouts then run.

    Raises the errors of the loss, and UnsupportedError if it reads another trainable tensor.
    """
    parameters = dict(model.named_parameters())
    before: dict[Tensor, Tensor | None] = {p: p.grad for p in parameters.values()}
    passes = _Passes(model, batch, loss, entering, head_tokens, routers)
    try:
        for p in parameters.values():
            p.grad = None
        passes.compute_values()
        views = LossViews(
            batch, denominators or batch_denominators(batch), passes.device, passes.dtype
        )
        view, _ = views.of_rollouts(np.ones(len(batch), bool))
        value = evaluate_loss(loss, passes.outputs(), view, passes.head)
        if value.requires_grad:
            check_leaves(value, passes.per_token.values())
            value.backward()
        if value.requires_grad or routers is not None:
            passes.compute_gradients()
        if not batch.loss_mask.any():
            passes.add_zeros()
        gradients = {
            name: None if p.grad is None else p.grad.detach() for name, p in parameters.items()
        }
    finally:
        for leaf, gradient in before.items():
            leaf.grad = gradient
    detached = {name: values_T.detach() for name, values_T in passes.per_token.items()}
    router_loss = None if routers is None else routers.value()
    return DenseRun(float(value.detach()), detached, gradients, router_loss)


Use = Callable[[Tensor, dict[str, Tensor]], Tensor | None]
"""Maps positions of trained tokens, and the model's outputs for them, to a scalar to differentiate,
or None."""


class _Passes:
    """Passes of a stock model over the rollouts of a batch, one rollout at a time."""

    def __init__(
        self,
        model: nn.Module,
        batch: RolloutBatch,
        loss: Loss,
        entering: Callable[[IntArray], None] | None,
        head_tokens: int | None,
        routers: DenseRouters | None,
    ) -> None:
        """Arguments are those of `dense_run`."""
        weight = next(model.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._stock = stock_of(model)
        self._batch, self._entering = batch, entering
        self._head_tokens, self._routers = head_tokens, routers
        self._runs_last = routers is not None and routers.last_token
        names = ("values",) if self._stock.is_critic else ("logprobs", "entropies")
        self._wanted = [name for name in names if name != "entropies" or loss.needs_entropy]
        self.per_token: dict[str, Tensor] = {
            name: torch.zeros(batch.logical_tokens, dtype=self.dtype, device=self.device)
            for name in names
        }

    def outputs(self) -> LossOutputs:
        """Outputs for the loss. They collect gradients from now on."""
        leaves = {name: self.per_token[name].requires_grad_() for name in self._wanted}
        # Not the leaves, because the loss may change its inputs in place.
        return LossOutputs(**{name: leaf * 1.0 for name, leaf in leaves.items()})

    @property
    def head(self) -> str:
        """Name of the outputs that a loss is computed from."""
        return "values" if self._stock.is_critic else "logprobs"

    def compute_values(self) -> None:
        """Compute the values of all trained tokens, without a graph."""
        with torch.no_grad():
            for rollout in range(len(self._batch)):
                self._run(rollout, self._keep)
                if self._routers is not None:
                    self._routers.count(rollout, self.dtype)
        if self._routers is not None:
            self._routers.counted()

    def compute_gradients(self) -> None:
        """Add the gradients of the parameters, from those of the outputs."""
        for rollout in range(len(self._batch)):
            self._run(rollout, self._weigh)

    def add_zeros(self) -> None:
        """Add zeros to the gradients of the parameters that the forward reads.

        Ordinary training multiplies the loss of every token by the mask, so all gradients are
        zeros.
        """
        with torch.enable_grad():
            ids = torch.as_tensor(self._batch.token_ids[:1].copy(), device=self.device)
            empty = self._stock.logits(ids[None])[:, :0]
        if empty.requires_grad:
            empty.sum().backward()

    def _keep(self, tokens: Tensor, found: dict[str, Tensor]) -> None:
        for name, values_T in self.per_token.items():
            values_T[tokens] = found[name]

    def _weigh(self, tokens: Tensor, found: dict[str, Tensor]) -> Tensor | None:
        total = None
        for name in self._wanted:
            gradient = self.per_token[name].grad
            if gradient is not None:
                total = _added(total, (gradient[tokens] * found[name]).sum())
        return total

    def _run(self, rollout: int, use: Use) -> None:
        """Run one rollout, and a backward of the result of `use` for its trained tokens and of its
        part of the router loss."""
        batch, stock, routers = self._batch, self._stock, self._routers
        begin, end = int(batch.offsets[rollout]), int(batch.offsets[rollout + 1])
        if self._entering is not None:
            self._entering(np.arange(begin, end - (not self._runs_last)))
        trained = torch.as_tensor(np.flatnonzero(batch.loss_mask[begin:end]), device=self.device)
        ids = torch.as_tensor(batch.token_ids[begin:end].copy(), device=self.device)
        shown = batch.shown([rollout])
        # A medium that ends at the end of the rollout is not cut. No trained token attends to it.
        whole = shown is not None and shown.types_NL[0, -1] > 0
        read = ids if whole or self._runs_last else ids[:-1]
        if shown is not None:
            shown = shown._replace(types_NL=shown.types_NL[:, : len(read)])
        if len(read) == 0 or (len(trained) == 0 and routers is None):
            return
        temperature = float(batch.temperatures[rollout])
        if routers is not None:
            routers.outputs.begin()

        def of_logits(part: slice, logits_nV: Tensor) -> Tensor | None:
            places = trained[part]
            if stock.is_critic:
                return use(places + begin, {"values": logits_nV.to(self.dtype)[:, 0]})
            every_nV = (logits_nV.to(self.dtype) / temperature).log_softmax(-1)
            entropies = -(every_nV.exp() * every_nV).sum(-1)
            logprobs = every_nV.gather(-1, ids[places, None])[:, 0]
            return use(places + begin, {"logprobs": logprobs, "entropies": entropies})

        def of_part(part: slice) -> Tensor | None:
            return of_logits(part, stock.logits(read[None], trained[part] - 1, shown)[0])

        with Changes() as changes:
            if self._head_tokens is None or stock.is_critic or len(trained) == 0:
                logits_nV = stock.logits(read[None], shown=shown)[0, trained - 1]
                total = of_logits(slice(None), logits_nV)
            else:
                stock.run_decoder_once(read[None], changes, shown)
                total = None
                for first in range(0, len(trained), self._head_tokens):
                    part = slice(first, first + self._head_tokens)
                    total = _added(
                        total,
                        checkpoint(of_part, part, use_reentrant=False, preserve_rng_state=False)
                        if torch.is_grad_enabled()
                        else of_part(part),
                    )
            if routers is not None:
                routers.outputs.end()
                if torch.is_grad_enabled():
                    total = _added(total, routers.term(rollout, self.dtype))
            if total is not None and total.requires_grad:
                total.backward()


def _added(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    return term if total is None else total if term is None else total + term
