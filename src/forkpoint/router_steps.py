"""The part of a call of a policy that is about a mixture's routers: what is asked, and of what."""

from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.engine.host import Host
from forkpoint.engine.routing import RouterTerms, Routing
from forkpoint.errors import ConfigError, PlanError, UnsupportedError
from forkpoint.losses.router import RouterLoss
from forkpoint.plan import Plan
from forkpoint.plan.routing import RouterDemand
from forkpoint.rollouts import RolloutBatch, short


@dataclass(frozen=True, eq=False)
class RouterWork:
    """Statistics of routers that a call computes."""

    router: RouterLoss
    terms: RouterTerms
    has_loss: bool
    """Whether the call has a router loss; else experts are counted alone."""

    def demand(self, *, scored: bool = False) -> RouterDemand:
        """Its demands on a plan. `scored`: where a pass of scores comes before it in any case."""
        known = scored or self.terms.given is not None or not self.terms.load_balancing
        return RouterDemand(self.router.last_token, None if known else self.terms.parts)

    def check_plan(self, plan: Plan, *, scored: bool = False) -> None:
        """Refuse a plan that was not made for it.

        Raises:
            PlanError: other tokens run than count, or counts that the loss needs first do not
                come first.
        """
        if plan.last_tokens is not self.router.last_token:
            raise PlanError(
                f"this plan {'runs' if plan.last_tokens else 'does not run'} rollouts' last "
                f"tokens, and last_token of the router loss is {self.router.last_token}. Make the "
                "plan for it: policy.plan(batch, loss, router=...)."
            )
        if plan.program.has_scores:
            return
        if self.demand(scored=scored).spans(plan.forest, plan.microbatches):
            raise PlanError(
                "this plan has one pass, and the router loss takes its counts over rollouts of "
                "several microbatches, so that it needs a pass of scores first. Make the plan for "
                "it: policy.plan(batch, loss, router=...), or give router_counts."
            )

    def routing(self, plan: Plan, host: Host) -> Routing:
        """Counts of experts, and the loss, of the plan that is to run."""
        routers = host.routers
        return Routing(
            plan,
            host.device,
            host.loss_dtype,
            layers=routers.layers,
            experts=routers.experts,
            terms=self.terms,
        )


def router_work(
    host: Host,
    batch: RolloutBatch,
    router: RouterLoss | None,
    counts: Tensor | None = None,
    *,
    expert_counts: bool = False,
) -> RouterWork | None:
    """The work that a call asks of the routers of a supported model; None where it asks none.

    Args:
        host: the model.
        batch: the rollouts.
        router: the loss, if any.
        counts: of experts, where they are known beforehand.
        expert_counts: whether experts are counted, also without a loss.

    Raises:
        ConfigError: an argument is none of its kind, or there are counts without a loss.
        UnsupportedError: the model has no routers, or its family no such loss, or several ranks
            hold it.
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
    if host.group is not None:
        raise UnsupportedError(
            "router= and expert_counts= were given for a model that several ranks hold; statistics "
            "of routers are not summed over ranks yet. Leave them out, or train in one process."
        )
    routers = host.routers
    if not routers.layers:
        raise UnsupportedError(
            "router= or expert_counts= were given, and the model has no routers that transformers "
            "records logits of; it is no mixture of experts. Leave them out."
        )
    asked = router or RouterLoss(load_balancing=0.0, z=0.0)
    known = asked.load_balancing
    load_balancing = routers.coefficient if known is None else float(known)
    z = float(asked.z or 0.0)
    if (load_balancing or z) and not routers.defines_loss:
        raise UnsupportedError(
            f"the router loss has load_balancing={load_balancing} and z={z}, and transformers "
            "defines no router loss for this model. Set both to 0; families that balance by a "
            "bias take the counts of stats.expert_counts."
        )
    terms = RouterTerms(load_balancing, z, asked.parts(batch), counts)
    return RouterWork(asked, terms, router is not None)


def move_biases(host: Host, counts: object, rate: float, *, centered: bool) -> None:
    """The work of `Policy.update_router_biases`."""
    routers = host.routers
    biases = routers.biases
    if not biases or len(biases) != routers.layers:
        raise UnsupportedError(
            "the model's routers have no bias that balances their load, as those of DeepSeek-V3 "
            "and GLM-4-MoE have. Balance this model by router=forkpoint.losses.RouterLoss(...)."
        )
    shape = (len(biases), len(biases[0]))
    if not isinstance(counts, Tensor) or tuple(counts.shape) != shape or counts.is_complex():
        found = tuple(counts.shape) if isinstance(counts, Tensor) else short(counts)
        raise ConfigError(
            f"expert_counts are {found}; the model takes a tensor of shape {shape}, as "
            "stats.expert_counts is."
        )
    with torch.no_grad():
        moves = []
        for bias, counts_E in zip(biases, counts, strict=True):
            wide_E = counts_E.to(bias.device, torch.float64)
            move = rate * (wide_E.mean() - wide_E).sign()
            moves.append((bias, move - move.mean() if centered else move))
        for bias, move in moves:
            bias += move.to(bias.dtype)
