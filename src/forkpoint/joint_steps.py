"""A step of several ranks: the exchange before it, the check of the model, and its end."""

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar

from forkpoint.config import Config
from forkpoint.engine.distributed import Distributed
from forkpoint.engine.guard import Step
from forkpoint.engine.host import Host
from forkpoint.errors import ForkpointError
from forkpoint.losses.base import Loss
from forkpoint.parallel.agreement import (
    Agreement,
    Proposal,
    agreed,
    coupled,
    group_digests,
)
from forkpoint.parallel.call import run_on_ranks
from forkpoint.parallel.step import StepOfRanks
from forkpoint.rollouts import RolloutBatch
from forkpoint.sample_checks import SampleChecks
from forkpoint.selfcheck import sample_of

T = TypeVar("T")
Looked = TypeVar("Looked", bound=tuple[Any, ...])


class JointStep:
    """One call of a policy, on every rank; on a rank that is alone it does what that one does."""

    def __init__(
        self, step: Step, host: Host, config: Config, checks: SampleChecks, *, training: bool
    ) -> None:
        """`training`: whether forwards record a graph. On ranks this is within `run_on_ranks`."""
        self.step: Step = step
        self.host: Host = host
        self.config: Config = config
        self.checks: SampleChecks = checks
        self.training: bool = training
        self.agreement: Agreement | None = None
        """None where this rank is alone, and before `agree`."""
        self.ranks: StepOfRanks | None = None
        self._batch: RolloutBatch | None = None
        self._fingerprint = 0

    def agree(
        self,
        call: str,
        batch: RolloutBatch,
        looked_at: Callable[[], Looked],
        *,
        loss: object = None,
        scores: bool = False,
        sampled: bool = True,
    ) -> Looked:
        """Agree on a step with the other ranks, if there are any. Collective.

        Args:
            call: what must be the same on all ranks.
            batch: this rank's rollouts.
            looked_at: this rank's checks; gives its plan and the model's fingerprint first. What it
                raises is told to the other ranks by `run_on_ranks`.
            loss: of `forward_backward`. A function's gradients are averaged over the ranks.
            scores: whether forwards alone run.
            sampled: whether the model is compared with the stock model where that is due.

        Returns the values of `looked_at`. Raises its error, or RankError for that of another rank.
        """
        group = self.host.group
        if group is None:
            found = looked_at()
            self._batch, self._fingerprint = batch if sampled else None, found[1]
            return found
        found = looked_at()
        plan, self._fingerprint = found[0], found[1]
        due = sampled and self.checks.is_due(
            self.host, self.config, self._fingerprint, training=self.training
        )
        couples, program = "", plan.score_program if scores else plan.program
        gathers = isinstance(loss, Loss) and loss.across_ranks
        if gathers:
            program = plan.with_program(scores=True).program
        elif isinstance(loss, Loss) and loss.decomposition == "joint":
            couples = coupled(loss.coupling(batch), batch)
        proposal = Proposal(
            call,
            program=program,
            costs=tuple(float(m.tokens) for m in plan.microbatches),
            trained_tokens=batch.trained_tokens,
            rollouts=len(batch),
            groups=group_digests(batch),
            couples=couples,
            gathered=batch if gathers else None,
            sample=sample_of(batch) if due and len(batch) else None,
        )
        ranks = group.ranks
        proposals = ranks.exchange(proposal)
        ranks.phase = "joined"
        try:
            self.agreement = agreed(
                proposals, ranks.index, ranks.global_ranks, lockstep=group.lockstep
            )
        except ForkpointError:  # the same on all ranks
            ranks.phase = "told"
            raise
        self._batch = self.agreement.sample
        mean = not isinstance(loss, Loss)
        self.ranks = self.agreement.step(ranks, mean=mean, lockstep=group.lockstep)
        return found

    def check_sample(self) -> None:
        """Compare the model on a sample of the batch, where that is due. Collective."""
        if self.ranks is None:
            self._check()
            return
        if self._batch is None:
            return
        error = None
        try:
            self._check()
        except ForkpointError as found:
            error = found
        assert self.host.group is not None
        self.host.group.settle()
        self.ranks.same(error)

    def _check(self) -> None:
        if self._batch is not None:
            self.checks.run(
                self.step,
                self.host,
                self.config,
                self._batch,
                self._fingerprint,
                training=self.training,
            )


def run_joint_step(host: Host, group: Distributed, work: Callable[[Step], T]) -> T:
    """Call `work` with a step, on all ranks; it ends on all of them, however it ends on one.

    Nothing is repeated where memory runs out: ranks would have to repeat it together.
    """
    step = Step(host.device)
    return run_on_ranks(
        group.ranks,
        lambda: step.run(lambda: work(step)),
        lockstep=group.lockstep,
        succeeded=lambda: step.outcome.gradients == "added",
    )


def kind_of(loss: object) -> str:
    """A loss's class and options, as far as they can be told; of a function, that it is one."""
    if isinstance(loss, Loss):
        return repr(loss) if is_dataclass(loss) else type(loss).__qualname__
    return "a function"
