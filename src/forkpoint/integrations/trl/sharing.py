"""The steps of a trainer: micro-batches are gathered, and an optimizer step's are run as one."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.config import HEAD_STATISTICS, Config
from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl.counts import Counts
from forkpoint.integrations.trl.ranks import additive, in_two_halves, ranks_of
from forkpoint.integrations.trl.routers import check_routers, factor_of, router_loss
from forkpoint.integrations.trl.rows import PackedRows, Rows
from forkpoint.integrations.trl.stand_ins import Answer, HeadAnswer, Recorded, Recorder, Scorer
from forkpoint.integrations.trl.terms import TokenTerms, streams
from forkpoint.integrations.trl.undo import LossState
from forkpoint.losses.base import FunctionLoss, Loss, LossBatch, LossOutputs
from forkpoint.plan import Plan
from forkpoint.policy import Policy
from forkpoint.wrapping import wrap

_log = logging.getLogger("forkpoint")

NAMES = {"logprobs": "log_probs", "entropies": "entropy"} | {x: x for x in HEAD_STATISTICS}
"""Names that TRL's head has for what forkpoint's gives."""

ComputeLoss = Callable[..., Tensor]
"""TRL's `compute_loss` of a trainer: (model, inputs, num_items_in_batch=) to a scalar."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of a window, with what its loss depends on besides its inputs."""

    inputs: Any
    num_items: Any
    rows: Rows
    syncs: bool
    """Whether it is the last one before the optimizer's step."""


