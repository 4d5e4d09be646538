"""Base class of losses, their views of a batch, and losses from functions.

The engine calls a loss with one view of the batch at a time and sums the results. The sum does not
depend on the views, because denominators are those of the whole batch.
"""

import math
import sys
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
LARGEST_NUMBER = float(np.finfo(np.float32).max)
"""Largest finite number that an option may have. Most models compute losses in float32."""

SOURCES = {
    "old_logprobs": "policy.score(batch) computes log-probs under a model",
    "reference_logprobs": "policy.score(batch) computes log-probs under a model",
    "weights": "importance weights are exp(old_logprobs - sampler_logprobs), bounded",
    "returns": "docs/reference/losses.md shows how to compute them from rewards and values",
    "old_values": "they are the critic's policy.score(batch).values before its update",
}
"""Fields of a RolloutBatch that a loss may need, with their sources."""

LOSSES_OF: dict[Head, str] = {
    "logprobs": "a loss of log-probs, such as losses.PPO",
    "values": "losses.ValueLoss",
}


NO_ENTROPIES = (
    "reads outputs.entropies, which is None because it does not ask for them. Give "
    "losses.FunctionLoss(function, needs_entropy=True), or set needs_entropy = True in its class."
)


def no_field(name: str) -> str:
    """Message about a field of a view that is None. The name of the loss precedes it."""
    return (
        f"reads batch.{name}, which is None because the rollouts have none. Give every Rollout its "
        f"{name}; {SOURCES[name]}."
    )


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Denominators of means: counts over all calls and ranks of a step.

    If a count is 0, the sum is not divided.

    Attributes:
        tokens: number of trained tokens.
        rollouts: number of rollouts, including those without trained tokens.
        groups: number of groups.

    Raises ConfigError for a count that is negative or not finite.
    """

    tokens: float
    rollouts: float
    groups: float

    def __post_init__(self) -> None:
        for name in ("tokens", "rollouts", "groups"):
            check_number(f"denominators.{name}", getattr(self, name))


def check_denominators(given: object) -> None:
    """Raises ConfigError unless the value is Denominators or None."""
    if given is not None and not isinstance(given, Denominators):
        raise ConfigError(
            f"denominators is {short(given)} of type {type(given).__name__}; it takes "
            "forkpoint.losses.Denominators(tokens=..., rollouts=..., groups=...), or None for the "
            "batch's own counts."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class LossBatch:
    """A view of the batch: T tokens of n rollouts, flat, in order of rollouts.

    A view for a token-additive loss may hold any tokens of the batch. A view for a rollout-additive
    loss holds whole rollouts, and one for a joint loss holds all coupled rollouts. Rollouts that
    the loss declares to be zero (`Loss.zero_rollouts`) may be in no view. Tensors are on the device
    of the outputs, and floats have their dtype.

    Attributes:
        offsets: int64 [n + 1]; rollout i has the tokens `offsets[i] : offsets[i + 1]` of the view.
        token_index: int64 [T]; position of each token in the flat tokens of the RolloutBatch, to
            look up values outside of the batch.
        token_rollout: int64 [T]; index from 0 to n - 1 of the rollout of each token.
        loss_mask: bool [T].
        advantages: [T].
        old_logprobs, reference_logprobs, weights, returns, old_values: [T], or None if the batch
            has none.
        rollout_tokens: [n]; number of trained tokens of the whole rollout, in this view or not.
        rollout_index: int64 [n]; position of the rollout in the RolloutBatch.
        group_index: int64 [n]; group of the rollout in the RolloutBatch.
        temperatures: [n].
        denominators: those of the whole batch, not of this view.
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
        """Set values, and their gradients, to 0 outside the loss mask: [T]."""
        return torch.where(self.loss_mask, values_T, 0)

    def to_tokens(self, values_n: Tensor) -> Tensor:
        """Repeat the value of each rollout for its tokens: [T]."""
        return values_n.index_select(0, self.token_rollout)

    def rollout_sum(self, values_T: Tensor) -> Tensor:
        """Sum the values of each rollout: [n]."""
        return values_T.new_zeros(len(self.rollout_ids)).index_add(0, self.token_rollout, values_T)

    def rollout_mean(self, values_T: Tensor) -> Tensor:
        """Mean over the trained tokens of each rollout, 0 for a rollout without any: [n].

        If the view has only a part of a rollout, the result is the contribution of this part to the
        mean.
        """
        return self.rollout_sum(self.trained(values_T)) / self.rollout_tokens.clamp(min=1)

    def total(self, terms_T: Tensor, normalize: Literal["token", "rollout", "none"]) -> Tensor:
        """Combine the terms of trained tokens into a scalar that is additive over views.

        "token": their sum, divided by `denominators.tokens`. "rollout": the mean over rollouts of
        the mean over the trained tokens of each rollout, 0 for a rollout without any. "none": their
        sum.
        """
        terms_T = self.trained(terms_T)
        if normalize == "none":
            return terms_T.sum()
        if normalize == "token":
            return divide(terms_T.sum(), self.denominators.tokens)
        terms_T = terms_T / self.to_tokens(self.rollout_tokens.clamp(min=1))
        return divide(terms_T.sum(), self.denominators.rollouts)


