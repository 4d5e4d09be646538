"""Base class of losses, the views that they are called with, and functions as losses.

The engine shows a loss one view of the batch at a time and adds up what the calls return. A loss is
right for every view because whatever it divides by was fixed over the whole batch beforehand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.errors import ConfigError, RolloutError
from forkpoint.losses.outputs import MODELS, REMEDIES, Head
from forkpoint.losses.outputs import LossOutputs as LossOutputs
from forkpoint.rollouts.batch import RolloutBatch, short

Decomposition = Literal["token", "rollout", "joint"]

SOURCES = {
    "old_logprobs": "policy.score(batch) computes log-probs under a model",
    "reference_logprobs": "policy.score(batch) computes log-probs under a model",
    "weights": "importance weights are exp(old_logprobs - sampler_logprobs), bounded",
    "returns": "docs/reference/losses.md computes them from rewards and a critic's values",
    "old_values": "they are the critic's policy.score(batch).values before its update",
}
"""Fields of a RolloutBatch that a loss may need, and where they come from."""

LOSSES_OF: dict[Head, str] = {
    "logprobs": "a loss of log-probs, such as losses.PPO",
    "values": "losses.ValueLoss",
}


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Denominators of means: counts of the whole batch, over all calls and ranks of a step.

    A count of 0 is allowed and means that there is nothing to divide.

    Attributes:
        tokens: trained tokens.
        rollouts: rollouts, those without trained tokens included.
        groups: groups.

    Raises ConfigError for a count that is negative or not finite.
    """

    tokens: float
    rollouts: float
    groups: float

    def __post_init__(self) -> None:
        for name in ("tokens", "rollouts", "groups"):
            check_number(f"denominators.{name}", getattr(self, name))


