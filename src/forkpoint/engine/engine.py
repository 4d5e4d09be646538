"""Passes of a step: scores, the loss, forwards and backwards, and the end of the step.

The executor (engine/executor.py) runs each pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.engine.executor import Executor
from forkpoint.engine.feature import Feature
from forkpoint.engine.gathered_cache import GatheredCache
from forkpoint.engine.gradients import GradientGuard, GradientSums, twins
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.host_cache import HostCache
from forkpoint.engine.media import Encoding
from forkpoint.engine.microbatches import MicrobatchInputs, PreparedMicrobatches
from forkpoint.engine.objective import (
    CoupledLosses,
    LossPart,
    MicrobatchLoss,
    MicrobatchLosses,
    TokenValues,
    WeightedSum,
    loss_inputs,
    names_of,
)
from forkpoint.engine.offload import Activations
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.prompt_exchange import PromptExchange
from forkpoint.engine.route_replay import RouteReplay
from forkpoint.engine.routing import Routing
from forkpoint.engine.staging import OffloadStats, Staging
from forkpoint.engine.timing import Timing
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import UnsupportedError
from forkpoint.losses.base import Denominators, Loss
from forkpoint.losses.views import LossViews
from forkpoint.parallel.step import RankStep
from forkpoint.plan.media import CommonEncoders
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import Instruction, Program, mark_last_backward
from forkpoint.rollouts.batch import RolloutBatch

NOTHING_TRAINED = (
    "no parameter that the model reads for the trained tokens requires a gradient, so the step "
    "would train nothing. Unfreeze some; if adapters are merged, call unmerge_adapter()."
)


@dataclass(frozen=True, eq=False)
class PassResult:
    """Results of one or two passes over a plan of T tokens; 0 at untrained tokens."""

    loss: Tensor
    """Scalar loss, over all ranks if they share a loss."""
    per_token: dict[str, Tensor]
    """[T] by name: outputs of the host's head, and "entropies" on request."""
    events: tuple[str, ...]
    phase_ms: dict[str, float]
    event_ms: tuple[float, ...]
    event_wait_ms: tuple[float, ...] = ()
    """Part of `event_ms` in which other stages of a pipeline were waited for."""
    offload: OffloadStats | None = None
    """Copies to host memory and back; None if the plan stores nothing there."""

    def after(self, scored: "PassResult") -> "PassResult":
        """Return this result with the events, times and copies of an earlier pass of scores."""
        offload = self.offload
        if offload is not None and scored.offload is not None:
            offload = offload.after(scored.offload)
        return replace(
            self,
            events=(*scored.events, *self.events),
            phase_ms={k: scored.phase_ms[k] + ms for k, ms in self.phase_ms.items()},
            event_ms=(*scored.event_ms, *self.event_ms),
            event_wait_ms=(*scored.event_wait_ms, *self.event_wait_ms),
            offload=offload,
        )


