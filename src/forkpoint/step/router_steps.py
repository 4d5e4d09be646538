"""Arguments for routers in a policy's calls."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.engine.distributed import Distributed
from forkpoint.engine.route_replay import RouteReplay, Routes
from forkpoint.engine.routing import RouterTerms
from forkpoint.errors import ConfigError, PlanError, RolloutError, UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.losses.base import is_own
from forkpoint.losses.router import RouterLoss
from forkpoint.parallel.statistics import StatisticsShare
from forkpoint.plan import Plan
from forkpoint.plan.routing import RouterDemand
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.tree.forest import IntArray


@dataclass(frozen=True, eq=False)
class RouterWork:
    """The router statistics that a call computes."""

    router: RouterLoss
    terms: RouterTerms
    tokens: IntArray
    """int64 [N], number of tokens that count, by rollout."""
    on_ranks: bool = False
    """Whether several ranks hold the model."""
    on_stages: bool = False
    """Whether routers are on several stages of a pipeline. A loss then needs the counts of all
    stages."""

    @property
    def joins(self) -> bool:
        """Whether one statistic is taken over the rollouts of all ranks."""
        return self.on_ranks and self.router.scope == "batch"

    @property
    def has_loss(self) -> bool:
        """Whether a router loss is computed. Otherwise experts are only counted."""
        return bool(self.terms.load_balancing or self.terms.z)

    def share(self) -> StatisticsShare | None:
        """This rank's part of the statistics of all ranks; None without other ranks."""
        if not self.on_ranks:
            return None
        given = self.terms.given
        return StatisticsShare(
            joins=self.joins,
            gathers=self.joins and given is None and bool(self.terms.load_balancing),
            tokens=int(self.tokens.sum()),
            statistics=len(np.unique(self.terms.parts)) if self.has_loss else 0,
            counts="" if given is None else _digest(given.detach().cpu().numpy()),
            parts=_digest(self.terms.parts),
        )

    def demand(self, *, scored: bool = False) -> RouterDemand:
        """The demands on a plan. `scored`: whether a pass of scores comes first in any case."""
        known = scored or self.terms.given is not None or not self.terms.load_balancing
        parts = None if known else self.terms.parts
        over_ranks = self.joins or self.on_stages
        return RouterDemand(self.router.last_token, parts, over_ranks=over_ranks)

    def check_plan(self, plan: Plan, *, scored: bool = False) -> None:
        """Raises PlanError if the plan does not run the tokens that count, or if it has no pass of
        scores and the loss needs counts first."""
        if plan.last_tokens is not self.router.last_token:
            raise PlanError(
                f"this plan {'runs' if plan.last_tokens else 'does not run'} rollouts' last "
                "tokens, and the router statistics of this call "
                f"{'include' if self.router.last_token else 'leave out'} them. Pass the same "
                "router= or expert_counts= to policy.plan(batch, loss, ...)."
            )
        spans = self.demand(scored=scored).spans(plan.forest, plan.microbatches)
        if spans and not plan.program.has_scores:
            raise PlanError(
                "this plan has one pass, and the router loss takes its counts over rollouts of "
                "several microbatches, so that it needs a pass of scores first. Make the plan for "
                "it: policy.plan(batch, loss, router=...), or give router_counts."
            )


def _digest(values: NDArray[Any]) -> str:
    content = np.ascontiguousarray(values).tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def describe_routers(router: object, counts: object = None, *, expert_counts: bool = False) -> str:
    """Describe the arguments for routers that must be the same on all ranks."""
    if not isinstance(router, RouterLoss):
        return ", expert_counts=True" if expert_counts else ""
    scope = router.scope if isinstance(router.scope, str) else "lists of rollouts"
    return (
        f", router={type(router).__name__}(load_balancing={router.load_balancing}, z={router.z}, "
        f"scope={scope}, last_token={router.last_token}), router_counts "
        f"{'left out' if counts is None else 'given'}"
    )


