"""Stages of a pipeline: the layers of each stage, and the order of its program.

Layers are divided by predicted cost, with that of the head. One function of the nesting and the
prices of slots (`plan.pipeline`) gives the orders of all stages, so each rank knows when the others
send. Slots of the prefix cache are assigned for the order of each stage (`Plan.reordered`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from forkpoint.errors import PlanError, UnsupportedError
from forkpoint.plan.align import nodes_of
from forkpoint.plan.host_cache import layer_cache_bytes
from forkpoint.plan.pipeline import Floats, StageSchedule, StageWork, order_stages
from forkpoint.plan.plan import Plan
from forkpoint.plan.predict import encoder_bytes, encoder_flops, layers_here
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.meters import NOISE, Meter, logits_bytes
from forkpoint.plan.program import (
    BACKWARD,
    BLOCKS,
    FORWARD,
    HEAD,
    RECOMPUTE,
    Instruction,
    Program,
)

BUDGETS = 5
"""Largest number of budgets that are tried: all memory, then less, until orders take longer."""


@dataclass(frozen=True)
class Stage:
    """A stage and the layers that it holds; the last stage has the head as well."""

    index: int
    stages: int
    first_layer: int
    layers: int
    all_layers: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def share(self) -> float:
        """Part of the model's layers."""
        return self.layers / self.all_layers


