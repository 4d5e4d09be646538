"""The first stage of a step: checks a request and plans its batch, on this rank only."""

import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from pathlib import Path

from forkpoint.config import AUTO, Config
from forkpoint.errors import ConfigError, PlanError, RolloutError, UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.topology import check_reduced
from forkpoint.losses.base import (
    LARGEST_NUMBER,
    Loss,
    LossFunction,
    as_loss,
    check_denominators,
    coupling_of,
    is_own,
)
from forkpoint.losses.views import check_range
from forkpoint.losses.zeros import zero_rollouts
from forkpoint.ops.delta_rule import DELTA_KERNELS
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.parting import LITTLE, MOVE, where_prompts_part
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.routing import RouterDemand
from forkpoint.plan.runs import run_lengths
from forkpoint.plan.shared_prompts import PlannedPrompt
from forkpoint.plan.stage_sizes import choose_size, offers_of, plans_of_sizes
from forkpoint.rollouts.batch import RolloutBatch, short
from forkpoint.step.request import (
    BackwardRequest,
    ComparedRequest,
    LocalStep,
    Request,
    ScoreRequest,
    StepPolicy,
    TrainRequest,
)
from forkpoint.step.router_steps import (
    RouterWork,
    check_averaged,
    check_routed_experts,
    describe_routers,
    router_work,
)
from forkpoint.tree.forest import IntArray

_log = logging.getLogger("forkpoint")


def check_and_plan(policy: StepPolicy, request: Request) -> LocalStep:
    """Check a request, and plan its batch.

    Raises as `Policy.forward_backward` if this rank cannot run the request.
    """
    if isinstance(request, BackwardRequest):
        return _check_backward(policy, request)
    host, batch = policy.host, as_batch(request.batch)
    check_batch(host, batch)
    gives_gradients = request.training and (request.scores or request.announced)
    if gives_gradients and not policy.model_state.checked_reduction:
        # Before the first gradients, check that they will be reduced over ranks.
        check_reduced(host.model, host.group)
        policy.model_state.checked_reduction = True
    loss, scale, counts = None, 1.0, None
    if isinstance(request, TrainRequest):
        loss, counts = as_loss(request.loss), request.router_counts
        loss.check_head(host.head)
        if len(batch):
            loss.check(batch)
    check_range(batch, host.loss_dtype)
    check_routed_experts(host, batch)
    if isinstance(request, ScoreRequest) and request.entropy and host.head == "values":
        raise UnsupportedError(
            "entropies were asked for, but the model is a critic, which gives values; ask the "
            "policy for them, or leave entropy=True out."
        )
    router = request.router
    fingerprint = host.check(batch, training=request.training, routed=router is not None)
    if isinstance(request, TrainRequest):
        check_denominators(request.denominators)
        scale = finite("scale", request.scale)
    counted = request.expert_counts
    if host.entry.counts.kept and request.training:
        if request.scores:
            raise UnsupportedError(
                "log-probs with gradients were asked for, and ordinary training of this model "
                "counts tokens of its experts, which their backward does not. Use "
                "policy.forward_backward."
            )
        counted = counted or not isinstance(request, ComparedRequest)
    work = router_work(host, batch, router, counts, expert_counts=counted)
    if work and router is not None and loss is not None:
        check_averaged(host.group, loss)
    return LocalStep(
        request=request,
        batch=batch,
        plans=_plans(policy, request, batch, loss, work),
        call=_describe(request, loss) + describe_routers(router, counts, expert_counts=counted),
        checked=policy.model_state.checks.model(
            host,
            policy.config,
            fingerprint,
            training=request.training,
            encodes=bool(batch.media),
        ),
        loss=loss,
        scale=scale,
        routers=work,
        settings=host.settings() if request.scores and request.training else None,
        factors=() if request.scores else (scale,),
    )


def _check_backward(policy: StepPolicy, request: BackwardRequest) -> LocalStep:
    host, first, weights = policy.host, request.first, request.weights
    first.check_unchanged(host.settings())
    host.check(first.batch, training=True)
    first.done = True
    return LocalStep(
        request=request,
        batch=first.batch,
        plans=(first.plan,),
        call=f"backward of logprobs, entropies {'entropies' in weights}",
        factors=tuple(0.0 if w is None else float(w.double().norm()) for w in weights.values()),
    )


def _describe(request: Request, loss: Loss | None) -> str:
    if isinstance(request, ScoreRequest):
        return f"{'logprobs' if request.training else 'score'}, entropy={request.entropy}"
    assert isinstance(request, TrainRequest) and loss is not None
    return f"forward_backward of {describe_loss(loss)}, denominators={request.denominators}"


# Plans
# ------------------------------------------------------------


