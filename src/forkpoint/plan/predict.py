"""Predictions of a plan's time and memory, and choices of activations, logits and caches that fit.

The program is simulated with the prices of a meter. Copies of offloaded microbatches overlap with
forwards and backwards, one at a time in each direction.
"""

import sys
from dataclasses import replace

from forkpoint.plan.host_cache import LAYERS_HERE, layer_cache_bytes
from forkpoint.plan.plan import Plan
from forkpoint.plan.pricing.cost import LINEAR_BACKWARD, ModelShape
from forkpoint.plan.pricing.meters import Meter, TokenMeter
from forkpoint.plan.program import BACKWARD, ENCODE, ENCODE_BACKWARD, FORWARD, HEAD
from forkpoint.tree import Microbatch


def plan_cost(plan: Plan, meter: Meter) -> float:
    """Predicted cost of a step: smaller is faster.

    Unlike the bound, this includes padding, microbatches too short to fill the device, repeated
    forwards, scores, and waits for copies. The step is simulated.

    The host first prepares the step. Then it issues the work of all microbatches in order. Work
    does not end before it has been issued.

    Copies of prefix caches to host memory and back overlap with their instruction, which ends after
    them.

    The copy of a microbatch to host memory begins with its forward. The copy back begins at half of
    the previous backward, for as many bytes as that backward frees (engine/offload.py), and
    continues during its own backward. This backward ends after the last byte has arrived and the
    work of one layer has followed.
    """
    layers = plan.shape.layers if plan.shape else 1
    now = issued = out_free = in_free = meter.step()
    half, given_back = 0.0, 0
    sent: dict[int, float] = {}
    offloaded = offloaded_bytes(plan, meter)
    for instruction in plan.program.instructions:
        if instruction.idle:
            continue
        microbatch, begin = plan.microbatches[instruction.microbatch], now
        index = microbatch.index
        issued += meter.host(microbatch, backward=instruction.operation == BACKWARD)
        if instruction.operation == BACKWARD:
            work, nbytes = meter.backward(microbatch), meter.kept_bytes(microbatch)
            now += work
            if index in sent:
                ahead = min(offloaded[index], given_back)
                in_free = max(in_free, sent.pop(index), half) + _copy_back(meter, ahead)
                in_free = max(in_free, begin) + _copy_back(meter, offloaded[index] - ahead)
                now = max(now, in_free + work / layers)
            half, given_back = begin + work / 2, nbytes
        else:
            now += meter.forward(microbatch, boundary_only=instruction.ends_at != HEAD)
            if instruction.operation == FORWARD and index in offloaded:
                out = meter.copy(offloaded[index], out=True) or 0.0
                out_free = sent[index] = max(out_free, begin) + out
            half, given_back = now, 0
        if plan.host_layers:
            out, back = plan.copied_bytes(instruction)
            in_free = max(in_free, begin) + _copy_back(meter, back)
            out_free = max(out_free, begin) + (meter.copy(out, out=True) or 0.0)
            # The copy of the first layer does not overlap with computation.
            now = max(now, in_free, out_free) + _copy_back(meter, back // plan.host_layers)
        now = max(now, issued)
    # Encoders do not overlap with other work.
    passes = (encoder_flops(plan, training=training) for training in (False, True))
    cost = now + meter.products(sum(sum(map(sum, each)) for each in passes))
    return cost / 3 if isinstance(meter, TokenMeter) else cost


def encoder_flops(plan: Plan, *, training: bool) -> tuple[list[float], list[float]]:
    """FLOPs of encoders before the forward of each microbatch, and after its backward.

    `training`: whether it is the pass of backwards, or that of scores.
    """
    forwards, backwards = ([0.0] * len(plan.microbatches) for _ in range(2))
    encoder, begun, last = plan.capabilities.encoder, 0.0, 0
    if encoder is None or not plan.microbatches:
        return forwards, backwards
    instructions = plan.program.training if training else plan.program.scores
    for instruction in plan.with_encoders(instructions, training=training):
        if instruction.operation in (ENCODE, ENCODE_BACKWARD):
            once = sum(encoder.forward_flops(plan.media[n]) for n in instruction.media)
            if instruction.operation == ENCODE:
                begun += once
            else:
                backwards[last] += once * (LINEAR_BACKWARD + plan.encodes_again)
        elif instruction.runs_microbatch:
            last = instruction.microbatch
            forwards[last] += begun
            begun = 0.0
    backwards[last] += begun  # no microbatch reads a medium
    return forwards, backwards


def _copy_back(meter: Meter, nbytes: int) -> float:
    return meter.copy(nbytes, out=False) or 0.0


def peak_bytes(plan: Plan, meter: Meter) -> int:
    """Peak of activations and prefix cache over the program, in bytes.

    The peak is during the backward of a microbatch. It includes the activations of this microbatch,
    and those that open microbatches keep.
    """
    held = worst = 0
    offloaded = offloaded_bytes(plan, meter)
    for instruction in plan.program.training:
        if instruction.idle:
            continue
        microbatch = plan.microbatches[instruction.microbatch]
        kept = meter.kept_bytes(microbatch)
        here = kept - offloaded.get(microbatch.index, 0)
        if microbatch.activations == "recompute":
            here = 0
        if instruction.operation == FORWARD:
            held += here
        elif instruction.operation == BACKWARD:
            held -= here
            worst = max(worst, held + kept + meter.working_bytes(microbatch))
    return worst + standing_bytes(plan)


def offloaded_bytes(plan: Plan, meter: Meter) -> dict[int, int]:
    """Bytes of activations that offloaded microbatches have in host memory, by index. Those beyond
    the limit stay on the device."""
    found: dict[int, int] = {}
    room = sys.maxsize
    if plan.host_memory_bytes is not None:
        room = max(0, plan.host_memory_bytes - plan.host_cache_bytes)
    for instruction in plan.program.training:
        if instruction.idle:
            continue
        microbatch = plan.microbatches[instruction.microbatch]
        if instruction.operation == FORWARD and microbatch.activations == "offload":
            found[microbatch.index] = min(room, meter.kept_bytes(microbatch))
            room -= found[microbatch.index]
        elif instruction.operation == BACKWARD:
            room += found.get(microbatch.index, 0)
    return found


def standing_bytes(plan: Plan) -> int:
    """Bytes that count for the whole step: prefix cache, and the peak of encoders."""
    return encoder_bytes(plan) + cache_bytes(plan)


def encoder_bytes(plan: Plan) -> int:
    """Peak of encoders in bytes: features, their gradients, and activations."""
    encoder, held, worst = plan.capabilities.encoder, 0, 0
    if encoder is None:
        return 0
    for instruction in plan.with_encoders(plan.program.training, training=True):
        media = [plan.media[number] for number in instruction.media]
        if not media:
            continue
        features = sum(encoder.feature_bytes(medium) for medium in media)
        kept = sum(encoder.kept_bytes(medium) for medium in media) if encoder.trained else 0
        if instruction.operation == ENCODE:
            held += features + kept * instruction.keeps_graph
            worst = max(worst, held)
        else:
            worst = max(worst, held + kept * plan.encodes_again)
            held -= features + kept * (not plan.encodes_again)
    return worst


def cache_bytes(plan: Plan) -> int:
    """Bytes of the prefix cache and its gradients, with copies that context-parallel ranks
    gather."""
    shape = plan.shape
    assert shape is not None
    each = layer_cache_bytes(plan.cache_tokens, shape)
    if any(microbatch.gathered for microbatch in plan.microbatches):
        each *= 1 + shape.context
    return layers_here(plan, shape) * each + plan.cache_states * shape.state_bytes


def layers_here(plan: Plan, shape: ModelShape) -> int:
    """Number of attention layers with their prefix cache on the device at a time."""
    return shape.attention_layers - plan.host_layers + min(LAYERS_HERE, plan.host_layers)


def microbatches_to_drop(plan: Plan, meter: Meter, budget: int) -> frozenset[int]:
    """Choose as few microbatches as needed whose activations are dropped, so that the peak is
    within the budget.

    At each microbatch that exceeds the budget, the outermost open microbatches are chosen first,
    because their tokens attend to the fewest others. If this is not enough, the plan stays above
    the budget.
    """
    room = budget - standing_bytes(plan)
    holds: list[int] = []
    """Bytes that each microbatch keeps while microbatches below it run."""
    opened: list[int] = []
    held = 0
    moved: set[int] = set()
    for microbatch in plan.microbatches:
        # Microbatches are in visiting order, so the open ones form a stack.
        while opened and opened[-1] != microbatch.parent:
            held -= holds[opened.pop()]
        kept = 0 if microbatch.shared_prompt == "received" else meter.kept_bytes(microbatch)
        over = held + kept + meter.working_bytes(microbatch) - room
        for index in opened if over > 0 else ():
            if over > 0 and holds[index]:
                moved.add(index)
                held -= holds[index]
                over -= holds[index]
                holds[index] = 0
        holds.append(kept if microbatch.activations == "keep" else 0)
        if microbatch.children:
            opened.append(microbatch.index)
            held += holds[-1]
    return frozenset(moved)


def drop_activations(plan: Plan, microbatches: frozenset[int], activations: str) -> Plan:
    """The plan with other storage of the activations of these microbatches."""
    changed = (
        replace(r, activations=activations) if r.index in microbatches else r
        for r in plan.microbatches
    )
    return plan.with_activations(changed)


def keep_logits(plan: Plan, meter: Meter, budget: int) -> Plan:
    """The plan with kept logits of microbatches without children, for those whose backwards still
    fit.

    A microbatch keeps either all of its logits or none.
    """
    room = budget - standing_bytes(plan)
    offloaded = offloaded_bytes(plan, meter)
    open_bytes: list[int] = []
    microbatches = []
    for microbatch in plan.microbatches:
        above = open_bytes[microbatch.parent] if microbatch.parent >= 0 else 0
        keeps = microbatch.activations != "recompute" and microbatch.shared_prompt != "received"
        kept = meter.kept_bytes(microbatch) if keeps else 0
        open_bytes.append(above + kept - offloaded.get(microbatch.index, 0))
        if not microbatch.children:
            microbatch = _keeping_logits(microbatch, keeps=True)
            if above + meter.kept_bytes(microbatch) + meter.working_bytes(microbatch) > room:
                microbatch = _keeping_logits(microbatch, keeps=False)
        microbatches.append(microbatch)
    return replace(plan, microbatches=tuple(microbatches))


def _keeping_logits(microbatch: Microbatch, *, keeps: bool) -> Microbatch:
    if not microbatch.parts and microbatch.keeps_logits == keeps:
        return microbatch
    parts = tuple(replace(part, keeps_logits=keeps) for part in microbatch.parts)
    return replace(microbatch, keeps_logits=keeps, parts=parts)