class Sharing:
    """The part of a trainer of ours that is not TRL's: policies, and the window so far.

    A window is the micro-batches of one optimizer step.
    """

    def __init__(self, trainer: Any, config: Config) -> None:
        self.trainer: Any = trainer
        self.config: Config = config
        self.streams: bool | None = None
        """Whether steps are streamed; None until the first one has looked at the options."""
        self.counts: Counts = Counts(config)
        self.last_plan: Plan | None = None
        self._window: list[MicroBatch] = []
        self._policies: dict[tuple[int, type], tuple[nn.Module, Policy]] = {}

    def policy(self, model: nn.Module) -> Policy:
        """The policy of a model, as accelerate has prepared it or as it was made."""
        key = (id(model), type(model))  # fully_shard changes the class
        known = self._policies.get(key)
        if known is None:
            known = self._policies[key] = (model, wrap(model, self.config))
        return known[1]

    @property
    def _statistics(self) -> tuple[str, ...]:
        """Numbers of the head that the loss or its metrics read besides log-probs and entropies."""
        return ()

    def _reading(self, model: nn.Module) -> Policy:
        """The policy of a model with all that a loss reads."""
        policy = self.policy(model)
        return policy.with_config(head_statistics=self._statistics) if self._statistics else policy

    def forget(self) -> None:
        """Drop a window that was not run, such as that of a training that was interrupted."""
        self._window = []

    # Training ------------------------------------------------------------------------------------

    def step(self, compute: ComputeLoss, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """The loss of a micro-batch; gradients are added at the last one of the window.

        Returns a leaf, whose backward does nothing: 0 before the last micro-batch of the window,
        then the losses of all.
        """
        trainer = self.trainer
        syncs = bool(trainer.accelerator.sync_gradients)
        rows = self._recorded(compute, model, inputs, num_items)
        self._window.append(MicroBatch(inputs, num_items, rows, syncs))
        if not syncs:
            return torch.zeros((), device=rows.input_ids.device, requires_grad=True)
        window, self._window = self._window, []
        state = LossState(trainer)
        try:
            return self._run(compute, model, window, state).requires_grad_()
        except BaseException:
            state.restore()
            raise

    def _recorded(
        self, compute: ComputeLoss, model: nn.Module, inputs: Any, num_items: Any
    ) -> Rows:
        try:
            compute(Recorder(model), inputs, num_items_in_batch=num_items)
        except Recorded as recorded:
            return recorded.rows
        raise UnsupportedError(
            f"the loss of {type(self.trainer).__name__} asks its model for no log-probs: it makes "
            "no call with fused_lm_head=True. Trainers whose losses do, as TRL's GRPO, RLOO and "
            "DPO do, can share."
        )

    def _run(
        self, compute: ComputeLoss, model: nn.Module, window: list[MicroBatch], state: LossState
    ) -> Tensor:
        policy = self._reading(model)
        packed = PackedRows([one.rows for one in window], self._temperature)
        references = self._references(packed)
        scale = self._scale(window[-1])
        begin = time.perf_counter()
        routed, device = window[0].rows.routed, packed.cells.device
        unknown = torch.zeros((), device=device) if routed else None

        def losses(per_token: Mapping[str, Tensor], routers: Tensor | None = unknown) -> Tensor:
            state.restore()  # where a step is repeated its loss is, too
            answers = self._answers(packed, per_token, routers)
            return self._losses(compute, model, window, answers, references)

        factor = router = None
        if routed:
            # TRL's loss is linear in those of routers: the step adds them, and TRL's code is given
            # their mean when it is known.
            check_routers(self.trainer, policy)
            factor = factor_of(losses, packed, ("logprobs", "entropies", *self._statistics))
            router = router_loss(packed, factor)
        terms = self._terms(window, packed, losses, state)
        values: list[Tensor] = []
        on_ranks = policy.host.group is not None
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
            stats = policy.forward_backward(packed.batch, loss, scale=scale, router=router)
        mean = None
        if factor is not None and stats.router_loss is not None:
            mean = torch.tensor(stats.router_loss / factor, device=device)
        if terms is not None or routed:
            with torch.no_grad():
                values.append(losses(stats.per_token, mean))
        value = values[-1]
        self.last_plan = stats.plan
        self.counts.add(stats.plan, len(packed.batch), (time.perf_counter() - begin) * 1e3)
        return value.detach().clone()

    def _terms(
        self,
        window: list[MicroBatch],
        packed: PackedRows,
        losses: Callable[[Mapping[str, Tensor]], Tensor],
        state: LossState,
    ) -> TokenTerms | None:
        """The terms of a streamed step; None where TRL's loss needs all log-probs at once."""
        trainer = self.trainer
        if self.streams is None:
            known = import_module("trl").GRPOTrainer
            self.streams = isinstance(trainer, known) and streams(trainer, known._compute_loss)
            if self.streams:
                terms = TokenTerms(trainer, [one.inputs for one in window], packed)

                def by_name(logprobs_T: Tensor, entropies_T: Tensor) -> Tensor:
                    return losses({"logprobs": logprobs_T, "entropies": entropies_T})

                agreed = torch.tensor(float(terms.agrees(by_name)), device=packed.cells.device)
                state.restore()
                self.streams = bool(trainer.accelerator.gather(agreed).min() == 1)
                if not self.streams:
                    _log.warning(
                        "The loss of this TRL is not the one that forkpoint knows for "
                        "loss_type=%r, so that steps run one more forward, and TRL's own code "
                        "computes their gradients.",
                        trainer.loss_type,
                    )
        if not self.streams:
            return None
        return TokenTerms(trainer, [one.inputs for one in window], packed)

    def _losses(
        self,
        compute: ComputeLoss,
        model: nn.Module,
        window: Sequence[MicroBatch],
        answers: Sequence[HeadAnswer],
        references: Sequence[HeadAnswer] | None,
    ) -> Tensor:
        """The sum of TRL's losses of a window's micro-batches."""
        values = []
        for index, (one, answer) in enumerate(zip(window, answers, strict=True)):
            reference = None
            if references is not None:
                reference = Answer(None, one.rows, references[index])
            with self._as_in(one, reference):
                values.append(
                    compute(
                        Answer(model, one.rows, answer),
                        one.inputs,
                        num_items_in_batch=one.num_items,
                    )
                )
        return torch.stack(values).sum()

    @contextmanager
    def _as_in(self, one: MicroBatch, reference: Answer | None) -> Iterator[None]:
        """Within it the trainer is as it was when this micro-batch came, and its reference model
        answers with what has been computed."""
        trainer = self.trainer
        gradients = trainer.accelerator.gradient_state
        syncs, model = gradients.sync_gradients, getattr(trainer, "ref_model", None)
        try:
            gradients._set_sync_gradients(one.syncs)
            if reference is not None:
                trainer.ref_model = reference
            yield
        finally:
            gradients._set_sync_gradients(syncs)
            if reference is not None:
                trainer.ref_model = model

    def _scale(self, last: MicroBatch) -> float:
        """The factor that Trainer and accelerate put on a loss before its backward."""
        trainer, scaler = self.trainer, self.trainer.accelerator.scaler
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            known = trainer.model_accepts_loss_kwargs and last.num_items is not None
            scaled = known or trainer.compute_loss_func is not None
        scale = 1.0 if scaled else 1.0 / trainer.current_gradient_accumulation_steps
        return scale if scaler is None else scale * scaler.get_scale()

    @property
    def _temperature(self) -> float:
        """Of the head that TRL has fused: its sampling temperature, 1 in DPO."""
        return float(getattr(self.trainer, "temperature", 1.0))

    def _answers(
        self, packed: PackedRows, per_token: Mapping[str, Tensor], routers: Tensor | None = None
    ) -> list[HeadAnswer]:
        """Answers of TRL's head for each of the calls, from outputs [T] by forkpoint's names, with
        the mean of their load-balancing losses."""
        found: list[dict[str, Tensor]] = [{} for _ in packed.calls]
        for name, values_T in per_token.items():
            for answer, x_BW in zip(found, packed.unpacked(values_T), strict=True):
                answer[NAMES[name]] = x_BW.bool() if name == "is_top1" else x_BW
        return [HeadAnswer(**answer, aux_loss=routers) for answer in found]

    def _references(self, packed: PackedRows) -> list[HeadAnswer] | None:
        """Of a window, where the loss asks a reference model itself; else None."""
        return None

    # Scores --------------------------------------------------------------------------------------

    def scorer(self, model: nn.Module, *, entropy: bool) -> Scorer:
        """A stand-in for a model that computes log-probs without a graph."""

        def score(rows: Rows) -> HeadAnswer:
            packed = PackedRows([rows], self._temperature)
            policy = self._reading(model) if entropy else self.policy(model)
            router = router_loss(packed, 1.0) if rows.routed else None
            found = policy.score(packed.batch, entropy=entropy, router=router)
            routers = None
            if found.own_router_loss is not None:
                # This rank's part of the mean over ranks, which have one call each.
                own = found.own_router_loss * ranks_of(policy)
                routers = torch.tensor(own, device=packed.cells.device)
            return self._answers(packed, found.per_token, routers)[0]

        return Scorer(model, score)
