"""Router losses and counts of experts that are not possible, or whose arguments are not allowed."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from router_losses import routed_model

from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy
from forkpoint import Config, Policy, Rollout, RolloutBatch, wrap
from forkpoint.errors import ConfigError, ForkpointError, PlanError, RolloutError, UnsupportedError
from forkpoint.losses import GRPO, RouterLoss

BATCH = RolloutBatch(
    [Rollout([7, 3, 9, 4, n, 5], [0, 0, 0, 0, 1, 1], 1.0, group_id=0) for n in range(3)]
)
ACROSS = Config(sharing="group", boundary="across", max_microbatch_tokens=3)


@cache
def mixture(family: str = "qwen3_moe") -> Policy:
    return wrap(routed_model(family), ACROSS)


def router_kind(
    call: Callable[[], object], *, message: str, error: type[ForkpointError] = ConfigError
) -> Kind:
    return Kind(error=error, message=message, call=call)


def trained(
    router: Any, batch: RolloutBatch = BATCH, family: str = "qwen3_moe", **options: Any
) -> Callable[[], object]:
    return lambda: mixture(family).forward_backward(batch, GRPO(), router=router, **options)


def with_setting(**settings: Any) -> Callable[[], object]:
    def call() -> None:
        model = routed_model("qwen3_moe")
        for name, value in settings.items():
            setattr(model.config, name, value)
        wrap(model).forward_backward(BATCH, GRPO())

    return call


def with_plan(planned: RouterLoss | None, router: RouterLoss) -> Callable[[], object]:
    def call() -> None:
        plan = mixture().plan(BATCH, GRPO(), router=planned)
        mixture().forward_backward(BATCH, GRPO(), plan=plan, router=router)

    return call


ROUTERS = (
    router_kind(
        with_setting(output_router_logits=True),
        message="the configuration has output_router_logits=True, so that ordinary training adds a "
        "load-balancing loss, and the step has none. Give "
        "router=forkpoint.losses.RouterLoss(), or set output_router_logits to False.",
        error=UnsupportedError,
    ),
    router_kind(
        trained(0.01),
        message="router is 0.01 of type float; it takes a forkpoint.losses.RouterLoss, or None.",
    ),
    router_kind(
        lambda: RouterLoss(load_balancing=float("nan")),
        message="load_balancing of RouterLoss is nan; it takes a finite number, or None.",
    ),
    router_kind(
        lambda: RouterLoss(scope="group"),  # type: ignore[arg-type]
        message='scope of RouterLoss is \'group\'; it takes "rollout", "batch", or a list of lists',
    ),
    router_kind(
        lambda: RouterLoss(scope=np.zeros((2, 2))),  # type: ignore[arg-type]
        message="scope of RouterLoss is array(",
    ),
    router_kind(
        lambda: RouterLoss(last_token=1),  # type: ignore[arg-type]
        message="last_token of RouterLoss is 1; it takes True or False.",
    ),
    router_kind(
        trained(RouterLoss(0.1, scope=[[0], [1, 1]])),
        message="scope of RouterLoss has 2 lists of 3 rollout indices in all, and the batch has",
    ),
    router_kind(
        trained(
            RouterLoss(0.1, scope="rollout", last_token=False),
            RolloutBatch([*BATCH, Rollout([1], [0], 1.0, group_id=1)]),
        ),
        message="the router loss takes a statistic over rollout 3 alone or with others like it,",
        error=RolloutError,
    ),
    router_kind(
        lambda: policy().forward_backward(BATCH, GRPO(), router=RouterLoss(0.1)),
        message="router= or expert_counts= were given, and the model has no routers whose",
        error=UnsupportedError,
    ),
    router_kind(
        trained(RouterLoss(0.1), family="deepseek_v3"),
        message="the router loss has load_balancing=0.1 and z=0.0, and transformers defines no",
        error=UnsupportedError,
    ),
    router_kind(
        trained(None, router_counts=torch.zeros(2, 8, dtype=torch.int64)),
        message="router_counts are given, and there is no router loss;",
    ),
    router_kind(
        trained(RouterLoss(0.1, scope="rollout"), router_counts=torch.ones(2, 8).long()),
        message="router_counts are torch.int64 of shape (2, 8), and the model and the scope take",
    ),
    router_kind(
        with_plan(None, RouterLoss(0.1)),
        message="this plan does not run rollouts' last tokens, and the router statistics of",
        error=PlanError,
    ),
    router_kind(
        with_plan(RouterLoss(0.0, z=0.1), RouterLoss(0.1)),
        message="this plan has one pass, and the router loss takes its counts over rollouts of",
        error=PlanError,
    ),
    router_kind(
        lambda: mixture().update_router_biases(torch.ones(2, 8), rate=0.001),
        message="the model's routers have no bias that balances their load, as those of",
        error=UnsupportedError,
    ),
    router_kind(
        lambda: mixture("deepseek_v3").update_router_biases(torch.ones(2, 8), rate=0.001),
        message="expert_counts are (2, 8); the model takes a tensor of shape (1, 8), as",
    ),
)
