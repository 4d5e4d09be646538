"""One rank of a group fails at a chosen moment of a step: how the step ends on each rank."""

import gc
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_of_ranks import Case, both, error_of, over_replicas
from processes import join
from scenarios_of_ranks import BAR, DEEP, UNEQUAL, group
from test_stages_of_ranks import of_data, of_split

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.losses import GRPO
from forkpoint.parallel.watch import EXIT_CODE
from forkpoint.testing import ReadOnlyHook

WRAPS: dict[str, Case] = {
    "fully_shard": Case(),
    "fully_shard, gathered once": Case(config=replace(DEEP, gather="step")),
    "DDP": Case(hold=over_replicas),
}
MESHES: dict[str, Case] = {
    "PP x CP": of_split(cp=2),
    "PP x TP": of_split(tp=2),
    "PP x FSDP2": of_data(),
}
"""Two stages of a pipeline, each on two ranks."""
LIMIT_S = 60.0
MODEL = "model"
CAUSES = {
    "loss": "ValueError: raised in a loss",
    "forward": "ValueError: raised in a forward",
    "backward": "ValueError: raised in a backward",
    "memory": "OutOfMemoryError: of the test",
    "interrupt": "KeyboardInterrupt",
    "kill": "",
    "score": "KeyboardInterrupt",
    "logprobs": "KeyboardInterrupt",
}
"""By kind, what the other ranks are told. Of one that is killed they know nothing."""


@dataclass
class Moment:
    """One failure: what, where and when."""

    kind: str
    wrap: str
    seed: int
    ranks: int = 2

    def __post_init__(self) -> None:
        self.ranks = self.case.size

    @property
    def case(self) -> Case:
        if self.wrap in MESHES:
            return MESHES[self.wrap]
        more = (group(20 + n, 3 + n, 12, 9) for n in range(self.ranks - 2))
        return replace(WRAPS[self.wrap], rollouts=(*UNEQUAL, *more))

    @property
    def victim(self) -> int:
        """The rank that fails."""
        if self.kind == "loss" and self.wrap in MESHES:
            return self.ranks - 1  # of the last stage, which has the loss
        return random.Random(self.seed).randrange(self.ranks)


@dataclass
class End:
    """How a process came out of it."""

    exit_code: int = 0
    seconds: float = 0.0
    """From the failure to the end of the process, or to that of the next step."""
    step: str = ""
    """The error of the step in which the moment was; empty where there was none."""
    after: str = ""
    """That of the next step."""
    kept: bool = True
    """Whether `.grad` was as before the step, or whole."""
    error: float | None = None
    """Of the next step's gradients, beside one process."""
    stderr: str = ""
    armed: float = 0.0


@dataclass
class Outcome:
    """A moment, how it ended on each rank, and what is wrong with that."""

    moment: Moment
    victim: int
    ends: list[End]
    faults: list[str] = field(default_factory=list)

    @property
    def how(self) -> str:
        """The end in a few words, for a table."""
        survivors = [end for rank, end in enumerate(self.ends) if rank != self.victim]
        if all(end.exit_code == 0 for end in self.ends):
            raised = sum(bool(end.step) for end in self.ends)
            return "after the step" if not raised else "raised on all, next step exact"
        if all(end.exit_code == EXIT_CODE for end in survivors):
            return f"others exit {EXIT_CODE}"
        return "others raise" if all(end.step for end in survivors) else "others exit or raise"


