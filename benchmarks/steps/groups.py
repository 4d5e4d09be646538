"""Steps of one group of rollouts in the shapes of a model, beside dense at its best.

Random tokens and random weights. Dense is the plan that shares nothing, with the microbatches that
are fastest for it; a sample of its rollouts is run and scaled by counted FLOPs. Head, kernels,
compilation and loss are the same on both sides. The policy's self-check compares the gradients of a
sample with ordinary training before the first step.
"""

import gc
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import (
    SCALE_TINY,
    checkpoint,
    make_group,
    make_model,
    make_titan_model,
)
from benchmarks.steps.cells import cell_row, cell_rows, out_of_memory
from benchmarks.steps.options import Steps
from benchmarks.steps.stepper import (
    DENSE,
    DENSE_ROW_TOKENS,
    Dense,
    RouterArguments,
    Stepper,
    Timed,
    best_dense,
    repeated,
)
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.errors import ConfigError
from forkpoint.losses import RouterLoss
from forkpoint.policy import Policy
from forkpoint.rollouts.batch import RolloutBatch

Shape = Literal["llama3-8b", "qwen3-8b", "qwen3-4b", "qwen3.5-4b", "qwen3-30b-a3b"]
Router = Literal["none", "rollout", "batch", "rollout-pass", "batch-pass"]
GROUPS: dict[Shape, tuple[str, ...]] = {
    "llama3-8b": (
        *(f"P{p}-R{12_288 - p}-N{n}" for p in (2048, 6144, 8192, 10_240) for n in (4, 8, 16, 32)),
        # Where sharing gains least: the planner must not lose there.
        *("P256-R2048-N2", "P1024-R1024-N2", "P2048-R10240-N2", "P256-R256-N8"),
    ),
    "qwen3-8b": ("P8192-R131~2048-N32", "P8192-R2048-N32"),
    "qwen3-4b": ("P3072-R1024-N4", "P7168-R1024-N4"),
    "qwen3.5-4b": ("P16384-R64-N9", "P16384-R128-N9", "P16384-R1024-N9", "P8192-R4096-N9"),
    "qwen3-30b-a3b": ("P8192-R2048-N32", "P4096-R4096-N8", "P4096-R4096-N16", "P2048-R2048-N8"),
}
GROUP = re.compile(r"P(\d+)-R(\d+)(?:~(\d+))?-N(\d+)")
LOAD_BALANCING = 0.001
"""The coefficient in this family's configurations; times do not depend on it."""
SHARES = (1.0, 0.7, 0.5)
"""Of the memory that is left: what plans may use, in turn, where a step runs out of memory."""