@dataclass(eq=False)
class Engine:
    """Runs a plan of a batch on a host."""

    host: Host
    config: Config
    transaction: Transaction
    """The transaction whose `run` calls this engine."""
    plan: Plan
    batch: RolloutBatch
    staging: Staging | None = None
    """Host memory; None if the plan stores nothing there."""
    _: KW_ONLY
    ranks: RankStep = field(default_factory=RankStep)
    """Ranks of the step; by default this process only."""
    routing: Routing | None = None
    replay: RouteReplay | None = None
    exchange: PromptExchange | None = None
    encoders: CommonEncoders | None = None
    """Encoder runs of all ranks, if they run in lockstep."""
    _failure: BaseException | None = field(default=None, init=False)

    # Calls
    # ------------------------------------------------------------

    def score(
        self,
        *,
        entropy: bool,
        graph: bool = False,
        compiled: bool = True,
        program: Program | None = None,
    ) -> PassResult:
        """Outputs of the head for every trained token, and entropies if asked for.

        `graph`: whether forwards record a graph, as in a step with backwards. The graph is dropped.
        `program`: the program that ranks have agreed on; by default that of the plan.
        """
        self._enter(compiled=compiled)
        scores = (program or self.plan.score_program).scores
        with torch.set_grad_enabled(graph):
            return self._pass(scores, entropy=entropy, graph=graph)

    def forward_backward(self, loss: Loss, denominators: Denominators, scale: float) -> PassResult:
        """Add the gradients of the batch's loss, times `scale`, to `.grad`.

        If the program has a pass of scores, it first computes log-probs (or values of a critic)
        without a graph, then the gradient of the loss with respect to them, and then runs the plan
        with this gradient as weights. Otherwise the loss is computed in each microbatch, which
        `Plan.check_coupling` has allowed.
        """
        plan = self.plan
        views = LossViews(self.batch, denominators, self.host.device, self.host.loss_dtype)
        mark = self._begin()
        losses = MicrobatchLosses(self.host, self.config, loss, views, self.ranks, scale)
        whole = plan.program.has_scores or bool(self.ranks.parts)
        scored = None
        if whole or plan.program.scores:
            with torch.no_grad():
                scored = self._pass(plan.program.scores, entropy=whole and loss.needs_entropy)
        if self.routing is not None:
            self.routing.gather(self.ranks)
        value = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
        if whole and scored is not None:
            given = loss_inputs(self.ranks, scored.per_token, views, losses.shown(plan))
            weights: dict[str, Tensor | None] = dict.fromkeys(given.per_token)
            # The loss is 0 if all rollouts are left out.
            if given.shown.any() or not len(given.shown):
                with self._deferred_failure():
                    part = losses.of_scores(given)
                    value = part.value
                    weights |= part.gradients
            microbatch_loss = WeightedSum(weights)
        elif loss.decomposition == "token":
            microbatch_loss = losses.of_tokens
        else:
            microbatch_loss = CoupledLosses(losses, plan, self.inputs)
            with self._deferred_failure():
                value = microbatch_loss.of_untrained()
        result = self._pass(
            plan.program.training,
            entropy=loss.needs_entropy,
            microbatch_loss=microbatch_loss,
            scale=losses.factor,
        )
        result = replace(result, loss=value if whole else result.loss + value)
        return self._ended(mark, result if scored is None else result.after(scored))

    def backward(
        self, weights: Mapping[str, Tensor | None], look: Callable[[Tensor], None]
    ) -> PassResult:
        """Add the gradients of sum(weight * value) over the batch's trained tokens to `.grad`.

        By the chain rule, this is the gradient of a loss of the values of `score`, if the weights
        are the gradient of the loss with respect to these values.

        weights: [T] for each output of the head by name, or None if it has no gradient. Entries of
            untrained tokens are not read.
        look: called with the head's values [T] before the step ends; its errors end the step.
        """
        mark = self._begin()
        result = self._pass(
            self.plan.program.training,
            entropy="entropies" in weights,
            # Each rank's loss is its own here.
            microbatch_loss=WeightedSum(weights, self.host.group.factor(mean=True)),
        )
        with self._deferred_failure():
            look(result.per_token[self.host.head])
        return self._ended(mark, result)

    # Begin and end
    # ------------------------------------------------------------

    def _begin(self) -> int:
        """Prepare gradients and model for backwards. Returns the mark to which `Changes.undo`
        undoes this."""
        changes, mark = self.transaction.changes, self.transaction.changes.mark
        parameters = [p for _, p in self.host.named_parameters() if p.requires_grad]
        fp32 = self.config.grad_accumulation_dtype == "float32"
        deferred = parameters if fp32 else self.host.group.deferred_params(parameters)
        guard = self.transaction.guard = GradientGuard(
            parameters,
            restore=self.config.restore_grads,
            sums=GradientSums(deferred, fp32=fp32) if deferred else None,
            holder=self.host.group,
        )
        if guard.sums is not None:
            leaves = deferred
            if self.host.topology.listens:
                leaves = twins(self.host.model, deferred, changes)
            guard.sums.collect(changes, leaves)
        self._enter()
        return mark

    def _enter(self, *, compiled: bool = True) -> None:
        changes = self.transaction.changes
        self.host.enter(changes, compiled=compiled)
        if self.routing is not None or self.replay is not None:
            note = None if self.routing is None else self.routing.outputs.note
            choose = None if self.replay is None else self.replay.choose
            self.host.watch_routers(note, changes, choose)

    @cached_property
    def inputs(self) -> PreparedMicrobatches:
        """Inputs of the plan's microbatches."""
        return PreparedMicrobatches(
            self.plan,
            self.batch,
            self.host.device,
            uses_temperature=self.host.head == "logprobs",
            split=self.host.topology.places,
            axes_AT=self.host.positions(self.batch) if self.batch.media else None,
        )

    def _ended(self, mark: int, result: PassResult) -> PassResult:
        """Finish a step with backwards. Returns the result with the loss of all ranks.

        Waits until each rank has ended its program. Restores the model, reduces gradients if the
        backwards have not done so, and completes `.grad`.
        """
        changes, guard = self.transaction.changes, self.transaction.guard
        assert guard is not None
        # Gathered weights are sharded again after gradients are reduced.
        held = self.host.group.gathered
        if not held:
            changes.undo(mark)
        router = None if self.routing is None else self.routing.ending
        loss = self.ranks.finish(result.loss, self._failure, router=router)
        if held:
            guard.touched = True
            self.host.group.reduce_held()
            changes.undo(mark)
        self.host.group.reduce_earlier()
        trains = any(len(inputs.trained_tokens) for inputs in self.inputs)
        alone = self.ranks.ranks.is_alone and not self.host.links.stages
        if trains and alone and not guard.began:
            raise UnsupportedError(NOTHING_TRAINED)
        if not (trains or self.ranks.any_trains):
            guard.add_zeros(self.host)
        if guard.sums is not None:
            parameters, mean = guard.sums.parameters, self.ranks.mean
            guard.sums.reduce(partial(self.host.group.reduce, parameters=parameters, mean=mean))
            guard.touched = True
            guard.sums.add_to_gradients()
        return replace(result, loss=loss)

    def _pass(
        self,
        instructions: Sequence[Instruction],
        *,
        entropy: bool,
        microbatch_loss: MicrobatchLoss | None = None,
        scale: float = 1.0,
        graph: bool = False,
    ) -> PassResult:
        """Run the instructions of one pass. A pass with backwards needs a `microbatch_loss`.

        `scale`: factor on the gradients of other losses, such as the router loss.
        """
        host, config, plan, changes = self.host, self.config, self.plan, self.transaction.changes
        mark, training = changes.mark, microbatch_loss is not None
        timing = Timing(plan, host.device)
        traffic = activations = hosted = gathered = None
        if self.staging is not None:
            traffic = OffloadStats()
            changes.later(self.staging.finish, traffic)
        if training:
            activations = Activations(plan, self.inputs, host, self.staging, traffic)
        if plan.host_layers:
            assert self.staging is not None and traffic is not None and plan.shape is not None
            layers = plan.shape.attention_layers
            hosted = HostCache(self.staging, traffic, hosted=plan.host_layers, layers=layers)
        cache = PrefixCache(
            plan.cache_tokens, gradients=training, cache_states=plan.cache_states, host=hosted
        )
        encoding, instructions = self._encoding(instructions, training=training)
        if any(microbatch.gathered for microbatch in plan.microbatches):
            gathered = GatheredCache(plan, host.topology.places)
        features = (timing, encoding, self.exchange, gathered, self.replay, activations)
        names = names_of(host.head, config, entropy)
        values = TokenValues(names, plan, self.batch, host.loss_dtype, host.device)
        used: list[Feature] = [each for each in (*features, self.routing) if each is not None]
        loss = Executor(self.transaction, host, plan, self.inputs, config, used).run(
            mark_last_backward(instructions),
            values,
            cache,
            entropy=entropy,
            loss=None if microbatch_loss is None else partial(self._loss_part, microbatch_loss),
            scale=scale,
            graph=graph,
        )
        changes.undo(mark)
        host.group.reshard()
        timing.end()
        return PassResult(
            loss=loss,
            per_token=values.by_name,
            events=tuple(timing.events),
            phase_ms=timing.totals_ms(),
            event_ms=timing.each_ms(),
            event_wait_ms=timing.waits_ms(),
            offload=traffic,
        )

    def _encoding(
        self, instructions: Sequence[Instruction], *, training: bool
    ) -> tuple[Encoding | None, Sequence[Instruction]]:
        """Insert the encoder's runs into the instructions of a pass. Returns both.

        Returns None and the same instructions if this rank encodes no medium.
        """
        host, common = self.host, self.encoders
        if not (host.links.begins_here and (self.batch.media or common is not None)):
            return None, instructions
        # Stages plan for an encoder that trains.
        plan = self.plan.with_encoder(host.encoder_shape())
        trains = plan.capabilities.trains_encoder if common is None else common.trains
        encoding = Encoding(
            host,
            self.batch.media,
            self.transaction,
            trains=training and trains,
            idle=None if common is None else common.idle,
        )
        return encoding, plan.with_encoders(instructions, training=training, common=common)

    # Errors of a loss
    # ------------------------------------------------------------

    @contextmanager
    def _deferred_failure(self) -> Iterator[None]:
        """Delay an error of a loss until the program has ended, if other ranks run the program too.

        Otherwise their collectives would wait for this rank. Gradients are zeros after the error,
        and no rank keeps any.
        """
        try:
            yield
        except BaseException as error:
            if self.ranks.ranks.is_alone:
                raise
            self._failure = self._failure or error

    def _loss_part(
        self, loss: MicrobatchLoss, inputs: MicrobatchInputs, outputs: HeadOutputs
    ) -> LossPart | None:
        """A microbatch's part of a loss. Its errors are delayed: see `_deferred_failure`."""
        if self._failure is None:
            with self._deferred_failure():
                return loss(inputs, outputs)
        return None