class Trigger:
    """Runs an action at the n-th time that it is passed, once armed; counts until then."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.passed = 0
        self.at = -1

    def arm(self, at: int) -> None:
        self.passed, self.at = 0, at

    def __call__(self, *_: Any) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.at = -1
            self.action()


@dataclass(frozen=True)
class Triggered(GRPO):
    """A loss that passes a trigger: each process has one, which is not part of the loss."""

    def __call__(self, outputs: Any, batch: Any) -> Any:
        LOSS[0]()
        return super().__call__(outputs, batch)


LOSS: list[Callable[[], None]] = [lambda: None]


def _raises(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def _signals(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _trigger(kind: str, blocks: list[Any], drawn: random.Random) -> tuple[Trigger, bool]:
    """The trigger of a kind, and whether it counts calls of functions, of any."""
    if kind in ("interrupt", "kill", "score", "logprobs"):
        number = signal.SIGKILL if kind == "kill" else signal.SIGINT
        return Trigger(_signals(number)), True
    cause = CAUSES[kind].partition(": ")[2]
    error = torch.OutOfMemoryError(cause) if kind == "memory" else ValueError(cause)
    trigger = Trigger(_raises(error))
    block = drawn.choice(blocks)

    def before(_: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            if kind == "backward" and args[0].requires_grad:
                args[0].register_hook(trigger)
            elif kind != "backward":
                trigger()

    if kind == "loss":
        LOSS[0] = trigger
    else:
        block.register_forward_pre_hook(ReadOnlyHook(before))
    return trigger, False


def _calls(kind: str, policy: forkpoint.Policy, batch: RolloutBatch) -> Callable[[], object]:
    """The call of the policy in which a moment lies."""
    if kind == "score":
        return lambda: policy.score(batch)
    if kind == "logprobs":

        def through() -> None:
            advantages = torch.as_tensor(batch.advantages * batch.loss_mask)
            (policy.logprobs(batch) * advantages).sum().backward()

        return through
    return lambda: policy.forward_backward(batch, Triggered())


def _in_rank(moment: Moment, victim: int, place: Path) -> End:
    """This rank's part of a trial."""
    rank, end = dist.get_rank(), End()
    armed = place / f"armed {rank}"
    drawn = random.Random(f"{moment.seed} {rank}")
    case = moment.case
    config = replace(case.config, restore_grads=bool(moment.seed % 2), self_check=False)
    case = replace(case, config=config)
    with both(place / MODEL, case) as (policy, alone, data_rank):
        model = policy.host.model
        own = RolloutBatch(case.rollouts[data_rank])
        blocks = [b for b in model.model.layers if any(True for _ in b.parameters())]
        trigger, everywhere = _trigger(moment.kind, blocks, drawn)
        call = _calls(moment.kind, policy, own)
        step = lambda: policy.forward_backward(own, Triggered())  # noqa: E731
        step()  # which meets everything for the first time
        call()
        model.zero_grad()
        # Objects that are freed at random would count as calls.
        gc.collect()
        gc.disable()
        trigger.arm(-1)
        with _profiled(trigger, everywhere):
            call()
        count = trigger.passed
        if not config.restore_grads:
            model.zero_grad()
        before = [None if p.grad is None else _local(p.grad).clone() for p in model.parameters()]
        if rank == victim:
            trigger.arm(drawn.randint(1, max(1, count)))
        dist.barrier()
        end.armed = time.monotonic()
        armed.write_text(str(end.armed))
        try:
            with _profiled(trigger, everywhere and rank == victim):
                call()
        except BaseException as error:
            end.step = f"{type(error).__name__}: {error}"
        trigger.arm(-1)
        after = [p.grad for p in model.parameters()]
        added = policy.last_step is not None and policy.last_step.gradients == "added"
        end.kept = added or all(
            (one is None) if other is None else one is not None and torch.equal(_local(one), other)
            for one, other in zip(after, before, strict=True)
        )
        model.zero_grad()
        try:
            step()
        except BaseException as error:
            end.after = f"{type(error).__name__}: {error}"
            end.seconds = time.monotonic() - end.armed
            return end
        end.seconds = time.monotonic() - end.armed
        alone.forward_backward(RolloutBatch([r for p in case.rollouts for r in p]), GRPO())
        end.error = error_of(model, alone.host.model)
    return end