def check_denominators(given: object) -> None:
    """Raises ConfigError for what is neither Denominators nor None."""
    if given is not None and not isinstance(given, Denominators):
        raise ConfigError(
            f"denominators is {short(given)} of type {type(given).__name__}; it takes "
            "forkpoint.losses.Denominators(tokens=..., rollouts=..., groups=...), or None for the "
            "batch's own counts."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LossBatch:
    """A view of the batch: T tokens of n rollouts, flat, the rollouts one after another.

    A view of a token-additive loss may hold any of the batch's tokens, one of a rollout-additive
    loss holds whole rollouts, one of a joint loss all rollouts that are coupled. Rollouts that the
    loss has declared to be zero (`Loss.zero_rollouts`) may be in none. Tensors lie on the
    device of the outputs, and floats have their dtype.

    Attributes:
        offsets: int64 [n + 1]; rollout i has the view's tokens `offsets[i] : offsets[i + 1]`.
        token_index: int64 [T]; for each token, its position in the RolloutBatch's flat tokens, for
            values that are kept outside of the batch.
        token_rollout: int64 [T]; for each token, which of the n rollouts it belongs to.
        loss_mask: bool [T].
        advantages: [T].
        old_logprobs, reference_logprobs, weights, returns, old_values: [T], or None where the batch
            has none.
        rollout_tokens: [n]; trained tokens of the whole rollout, however few of them are in this
            view.
        rollout_index: int64 [n]; the rollout's position in the RolloutBatch.
        group_index: int64 [n]; the rollout's group in the RolloutBatch.
        temperatures: [n].
        denominators: of the whole batch, not of this view.
        rollout_ids: n texts.
    """

    offsets: Tensor
    token_index: Tensor
    token_rollout: Tensor
    loss_mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    weights: Tensor | None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    rollout_tokens: Tensor
    rollout_index: Tensor
    group_index: Tensor
    temperatures: Tensor
    denominators: Denominators
    rollout_ids: tuple[str, ...]

    def trained(self, values_T: Tensor) -> Tensor:
        """`values_T` with 0 outside the loss mask, where then neither value nor gradient counts."""
        return torch.where(self.loss_mask, values_T, 0)

    def to_tokens(self, values_n: Tensor) -> Tensor:
        """For each token, the value of its rollout: [T]."""
        return values_n.index_select(0, self.token_rollout)

    def rollout_sum(self, values_T: Tensor) -> Tensor:
        """The sum of each rollout's values: [n]."""
        return values_T.new_zeros(len(self.rollout_ids)).index_add(0, self.token_rollout, values_T)

    def rollout_mean(self, values_T: Tensor) -> Tensor:
        """The mean of each rollout's values over its trained tokens, 0 where it has none: [n].

        It is the mean only in views that hold whole rollouts; in others it is their share of it.
        """
        return self.rollout_sum(self.trained(values_T)) / self.rollout_tokens.clamp(min=1)

    def total(self, terms_T: Tensor, normalize: Literal["token", "rollout", "none"]) -> Tensor:
        """The trained tokens' terms as one scalar, additive over any views of the batch.

        "token": their sum over `denominators.tokens`. "rollout": the mean over rollouts of the mean
        over the rollout's trained tokens; a rollout without any counts as 0. "none": their sum.
        """
        terms_T = self.trained(terms_T)
        if normalize == "none":
            return terms_T.sum()
        if normalize == "token":
            return divide(terms_T.sum(), self.denominators.tokens)
        terms_T = terms_T / self.to_tokens(self.rollout_tokens.clamp(min=1))
        return divide(terms_T.sum(), self.denominators.rollouts)


class Loss:
    """A loss and how it decomposes. Subclass it, set what follows, and define `__call__`.

    Every loss here raises ConfigError for arguments that are not allowed.

    Attributes:
        decomposition: "token" if the loss of the batch is the sum over any split of its tokens into
            views, "rollout" if it is so over any split into whole rollouts, "joint" if coupled
            rollouts (see `coupling`) must be seen together. A loss that claims too much trains on
            wrong gradients. Views of a "token" loss may leave out tokens outside the loss mask.
        reads: "logprobs" for a loss of a language model, "values" for one of a critic. With the
            other model it is refused; None, of a plain function, leaves that to what the function
            reads.
        needs_entropy: whether `outputs.entropies` is wanted, with gradients.
        needs: fields of the RolloutBatch without which the loss cannot be computed.
        takes_weights: False where the loss has no use for per-token weights; they are then refused.
        uses_advantages: whether the loss reads advantages; a batch without any is then refused.
        across_ranks: whether rollouts that the loss couples may lie on several ranks. Log-probs and
            rollouts of all ranks are then gathered on each, at the price of a pass of scores.

    A call must not read values back to the host (`.item()`, `if tensor:`): what depends on values
    is checked in `check`, on numpy arrays, before anything runs.
    """

    decomposition: ClassVar[Decomposition]
    reads: ClassVar[Head | None] = "logprobs"
    needs_entropy: bool = False
    needs: tuple[str, ...] = ()
    takes_weights: bool = True
    uses_advantages: bool = False
    across_ranks: ClassVar[bool] = False

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        """The view's part of the loss, a scalar with a graph to `outputs`."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__.")

    def check(self, batch: RolloutBatch) -> None:
        """Raises RolloutError where this loss cannot be computed on `batch`."""
        for name in self.needs:
            if getattr(batch, name) is None:
                raise RolloutError(
                    f"{self!r} needs {name}, but the rollouts have none. Give every Rollout its "
                    f"{name}; {SOURCES[name]}."
                )
        if self.uses_advantages and not batch.has_advantages:
            raise RolloutError(
                f"{self!r} needs advantages, but the batch was made without any. Give them where "
                "the batch is made: one number per rollout, or one per token."
            )
        if batch.weights is not None and not self.takes_weights:
            raise RolloutError(
                f"The rollouts have weights, for which {type(self).__name__} has no use. Leave "
                "weights out, or take a loss that multiplies its terms by them, such as GRPO."
            )

    def check_head(self, head: Head) -> None:
        """Raises ConfigError where this loss is not one of a model that gives `head`."""
        if self.reads not in (head, None) or (self.needs_entropy and head == "values"):
            wanted: Head = "logprobs" if self.needs_entropy else self.reads or "logprobs"
            raise ConfigError(
                f"{self!r} is a loss of {MODELS[wanted]}'s {wanted}, but the model is "
                f"{MODELS[head]}, which gives {head}. Train it with {LOSSES_OF[head]}, or "
                f"{REMEDIES[wanted]}."
            )

    def coupling(self, batch: RolloutBatch) -> NDArray[np.int64]:
        """Which rollouts must lie in one graph: int64 [N], equal for those that must.

        All of them for a joint loss, unless it knows better; otherwise each is on its own.
        """
        count = len(batch.rollout_ids)
        return np.zeros(count, np.int64) if self.decomposition == "joint" else np.arange(count)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        """Rollouts whose terms are 0, and have gradients of 0, whatever the model computes.

        A step leaves them out, so that a rollout that is declared wrongly is not trained on;
        `policy.verify` finds that. Of rollouts that the loss couples, all or none are left out. A
        subclass that defines `__call__` or another method anew declares for itself: what its base
        class declares then counts for nothing.

        Returns bool [N], from numpy arrays of the batch alone; here none.
        """
        return np.zeros(len(batch), bool)


LossFunction = Callable[[LossOutputs, LossBatch], Tensor]


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function of (outputs, batch) as a loss. In a step of several ranks it is each rank's own.

    Attributes:
        function: gives the view's part of the loss, a scalar with a graph.
        decomposition: what the function promises, as in `Loss`. A function by itself is joint,
            since nothing is known of it.
        needs_entropy: whether `outputs.entropies` is wanted, with gradients.
    """

    reads: ClassVar[Head | None] = None

    function: LossFunction
    decomposition: Decomposition = "joint"  # pyright: ignore[reportIncompatibleVariableOverride]
    needs_entropy: bool = False

    def __repr__(self) -> str:
        """The function's name, without the address that its own repr has."""
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return self.function(outputs, batch)


def as_loss(loss: Loss | LossFunction) -> Loss:
    """`loss` itself if it is a Loss; a function of (outputs, batch) becomes a joint one.

    Raises ConfigError for anything else, for a class in place of its instance, and for a Loss whose
    decomposition or needs are not allowed.
    """
    if isinstance(loss, type):
        raise ConfigError(
            f"The loss is the class {loss.__name__}; pass an instance, {loss.__name__}()."
        )
    if not isinstance(loss, Loss):
        if not callable(loss) or hasattr(loss, "decomposition"):
            raise ConfigError(
                f"The loss is {loss!r} of type {type(loss).__name__}; it takes a "
                "forkpoint.losses.Loss or a function of (outputs, batch). A loss that declares its "
                "decomposition subclasses Loss."
            )
        return FunctionLoss(cast(LossFunction, loss))
    check_choice("decomposition", getattr(loss, "decomposition", None), get_args(Decomposition))
    for name in loss.needs:
        check_choice("needs", name, tuple(SOURCES))
    return loss


def is_own(loss: object) -> bool:
    """Whether each of several ranks has its own such loss, so that gradients are averaged over the
    ranks; otherwise the ranks' losses are parts of one."""
    return not isinstance(loss, Loss) or isinstance(loss, FunctionLoss)


def divide(total: Tensor, count: float) -> Tensor:
    """`total / count`, and `total`, then an empty sum, where there is nothing to divide by."""
    return total / count if count else total


def check_number(
    name: str, value: object, *, positive: bool = False, infinite: bool = False
) -> None:
    """Raises ConfigError unless `value` is a number of at least 0 (above 0 if `positive`)."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    large_enough = number > 0 if positive else number >= 0
    if large_enough and (infinite or number < math.inf):
        return
    raise ConfigError(
        f"{name} is {value!r}; it takes a {'' if infinite else 'finite '}number "
        f"{'above' if positive else 'of at least'} 0."
    )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}.")