def router_work(
    host: ModelHost,
    batch: RolloutBatch,
    router: RouterLoss | None,
    counts: Tensor | None = None,
    *,
    expert_counts: bool = False,
) -> RouterWork | None:
    """The router statistics that a call requests; None if it requests none.

    Args:
        router: the loss, if any.
        counts: counts of experts, if the caller has them.
        expert_counts: whether to count experts even without a loss.

    Raises:
        ConfigError: an argument has a wrong type, or there are counts without a loss.
        RolloutError: a statistic has no tokens.
        UnsupportedError: the model has no routers, or its family has no router loss.
    """
    if router is not None and not isinstance(router, RouterLoss):
        raise ConfigError(
            f"router is {short(router)} of type {type(router).__name__}; it takes a "
            "forkpoint.losses.RouterLoss, or None."
        )
    if counts is not None and (router is None or not isinstance(counts, Tensor)):
        found = "there is no router loss" if router is None else f"they are {short(counts)}"
        raise ConfigError(
            f"router_counts are given, and {found}; give the tensor scores.expert_counts together "
            "with router=forkpoint.losses.RouterLoss(...)."
        )
    if router is None and not expert_counts:
        return None
    _check_has_routers(host, "router= or expert_counts= were given")
    # Models that count experts themselves are trained on all tokens of a rollout except the last.
    asked = router or RouterLoss(load_balancing=0.0, z=0.0, last_token=not host.entry.counts.kept)
    known = asked.load_balancing
    load_balancing = host.routers.coefficient if known is None else float(known)
    z = float(asked.z or 0.0)
    if (load_balancing or z) and not host.routers.defines_loss:
        raise UnsupportedError(
            f"the router loss has load_balancing={load_balancing} and z={z}, and transformers "
            "defines no router loss for this model. Leave router= out. For DeepSeek-V3 and "
            "GLM-4-MoE use expert_counts=True and policy.update_router_biases."
        )
    terms = RouterTerms(load_balancing, z, asked.parts(batch), counts)
    tokens = np.maximum(batch.lengths - (not asked.last_token), 0).astype(np.int64)
    work = RouterWork(
        asked,
        terms,
        tokens,
        on_ranks=not host.group.ranks.is_alone,
        on_stages="stage" in host.topology.relations,
    )
    empty = np.flatnonzero(np.bincount(terms.parts, weights=tokens) == 0)
    if work.has_loss and not work.joins and len(empty):
        rollout = int(np.flatnonzero(terms.parts == empty[0])[0])
        raise RolloutError(
            f"the router loss takes a statistic over rollout {rollout} alone or with others like "
            "it, and each has one token, which last_token=False does not count. Leave the rollout "
            "out, or use RouterLoss(last_token=True)."
        )
    return work


def _check_has_routers(host: ModelHost, given: str) -> None:
    if not host.routers.layers:
        raise UnsupportedError(
            f"{given}, and the model has no routers whose logits this transformers version "
            "records. Use a mixture of experts, update transformers, or leave the option out."
        )


def check_averaged(group: Distributed, loss: object) -> None:
    """Raises UnsupportedError for a router loss together with a loss whose gradients are averaged
    over ranks."""
    if len(set(group.ranks.batches)) > 1 and is_own(loss):
        raise UnsupportedError(
            "router= was given with a loss that is a function, on several ranks. Gradients of a "
            "function are averaged over the ranks, and those of a router loss are of all their "
            "rollouts. Give one of forkpoint.losses, or a Loss."
        )


def check_routed_experts(host: ModelHost, batch: RolloutBatch) -> None:
    """Refuse routed_experts that do not fit the model's routers.

    Raises:
        RolloutError: they are of another model.
        UnsupportedError: the model has no experts.
    """
    given_TLK = batch.routed_experts
    if given_TLK is None:
        return
    routers = host.routers
    _check_has_routers(host, "the rollouts have routed_experts")
    _, layers, chosen = given_TLK.shape
    wanted = routers.chosen
    if layers != routers.layers or (wanted is not None and chosen != wanted):
        each = "" if wanted is None else f", which send a token to {wanted} experts"
        raise RolloutError(
            f"routed_experts have {layers} layers with {chosen} experts a token, and the model has "
            f"{routers.layers} layers with a router{each}. Give one entry for each of these "
            "layers, in their order; layers without experts have none."
        )
    most = int(given_TLK.max(initial=-1))
    if most >= routers.experts:
        raise RolloutError(
            f"routed_experts have expert {most}, and the model's routers choose among "
            f"{routers.experts}, from 0. Give the routes of this model."
        )


def route_replay(host: ModelHost, plan: Plan, batch: RolloutBatch) -> RouteReplay | None:
    """Make the feature that forces the batch's routed_experts; None if it has none."""
    if batch.routed_experts is None:
        return None
    routers = host.routers
    routes = Routes.given(plan, batch, host.device, routers)
    return RouteReplay(routes, len(routers.found), host.device, plan)


def move_biases(host: ModelHost, counts: object, rate: float, *, centered: bool) -> None:
    """Implement `Policy.update_router_biases`."""
    routers = host.routers
    biases = routers.biases
    if not routers.layers or len(biases) != len(routers.found):
        raise UnsupportedError(
            "the model's routers have no bias that balances their load, as those of DeepSeek-V3 "
            "and GLM-4-MoE have. Balance this model by router=forkpoint.losses.RouterLoss(...)."
        )
    shape = (routers.layers, routers.experts)
    if not isinstance(counts, Tensor) or tuple(counts.shape) != shape or counts.is_complex():
        found = tuple(counts.shape) if isinstance(counts, Tensor) else short(counts)
        raise ConfigError(
            f"expert_counts are {found}; the model takes a tensor of shape {shape}, as "
            "stats.expert_counts is."
        )
    with torch.no_grad():
        own = counts[routers.first :][: len(biases)]
        wide = [c_E.to(b_E.device, torch.float64) for b_E, c_E in zip(biases, own, strict=True)]
        moves = [rate * (counts_E.mean() - counts_E).sign() for counts_E in wide]
        for bias_E, move_E in zip(biases, moves, strict=True):
            bias_E += (move_E - move_E.mean() if centered else move_E).to(bias_E.dtype)
