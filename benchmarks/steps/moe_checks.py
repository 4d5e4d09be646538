"""Gradients of a mixture of experts, shared beside dense: with router losses, and in bfloat16.

A model with few of the shape's layers and all of their sizes. In float32, with experts run one by
one, gradients of a step shared across microbatches are compared with those of a dense step, for
each scope of the router loss, with counts given and with a pass for them. In bfloat16 errors are
taken against float32 with routes held, shared and dense, by `policy.verify`.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.rows import ResultRow
from benchmarks.shapes import make_group, make_model
from benchmarks.steps.cells import cell_row
from forkpoint import Config, Policy, losses, wrap
from forkpoint.errors import ForkpointError
from forkpoint.losses import RouterLoss
from forkpoint.rollouts.batch import RolloutBatch

LAYERS = 2
SEEDS = 2
BAR = 1e-3
"""Of gradients in float32, relative to dense's; a choice of experts that rounding turns shows."""
OVER_DENSE = 1.1
ROUTERS = (
    (RouterLoss(load_balancing=0.1, z=0.01, scope="rollout"), True),
    (RouterLoss(load_balancing=0.1, z=0.01, scope="batch"), True),
    (RouterLoss(load_balancing=0.1, z=0.01, scope="batch"), False),
)
"""Router losses, and whether counts are given."""
OTHERS: dict[str, Any] = {"memory_budget": None, "checkpointing": "none", "compile_blocks": False}
ACROSS = Config(sharing="group", boundary="across", max_microbatch_tokens=300, **OTHERS)
DENSE = Config(sharing="none", boundary="within", **OTHERS)


def check_rows(shape: str, device: torch.device, *, experts: str) -> Iterator[ResultRow]:
    """The rows of the comparison; those beyond their bar fail the benchmark."""
    figure = partial(cell_row, "moe", f"{shape}, {LAYERS} layers, gradients")
    model: Any = make_model(shape, device, dtype=torch.float32, layers=LAYERS)
    # The default's grouped products are in bfloat16 alone on some devices.
    model.set_experts_implementation("eager")
    policy = wrap(model, DENSE)
    batch = _batch(policy, 0)
    for router, given in ROUTERS:
        how = f"{router.scope} scope, {'counts given' if given else 'a pass of its own'}"
        try:
            routers, every = _apart(policy, batch, router, given=given)
        except (ForkpointError, torch.OutOfMemoryError) as error:
            note = f"{type(error).__name__}: {error}"[:300]
            yield figure(f"float32, {how}", float("nan"), "relative", bar=BAR, note=note)
            continue
        yield figure(f"float32 routers, {how}", routers, "relative", bar=BAR)
        yield figure(f"float32, {how}", every, "relative", bar=BAR)
    del policy
    model.zero_grad(set_to_none=True)
    gc.collect()
    model.to(torch.bfloat16)
    model.set_experts_implementation(experts)
    yield from _held_rows(model, figure)


def _batch(policy: Policy, seed: int) -> RolloutBatch:
    vocab = policy.host.shape.vocab
    first = make_group(157, [61, 40, 93, 52], vocab=vocab, seed=seed)
    other = make_group(70, [31, 66], vocab=vocab, seed=seed + 100, group="h")
    every = [*first, *other]
    return RolloutBatch(replace(r, rollout_id=str(n)) for n, r in enumerate(every))


def _gradients(
    policy: Policy, batch: RolloutBatch, router: RouterLoss, *, given: bool
) -> dict[str, Tensor]:
    for _, parameter in policy.host.named_parameters():
        parameter.grad = None
    counts = None
    if given:
        scores = policy.score(batch, router=router)
        single = router.scope == "batch"
        counts = scores.expert_counts if single else scores.rollout_expert_counts
    policy.forward_backward(batch, losses.GRPO(), router=router, router_counts=counts)
    return {n: p.grad for n, p in policy.host.named_parameters() if p.grad is not None}


def _apart(
    policy: Policy, batch: RolloutBatch, router: RouterLoss, *, given: bool
) -> tuple[float, float]:
    """Relative differences of gradients, shared from dense: of routers, and of all parameters."""
    dense = policy.with_config(sharing="none", boundary="within", max_microbatch_tokens=None)
    shared = policy.with_config(
        sharing="group", boundary="across", max_microbatch_tokens=ACROSS.max_microbatch_tokens
    )
    wanted = _gradients(dense, batch, router, given=given)
    wanted = {name: gradient.clone() for name, gradient in wanted.items()}
    found = _gradients(shared, batch, router, given=given)
    assert set(found) == set(wanted)
    routers = [name for name in wanted if name.endswith("mlp.gate.weight")]
    assert routers, "the model has no routers"
    return _relative(found, wanted, routers), _relative(found, wanted, list(wanted))


def _relative(found: dict[str, Tensor], wanted: dict[str, Tensor], names: list[str]) -> float:
    apart = sum(float((found[n].double() - wanted[n].double()).square().sum()) for n in names)
    norm = sum(float(wanted[n].double().square().sum()) for n in names)
    return (apart / norm) ** 0.5 if norm else float("nan")


def _held_rows(model: Any, figure: Any) -> Iterator[ResultRow]:
    """Errors in bfloat16 against float32 with routes held, medians over batches."""
    policy = wrap(model, ACROSS)
    shared: list[float] = []
    dense: list[float] = []
    elsewhere: list[float] = []
    for seed in range(1, SEEDS + 1):
        try:
            report = policy.verify(_batch(policy, seed), losses.GRPO(), hold_routes=True)
        except (ForkpointError, torch.OutOfMemoryError) as error:
            note = f"{type(error).__name__}: {error}"[:300]
            yield figure(
                "bfloat16 error over dense's", float("nan"), "1", bar=OVER_DENSE, note=note
            )
            return
        shared.append(report.shared_error)
        dense.append(report.dense_error)
        if report.routes is not None and report.routes.shared is not None:
            elsewhere.append(report.routes.shared.fraction)
    note = f"against float32, routes held; the median of {SEEDS} batches"
    yield figure("bfloat16 shared error", median(shared), "of the gradient's norm", note=note)
    yield figure("bfloat16 dense error", median(dense), "of the gradient's norm", note=note)
    over = median(s / d for s, d in zip(shared, dense, strict=True))
    yield figure("bfloat16 error over dense's", over, "1", bar=OVER_DENSE, note=note)
    if elsewhere:
        yield figure("bfloat16 choices elsewhere", median(elsewhere), "of choices", note=note)
