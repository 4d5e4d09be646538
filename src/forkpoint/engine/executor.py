"""The executor: runs the instructions of one pass in order.

A forward reads the prefix cache of the microbatches above and captures its own (plan/program.py). A
backward starts from the microbatch's loss, and adds to the gradients of the prefix cache that its
forward read. Features do the rest, such as offloading between the two (engine/feature.py). Nothing
is decided here.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from forkpoint.config import Config
from forkpoint.engine.boundary import PrefixCache
from forkpoint.engine.feature import Feature, Root
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.microbatches import (
    CacheView,
    KernelOptions,
    MicrobatchInputs,
    prepare_microbatches,
)
from forkpoint.engine.objective import MicrobatchLoss, TokenValues
from forkpoint.engine.transaction import Transaction
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.plan import Plan
from forkpoint.plan.planner import make_plan
from forkpoint.plan.program import BACKWARD, RECOMPUTE, Instruction
from forkpoint.rollouts.batch import Rollout, RolloutBatch


class Links:
    """Links of a rank to the ranks that run the blocks before and after its own: here there are
    none. A pipeline stage overrides both methods, to receive before a call and to send after it."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def forward(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: CacheView,
        kernels: KernelOptions,
        *,
        entropy: bool,
    ) -> HeadOutputs:
        """As `Host.forward`."""
        return self.host.forward(instruction, inputs, state, kernels, entropy=entropy)

    def backward(self, instruction: Instruction, roots: Sequence[Root]) -> None:
        """Run the backward of an instruction's microbatch from these roots."""
        tensors, gradients = [tensor for tensor, _ in roots], [gradient for _, gradient in roots]
        self.host.backward(tensors, gradients, last=instruction.last_backward)


class Executor:
    """Runs passes of one step of a plan."""

    def __init__(
        self,
        transaction: Transaction,
        host: Host,
        plan: Plan,
        prepared: Sequence[MicrobatchInputs],
        kernels: KernelOptions,
        features: Iterable[Feature],
    ) -> None:
        """`prepared`: by microbatch of the plan, as tensors. `transaction`: its guard is set
        where a pass has backwards."""
        self.transaction = transaction
        self.host = host
        self.links: Links = Links(host)
        self.plan = plan
        self.prepared = prepared
        self.kernels = kernels
        self.features: tuple[Feature, ...] = tuple(features)
        self._roots: dict[int, list[Root]] = {}
        """By slot: where its backward starts."""

    def run(
        self,
        instructions: Sequence[Instruction],
        values: TokenValues,
        *,
        entropy: bool,
        loss: MicrobatchLoss | None = None,
        scale: float = 1.0,
        graph: bool = False,
    ) -> Tensor:
        """Run one pass.

        Args:
            instructions: of the pass; backwards need a `loss`.
            values: collects the head's values of each token.
            entropy: whether the head gives entropies as well.
            loss: of each microbatch.
            scale: a factor on the gradients of features' roots.
            graph: whether forwards record a graph in a pass without backwards; it is dropped.

        Returns the sum of the microbatches' losses, a scalar.
        """
        training = loss is not None
        plan = self.plan
        cache = PrefixCache(plan.cache_tokens, gradients=training, cache_states=plan.cache_states)
        total = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
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
            state = CacheView(source, inputs.microbatch, cache, captures=captures)
            with torch.set_grad_enabled(training or graph):
                outputs = self._forward(instruction, inputs, state, entropy)
                # Of a forward that is repeated the second computes the loss.
                part = None
                if loss is not None and instruction.keeps_graph and not instruction.idle:
                    part = loss(inputs, outputs)
                found = [f.root(instruction, inputs, scale) for f in self.features]
                more = [root for root in found if root is not None]
            if instruction.keeps_graph or not training:
                if not instruction.idle:
                    values.collect(inputs, outputs)
                if part is not None:
                    total += part.value
                if training:
                    gradients = {} if part is None else part.gradients
                    self._roots[instruction.slot] = [*_roots_of(gradients, outputs), *more]
                    del gradients
            del outputs, part, state, found, more
        return total

    def _inputs(self, instruction: Instruction) -> tuple[Plan, MicrobatchInputs]:
        """The microbatch to run, and its plan."""
        if instruction.idle:
            return idle_inputs(self.host.device, self.plan.capabilities.length_multiple)
        return self.plan, self.prepared[instruction.microbatch]

    def _forward(
        self,
        instruction: Instruction,
        inputs: MicrobatchInputs,
        state: CacheView,
        entropy: bool,
    ) -> HeadOutputs:
        hooks = [h for f in self.features if (h := f.saved_tensor_hooks(instruction)) is not None]
        with saved_tensors_hooks(*hooks[0]) if hooks else nullcontext():
            outputs = self.links.forward(instruction, inputs, state, self.kernels, entropy=entropy)
        state.end_forward()
        for feature in self.features:
            feature.after_forward(instruction, inputs)
        return outputs

    def _backward(self, instruction: Instruction) -> None:
        guard = self.transaction.guard
        assert guard is not None
        roots = self._roots.pop(instruction.slot)
        # Frozen layers under a microbatch without trained tokens leave it nothing to do.
        if roots:
            guard.begin()
        self.links.backward(instruction, roots)
        del roots
        for feature in self.features:
            feature.after_backward(instruction)


def _roots_of(gradients: Mapping[str, Tensor], outputs: HeadOutputs) -> list[Root]:
    """The head's values with the gradients of the loss, or the host's roots with zeros, which reach
    blocks that a feature's root may not."""
    found = [(outputs.per_token[name], gradient) for name, gradient in gradients.items()]
    return found or [(x, torch.zeros_like(x)) for x in outputs.roots if x.requires_grad]


@cache
def idle_inputs(device: torch.device, multiple: int) -> tuple[Plan, MicrobatchInputs]:
    """Dummy microbatch for slots in which this rank has no work: one token, trained on nothing.

    `multiple`: the host takes lengths that are multiples of it.
    """
    batch = RolloutBatch([Rollout([0, 0], [0, 0], 0.0)])
    capabilities = Capabilities(length_multiple=multiple)
    config = Config(sharing="none", boundary="within")
    plan = make_plan(batch, config=config, capabilities=capabilities)
    (inputs,) = prepare_microbatches(plan, batch, device)
    return plan, inputs