# In a function, a loss computes its terms without `Loss.check`.


def given(batch: LossBatch, name: str) -> Tensor:
    """A field of the view. Raises ConfigError if the rollouts have none."""
    value = getattr(batch, name)
    if value is None:
        raise ConfigError(f"the loss {no_field(name)}")
    return value


def given_entropies(outputs: LossOutputs) -> Tensor:
    """Entropies of the view. Raises ConfigError if there are none."""
    if outputs.entropies is None:
        raise ConfigError(f"the loss {NO_ENTROPIES}")
    return outputs.entropies


class Loss:
    """Base class of losses. A subclass sets the attributes below and defines `__call__`.

    Losses raise ConfigError for arguments that are not allowed.

    Attributes:
        decomposition: "token" if the loss is the sum over views for any split of the tokens,
            "rollout" if it is that sum for any split into whole rollouts, "joint" if coupled
            rollouts (see `coupling`) must be in one view. A wrong value gives wrong gradients.
            Views of a "token" loss may leave out tokens outside the loss mask.
        reads: "logprobs" for a loss of a language model, "values" for a loss of a critic. Other
            models are refused. None, for a function, accepts both.
        needs_entropy: whether the loss needs `outputs.entropies`, with gradients.
        needs: fields of the RolloutBatch that the loss needs.
        takes_weights: whether the loss uses per-token weights. If not, they are refused.
        uses_advantages: whether the loss uses advantages. If so, a batch without them is refused.
        across_ranks: whether coupled rollouts may be on several ranks. Each rank then gathers the
            log-probs and rollouts of all ranks, which takes a pass of scores.

    A call must not read values back to the host (`.item()`, `if tensor:`). Check values in `check`,
    on numpy arrays, before anything runs.
    """

    decomposition: ClassVar[Decomposition]
    reads: ClassVar[Head | None] = "logprobs"
    needs_entropy: bool = False
    needs: tuple[str, ...] = ()
    takes_weights: bool = True
    uses_advantages: bool = False
    across_ranks: ClassVar[bool] = False

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        """Compute the view's part of the loss: a scalar with a graph to `outputs`."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__.")

    def check(self, batch: RolloutBatch) -> None:
        """Raises RolloutError if this loss cannot be computed on `batch`."""
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
                f"The rollouts have weights, which {type(self).__name__} does not use. Leave "
                "weights out, or take a loss that multiplies its terms by them, such as GRPO."
            )

    def check_head(self, head: Head) -> None:
        """Raises ConfigError if the loss does not fit a model with the output `head`."""
        if self.reads not in (head, None) or (self.needs_entropy and head == "values"):
            wanted: Head = "logprobs" if self.needs_entropy else self.reads or "logprobs"
            raise ConfigError(
                f"{self!r} is a loss of {MODELS[wanted]}'s {wanted}, but the model is "
                f"{MODELS[head]}, which gives {head}. Train it with {LOSSES_OF[head]}, or "
                f"{REMEDIES[wanted]}."
            )

    def coupling(self, batch: RolloutBatch) -> NDArray[np.int64]:
        """Numbers of the rollouts, equal for rollouts that must be in one view: int64 [N].

        By default all rollouts of a joint loss have the same number, and those of other losses have
        different numbers.
        """
        count = len(batch.rollout_ids)
        return np.zeros(count, np.int64) if self.decomposition == "joint" else np.arange(count)

    def zero_rollouts(self, batch: RolloutBatch) -> NDArray[np.bool_]:
        """Rollouts whose terms and gradients are 0 for all outputs of the model: bool [N].

        A step leaves them out. A rollout that is declared wrongly is therefore not trained.
        `policy.verify` finds this. Coupled rollouts are left out only if all of them are declared.
        If a subclass overrides `__call__` or another method, the declaration of its base class is
        ignored, so override this method too.

        The result must depend only on numpy arrays of the batch. By default no rollout is declared.
        """
        return np.zeros(len(batch), bool)


LossFunction = Callable[[LossOutputs, LossBatch], Tensor]


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A loss from a function of (outputs, batch). With several ranks each rank has its own loss.

    Attributes:
        function: computes the view's part of the loss, a scalar with a graph.
        decomposition: as in `Loss`. The default "joint" is correct for each function.
        needs_entropy: whether the function needs `outputs.entropies`, with gradients.
    """

    reads: ClassVar[Head | None] = None

    function: LossFunction
    decomposition: Decomposition = "joint"  # pyright: ignore[reportIncompatibleVariableOverride]
    needs_entropy: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            raise ConfigError(
                f"the function of FunctionLoss is {short(self.function)}; it takes a function of "
                "(outputs, batch)."
            )

    def __repr__(self) -> str:
        """Name of the function, without the address in its repr."""
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return self.function(outputs, batch)