@dataclass(frozen=True, kw_only=True)
class Groups(Steps):
    """Time steps of one group beside dense, with the counted bound, peaks and the time of phases.

    Attributes:
        shape: Whose sizes the model has. qwen3.5-4b mixes attention with gated linear attention,
            qwen3-30b-a3b is a mixture of experts.
        groups: Prompt, responses and their number, such as P8192-R2048-N32; P8192-R131~2048-N32
            draws lengths of responses. By default those that are published for the shape.
        library: Whose model runs. torchtitan has llama3-8b.
        routers: Router losses of a mixture: none; rollout and batch, from counts of a score pass;
            and the same with a pass of their own, which the bound then counts.
        scores: Time the pass for log-probs as well.
        activations: Of inner microbatches, as in Config.
        checkpointed: Let blocks keep only their inputs, dense and shared alike.
        sample: Rollouts that are run densely, or as many as the longest dense microbatch holds.
        all_rollouts: Time one dense step of all rollouts, and do not scale a sample.
        dense_microbatch: The most tokens of the dense microbatches that are tried.
    """

    NAME: ClassVar[str] = "groups"

    shape: Shape = "llama3-8b"
    groups: tuple[str, ...] = ()
    library: Literal["transformers", "torchtitan"] = "transformers"
    routers: tuple[Router, ...] = ("none",)
    scores: Flag = False
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    checkpointed: Flag = False
    sample: Count = 4
    all_rollouts: Flag = False
    dense_microbatch: Count = DENSE_ROW_TOKENS

    def check(self) -> None:
        super().check()
        for name in self.groups:
            if not GROUP.fullmatch(name):
                raise ConfigError(f"groups has {name!r}; give P8192-R2048-N32 or the like.")
        if self.routers != ("none",) and self.shape != "qwen3-30b-a3b":
            raise ConfigError(f"routers are those of a mixture, and {self.shape} has none.")
        if self.library == "torchtitan" and (self.shape != "llama3-8b" or self.checkpointed):
            raise ConfigError(
                "library is torchtitan, whose llama3-8b without --checkpointed this benchmark "
                f"runs; shape is {self.shape} and checkpointed is {self.checkpointed}."
            )

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        titan = self.library == "torchtitan"
        stepper = self.stepper(self.shape, make_titan_model if titan else make_model)
        if self.checkpointed:
            checkpoint(stepper.model)
        layers = f" {stepper.policy.host.shape.layers} layers" if self.layers else ""
        layers += " of torchtitan" if titan else ""
        for name in self.groups or GROUPS[self.shape]:
            batch = self._batch(name, stepper.vocab)
            for router in self.routers:
                case = f"{self.shape} {stepper.mode}{layers} {name}"
                case += f" {router}" if len(self.routers) > 1 or router != "none" else ""
                if deadline.over(case):
                    continue
                try:
                    yield from self._case(case, stepper, batch, router)
                except torch.OutOfMemoryError as error:
                    yield out_of_memory(self.NAME, case, error)

    def _batch(self, name: str, vocab: int) -> RolloutBatch:
        found = GROUP.fullmatch(name)
        assert found is not None
        prompt, least, most, count = found.groups()
        lengths = [int(least)] * int(count)
        if most:
            lengths = np.random.default_rng(42).integers(int(least), int(most), int(count)).tolist()
        scale = SCALE_TINY if self.tiny else 1
        # Tokens for images and other special ones are at the vocabulary's end.
        shortened = [max(2, length // scale) for length in lengths]
        return make_group(max(2, int(prompt) // scale), shortened, vocab=vocab // 2)

    def _case(
        self, case: str, stepper: Stepper, batch: RolloutBatch, router: Router
    ) -> Iterator[ResultRow]:
        row = partial(cell_row, self.NAME, case)
        # Each rollout by itself takes no pass for its counts.
        plain = RouterArguments()
        if router != "none":
            plain["router"] = router_loss("rollout")
        stepper.routers = plain
        dense, dense_policy, some = best_dense(
            stepper,
            batch,
            sample=self.sample,
            row_tokens=self.dense_microbatch // (SCALE_TINY if self.tiny else 1),
            all_rollouts=self.all_rollouts,
        )
        policy, arguments, score_ms, shared = self._shared(stepper, batch, router)
        if not self.all_rollouts:
            # Again in turn, so that neither has the warmer device.
            for _ in range(2):
                stepper.routers = plain
                stepper.repeat(dense_policy, some, repeats=1, into=dense.timed)
                stepper.routers = arguments
                stepper.repeat(policy, batch, repeats=1, into=shared)
        yield from cell_rows(stepper, self.NAME, case, shared, dense, bound=counted_bound(shared))
        if score_ms is not None:
            yield row("score pass", score_ms, "ms", note="gives the counts; not in the step")
        named = stepper.policy.host.named_parameters()
        wrong = [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
        note = f"not finite are {', '.join(wrong[:8])}" if wrong else None
        yield row("shared nonfinite", len(wrong), "parameters", bar=0.0, note=note)
        offload = shared.stats.offload if shared.stats else None
        if offload is not None:
            yield row("offload out_bytes", offload.out_bytes, "bytes")
        if self.scores:
            whole = batch if self.all_rollouts else some
            yield from self._score_rows(case, stepper, policy, batch, whole, dense)

    def _shared(
        self, stepper: Stepper, batch: RolloutBatch, router: Router
    ) -> tuple[Policy, RouterArguments, float | None, Timed]:
        """Time shared steps. The memory budget is lowered until they fit."""
        budget = stepper.budget_bytes
        for share in SHARES:
            memory = None if budget is None else int(budget * share)
            policy = stepper.configured(memory_budget=memory, activations=self.activations)
            try:
                stepper.routers = {}
                arguments, score_ms = router_arguments(stepper, policy, batch, router)
                stepper.routers = arguments
                return policy, arguments, score_ms, repeated(stepper, policy, batch)
            except torch.OutOfMemoryError:
                if share == SHARES[-1]:
                    raise
            gc.collect()  # frames of the error are in cycles with what they hold
            torch.cuda.empty_cache()
        raise AssertionError("the last share returns or raises")

    def _score_rows(
        self,
        case: str,
        stepper: Stepper,
        policy: Policy,
        batch: RolloutBatch,
        some: RolloutBatch,
        dense: Dense,
    ) -> Iterator[ResultRow]:
        """The pass for old or reference log-probs."""
        tokens = dense.timed.plan.max_microbatch_tokens
        alone = stepper.configured(**DENSE, max_microbatch_tokens=tokens)
        for each, rollouts in ((alone, some), (policy, batch)):
            stepper.score(each, rollouts, repeats=1)
        plain = stepper.score(alone, some, repeats=2)
        shared = stepper.score(policy, batch, repeats=2)
        plan, shape = shared.plan, shared.plan.shape
        assert shape is not None
        forward = plan.dense.forward_flops(shape)
        scale = forward / plain.plan.dense.forward_flops(shape)
        whole = replace(dense, scale=scale).scaled(plain.typical_ms)
        row = partial(cell_row, self.NAME, case)
        yield row("shared log-probs", shared.typical_ms, "ms")
        yield row("dense log-probs", whole, "ms")
        bound = forward / plan.shared.forward_flops(shape)
        beside = {"baseline": "dense", "baseline_leaves_out": True, "bound": bound}
        yield row("log-probs speed-up", whole / shared.typical_ms, "x", **beside)


def router_loss(scope: Literal["rollout", "batch"]) -> RouterLoss:
    return RouterLoss(load_balancing=LOAD_BALANCING, scope=scope)


def router_arguments(
    stepper: Stepper, policy: Policy, batch: RolloutBatch, router: Router
) -> tuple[RouterArguments, float | None]:
    """A step's arguments about routers, and milliseconds of the score pass that gave counts."""
    if router == "none":
        return {}, None
    scope = "batch" if router.startswith("batch") else "rollout"
    loss = router_loss(scope)
    if router.endswith("pass"):
        return {"router": loss}, None
    policy.score(batch, router=loss)  # compiles and plans
    begin = time.perf_counter()
    scores = policy.score(batch, router=loss)
    if stepper.cuda:
        torch.cuda.synchronize()
    counts = scores.expert_counts if scope == "batch" else scores.rollout_expert_counts
    return {"router": loss, "router_counts": counts}, (time.perf_counter() - begin) * 1e3


def counted_bound(timed: Timed) -> float:
    """The plan's bound; with a pass of scores in the step its forwards count as well."""
    plan, shape = timed.plan, timed.plan.shape
    if not plan.counts_first:
        return plan.bound
    assert shape is not None
    runs = plan.shared.step_flops(shape) + plan.shared.forward_flops(shape)
    return plan.dense.step_flops(shape) / runs
