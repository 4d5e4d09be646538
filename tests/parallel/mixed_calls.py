"""Calls of a policy on ranks, mixed with stock losses of the same model, beside dense training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from scenarios_of_ranks import Scenario, distance, gradients, model_of, on_ranks
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from forkpoint import RolloutBatch
from forkpoint.errors import RankError
from forkpoint.losses import Loss
from forkpoint.losses.base import FunctionLoss
from forkpoint.testing import dense_run, lifted_upcasts


def own(logprobs_T: Tensor, weights_T: Tensor) -> Tensor:
    """A loss that couples all tokens of a rank."""
    total = (logprobs_T * weights_T).sum()
    return total + 0.01 * total.square()


def own_function(outputs: Any, batch: Any) -> Tensor:
    return own(outputs.logprobs, batch.trained(batch.advantages))


def stock(model: Any, rank: int) -> Tensor:
    """A stock loss by the model's own forward, of tokens of this rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.randint(0, 60, (2, 11 + rank), generator=generator)
    logits = model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits
    return 20 * F.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device)
    )


class MixedCalls:
    """A model that ranks hold, and the same model in one process, trained by the same calls."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rank: int = dist.get_rank()
        inner, self.other = model_of(scenario), model_of(scenario)
        self.inner: Any = inner
        self.model: Any = scenario.wrap(inner)
        config = replace(scenario.config, restore_grads=True)
        self.policy = on_ranks(self.model, config, scenario.gather)
        self.batches = [RolloutBatch(part) for part in scenario.rollouts]
        self.kept: list[Tensor] = []
        self.outcomes: list[str] = []
        """Of steps that failed, what became of gradients."""

    def run(self, calls: Sequence[str]) -> float:
        """The distance of gradients from dense training's after these calls."""
        with lifted_upcasts(self.inner), lifted_upcasts(self.other):
            for call in calls:
                getattr(self, f"_{call}")()
            names = [name for name, _ in self.other.named_parameters()]
            return distance(gradients(self.inner), gradients(self.other), names)

    # Calls of both
    # ------------------------------------------------------------

    @property
    def _batch(self) -> RolloutBatch:
        return self.batches[self.rank]

    def _own(self) -> Tensor:
        """The own loss, from log-probs."""
        logprobs_T = self.policy.logprobs(self._batch)
        weights_T = torch.as_tensor(self._batch.advantages * self._batch.loss_mask)
        return own(logprobs_T, weights_T.to(logprobs_T))

    def _function(self) -> None:
        self.policy.forward_backward(self._batch, own_function)
        self._wanted_own()

    def _loss(self) -> None:
        self.policy.forward_backward(self._batch, self.scenario.loss)
        whole = RolloutBatch([r for part in self.scenario.rollouts for r in part])
        self._add(dense_run(self.other, whole, self.scenario.loss).gradients)

    def _logprobs(self) -> None:
        self._own().backward()
        self._wanted_own()

    def _stock(self) -> None:
        stock(self.model, self.rank).backward()
        self._wanted_stock()

    def _sum(self) -> None:
        ours = self._own()
        (ours + stock(self.model, self.rank)).backward()
        self._wanted_own()
        self._wanted_stock()

    def _sum_of_stock_first(self) -> None:
        value = stock(self.model, self.rank)
        (self._own() + value).backward()
        self._wanted_own()
        self._wanted_stock()

    def _forward(self) -> None:
        self.kept.append(stock(self.model, self.rank))

    def _backward(self) -> None:
        self.kept.pop().backward()
        self._wanted_stock()

    # Calls that leave no gradient
    # ------------------------------------------------------------

    def _dropped(self) -> None:
        stock(self.model, self.rank)

    def _score(self) -> None:
        self.policy.score(self._batch)

    def _logprobs_dropped(self) -> None:
        self.policy.logprobs(self._batch)

    def _fails(self) -> None:
        def fails(outputs: Any, batch: Any) -> Tensor:
            if self.rank == 0:
                raise ZeroDivisionError("of the test")
            return own_function(outputs, batch)

        try:
            self.policy.forward_backward(self._batch, fails)
        except (ZeroDivisionError, RankError):
            assert self.policy.last_step is not None
            self.outcomes.append(self.policy.last_step.gradients)

    def _unsynced(self) -> None:
        self._synchronise(False)

    def _synced(self) -> None:
        self._synchronise(True)

    def _synchronise(self, now: bool) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = now  # as no_sync() does
        else:
            self.model.set_requires_gradient_sync(now)

    # Dense training
    # ------------------------------------------------------------

    def _wanted_own(self) -> None:
        loss: Loss = FunctionLoss(own_function)
        for batch in self.batches:
            if len(batch):
                self._add(dense_run(self.other, batch, loss).gradients, 1 / len(self.batches))

    def _wanted_stock(self) -> None:
        for rank in range(len(self.batches)):
            (stock(self.other, rank) / len(self.batches)).backward()

    def _add(self, found: dict[str, Tensor | None], factor: float = 1.0) -> None:
        for name, parameter in self.other.named_parameters():
            gradient = found[name]
            if gradient is not None:
                before = 0 if parameter.grad is None else parameter.grad
                parameter.grad = before + factor * gradient


def mixed(scenario: Scenario, sequences: Sequence[str]) -> dict[str, float]:
    """By sequence of calls, the error on this rank."""
    return {calls: MixedCalls(scenario).run(calls.split()) for calls in sequences}
