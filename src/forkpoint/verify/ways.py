"""Plans and ways to save memory that `verify` begins with, of those that fit."""

from dataclasses import dataclass
from typing import TypeVar, cast

from forkpoint.errors import PlanError
from forkpoint.losses.base import Loss
from forkpoint.losses.router import RouterLoss
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.verify.memory import DENSE_WAYS, REFERENCE_WAYS, Needs, Way, first_fitting
from forkpoint.verify.plans import Choice, Planning, choose_plans

Planned = TypeVar("Planned", bound=Planning)


@dataclass(frozen=True)
class Ways:
    """How the two runs of single rollouts save memory: the first way that fits, and further ones
    for where memory runs out all the same."""

    reference: tuple[Way, ...]
    dense: tuple[Way, ...]

    @classmethod
    def fitting(cls, needs: Needs, room: int | None, keeps: bool, streams: bool) -> "Ways":
        """`streams`: whether the reference's blocks may stay in the host's memory."""
        ways = REFERENCE_WAYS if streams else REFERENCE_WAYS[:-1]
        left = room if room is None or not keeps else room - needs.gradients
        return cls(
            reference=first_fitting(ways, needs.reference, room),
            dense=first_fitting(DENSE_WAYS, needs.dense, left),
        )


def fitting_plans(
    policy: Planned,
    batch: RolloutBatch,
    loss: Loss,
    needs: Needs,
    room: int | None,
    router: RouterLoss | None = None,
) -> tuple[Planned, Choice, bool]:
    """The policy to run, its plans, and whether the reference's gradients stay on the device.

    They go to the host's memory where plans would have to become smaller for their sake.
    """
    choice = choose_plans(policy, batch, loss, router)
    if room is None or choice.reason is not None:
        return policy, choice, True
    left = room - needs.own_gradients
    if choice.peak_bytes + needs.gradients <= left:
        return policy, choice, True
    if choice.peak_bytes <= left:
        return policy, choice, False
    changed = policy
    given = policy.config.checkpointing
    for checkpointing in (given, "full") if given != "full" else (given,):
        changed = cast(
            Planned, policy.with_config(memory_budget=max(1, left), checkpointing=checkpointing)
        )
        try:
            smaller = choose_plans(changed, batch, loss, router)
        except PlanError:
            continue
        if smaller.compared and (choice.unfit or not smaller.unfit):
            return changed, smaller, False
    # Predictions may be too high, and what does not fit says so.
    return policy, choice, False