def plan_batch(
    policy: StepPolicy,
    batch: RolloutBatch,
    loss: Loss | LossFunction | None,
    routers: RouterDemand | None,
) -> Plan:
    """Plan a batch within the policy's memory budget.

    On stages of a pipeline, the size of the plan is the best one for this rank's batch.
    """
    plans = plans_of_batch(policy, batch, loss, routers)
    plan, links = plans[0], policy.host.links
    if len(plans) > 1:
        state, host, config = policy.model_state, policy.host, policy.config
        offers = offers_of(plans, state.calibration(host, config))
        found = choose_size([offers], links.stages, state.budgets.of(host, config))
        plan = found.predicted(plans[found.size])
    return plan


def plans_of_batch(
    policy: StepPolicy,
    batch: RolloutBatch,
    loss: Loss | LossFunction | None,
    routers: RouterDemand | None,
) -> tuple[Plan, ...]:
    """Plan a batch within the policy's memory budget; on stages of a pipeline, in several sizes
    (`plan.stage_sizes`)."""
    budgets, stages = policy.model_state.budgets, policy.host.links.stages
    budget_bytes = budgets.of(policy.host, policy.config)

    def make(config: Config, budget_bytes: int | None) -> Plan:
        return plan_within(policy, batch, loss, budget_bytes, routers, config=config)

    if stages:
        plans = plans_of_sizes(policy.config, budget_bytes, len(stages), make)
    else:
        plans = (make(policy.config, budget_bytes),)
    budgets.planned(plans[0])
    if loss is not None and not policy.model_state.looked_at_prompts:
        policy.model_state.looked_at_prompts = True
        _warn_of_parting(batch, plans[0], policy.config)
    return plans


def _warn_of_parting(batch: RolloutBatch, plan: Plan, config: Config) -> None:
    """Log once why a batch shares little, if equal tokens follow a difference of prompts."""
    if config.sharing == "none" or plan.computed_tokens < LITTLE * plan.dense.tokens:
        return
    parting = where_prompts_part(batch)
    if parting is not None:
        _log.warning("the first batch shares little: %s; %s.", parting, MOVE)


def plan_within(
    policy: StepPolicy,
    batch: RolloutBatch,
    loss: Loss | LossFunction | None,
    budget_bytes: int | None,
    routers: RouterDemand | None,
    *,
    prompts: tuple[PlannedPrompt, ...] | None = None,
    config: Config | None = None,
) -> Plan:
    """Plan a batch within a budget for activations and prefix caches (None is no limit).

    `loss`: None for scores and log-probs. `prompts`: exchanged prompts. `config`: None for the
    policy's.
    """
    host, config = policy.host, config or policy.config
    if config.host_memory == AUTO:
        limit = policy.model_state.budgets.of_host(host, config)
        config = replace(config, host_memory=limit)
    loss = None if loss is None else as_loss(loss)
    coupling = None
    if loss is not None and loss.decomposition != "token":
        coupling = coupling_of(loss, batch)
    shape = host.shape
    return make_plan(
        batch,
        shape,
        config,
        coupling=coupling,
        calibration=policy.model_state.calibration(host, config),
        capabilities=_capabilities(host, shape, batch),
        budget_bytes=budget_bytes,
        uses_temperature=host.head == "logprobs",
        routers=routers,
        prompts=prompts,
        runs=_edges_to_run(policy, batch, loss, routers),
    )


def _capabilities(host: ModelHost, shape: ModelShape, batch: RolloutBatch) -> Capabilities:
    """Capabilities of the host, with its encoder if the batch has media."""
    found, encoder = host.capabilities(shape), host.encoder_shape() if batch.media else None
    if encoder is not None and "stage" in host.topology.relations:
        # All stages must plan equally, and only the first knows whether the encoder trains.
        encoder = replace(encoder, trained=True)
    return replace(found, encoder=encoder) if batch.media else found


def _edges_to_run(
    policy: StepPolicy, batch: RolloutBatch, loss: Loss | None, routers: RouterDemand | None
) -> IntArray:
    """Number of edges of each rollout that a call needs: int64 [N]. `loss`: None for log-probs."""
    zero = None
    # Rollouts of other ranks may be coupled with rollouts that are zero on this rank.
    gathers = loss is not None and loss.across_ranks and not policy.host.group.ranks.is_alone
    if loss is not None and not gathers and not policy.config.all_logprobs:
        zero = zero_rollouts(loss, batch)
    last_tokens = routers is not None and routers.last_tokens
    return run_lengths(batch, zero, whole=routers is not None, last_tokens=last_tokens)