def cut_layers(count: int, stages: int, head: float = 0.0, first: int = 1) -> tuple[Stage, ...]:
    """Cut layers of equal costs into stages so that the costliest stage costs least.

    Args:
        count: number of layers.
        stages: number of stages. Each gets at least one layer.
        head: cost of the head, which is on the last stage, relative to the cost of a layer.
        first: smallest number of layers of the first stage.

    Raises:
        PlanError: there are fewer layers than stages need.
    """
    if 1 < stages <= count < first + stages - 1:
        raise PlanError(
            f"the model has {count} layers, which are to be cut into {stages} stages, and features "
            f"of images enter after the first {first}, which the first stage holds. Take 1 to "
            f"{count - first + 1} stages."
        )
    if not 1 <= stages <= count:
        raise PlanError(
            f"the model has {count} layers, which are to be cut into {stages} stages; each stage "
            f"holds a layer at least. Take 1 to {count} stages."
        )
    sizes, least = [count], (np.inf, np.inf)
    for last in range(1, count - first - stages + 3) if stages > 1 else ():
        # The other stages get equal numbers of layers, or the earlier ones get fewer.
        own, others = max(first, (count - last) // (stages - 1)), stages - 2
        ends = [(count - last - own) * n // others for n in range(others + 1)] if others else []
        each = [own, *sorted(b - a for a, b in pairwise(ends)), last]
        costs = [*each[:-1], last + head]
        worst = max(costs), sum(cost**2 for cost in costs)
        if min(each) > 0 and sum(each) == count and worst <= least:
            sizes, least = each, worst
    begins = accumulate(sizes, initial=0)
    return tuple(
        Stage(n, stages, begin, size, count)
        for n, (begin, size) in enumerate(zip(begins, sizes, strict=False))
    )


def stages_of_shape(shape: ModelShape, stages: int, first: int = 1) -> tuple[Stage, ...]:
    """Cut a model's layers into stages by the multiply-adds of layers and of the head, with a label
    for every token.

    The cut does not depend on batches, so weights stay on their stages. The first stage gets at
    least `first` layers.
    """
    layer = shape.linear_parameters / shape.layers
    # The head computes its logits again in the backward, unless they are kept.
    head = float(shape.hidden * shape.vocab) * 4 / 3
    return cut_layers(shape.layers, stages, head / layer, first)


def stages_of_layers(held: Sequence[range], layers: int) -> tuple[Stage, ...]:
    """The stages that hold these layers, the first stage's first.

    Raises UnsupportedError if they are not all layers in their order.
    """
    if [n for each in held for n in each] != list(range(layers)):
        raise UnsupportedError(
            f"the stages of the pipeline hold the layers {[list(each) for each in held]} of a "
            f"model with {layers}. Cut the whole model with the mesh that it is wrapped with."
        )
    return tuple(Stage(n, len(held), h.start, len(h), layers) for n, h in enumerate(held))


def least_sizes(shapes: Sequence[ModelShape]) -> dict[str, Any]:
    """Sizes of modules that tensor-parallel ranks split, the smallest of all stages."""
    names = ("heads", "kv_heads", "intermediate", "vocab", "expert_activations")
    names += ("attention_parameters", "attention_activations")
    every = {name: [getattr(shape, name) for shape in shapes] for name in names}
    return {name: None if None in sizes else min(sizes) for name, sizes in every.items()}


def nesting(program: Program) -> tuple[int, ...]:
    """For each slot of the training pass, the slot around it, or -1.

    Raises:
        UnsupportedError: ranks exchange prefix caches in the program.
    """
    if program.exchanges:
        raise UnsupportedError(
            "ranks exchange prefix caches of prompts in this step (split='exchange'), which "
            "has not been shown exact with stages of a pipeline. Take split='replicate'."
        )
    return tuple(node.parent for node in nodes_of(program))


class PartPrices(NamedTuple):
    """Costs and bytes of one rank's M microbatches in one part of the model."""

    forward: Floats
    """[M]: cost of a forward."""
    backward: Floats
    """[M]"""
    held: Floats
    """[M]: bytes from a forward to the backward."""
    working: Floats
    """[M]: bytes that a backward needs in addition to `held`."""


@dataclass(frozen=True, eq=False)
class StagePrices:
    """Costs and bytes of one rank's microbatches."""

    blocks: PartPrices
    """Prices of all layers. A stage has its share of them."""
    head: PartPrices
    """Prices of the head, which is on the last stage."""
    encoders: PartPrices
    """Prices of encoders of images, which are on the first stage. They run before the forward of
    the first microbatch that reads their features, and after the backward of the last one.
    `working` has all their bytes."""
    working: Floats
    """[M]: additional bytes that a backward needs at any stage."""

    def at(self, stage: Stage) -> PartPrices:
        """Prices of a stage, with those of the head and of encoders if it has them."""
        parts = zip(self.blocks, self.head, self.encoders, strict=True)
        ends = stage.is_last, stage.is_first
        found = PartPrices(*(b * stage.share + h * ends[0] + e * ends[1] for b, h, e in parts))
        return found._replace(working=found.working + self.working)


def stage_prices(plan: Plan, meter: Meter) -> StagePrices:
    """Costs and bytes of a plan's microbatches in the blocks, in the head and in encoders."""
    blocks, head = np.zeros((2, 4, len(plan.microbatches)))
    working = np.zeros(len(plan.microbatches))
    shape = plan.shape
    # A stage has a part of the layers, but the same number of them on the device at a time.
    each = layers_here(plan, shape) * layer_cache_bytes(1, shape) if shape else 0
    for m, microbatch in enumerate(plan.microbatches):
        logits = captured = 0
        if shape is not None:
            logits = logits_bytes(microbatch, shape)
            copies = 1 + shape.context * microbatch.gathered
            states = sum(segment in plan.state_of for segment in microbatch.segments)
            captured = plan.captured_tokens(microbatch) * each * copies + states * shape.state_bytes
        kept, keeps = meter.kept_bytes(microbatch) - logits, microbatch.activations == "keep"
        of_head = meter.head(microbatch, backward=True)
        blocks[:, m] = (
            meter.forward(microbatch, boundary_only=True),
            meter.backward(microbatch) - of_head,
            captured + kept * keeps,
            kept * (not keeps),
        )
        forward = meter.head(microbatch, backward=False)
        head[:, m] = forward, of_head, logits * keeps, logits * (not keeps)
        working[m] = meter.working_bytes(microbatch)
    flops = encoder_flops(plan, training=True)
    before, after = (np.array(list(map(meter.products, each))) for each in flops)
    held = np.full(len(working), float(encoder_bytes(plan)))
    encoders = PartPrices(before, after, np.zeros_like(held), held)
    return StagePrices(PartPrices(*blocks), PartPrices(*head), encoders, working)


def stage_work(
    programs: Sequence[Program], prices: Sequence[StagePrices], stages: Sequence[Stage]
) -> StageWork:
    """Costs and bytes of the slots of a step. Each slot has the largest of all data ranks.

    Args:
        programs: aligned programs by data rank (`plan.align`).
        prices: by data rank, prices of its microbatches.

    The result depends only on the arguments, so data ranks of a stage run their slots in one order,
    as `fully_shard` needs.
    """
    parents = nesting(programs[0])
    forward, backward, held, working = np.zeros((4, len(stages), len(parents)))
    for program, price in zip(programs, prices, strict=True):
        # Features of images stay in memory during idle slots.
        working[0] = np.maximum(working[0], price.encoders.working.max(initial=0.0))
        own_forward, own_backward = np.zeros((2, len(stages), len(parents)))
        at_stages = zip(*map(price.at, stages), strict=True)
        _, backward_SM, held_SM, working_SM = (np.array(each) for each in at_stages)
        for instruction in program.training:
            slot, m = instruction.slot, instruction.microbatch
            if instruction.idle:
                continue
            if instruction.operation == BACKWARD:
                own_backward[:, slot] += backward_SM[:, m]
                held[:, slot] = np.maximum(held[:, slot], held_SM[:, m])
                working[:, slot] = np.maximum(working[:, slot], working_SM[:, m])
                continue
            costs = own_forward if instruction.operation == FORWARD else own_backward
            costs[:, slot] += _forward_costs(instruction, price, stages)
        forward, backward = np.maximum(forward, own_forward), np.maximum(backward, own_backward)
    return StageWork(parents, forward, backward, held, working)


def _forward_costs(instruction: Instruction, price: StagePrices, stages: Sequence[Stage]) -> Floats:
    """[S]: the cost of a forward at each stage."""
    m, repeated = instruction.microbatch, instruction.operation == RECOMPUTE
    blocks = float(price.blocks.forward[m])
    head = float(price.head.forward[m]) * (instruction.ends_at == HEAD)
    encoders = 0.0 if repeated else float(price.encoders.forward[m])
    return np.array([blocks * s.share + head * s.is_last + encoders * s.is_first for s in stages])


def score_costs(
    programs: Sequence[Program], prices: Sequence[StagePrices], stages: Sequence[Stage]
) -> Floats:
    """[S, N]: cost of each slot of the pass of scores at each stage, the largest of all data ranks.
    N is 0 without such a pass. Arguments are those of `stage_work`."""
    found = np.zeros((len(stages), len(programs[0].scores)))
    for program, price in zip(programs, prices, strict=True):
        for at, instruction in enumerate(program.scores):
            if not instruction.idle:
                costs = _forward_costs(instruction, price, stages)
                found[:, at] = np.maximum(found[:, at], costs)
    return found


def schedule_stages(work: StageWork, budget_bytes: float | None = None) -> StageSchedule:
    """The fastest order of all stages within a budget of bytes on each.

    Of orders that are equally fast within noise, the one with the smallest peak. `budget_bytes`:
    None means no limit.
    """
    found = [order_stages(work, np.inf if budget_bytes is None else budget_bytes)]
    fastest = found[0].time
    for step in reversed(range(1, BUDGETS)):
        peaks = found[0].peak_bytes
        found.append(order_stages(work, [peak * step / BUDGETS for peak in peaks]))
        fastest = min(fastest, found[-1].time)
        if found[-1].time > fastest * (1 + NOISE):
            break
    as_fast = (schedule for schedule in found if schedule.time <= fastest * (1 + NOISE))
    return min(as_fast, key=lambda schedule: max(schedule.peak_bytes))


def stage_plan(
    plan: Plan, schedule: StageSchedule, stage: Stage, budget_bytes: int | None = None
) -> Plan:
    """The plan of one stage, with the program in the stage's order, and cache slots for that order.

    Forwards of stages before the last run all blocks, because the next stage reads the output of
    the last block. `budget_bytes`: budget of each stage; None means no limit.
    """
    units = plan.program.units
    unit_of = {(u[-1].slot, u[-1].operation == BACKWARD): at for at, u in enumerate(units)}
    found = plan.reordered([unit_of[entry] for entry in schedule.orders[stage.index]])
    found = replace(
        found,
        pipeline=schedule,
        predicted_peak_bytes=(
            None if plan.shape is None else round(schedule.peak_bytes[stage.index])
        ),
        memory_budget_bytes=budget_bytes,
    )
    if stage.is_last:
        return found
    through = (
        i if i.operation == BACKWARD else i._replace(ends_at=BLOCKS)
        for i in found.program.instructions
    )
    return replace(found, program=Program(tuple(through)))
