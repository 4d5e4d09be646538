"""Batches that no plan fits, plans of something else, and kernels that cannot serve."""

from collections.abc import Callable
from typing import Any

import torch
from steps import forked_batch

from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy
from forkpoint import Config, RolloutBatch, losses, wrap
from forkpoint.errors import ForkpointError, PlanError, UnsupportedError
from forkpoint.ops.attention import select_kernel
from forkpoint.ops.attention.kernel import Asked
from forkpoint.plan import make_plan
from forkpoint.testing import tiny_model

BATCH = forked_batch()
OTHER = RolloutBatch(BATCH[n] for n in range(3))


def plan_kind(
    call: Callable[[], object] | None = None,
    argv: tuple[str, ...] = (),
    *,
    message: str,
    error: type[ForkpointError] = PlanError,
) -> Kind:
    return Kind(error=error, message=message, call=call, argv=argv)


def scored_with(**options: Any) -> Callable[[], object]:
    return lambda: wrap(tiny_model("llama"), Config(**options)).score(BATCH)


def asked(**changes: Any) -> Callable[[], object]:
    usual = Asked(torch.device("cpu"), torch.float32, 32, 32, 0.0, 0, deterministic=False)
    return lambda: select_kernel("auto", usual._replace(**changes))


PLANS = (
    plan_kind(
        argv=(
            *("plan", "ok.jsonl", "--sharing", "group", "--boundary", "within"),
            *("--max-microbatch-tokens", "8"),
        ),
        message="no plan fits this batch: group + within: rollout 4 has 41 tokens to run and a "
        "microbatch holds at most 8: boundary='within' cannot cut a rollout. Raise "
        "max_microbatch_tokens to 41, or use boundary='across'.",
    ),
    plan_kind(
        lambda: make_plan(
            BATCH,
            policy().host.shape,
            Config(sharing="tree", boundary="mixed", memory_budget=100, checkpointing="none"),
        ),
        message="no plan fits this batch: tree + mixed: microbatches of 64 tokens are predicted to "
        "need 652.5 KiB (668,160 bytes) and memory_budget is 100 bytes; raise it to at least "
        "668160, or checkpoint activations.",
    ),
    plan_kind(
        lambda: policy().score(BATCH, plan=policy().plan(OTHER)),
        message="this plan was made for a batch with fingerprint cad55e9bf914d5e1, and this batch "
        "has 4d3d4605bf8f23af: their tokens, masks, groups or temperatures differ. Make a "
        "plan for this batch.",
    ),
    plan_kind(
        lambda: policy().forward_backward(BATCH, losses.GRPO(), plan="tree"),  # type: ignore
        message="the plan is 'tree' of type str; give one that policy.plan(batch) made, or None.",
    ),
    plan_kind(
        lambda: policy().forward_backward(BATCH, losses.GRPO(), plan=make_plan(BATCH, prompts=())),
        message="this plan is of a step in which ranks exchanged prefix caches, and it lacks the",
    ),
)

KERNELS = (
    plan_kind(
        scored_with(attention_kernel="flashy"),
        message="There is no attention kernel 'flashy'; there are 'auto', 'fa4', 'padded',",
        error=UnsupportedError,
    ),
    plan_kind(
        asked(dtype=torch.int8),
        message="No attention kernel can serve torch.int8 on cpu with head dims 32 and 32.",
        error=UnsupportedError,
    ),
)
