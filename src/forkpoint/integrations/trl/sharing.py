"""Steps of a trainer: all micro-batches of an optimizer step run as one step of forkpoint.

A loss of TRL's code is computed after all micro-batches of an optimizer step have arrived. A loss
of other code runs once per micro-batch, on log-probs that are computed for it. In both cases the
trainer gets a tensor whose backward stores the gradient (`arrivals`). The step runs after the
backward of the last micro-batch.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from forkpoint.config import HEAD_STATISTICS, Config
from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.integrations.trl.arrivals import Arrivals
from forkpoint.integrations.trl.calls import (
    Captured,
    HeadAnswer,
    PackedRows,
    Rows,
    StandIn,
    answering,
    capturing,
    scoring,
)
from forkpoint.integrations.trl.counts import Counts
from forkpoint.integrations.trl.heads import HeadChecks
from forkpoint.integrations.trl.losses import (
    TokenTerms,
    additive,
    check_routers,
    factor_of,
    in_two_halves,
    one_factor,
    ranks_of,
    router_loss,
    streams,
    weighted_step,
)
from forkpoint.integrations.trl.undo import LossState
from forkpoint.losses.base import FunctionLoss, Loss, LossBatch, LossOutputs
from forkpoint.plan import Plan
from forkpoint.policy import Policy, StepStats
from forkpoint.step.differentiable import after_this_backward, autocast_as_now
from forkpoint.wrapping import wrap

_log = logging.getLogger("forkpoint")

NAMES = {"logprobs": "log_probs", "entropies": "entropy"} | {x: x for x in HEAD_STATISTICS}
"""TRL's names of head outputs, by forkpoint's names."""

ROUTERS = "routers"
"""Name of the load-balancing loss among the values that receive gradients."""

ComputeLoss = Callable[..., Tensor]
"""TRL's `compute_loss` of a trainer: (model, inputs, num_items_in_batch=) to a scalar."""


@dataclass(eq=False, kw_only=True)
class Call:
    """A call of a model, with the gradients that arrive at its outputs."""

    model: nn.Module
    rows: Rows
    syncs: bool
    """Whether its micro-batch is the last one before the optimizer's step."""
    steps: int
    """Number of windows that had run before the call."""
    names: tuple[str, ...] = ()
    """Names of the outputs from which a loss was computed."""
    expert_counts: Tensor | None = None
    """Counts int64 [rows, layers, experts], if the call needs the load-balancing loss."""
    arrivals: Arrivals = field(init=False)

    def weight(self, name: str) -> Tensor:
        """Gradient with respect to an output: [tokens], or a scalar; 0 if there is none."""
        values = dict(zip(self.names, self.arrivals.gradients, strict=True))
        shape = () if name == ROUTERS else (int(self.rows.present.sum()),)
        found = values.get(name)
        return torch.zeros(shape, device=self.rows.input_ids.device) if found is None else found


@dataclass(eq=False, kw_only=True)
class MicroBatch(Call):
    """Call whose loss is computed together with the other losses of its window."""

    compute: ComputeLoss
    inputs: Any
    num_items: Any