class _profiled:
    """Passes a trigger at each call of a function in this thread."""

    def __init__(self, trigger: Trigger, on: bool) -> None:
        self.trigger, self.on = trigger, on

    def __enter__(self) -> None:
        if self.on:
            sys.setprofile(self._passed)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _passed(self, frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call") and threading.current_thread() is threading.main_thread():
            self.trigger()


def _local(x: Any) -> torch.Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def tried(moment: Moment) -> Outcome:
    """Run one moment in processes of its own, and look at how they end."""
    victim = moment.victim
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        moment.case.save(Path(place, MODEL))
        children = []
        for rank in range(moment.ranks):
            child = os.fork()
            if child == 0:
                _be(rank, port, moment, victim, Path(place))
            children.append(child)
        codes, ended = _ended(children)
        ends = []
        for rank, code in enumerate(codes):
            said = Path(place, f"said {rank}")
            end = End(**json.loads(said.read_text())) if said.exists() else End()
            armed = Path(place, f"armed {rank}")
            if armed.exists() and not said.exists():
                end.seconds = ended[rank] - float(armed.read_text())
            end.exit_code = code
            end.stderr = Path(place, f"stderr {rank}").read_text()
            ends.append(end)
    outcome = Outcome(moment, victim, ends)
    outcome.faults = list(_faults(outcome))
    return outcome


def _be(rank: int, port: int, moment: Moment, victim: int, place: Path) -> None:
    """Become one rank; does not return."""
    code = 1
    try:
        handle = os.open(place / f"stderr {rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        size = moment.ranks
        join(rank, size, port, timeout_s=90)
        end = _in_rank(moment, victim, place)
        (place / f"said {rank}").write_text(json.dumps(asdict(end)))
        if not end.after:
            dist.barrier()
            code = 0
        elif rank == 0:
            # The store is in this process; the others look into it for the reason.
            time.sleep(_longest_wait())
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(code)


def _longest_wait() -> float:
    from forkpoint.parallel import watch

    return watch.GRACE_S + 4 * watch.POLL_S + 0.5


def _ended(children: list[int]) -> tuple[list[int], list[float]]:
    """Exit statuses, and when each ended; after the limit a child is killed."""
    limit = time.monotonic() + 2 * LIMIT_S
    found: dict[int, tuple[int, float]] = {}
    while len(found) < len(children):
        for child in children:
            if child in found:
                continue
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                found[child] = os.waitstatus_to_exitcode(status), time.monotonic()
            elif time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
                limit = time.monotonic() + 1
        time.sleep(0.01)
    return [found[c][0] for c in children], [found[c][1] for c in children]


def _faults(outcome: Outcome) -> list[str]:
    """Ways in which an outcome is not what it has to be."""
    kind, victim, ends = outcome.moment.kind, outcome.victim, outcome.ends
    found = []
    for rank, end in enumerate(ends):
        if end.seconds > LIMIT_S:
            found.append(f"rank {rank} took {end.seconds:.0f} s")
        if not end.kept:
            found.append(f"rank {rank} kept part of a gradient")
        if end.exit_code == 0 and (end.error is None or not end.error < BAR):
            found.append(f"rank {rank}: the next step is off by {end.error}")
        if end.exit_code < 0 and not (kind == "kill" and rank == victim):
            found.append(f"rank {rank} had to be killed")
    if len({end.exit_code == 0 for end in ends}) > 1:
        found.append(f"exit codes {[end.exit_code for end in ends]}")
    own = ends[victim]
    if kind != "kill" and CAUSES[kind] not in own.step:
        # What is raised within a destructor is lost, as Python has it; nothing has failed then.
        lost = "Exception ignored" in own.stderr or kind in ("interrupt", "score", "logprobs")
        if not (lost and all(end.exit_code == 0 for end in ends)):
            found.append(f"rank {victim} raised {own.step or 'nothing'}")
    for rank, end in enumerate(ends):
        # Where all exit with 0 and this rank has no error, the moment was after the step.
        if rank == victim or (end.exit_code == 0 and not end.step):
            continue
        told = f"{end.step} {end.after} {end.stderr}"
        if f"the ranks make different calls: rank {victim}" in told:
            continue  # it was interrupted between two calls, and has begun another
        if f"rank {victim}" not in told or CAUSES[kind] not in told:
            found.append(f"rank {rank} does not name rank {victim} and its cause: {told[:500]}")
    return found
