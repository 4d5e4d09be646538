"""Exchanges prefix caches of prompts, and later their boundary gradients, between ranks.

The rank that owns a prompt runs it like any microbatch that others read. Its prefix cache is copied
into the caches of other ranks, whose microbatches read it as if it were computed there. Their
boundary gradients are added to the owner's, which its backward uses.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs, cache_run
from forkpoint.engine.prefix_cache import Key, PrefixCache, joined
from forkpoint.parallel.step import RankStep
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import SHARE, Instruction
from forkpoint.plan.shared_prompts import PlannedPrompt, SharedPrompt

Layout = dict[tuple[str, str], tuple[bool, tuple[int, ...], torch.dtype]]
"""Values as in `PrefixCache.layout`, by the name of a module and of a tensor within it."""


class PromptExchange(Feature):
    """Sends and receives the exchanged prompts of one step."""

    def __init__(
        self,
        step: RankStep,
        prompts: Sequence[SharedPrompt],
        own: Sequence[PlannedPrompt],
        plan: Plan,
        model: nn.Module,
        device: torch.device,
    ) -> None:
        """`prompts`: all exchanged prompts of the step, the same on all ranks. `own`: prompts of
        this rank's rollouts. `plan`: the plan of this rank."""
        self.step: RankStep = step
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self._names: dict[int, str] = {id(m): name for name, m in self._modules.items()}
        here = step.ranks.index
        self._sent: dict[int, list[int]] = {}
        """Numbers of this rank's prompts, by the rank that reads them."""
        self._received: dict[int, list[int]] = {}
        """Numbers of the prompts that this rank reads, by the rank that owns them."""
        for number, prompt in enumerate(prompts):
            for reader in prompt.ranks:
                if reader == prompt.owner:
                    continue
                if prompt.owner == here:
                    self._sent.setdefault(reader, []).append(number)
                elif reader == here:
                    self._received.setdefault(prompt.owner, []).append(number)
        self._segments: dict[int, list[int]] = {t.number: t.segments(plan.forest) for t in own}
        self._plan = plan
        self._device = device
        self._layout: Layout = {}

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Exchange prefix caches, or their boundary gradients. Collective.

        Raises RankError if another rank has failed before it came to this.
        """
        if not instruction.exchanges:
            return
        cache, ranks, shares = self.cache, self.step.ranks, instruction.operation == SHARE
        # Before the transfers, to learn of ranks that have failed.
        found = self.step.gather({"layout": self._named(cache) if shares and self._sent else {}})
        if shares:
            self._layout = next((each["layout"] for each in found if each["layout"]), {})
        # From here on, a failure of this rank leaves others waiting.
        before, ranks.phase = ranks.phase, "exchanging"
        group = ranks.group_of(self._device)
        with torch.no_grad():
            # A rank without exchanged prompts makes no buffers: its layers may be in host memory.
            for name in sorted(self._layout) if self._sent or self._received else ():
                self._transfer(cache, name, group, shares=shares)
        ranks.phase = before

    def _transfer(
        self, cache: PrefixCache, name: tuple[str, str], group: dist.ProcessGroup, *, shares: bool
    ) -> None:
        """Exchange one tensor of the prefix cache, or its boundary gradients."""
        of_states, tail, dtype = self._layout[name]
        key: Key = self._modules[name[0]], name[1]
        if shares:
            like = torch.empty((0, *tail), dtype=dtype, device=self._device)
            state, gradient = cache.buffers(key, like, of_states=of_states)
            runs, parts = self._moved(state, self._sent, self._received, of_states, group)
            for (begin, end), part in zip(runs, parts, strict=True):
                state[begin:end].copy_(part)
                if gradient is not None:
                    gradient[begin:end].zero_()
            return
        _, gradient = cache.read(key)
        assert gradient is not None
        runs, parts = self._moved(gradient, self._received, self._sent, of_states, group)
        for (begin, end), part in zip(runs, parts, strict=True):
            gradient[begin:end] += part

    def _moved(
        self,
        buffer: Tensor,
        sent: Mapping[int, Sequence[int]],
        received: Mapping[int, Sequence[int]],
        of_states: bool,
        group: dist.ProcessGroup,
    ) -> tuple[list[tuple[int, int]], list[Tensor]]:
        """Send cache slots to the ranks in `sent`. Returns runs of received slots, and their
        tensors."""
        peers = self.step.ranks.global_ranks
        operations: list[dist.P2POp] = []
        runs: list[tuple[int, int]] = []
        parts: list[Tensor] = []
        for rank, numbers in sorted(sent.items()):
            pieces = [buffer[begin:end] for begin, end in self._runs(numbers, of_states)]
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            operations.append(dist.P2POp(dist.isend, x, peers[rank], group))
        for rank, numbers in sorted(received.items()):
            here = self._runs(numbers, of_states)
            lengths = [end - begin for begin, end in here]
            x = buffer.new_empty((sum(lengths), *buffer.shape[1:]))
            runs += here
            parts += x.split(lengths)
            operations.append(dist.P2POp(dist.irecv, x, peers[rank], group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return runs, parts

    def _named(self, cache: PrefixCache) -> Layout:
        return {
            (self._names[id(module)], name): each for (module, name), each in cache.layout().items()
        }

    def _runs(self, numbers: Sequence[int], of_states: bool) -> list[tuple[int, int]]:
        """Runs of this rank's cache slots of these prompts, in order, adjacent ones joined."""
        plan = self._plan
        if of_states:  # a prompt has the state of its last segment
            states = [plan.state_of[self._segments[number][-1]] for number in numbers]
            return joined((at, at + 1) for at in states)
        segments = [segment for number in numbers for segment in self._segments[number]]
        return joined(cache_run(plan, segment) for segment in segments)
