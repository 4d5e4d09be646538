"""The executor: runs the instructions of one pass in order.

A forward reads the prefix cache of the microbatches above and captures its own (plan/program.py). A
backward starts from the microbatch's loss, and adds to the gradients of the prefix cache that its
forward read. Features do the rest, such as offloading between the two (engine/feature.py). Nothing
is decided here.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from forkpoint.device import on_device
from forkpoint.engine.boundary import PrefixCache
from forkpoint.engine.feature import Feature
from forkpoint.engine.guard import Step
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.idling import idle_inputs
from forkpoint.engine.microbatches import KernelOptions, MicrobatchInputs, MicrobatchState
from forkpoint.engine.roots import Root, roots_of
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, RECOMPUTE, Instruction

MicrobatchLoss = Callable[[MicrobatchInputs, HeadOutputs], Tensor | None]
"""The loss of one microbatch, a scalar; None where it has none."""


@dataclass(frozen=True, eq=False)
class PassResult:
    """Results of one pass. T is the batch's tokens; entries that are not trained are 0."""

    loss: Tensor
    """The sum over microbatches."""
    per_token: dict[str, Tensor]
    """[T] by name."""


class Executor:
    """Runs passes of one step of a plan."""

    def __init__(
        self,
        step: Step,
        host: Host,
        plan: Plan,
        prepared: Sequence[MicrobatchInputs],
        kernels: KernelOptions,
        features: Iterable[Feature],
    ) -> None:
        """`prepared`: by microbatch of the plan, as tensors. `step`: its guard is set where a pass
        has backwards."""
        self.step = step
        self.host = host
        self.plan = plan
        self.prepared = prepared
        self.kernels = kernels
        self.features: tuple[Feature, ...] = tuple(features)
        self._roots: dict[int, list[Root]] = {}
        """By slot: where its backward starts."""

    def run(
        self,
        instructions: Sequence[Instruction],
        *,
        names: Sequence[str],
        loss: MicrobatchLoss | None = None,
        scale: float = 1.0,
        graph: bool = False,
    ) -> PassResult:
        """Run one pass.

        Args:
            instructions: of the pass; backwards need a `loss`.
            names: of the head's values to collect.
            loss: of each microbatch.
            scale: a factor on every gradient.
            graph: whether forwards record a graph in a pass without backwards; it is dropped.
        """
        training = loss is not None
        plan, device, dtype = self.plan, self.host.device, self.host.loss_dtype
        cache = PrefixCache(plan.cache_tokens, gradients=training, cache_states=plan.cache_states)
        per_token = {
            name: torch.zeros(plan.logical_tokens, dtype=dtype, device=device) for name in names
        }
        total = torch.zeros((), dtype=dtype, device=device)
        for feature in self.features:
            feature.begin_pass(cache)
        for instruction in instructions:
            source, inputs = self._inputs(instruction)
            for feature in self.features:
                feature.before(instruction, inputs)
            if instruction.exchanges:
                continue
            if instruction.operation == BACKWARD:
                self._backward(instruction)
                continue
            captures = instruction.operation != RECOMPUTE
            state = MicrobatchState(source, inputs.microbatch, cache, captures=captures)
            with torch.set_grad_enabled(training or graph):
                outputs = self._forward(instruction, inputs, state, "entropies" in per_token)
                # Of a forward that is repeated the second computes the loss.
                value = None
                if loss is not None and instruction.records and not instruction.idle:
                    value = loss(inputs, outputs)
                more = self._more_roots(instruction, inputs, scale)
            if instruction.records or not training:
                if not instruction.idle:
                    _collect(inputs, outputs, per_token)
                if value is not None:
                    total += value.detach()
                if training:
                    self._roots[instruction.slot] = roots_of(value, outputs.roots, scale, more)
            del outputs, value, state, more
        return PassResult(total, per_token)

    def _inputs(self, instruction: Instruction) -> tuple[Plan, MicrobatchInputs]:
        """The microbatch to run, and the plan that it is of."""
        if instruction.idle:
            return idle_inputs(self.host.device, self.plan.capabilities.length_multiple)
        return self.plan, self.prepared[instruction.microbatch]

    def _forward(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: MicrobatchState,
        entropy: bool,
    ) -> HeadOutputs:
        hooks = [h for f in self.features if (h := f.saved_tensor_hooks(instruction)) is not None]
        with saved_tensors_hooks(*hooks[0]) if hooks else nullcontext():
            outputs = self.host.forward(instruction, inputs, state, self.kernels, entropy=entropy)
        state.end_forward()
        for feature in self.features:
            feature.after_forward(instruction, inputs)
        return outputs

    def _more_roots(
        self, instruction: Instruction, inputs: MicrobatchInputs, scale: float
    ) -> list[Root]:
        found = (feature.root(instruction, inputs, scale) for feature in self.features)
        return [root for root in found if root is not None]

    def _backward(self, instruction: Instruction) -> None:
        guard = self.step.guard
        assert guard is not None
        roots = self._roots.pop(instruction.slot)
        # Frozen layers under a microbatch without trained tokens leave it nothing to do.
        if roots:
            guard.begin()
        tensors, gradients = [tensor for tensor, _ in roots], [gradient for _, gradient in roots]
        del roots
        self.host.backward(tensors, gradients, last=instruction.last_backward)
        for feature in self.features:
            feature.after_backward(instruction)


def _collect(
    inputs: MicrobatchInputs, outputs: HeadOutputs, per_token: dict[str, Tensor]
) -> None:
    if not len(inputs.trained_tokens):
        return
    device = next(iter(per_token.values())).device
    tokens = on_device(inputs.trained_tokens, device)
    entries = on_device(inputs.trained_entry, device)
    for name, values_T in per_token.items():
        values_T[tokens] = outputs.per_token[name].detach()[entries]