class Sharing:
    """forkpoint's part of a trainer, with the present window.

    A window has the micro-batches of one optimizer step. Their losses are computed together, or
    each loss has already called the model.
    """

    def __init__(self, trainer: Any, config: Config) -> None:
        self.trainer: Any = trainer
        self.config: Config = config
        self.streams: bool | None = None
        """Whether steps are streamed; None before the first step."""
        self.counts: Counts = Counts(config)
        self.context_ranks: int = 1
        """Number of ranks that run one sequence together."""
        self.last_plan: Plan | None = None
        self._window: list[Call] = []
        """Micro-batches, or calls of the model, whose backward has run."""
        self._gathers = False
        """Whether the present loss is computed with the others of its window."""
        self._value: Tensor | None = None
        """Losses of the window that has run in this training step."""
        self._steps = 0
        """Number of windows that have run."""
        self._warned = False
        self._heads = HeadChecks()
        self._policies: dict[tuple[int, type], tuple[nn.Module, Policy]] = {}

    def forget(self) -> None:
        """Drop a window that was not run, such as that of a training that was interrupted."""
        self._window = []
        self._heads.forget()

    # Models ---------------------------------------------------------------------------------------

    def policy(self, model: nn.Module) -> Policy:
        """The policy of a model, with or without the wrapper of accelerate."""
        key = (id(model), type(model))  # fully_shard changes the class
        if key not in self._policies:
            mesh = self._mesh if isinstance(model, FSDPModule) else None
            self._policies[key] = model, wrap(model, self.config, mesh=mesh)
        _, found = self._policies[key]
        return found

    @cached_property
    def _mesh(self) -> DeviceMesh | None:
        """Device mesh with neighbouring ranks in one context group, as in accelerate's mesh; None
        without context parallelism. The first call is collective."""
        if self.context_ranks == 1:
            return None
        sizes = (dist.get_world_size() // self.context_ranks, self.context_ranks)
        device = self.trainer.accelerator.device.type
        return init_device_mesh(device, sizes, mesh_dim_names=("data", "cp"))

    @cached_property
    def temperature(self) -> float:
        """Temperature of TRL's fused head: the sampling temperature, or 1 in DPO.

        TRL reads it once, when it makes the head.
        """
        return float(getattr(self.trainer, "temperature", 1.0))

    @property
    def _asks(self) -> bool:
        """Whether the loss calls a reference model itself."""
        trainer = self.trainer
        return hasattr(trainer, "precompute_ref_logps") and not trainer.precompute_ref_logps

    @property
    def _statistics(self) -> tuple[str, ...]:
        trainer = self.trainer
        if not hasattr(trainer, "use_weighting"):
            return ()
        more = ("log_sum_sq_probs",) if trainer.use_weighting else ()
        return ("mean_logits", "is_top1", *more)

    def _reading(self, model: nn.Module) -> Policy:
        """The policy of a model, with the options for the outputs that a loss reads."""
        policy = self.policy(model)
        return policy.with_config(head_statistics=self._statistics) if self._statistics else policy

    def _packed(self, policy: Policy, calls: Sequence[Rows]) -> PackedRows:
        """Pack the rows of calls. Collective over context-parallel ranks."""
        return PackedRows(calls, self.temperature, policy.host.topology.places)

    def _check_head(self, model: nn.Module, rows: Rows) -> None:
        """Compare TRL's own head on a model, if that is due. Collective."""

        def answered(few: Rows, temperature: float) -> HeadAnswer:
            policy = self._reading(model)
            packed = PackedRows([few], temperature, policy.host.topology.places)
            scores = policy.score(packed.batch, entropy=True)
            return self._answers(packed, packed.own(scores.per_token))[0]

        policy = self.policy(model)
        self._heads.check(self.trainer, policy, model, rows, self.temperature, answered)

    def _answers(
        self, packed: PackedRows, per_token: Mapping[str, Tensor], routers: Tensor | None = None
    ) -> list[HeadAnswer]:
        """Outputs of TRL's head for each call, from outputs [t] by forkpoint's names, with the mean
        of the load-balancing losses."""
        found: list[dict[str, Tensor]] = [{} for _ in packed.calls]
        for name, values_t in per_token.items():
            for answer, x_BW in zip(found, packed.unpacked(values_t), strict=True):
                answer[NAMES[name]] = x_BW.bool() if name == "is_top1" else x_BW
        return [HeadAnswer(**answer, aux_loss=routers) for answer in found]

    # Training ------------------------------------------------------------------------------------

    def training_step(self, run: Callable[[], Tensor], foreign: str | None) -> Tensor:
        """The loss of a micro-batch, from `run`, the trainer's own `training_step`.

        If the losses of a window are computed together, it is 0 before the last micro-batch, and
        the sum of all losses at the last one.

        foreign: name of a method of the loss that is not TRL's code; None if there is none.
        """
        if foreign is not None:
            self.streams = False
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s is not TRL's own code. It runs once, when its micro-batch comes, on "
                    "log-probs that are computed for it: one more forward, in which rows of other "
                    "micro-batches are not shared.",
                    foreign,
                )
            return run()
        self._gathers, self._value = True, None
        try:
            # Gradient of a loss of 1, which is the factor of the loss.
            factor = run()
        finally:
            self._gathers = False
        value = self._value
        return torch.zeros_like(factor) if value is None else factor * value

    def loss(
        self,
        compute: ComputeLoss,
        model: nn.Module,
        inputs: Any,
        *,
        return_outputs: bool,
        num_items: Any,
    ) -> Any:
        """Result of TRL's `compute_loss`, from log-probs of forkpoint."""
        if self._gathers and torch.is_grad_enabled() and not return_outputs:
            return self._gathered(compute, model, inputs, num_items)
        with self.evaluating():
            return compute(
                self.scorer(model, entropy=True),
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items,
            )

    def _gathered(
        self, compute: ComputeLoss, model: nn.Module, inputs: Any, num_items: Any
    ) -> Tensor:
        """A placeholder of a loss that is computed with the others of its window."""
        trainer, policy = self.trainer, self.policy(model)
        refusals.check_trainable(policy.host.model)
        state = LossState(trainer)
        try:
            compute(capturing(model), copy(inputs), num_items_in_batch=num_items)
        except Captured as captured:
            rows = captured.rows
        else:
            raise UnsupportedError(
                f"the loss of {type(trainer).__name__} does not call its model with "
                "fused_lm_head=True, which forkpoint needs to find the rows. Call the model as "
                "TRL's GRPO, RLOO and DPO do, or use the trainer of TRL."
            )
        finally:
            state.restore()
        self._check_head(model, rows)
        found = MicroBatch(
            model=model,
            rows=rows,
            syncs=bool(trainer.accelerator.sync_gradients),
            steps=self._steps,
            compute=compute,
            inputs=inputs,
            num_items=num_items,
        )
        return self._awaited(found, torch.ones((), device=rows.input_ids.device))[0]

    def _awaited(self, call: Call, *values: Tensor) -> tuple[Tensor, ...]:
        """The values, with a graph whose backward adds the call to the window. After the backward
        of the last call the window runs."""
        autocast = autocast_as_now(call.rows.input_ids.device)

        def reached() -> None:
            if call not in self._window:
                self._window.append(call)
            if call.syncs:
                after_this_backward(partial(self._finish, autocast))

        call.arrivals = Arrivals(self.policy(call.model).host.named_parameters(), reached)
        return call.arrivals.at(*values)

    def check_finished(self) -> None:
        """Raises UnsupportedError if an optimizer steps without the gradients of its window."""
        count, self._window = len(self._window), []
        if count:
            raise UnsupportedError(
                f"the optimizer steps, and the gradients of {count} micro-batches have not been "
                "computed, because the last micro-batch had no backward. Call backward for each "
                "micro-batch. To leave one out, call (loss * 0).backward()."
            )

    def _finish(self, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the window, in the backward of its last micro-batch."""
        window, self._window = self._window, []
        if not window:  # the window has run, for another value of the same backward
            return
        steps, self._steps = self._steps, self._steps + 1
        for one in window:
            one.arrivals.check_weights()
            if one.steps == steps and not self.policy(one.model).host.group.ranks.is_alone:
                one.arrivals.check_gradients()
            one.arrivals.used = True
        batches = [one for one in window if isinstance(one, MicroBatch)]
        calls = [one for one in window if not isinstance(one, MicroBatch)]
        if batches and calls:
            raise UnsupportedError(
                "the trainer's compute_loss was replaced between the micro-batches of an "
                "optimizer step. Replace it between optimizer steps."
            )
        with autocast(), torch.enable_grad():
            if batches:
                self._finish_batches(batches)
            # The models that losses have called, in the same order on every rank.
            for model in dict.fromkeys(one.model for one in calls):
                self._finish_calls(model, [one for one in calls if one.model is model])

    def _finish_batches(self, window: list[MicroBatch]) -> None:
        factors = [g for one in window for g in one.arrivals.gradients if g is not None]
        remedy = (
            "Let a compute_loss of your own class multiply them, and train with "
            "shared_trainer(YourClass)."
        )
        factor = one_factor("the losses in the backwards", factors, remedy)
        state = LossState(self.trainer)
        try:
            self._value = self._run(window, factor, state)
        except BaseException:
            state.restore()
            raise

    def _finish_calls(self, model: nn.Module, calls: list[Call]) -> None:
        """Run a step with the stored gradients of a model's log-probs."""
        policy = self.policy(model)
        packed = self._packed(policy, [one.rows for one in calls])
        weights: dict[str, Tensor] = {
            name: torch.cat([one.weight(name) for one in calls])
            for name in dict.fromkeys(name for one in calls for name in one.names)
            if name != ROUTERS
        }
        router = counts = None
        if any(one.rows.routed for one in calls):
            remedy = "Give all the same weight, or set router_aux_loss_coef=0.0."
            factors = [one.weight(ROUTERS) for one in calls]
            factor = one_factor("the load-balancing losses", factors, remedy)
            router = router_loss(packed, factor * len(calls))
            counts = torch.cat([x for x in (one.expert_counts for one in calls) if x is not None])
        begin = time.perf_counter()
        stats = weighted_step(policy, packed, weights, router=router, router_counts=counts)
        self._count(stats, packed, begin)

    def _count(self, stats: StepStats, packed: PackedRows, begin: float) -> None:
        self.last_plan = stats.plan
        self.counts.add(stats.plan, (time.perf_counter() - begin) * 1e3)

    def _run(self, window: list[MicroBatch], scale: float, state: LossState) -> Tensor:
        """Run a window, with gradients multiplied by `scale`. Returns the losses of its
        micro-batches."""
        model = window[-1].model
        policy = self._reading(model)
        packed = self._packed(policy, [one.rows for one in window])
        references = self._references(packed.calls, self.trainer.ref_model) if self._asks else None
        begin = time.perf_counter()
        routed, device = window[0].rows.routed, packed.cells.device
        unknown = torch.zeros((), device=device) if routed else None

        def losses(per_token: Mapping[str, Tensor], routers: Tensor | None = unknown) -> Tensor:
            state.restore()  # a repeated step computes its loss again
            answers = self._answers(packed, per_token, routers)
            return self._losses(window, answers, references)

        factor = router = None
        if routed:
            # TRL's loss is linear in router losses. The step adds their gradients, and TRL's code
            # gets their mean later.
            check_routers(self.trainer, policy)
            factor = factor_of(losses, packed, ("logprobs", "entropies", *self._statistics))
            router = router_loss(packed, factor)
        terms = self._terms(window, packed, losses, state)
        values: list[Tensor] = []
        on_ranks = not policy.host.group.ranks.is_alone
        if terms is None and on_ranks:
            stats, value = in_two_halves(policy, packed, losses, scale, router)
            values.append(value)
        else:

            def whole(outputs: LossOutputs, batch: LossBatch) -> Tensor:
                values.append(losses(outputs.per_token))
                return values[-1]

            loss: Loss = FunctionLoss(whole, needs_entropy=True)
            if terms is not None:
                loss = additive(policy, terms, router)
            scale /= packed.ranks
            stats = policy.forward_backward(packed.batch, loss, scale=scale, router=router)
        mean = None
        if factor is not None and stats.router_loss is not None:
            mean = torch.tensor(stats.router_loss / factor, device=device)
        if terms is not None or routed:
            with torch.no_grad():
                values.append(losses(packed.own(stats.per_token), mean))
        self._count(stats, packed, begin)
        return values[-1].detach().clone()

    def _terms(
        self,
        window: list[MicroBatch],
        packed: PackedRows,
        losses: Callable[[Mapping[str, Tensor]], Tensor],
        state: LossState,
    ) -> TokenTerms | None:
        """The terms of a streamed step; None if TRL's loss needs all log-probs at once.

        Every step compares them with TRL's code, because a callback may have changed an option.
        """
        trainer = self.trainer
        if self.streams is None or self.streams:
            known = import_module("trl").GRPOTrainer
            self.streams = isinstance(trainer, known) and streams(trainer)
        if not self.streams:
            return None
        terms = TokenTerms(trainer, [one.inputs for one in window], packed)

        def by_name(logprobs_t: Tensor, entropies_t: Tensor) -> Tensor:
            return losses({"logprobs": logprobs_t, "entropies": entropies_t})

        agreed = torch.tensor(float(terms.agrees(by_name)), device=packed.cells.device)
        state.restore()
        self.streams = bool(trainer.accelerator.gather(agreed).min() == 1)
        if self.streams:
            return terms
        _log.warning(
            "TRL's loss code, with the trainer's present options, has other gradients than "
            "forkpoint knows for loss_type=%r, so that steps run one more forward, and TRL's own "
            "code computes their gradients.",
            trainer.loss_type,
        )
        return None

    def _losses(
        self,
        window: Sequence[MicroBatch],
        answers: Sequence[HeadAnswer],
        references: Sequence[HeadAnswer] | None,
    ) -> Tensor:
        values, gradients = [], self.trainer.accelerator.gradient_state
        for index, (one, answer) in enumerate(zip(window, answers, strict=True)):
            reference = None
            if references is not None:
                reference = answering(None, one.rows, references[index])
            model = answering(one.model, one.rows, answer)
            with Changes() as changes:
                # The state at the time of this micro-batch.
                changes.later(gradients._set_sync_gradients, gradients.sync_gradients)
                gradients._set_sync_gradients(one.syncs)
                if reference is not None:
                    changes.set(vars(self.trainer), "ref_model", reference)
                values.append(
                    one.compute(model, copy(one.inputs), num_items_in_batch=one.num_items)
                )
        return torch.stack(values).sum()

    # Calls of a model -----------------------------------------------------------------------------

    def scorer(self, model: nn.Module, *, entropy: bool) -> StandIn:
        """A stand-in for a model that computes log-probs.

        They have no graph of the model. If gradients are enabled, a backward of the log-probs runs
        a step.
        """

        def score(rows: Rows) -> HeadAnswer:
            self._check_head(model, rows)
            policy = self._reading(model) if entropy else self.policy(model)
            packed = self._packed(policy, [rows])
            router = router_loss(packed, 1.0) if rows.routed else None
            found = policy.score(packed.batch, entropy=entropy, router=router)
            values, routers = packed.own(found.per_token), None
            if found.own_router_loss is not None:
                # This rank's part of the mean over ranks. Each rank has one call.
                own = found.own_router_loss * ranks_of(policy)
                routers = torch.tensor(own, device=packed.cells.device)
            if torch.is_grad_enabled():
                given = {n: values[n] for n in ("logprobs", "entropies") if n in values}
                if routers is not None:
                    given[ROUTERS] = routers
                call = Call(
                    model=model,
                    rows=rows,
                    syncs=bool(self.trainer.accelerator.sync_gradients),
                    steps=self._steps,
                    names=tuple(given),
                    expert_counts=found.rollout_expert_counts,
                )
                values |= dict(zip(given, self._awaited(call, *given.values()), strict=True))
                routers = values.pop(ROUTERS, None)
            return self._answers(packed, values, routers)[0]

        return scoring(model, score)

    def _references(self, calls: Sequence[Rows], model: Any) -> list[HeadAnswer]:
        """Outputs of the trainer's reference model: `model`, or the policy without its adapter."""
        trainer, adapters = self.trainer, nullcontext()
        if model is None:
            model = trainer.accelerator.unwrap_model(trainer.model)
            name = "ref" if "ref" in model.peft_config else None
            adapters = import_module("trl.trainer.utils").use_adapter(model, adapter_name=name)
        with torch.no_grad(), adapters:
            self._check_head(model, calls[0])
            policy = self.policy(model)
            packed = self._packed(policy, calls)
            found = policy.score(packed.batch)
        return self._answers(packed, packed.own(found.per_token))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Replace the reference model by a stand-in that scores rows, inside the block."""
        with Changes() as changes:
            if self._asks:
                before = self.trainer.ref_model
                stand_in = scoring(before, lambda rows: self._references([rows], before)[0])
                changes.set(vars(self.trainer), "ref_model", stand_in)
            yield
