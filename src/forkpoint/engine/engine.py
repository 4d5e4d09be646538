"""The interpreter of a plan's program.

It runs one instruction after the other (plan/program.py). A forward reads the prefix cache of the
microbatches above and captures its own. A backward is rooted in the microbatch's loss, and adds to
the gradients of the prefix cache that its forward read. Between the two, activations are where the
plan says (engine/activations.py). Nothing is decided here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from forkpoint.config import Config
from forkpoint.device import on_device
from forkpoint.engine.activations import Activations
from forkpoint.engine.boundary import PrefixCache
from forkpoint.engine.gathered_scores import loss_inputs
from forkpoint.engine.gradient_sums import GradientSums
from forkpoint.engine.guard import GradientGuard, Step
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.idling import idle_inputs
from forkpoint.engine.loss_calls import names_of
from forkpoint.engine.loss_gradients import LossGradients
from forkpoint.engine.microbatch_losses import MicrobatchLoss, MicrobatchLosses, weighted
from forkpoint.engine.microbatches import (
    KernelOptions,
    MicrobatchInputs,
    MicrobatchState,
    prepare_microbatches,
)
from forkpoint.engine.roots import roots_of
from forkpoint.engine.route_replay import RouteReplay
from forkpoint.engine.routing import Routing
from forkpoint.engine.staging import Staging
from forkpoint.engine.step_result import StepResult, after
from forkpoint.engine.timing import PhaseTimer
from forkpoint.engine.trunk_exchange import TrunkExchange
from forkpoint.engine.untrained import add_zero_gradients
from forkpoint.losses.base import Denominators, Loss
from forkpoint.losses.views import LossViews
from forkpoint.parallel.step import StepOfRanks
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import (
    BACKWARD,
    LEAF,
    PREFIX_BACKWARD,
    PREFIX_FORWARD,
    RECOMPUTE,
    SHARE,
    Instruction,
    Program,
    phase_of,
)
from forkpoint.rollouts import RolloutBatch


class Engine:
    """Runs plans on a host."""

    def __init__(self, host: Host, config: Config, staging: Staging | None = None) -> None:
        """`staging` is where plans that offload microbatches put them."""
        self.host: Host = host
        self.config: Config = config
        self.staging: Staging | None = staging
        self.observer: Callable[[str], None] | None = None
        """Called with each event before it runs: for measurements of what lies between."""
        self._failure: BaseException | None = None
        self.ranks: StepOfRanks | None = None
        """The agreement of the ranks on this step; None where this rank is alone."""
        self.exchange: TrunkExchange | None = None
        """The trunks that ranks exchange in this step; None where they exchange none."""
        self.routing: Routing | None = None
        """The statistics of routers that this step computes; None where it computes none."""
        self.replay: RouteReplay | None = None
        """The experts that routers are held to; None where they choose."""

    def score(
        self,
        step: Step,
        plan: Plan,
        batch: RolloutBatch,
        *,
        entropy: bool,
        graph: bool = False,
        compiled: bool = True,
        program: Program | None = None,
    ) -> StepResult:
        """Outputs of the head for every trained token (and entropies).

        `step` is the one whose `run` calls this, here and in `forward_backward`. With `graph`
        forwards record one, as those of a step with backwards do; it is dropped.
        Without `compiled` blocks run eagerly. `program` is the one that ranks have agreed on.
        """
        self._enter(step, compiled=compiled)
        with torch.set_grad_enabled(graph):
            prepared = self._prepare(plan, batch)
            scores = (program or plan.score_program).scores
            return self._pass(step, plan, batch, prepared, scores, entropy=entropy, graph=graph)

    def forward_backward(
        self,
        step: Step,
        plan: Plan,
        batch: RolloutBatch,
        loss: Loss,
        denominators: Denominators,
        scale: float,
    ) -> StepResult:
        """Add the gradients of the batch's loss, times `scale`, to `.grad`.

        Where the program has a pass of scores the log-probs (a critic's values) come first,
        without a graph, then the loss's gradient by them, then the plan with these as weights.
        Otherwise the loss is computed microbatch by microbatch, which `Plan.check_coupling` has
        shown to be possible.
        """
        views = LossViews(batch, denominators, self.host.device, self.host.loss_dtype)
        mark = step.changes.mark
        gradients = LossGradients(self.host, self._begin(step), self.ranks, scale)
        losses = MicrobatchLosses(self.host, self.config, loss, views, gradients)
        prepared = self._prepare(plan, batch)
        constant = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
        if plan.program.has_scores or (self.ranks is not None and self.ranks.parts):
            result = self._replay(step, plan, batch, losses, prepared)
        else:
            before = None
            if plan.program.scores:
                with torch.no_grad():
                    scores = plan.program.scores
                    before = self._pass(step, plan, batch, prepared, scores, entropy=False)
            if self.routing is not None:
                self.routing.gather(self.ranks)
            if loss.decomposition == "token":
                microbatch_loss = losses.by_tokens()
            else:
                microbatch_loss, of_untrained = losses.by_rollouts(loss.coupling(batch), prepared)
                with self._kept_failure():
                    constant = of_untrained()
            result = self._pass(
                step,
                plan,
                batch,
                prepared,
                plan.program.training,
                entropy=loss.needs_entropy,
                microbatch_loss=microbatch_loss,
                scale=gradients.factor,
            )
            if before is not None:
                result = after(before, result)
        result = replace(result, loss=result.loss + constant)
        return self._ended(step, mark, prepared, result)

    def backward(
        self,
        step: Step,
        plan: Plan,
        batch: RolloutBatch,
        weights: Mapping[str, Tensor | None],
        look: Callable[[Tensor], None],
    ) -> StepResult:
        """Add the gradients of sum(weight * value) over the batch's trained tokens to `.grad`.

        weights: [T] for each name that the head gives, None for those without a gradient. Entries
            of tokens that are not trained are not read.
        look: called with the head's values [T] before the step ends; what it raises ends it.

        This is the second half of a loss that is computed from the values of `score`: with the
        loss's gradients by these values as weights the sum has the loss's gradient (chain rule).
        """
        mark = step.changes.mark
        self._begin(step)
        prepared = self._prepare(plan, batch)
        result = self._weighted(step, plan, batch, prepared, weights)
        with self._kept_failure():
            look(result.per_token[self.host.head])
        return self._ended(step, mark, prepared, result)

    def _begin(self, step: Step) -> GradientGuard:
        """Prepare gradients and model for backwards, until the changes are undone."""
        parameters = [p for _, p in self.host.named_parameters() if p.requires_grad]
        group = self.host.group
        wide = self.config.grad_accumulation_dtype == "float32"
        apart = parameters if wide else group.apart(parameters) if group is not None else []
        guard = step.guard = GradientGuard(
            parameters,
            restore=self.config.restore_grads,
            sums=GradientSums(apart, wide=wide) if apart else None,
        )
        if group is not None:
            guard.reset = group.reset
            guard.held = lambda: group.gathered
            guard.missing = group.missing_bytes if group.reduces else None
        if guard.sums is not None:
            guard.sums.collect(step.changes)
        self._enter(step)
        return guard

    def _ended(
        self, step: Step, mark: int, prepared: list[MicrobatchInputs], result: StepResult
    ) -> StepResult:
        """The result, once every rank has come to the end of its program: its loss is over all.

        The model is put back, and gradients are reduced where the backwards have not done so.
        """
        guard, group = step.guard, self.host.group
        assert guard is not None
        held = group is not None and group.gathered
        if not held:
            step.changes.undo(mark)
        if self.ranks is not None:
            end = None if self.routing is None else self.routing.ending()
            loss = self.ranks.settle(result.loss, self._failure, router=end)
            result = replace(result, loss=loss)
        if group is not None and held:
            guard.touched = True
            group.reduce_held()
            step.changes.undo(mark)
        self._end(guard, prepared)
        return result

    def _enter(self, step: Step, *, compiled: bool = True) -> None:
        self.host.enter(step.changes, compiled=compiled)
        if self.routing is not None or self.replay is not None:
            note = None if self.routing is None else self.routing.note
            self.host.watch_routers(note, step.changes, self.replay)

    def _end(self, guard: GradientGuard, prepared: list[MicrobatchInputs]) -> None:
        """All backwards are done, and the model is as it was."""
        trains = any(len(inputs.trained_tokens) for inputs in prepared)
        if self.ranks is not None:
            trains = self.ranks.trains
        group = self.host.group
        if not trains:
            add_zero_gradients(self.host, guard)
        if group is not None and guard.sums is not None:
            mean = self.ranks is not None and self.ranks.mean
            guard.sums.reduce(partial(group.reduce, parameters=guard.sums.parameters, mean=mean))
        guard.add_sums()

    def _prepare(self, plan: Plan, batch: RolloutBatch) -> list[MicrobatchInputs]:
        tempers = self.host.head == "logprobs"
        return prepare_microbatches(plan, batch, self.host.device, tempers=tempers)

    def _replay(
        self,
        step: Step,
        plan: Plan,
        batch: RolloutBatch,
        losses: MicrobatchLosses,
        prepared: list[MicrobatchInputs],
    ) -> StepResult:
        """Scores, the loss of the whole batch, then the plan with its gradients as weights."""
        needs_entropy = losses.loss.needs_entropy
        with torch.no_grad():
            program = plan.program.scores
            scored = self._pass(step, plan, batch, prepared, program, entropy=needs_entropy)
        if self.routing is not None:
            self.routing.gather(self.ranks)
        given = loss_inputs(self.ranks, scored.per_token, losses.views)
        value = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
        weights: dict[str, Tensor | None] = dict.fromkeys(given.per_token)
        with self._kept_failure():
            part = losses.of_scores(given)
            value = part.value
            weights |= part.gradients
        scale = losses.gradients.factor
        result = self._weighted(step, plan, batch, prepared, weights, scale)
        return replace(after(scored, result), loss=value)

    @contextmanager
    def _kept_failure(self) -> Iterator[None]:
        """Keep an error of a loss until the program has ended, where other ranks run it as well.

        Its collectives would wait for this rank. Gradients are zeros from here on, and no rank
        keeps any.
        """
        try:
            yield
        except BaseException as error:
            if self.ranks is None:
                raise
            self._failure = self._failure or error

    def _weighted(
        self,
        step: Step,
        plan: Plan,
        batch: RolloutBatch,
        prepared: list[MicrobatchInputs],
        weights: Mapping[str, Tensor | None],
        scale: float = 1.0,
    ) -> StepResult:
        """Run forwards and backwards of sum(weight * value) over trained tokens.

        scale: a factor on other losses' gradients, such as the routers'.
        """
        return self._pass(
            step,
            plan,
            batch,
            prepared,
            plan.program.training,
            entropy="entropies" in weights,
            microbatch_loss=weighted(weights),
            scale=scale,
        )

    # The schedule --------------------------------------------------------------------------------

    def _pass(
        self,
        step: Step,
        plan: Plan,
        batch: RolloutBatch,
        prepared: list[MicrobatchInputs],
        instructions: Sequence[Instruction],
        *,
        entropy: bool,
        microbatch_loss: MicrobatchLoss | None = None,
        scale: float = 1.0,
        graph: bool = False,
    ) -> StepResult:
        """Run the instructions of one pass; those with backwards need a loss."""
        training = microbatch_loss is not None
        device, dtype = self.host.device, self.host.loss_dtype
        cache = PrefixCache(plan.cache_tokens, gradients=training, cache_states=plan.cache_states)
        per_token = {
            name: torch.zeros(plan.logical_tokens, dtype=dtype, device=device)
            for name in names_of(self.host.head, self.config, entropy)
        }
        total = torch.zeros((), dtype=dtype, device=device)
        kernels = KernelOptions(
            attention=self.config.attention_kernel,
            recurrence=self.config.recurrence_kernel,
            head_chunk_tokens=self.config.head_chunk_tokens,
            head_statistics=self.config.head_statistics,
        )
        timer = PhaseTimer(device)
        events: list[str] = []
        roots: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """By slot: what its backward starts from."""
        mark = step.changes.mark
        activations = None
        if training:
            activations = Activations(plan, prepared, self.host, cache, self.staging)
            step.changes.later(activations.close)
        for instruction in instructions:
            if instruction.exchanges:
                timer.mark(PREFIX_FORWARD if instruction.operation == SHARE else PREFIX_BACKWARD)
                self._note(events, plan.event(instruction))
                assert self.exchange is not None
                self.exchange.run(instruction, cache, device)
                continue
            idle = instruction.idle  # such a slot runs one token of a plan of its own
            if idle:
                source, inputs = idle_inputs(device, plan.capabilities.length_multiple)
            else:
                source, inputs = plan, prepared[instruction.microbatch]
            timer.mark(phase_of(instruction.operation, inputs.microbatch))
            self._note(events, plan.event(instruction))
            if self.replay is not None:
                self.replay.at(instruction, inputs)
            if instruction.operation == BACKWARD:
                assert step.guard is not None and activations is not None
                tensors, gradients = roots.pop(instruction.slot)
                activations.before_backward(instruction.microbatch, step.guard.missing_bytes)
                # Frozen layers under a microbatch without trained tokens leave it nothing to do.
                if tensors:
                    step.guard.begin()
                self.host.backward(tensors, gradients, last=instruction.last_backward)
                activations.after_backward(instruction.microbatch)
                del tensors, gradients
                continue
            captures = instruction.operation != RECOMPUTE
            state = MicrobatchState(source, inputs.microbatch, cache, captures=captures)
            hooks = activations.hooks(instruction) if activations else None
            if self.routing is not None:
                self.routing.begin(instruction)
            with torch.set_grad_enabled(training or graph):
                with saved_tensors_hooks(*hooks) if hooks else nullcontext():
                    outputs = self.host.forward(
                        instruction, inputs, state, kernels, entropy=entropy
                    )
                if activations is not None:
                    activations.end_forward(instruction.microbatch)
                state.end_forward()
                if self.replay is not None:
                    self.replay.end_forward()
                if self.routing is not None:
                    self.routing.end(inputs)
                # A forward that is repeated computes its loss then.
                part = None
                if microbatch_loss and instruction.records and not idle and not self._failure:
                    with self._kept_failure():
                        part = microbatch_loss(inputs, outputs)
                more = self.routing.root(instruction, inputs, scale) if self.routing else None
            if instruction.records or not training:
                if not instruction.idle:
                    self._collect(inputs, outputs, per_token)
                if part is not None:
                    total += part.value
                if training:
                    gradients = {} if part is None else part.gradients
                    roots[instruction.slot] = roots_of(gradients, outputs, more)
            del outputs, part, state
        step.changes.undo(mark)
        if self.host.group is not None:
            self.host.group.settle()
        timer.mark(LEAF)
        return StepResult(
            loss=total,
            per_token=per_token,
            events=tuple(events),
            phase_ms=timer.totals_ms(),
            event_ms=timer.each_ms(),
            event_memory_bytes=timer.allocated_bytes(),
            offload=activations.stats if activations else None,
        )

    def _note(self, events: list[str], event: str) -> None:
        events.append(event)
        if self.observer is not None:
            self.observer(event)

    def _collect(
        self, inputs: MicrobatchInputs, outputs: HeadOutputs, per_token: dict[str, Tensor]
    ) -> None:
        if not len(inputs.trained_tokens):
            return
        tokens = on_device(inputs.trained_tokens, self.host.device)
        entries = on_device(inputs.trained_entry, self.host.device)
        for name, values_T in per_token.items():
            values_T[tokens] = outputs.per_token[name].detach()[entries]