def _plans(
    policy: StepPolicy,
    request: Request,
    batch: RolloutBatch,
    loss: Loss | None,
    work: RouterWork | None,
) -> tuple[Plan, ...]:
    """The plan of a request: a new one, or the caller's plan after checks.

    On stages of a pipeline, a training request gets several new plans, from which ranks choose.
    """
    plan, demand = request.plan, None if work is None else work.demand(scored=request.scores)
    if plan is None and request.scores:
        return (plan_batch(policy, batch, loss, demand),)
    if plan is None:
        return plans_of_batch(policy, batch, loss, demand)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"the plan is {short(plan)} of type {type(plan).__name__}; give one that "
            "policy.plan(batch) made, or None."
        )
    if plan.split == "exchange":
        raise PlanError(
            "this plan is of a step in which ranks exchanged prefix caches, and it lacks the plans "
            "of the other ranks. Make a plan with policy.plan(batch), or leave plan= out."
        )
    if plan.pipeline is not None:  # of an earlier step; its orders are made again
        plan = replace(plan.with_program(scores=plan.program.has_scores), pipeline=None)
    shape = policy.host.shape
    plan.check_batch(batch)
    plan.check_host(_capabilities(policy.host, shape, batch), shape.context)
    if loss is not None and loss.decomposition != "token":
        plan.check_coupling(batch, coupling_of(loss, batch))
    if work is not None:
        work.check_plan(plan, scored=request.scores)
    plan.check_runs(batch, _edges_to_run(policy, batch, loss, demand))
    return (plan,)


# Arguments
# ------------------------------------------------------------


def as_batch(given: object) -> RolloutBatch:
    """Return a batch unchanged, or make the batch of a list of rollouts.

    Raises RolloutError for anything else.
    """
    if isinstance(given, RolloutBatch):
        return given
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return RolloutBatch(given)
    raise RolloutError(
        f"the batch is {short(given)} of type {type(given).__name__}; it takes a RolloutBatch, or "
        "a list of Rollout objects."
    )


def check_batch(host: ModelHost, batch: RolloutBatch) -> None:
    """Raises RolloutError for a batch without rollouts, unless other ranks have some."""
    if not len(batch) and host.group.ranks.is_alone:
        raise RolloutError(
            "There are no rollouts; a batch takes at least one, except on a rank without rollouts "
            "in a step of several ranks."
        )


def finite(name: str, value: object) -> float:
    """Convert an argument to a number that float32 holds: a number of Python or numpy, or a tensor
    of one element."""
    number = math.nan
    if not isinstance(value, bool | str | bytes):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # pyright: ignore[reportArgumentType]
    if not abs(number) <= LARGEST_NUMBER:
        raise ConfigError(
            f"{name} is {short(value)}; it takes a finite number of at most {LARGEST_NUMBER:.2g}."
        )
    return number


def describe_loss(loss: Loss) -> str:
    """Describe a loss by its class and, for dataclasses, its options; "a function" for
    functions."""
    if is_own(loss):
        return "a function"
    if not is_dataclass(loss):
        return type(loss).__qualname__
    # The repr of some options has their address, which differs between ranks.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(loss))


def check_config(host: ModelHost, config: Config) -> None:
    """Raises ConfigError if a configuration does not fit this machine or the holders of the
    model."""
    kernels = (AUTO, *(kernel.name for kernel in DELTA_KERNELS))
    # A model without layers that carry a state never reads this name.
    if config.recurrence_kernel not in kernels:
        raise ConfigError(
            f"recurrence_kernel is {short(config.recurrence_kernel)}; allowed are "
            f"{', '.join(kernels)}."
        )
    folder = config.offload_folder
    # The folder is used for the first time by the first step that exceeds host_memory, which can be
    # a late one.
    if folder is not None and not (folder and Path(folder).is_dir()):
        raise ConfigError(
            f"offload_folder is {str(folder)!r}, and there is no such folder. Create it, or name "
            "another folder."
        )
    topology, on_ranks = host.topology, not host.group.ranks.is_alone
    if config.gather != "auto" and not topology.reduces:
        raise ConfigError(
            f"gather is {config.gather!r}, and this rank has all of the model's weights. Leave "
            "the option out, or shard the model with fully_shard."
        )
    if config.gather == "step" and not topology.gathers:
        raise ConfigError(
            "gather is 'step', and several ranks run one batch (tensor or context parallelism): "
            "forwards contain collectives, so ranks run in lockstep. Leave the option out."
        )
    if config.split == "exchange" and (not on_ranks or topology.shares_batches):
        why = "this rank trains its model alone"
        if on_ranks:
            why = "several ranks have one batch: each has a part of every prefix cache"
        raise ConfigError(
            f"split is 'exchange', and {why}. Leave the option out; prompts are exchanged by "
            "ranks of fully_shard and DistributedDataParallel."
        )
    if topology.reduces and config.grad_accumulation_dtype == "float32":
        raise ConfigError(
            "grad_accumulation_dtype is 'float32', and the model is sharded by fully_shard, "
            "which adds up gradients itself, in its reduce_dtype. Leave the option out and "
            "shard with mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)."
        )