def as_loss(loss: Loss | LossFunction) -> Loss:
    """Return a Loss unchanged, and convert a function of (outputs, batch) to a joint loss.

    Raises ConfigError for other objects, for a class instead of an instance, and for a Loss whose
    decomposition or needs are not allowed.
    """
    if isinstance(loss, type):
        raise ConfigError(
            f"The loss is the class {loss.__name__}; pass an instance, {loss.__name__}()."
        )
    if not isinstance(loss, Loss):
        if not callable(loss) or hasattr(loss, "decomposition"):
            raise ConfigError(
                f"The loss is {short(loss)} of type {type(loss).__name__}; it takes a "
                "forkpoint.losses.Loss or a function of (outputs, batch). A loss that declares its "
                "decomposition subclasses Loss."
            )
        return FunctionLoss(cast(LossFunction, loss))
    check_choice("decomposition", getattr(loss, "decomposition", None), get_args(Decomposition))
    for name in loss.needs:
        check_choice("needs", name, tuple(SOURCES))
    return loss


def coupling_of(loss: Loss, batch: RolloutBatch) -> NDArray[np.int64]:
    """The result of `loss.coupling`, after a check: int64 [N].

    Raises ConfigError unless it is a numpy array of integers, one for each rollout.
    """
    found: object = loss.coupling(batch)
    if isinstance(found, np.ndarray):
        if found.dtype.kind in "iu" and found.shape == (len(batch),):
            # Counted from 0, because planners multiply these numbers.
            return np.unique(found, return_inverse=True)[1]
        what = f"{found.dtype} of shape {found.shape}"
    else:
        what = short(found)
    raise ConfigError(
        f"coupling of the loss {loss!r} returned {what}; it must return a numpy array of int64, "
        f"one entry for each of the {len(batch)} rollouts, such as batch.group_index."
    )


def is_own(loss: object) -> bool:
    """Whether each rank has its own loss. Gradients are then averaged over the ranks.

    Otherwise the losses of the ranks are parts of one loss.
    """
    return not isinstance(loss, Loss) or isinstance(loss, FunctionLoss)


def divide(total: Tensor, count: float) -> Tensor:
    """Return `total / count`, or `total` if the count is 0."""
    return total / count if count else total


def check_number(
    name: str, value: object, *, positive: bool = False, infinite: bool = False
) -> None:
    """Raises ConfigError unless `value` is a number of at least 0 (above 0 if `positive`) that
    float32 holds."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer
            number = sys.float_info.max if value > 0 else -1.0  # pyright: ignore[reportOperatorIssue]
    large_enough = number > 0 if positive else number >= 0
    if large_enough and (number <= LARGEST_NUMBER or (infinite and number == math.inf)):
        return
    least = f"{'above' if positive else 'of at least'} 0"
    most = f" and at most {LARGEST_NUMBER:.2g}" if large_enough and number < math.inf else ""
    raise ConfigError(
        f"{name} is {short(value)}; it takes a {'' if infinite else 'finite '}number {least}{most}."
    )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(map(repr, allowed))
        raise ConfigError(f"{name} is {short(value)}; allowed are {listed}.")
