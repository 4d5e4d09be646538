"""Policies of a trainer's models, and what they answer where TRL's losses ask a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.config import HEAD_STATISTICS, Config
from forkpoint.integrations.trl.heads import HeadChecks
from forkpoint.integrations.trl.ranks import ranks_of
from forkpoint.integrations.trl.routers import router_loss
from forkpoint.integrations.trl.rows import PackedRows, Rows
from forkpoint.integrations.trl.stand_ins import HeadAnswer, Scorer
from forkpoint.policy import Policy
from forkpoint.wrapping import wrap

NAMES = {"logprobs": "log_probs", "entropies": "entropy"} | {x: x for x in HEAD_STATISTICS}
"""Names that TRL's head has for what forkpoint's gives."""


class Answering:
    """The part of a trainer of ours that answers calls of its models."""

    def __init__(self, trainer: Any, config: Config) -> None:
        self.trainer: Any = trainer
        self.config: Config = config
        self._temperature: float | None = None
        self._heads = HeadChecks()
        self._policies: dict[tuple[int, type], tuple[nn.Module, Policy]] = {}

    def policy(self, model: nn.Module) -> Policy:
        """The policy of a model, as accelerate has prepared it or as it was made."""
        key = (id(model), type(model))  # fully_shard changes the class
        known = self._policies.get(key)
        if known is None:
            known = self._policies[key] = (model, wrap(model, self.config))
        return known[1]

    @property
    def temperature(self) -> float:
        """Of the head that TRL has fused: its sampling temperature, 1 in DPO."""
        self.keep_temperature()
        assert self._temperature is not None
        return self._temperature

    def keep_temperature(self) -> None:
        """Read the temperature now, once: TRL reads it when it makes the head."""
        if self._temperature is None:
            self._temperature = float(getattr(self.trainer, "temperature", 1.0))

    @property
    def _statistics(self) -> tuple[str, ...]:
        """Numbers of the head that the loss or its metrics read besides log-probs and entropies."""
        return ()

    def _reading(self, model: nn.Module) -> Policy:
        """The policy of a model with all that a loss reads."""
        policy = self.policy(model)
        return policy.with_config(head_statistics=self._statistics) if self._statistics else policy

    def _check_head(self, model: nn.Module, rows: Rows) -> None:
        """Compare TRL's own head on a model, where that is due. Collective."""

        def answered(few: Rows, temperature: float) -> HeadAnswer:
            packed = PackedRows([few], temperature)
            scores = self._reading(model).score(packed.batch, entropy=True)
            return self._answers(packed, scores.per_token)[0]

        policy = self.policy(model)
        self._heads.check(self.trainer, policy, model, rows, self.temperature, answered)

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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it a loss is computed at once; see ReferenceSharing."""
        yield

    def scorer(self, model: nn.Module, *, entropy: bool) -> Scorer:
        """A stand-in for a model that computes log-probs.

        They have no graph of the model. Where gradients are enabled, what arrives at them in a
        backward becomes a step.
        """

        def score(rows: Rows) -> HeadAnswer:
            packed = PackedRows([rows], self.temperature)
            self._check_head(model, rows)
            policy = self._reading(model) if entropy else self.policy(model)
            router = router_loss(packed, 1.0) if rows.routed else None
            found = policy.score(packed.batch, entropy=entropy, router=router)
            values, routers = dict(found.per_token), None
            if found.own_router_loss is not None:
                # This rank's part of the mean over ranks, which have one call each.
                own = found.own_router_loss * ranks_of(policy)
                routers = torch.tensor(own, device=packed.cells.device)
            if torch.is_grad_enabled():
                counts = found.rollout_expert_counts
                values, routers = self._reachable(model, rows, values, routers, counts)
            return self._answers(packed, values, routers)[0]

        return Scorer(model, score)

    def _reachable(
        self,
        model: nn.Module,
        rows: Rows,
        values: dict[str, Tensor],
        routers: Tensor | None,
        expert_counts: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Outputs of a call, with a graph at whose end gradients are kept for the step.

        Args:
            model: the model that was called.
            rows: the call's.
            values: outputs [T] by forkpoint's names.
            routers: the load-balancing loss, where it was asked for.
            expert_counts: int64 [rows, layers, experts], likewise.
        """
        raise NotImplementedError
