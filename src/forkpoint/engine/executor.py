"""The executor: runs the instructions of one pass in order.

A forward reads the prefix cache of the microbatches above and captures its own (plan/program.py). A
backward starts from the microbatch's loss, and adds to the gradients of the prefix cache that its
forward read. Features (engine/feature.py) add other work, such as offloading.

Stages of a pipeline receive and send around the two calls of the host (engine/feature.py).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from forkpoint.config import Config
from forkpoint.engine.feature import Feature, Root
from forkpoint.engine.garbage import collect_middle
from forkpoint.engine.host import HeadOutputs, Host
from forkpoint.engine.microbatches import (
    CacheView,
    MicrobatchInputs,
    PreparedMicrobatches,
)
from forkpoint.engine.objective import LossPart, MicrobatchLoss, TokenValues
from forkpoint.engine.prefix_cache import PrefixCache
from forkpoint.engine.transaction import Transaction
from forkpoint.parallel.topology import Places
from forkpoint.plan.plan import Plan
from forkpoint.plan.planner import make_plan
from forkpoint.plan.program import BACKWARD, RECOMPUTE, Instruction
from forkpoint.rollouts.batch import Rollout, RolloutBatch


@dataclass(eq=False)
class Executor:
    """Runs passes of one step of a plan."""

    transaction: Transaction
    """Has a guard if the pass has backwards."""
    host: Host
    plan: Plan
    prepared: PreparedMicrobatches
    """Inputs by microbatch."""
    config: Config
    features: Sequence[Feature]
    _roots: dict[int, list[Root]] = field(default_factory=dict, init=False)
    """Roots of the backward, by slot."""
    _views: dict[int, CacheView] = field(default_factory=dict, init=False)
    """Access to the prefix cache, by slot."""

    def run(
        self,
        instructions: Sequence[Instruction],
        values: TokenValues,
        cache: PrefixCache,
        *,
        entropy: bool,
        loss: MicrobatchLoss | None = None,
        scale: float = 1.0,
        graph: bool = False,
    ) -> Tensor:
        """Run one pass. Returns the sum of its microbatches' losses. A pass with backwards needs a
        `loss`.

        `values` collects the head's values of each token. `cache`: an empty one. `scale`: a factor
        on the gradients of features' roots. `graph`: whether forwards record a graph in a pass
        without backwards.
        """
        training = loss is not None
        plan = self.plan
        total = torch.zeros((), dtype=self.host.loss_dtype, device=self.host.device)
        self.host.links.begin_pass(plan, instructions)
        for feature in self.features:
            feature.begin_pass(cache)
        for instruction in instructions:
            if instruction.idle:
                source, inputs = idle_inputs(self.host.device, self.host.topology.places)
            else:
                source, inputs = plan, self.prepared[instruction.microbatch]
            for feature in self.features:
                feature.before(instruction, inputs)
            if not instruction.runs_microbatch:
                continue
            if instruction.operation == BACKWARD:
                self._backward(instruction)
                collect_middle()
                continue
            captures = instruction.operation != RECOMPUTE
            read = cache.whole if inputs.microbatch.parts and cache.whole is not None else cache
            view = CacheView(source, inputs.part, read, captures=captures)
            view.begin(backward=False)
            every = (feature.saved_tensor_hooks(instruction) for feature in self.features)
            hooks = next((found for found in every if found is not None), None)
            ends_here, part = self.host.links.ends_here and not instruction.idle, None
            with torch.set_grad_enabled(training or graph):
                hidden = self.host.links.receive(instruction, inputs)
                self._received(instruction)
                with saved_tensors_hooks(*hooks) if hooks else nullcontext():
                    outputs = self.host.forward(
                        instruction, inputs, view, self.config, entropy=entropy, hidden=hidden
                    )
                view.end_forward()
                self.host.links.send(instruction, outputs.roots[0])
                for feature in self.features:
                    feature.after_forward(instruction, inputs)
                # If a forward is repeated, the second computes the loss.
                if loss is not None and instruction.keeps_graph and ends_here:
                    part = loss(inputs, outputs)
                found = [f.root(instruction, inputs, scale) for f in self.features]
            if ends_here and (instruction.keeps_graph or not training):
                values.collect(inputs, outputs)
            if part is not None:
                total += part.value
            if training and instruction.keeps_graph:
                more = [root for root in found if root is not None]
                own = _roots_of(part, outputs) if self.host.links.ends_here else []
                self._roots[instruction.slot] = [*own, *more]
                self._views[instruction.slot] = view
                del own
                del more
            del outputs, part, view, found, hidden
            if not (instruction.keeps_graph and (training or graph)):
                collect_middle()
        self.host.links.end_pass((total, *values.by_name.values()))
        for feature in self.features:
            feature.end_pass()
        return total

    def _backward(self, instruction: Instruction) -> None:
        guard = self.transaction.guard
        assert guard is not None
        roots = [*self.host.links.roots(instruction), *self._roots.pop(instruction.slot)]
        self._received(instruction)
        tensors, gradients = [x for x, _ in roots], [gradient for _, gradient in roots]
        view = self._views.pop(instruction.slot)
        view.begin(backward=True)
        # With frozen layers a microbatch without trained tokens has no root.
        if roots:
            guard.begin()
        del roots
        self.host.backward(tensors, gradients, last=instruction.last_backward)
        del tensors, gradients
        view.cache.end()
        self.host.links.after_backward(instruction)
        for feature in self.features:
            feature.after_backward(instruction)

    def _received(self, instruction: Instruction) -> None:
        if self.host.links.stages:
            for feature in self.features:
                feature.after_receive(instruction)


def _roots_of(part: LossPart | None, outputs: HeadOutputs) -> list[Root]:
    """Roots of a backward: the head's outputs with gradients of the loss, or the host's roots with
    zeros. Zeros reach blocks that a feature's root may not reach."""
    gradients = {} if part is None else part.gradients
    found = [(outputs.per_token[name], gradient) for name, gradient in gradients.items()]
    return found or [(x, torch.zeros_like(x)) for x in outputs.roots if x.requires_grad]


@cache
def idle_inputs(device: torch.device, split: Places) -> tuple[Plan, MicrobatchInputs]:
    """Dummy microbatch for slots in which this rank has no work: one untrained token."""
    batch = RolloutBatch([Rollout([0, 0], [0, 0], 0.0)])
    plan = make_plan(batch, config=Config(sharing="none", boundary="within"))
    (inputs,) = PreparedMicrobatches(plan, batch, device, split=split)
    return plan, inputs
