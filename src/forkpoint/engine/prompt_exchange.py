"""The exchange of prompts between ranks: their prefix caches once, and the gradients of these once.

The rank that owns a prompt runs it as any microbatch that others read. What it leaves in the cache
is copied into the caches of the other ranks, whose microbatches read it there as if it had been
computed there. Their sums of gradients are added to the owner's, whose backward injects the whole.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forkpoint.engine.boundary import Key, PrefixCache
from forkpoint.engine.feature import Feature
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.parallel.ranks import Phase
from forkpoint.parallel.step import StepOfRanks
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import RETURN, SHARE, Instruction
from forkpoint.plan.shared_prompts import PlannedPrompt, SharedPrompt

Layout = dict[tuple[str, str], tuple[bool, tuple[int, ...], torch.dtype]]
"""By the name of a module and of a tensor within it: as `PrefixCache.layout`."""
Run = tuple[int, int]
"""First place, and one past the last."""


class PromptExchange(Feature):
    """The prompts of one step, as this rank sends and receives them."""

    def __init__(
        self,
        step: StepOfRanks,
        prompts: Sequence[SharedPrompt],
        own: Sequence[PlannedPrompt],
        plan: Plan,
        model: nn.Module,
        device: torch.device,
    ) -> None:
        """
        Args:
            step: of the ranks.
            prompts: all of the step, the same on all ranks.
            own: those that this rank has rollouts of.
            plan: this rank's.
            model: the same on all ranks, but for its weights.
            device: of the model.
        """
        self.step: StepOfRanks = step
        self._modules: dict[str, nn.Module] = dict(model.named_modules())
        self._names: dict[int, str] = {id(m): name for name, m in self._modules.items()}
        here = step.ranks.index
        self._sent: dict[int, list[int]] = {}
        """By rank that reads them, the numbers of this rank's prompts."""
        self._received: dict[int, list[int]] = {}
        """By rank that owns them, the numbers of prompts that this rank reads."""
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
        self._cache: PrefixCache | None = None

    def begin_pass(self, cache: PrefixCache) -> None:
        self._cache = cache

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Exchange prefix caches, or their gradients. Collective.

        Raises RankError where another rank has failed before it came to this.
        """
        assert self._cache is not None
        with torch.no_grad():
            if instruction.operation == SHARE:
                self._share(self._cache, self._device)
            elif instruction.operation == RETURN:
                self._return(self._cache, self._device)

    def _share(self, cache: PrefixCache, device: torch.device) -> None:
        given = self._named(cache) if self._sent else {}
        found = self.step.gather({"layout": given})
        self._layout = next((each["layout"] for each in found if each["layout"]), {})
        group, before = self._begin(device)
        for name in sorted(self._layout):
            of_states, tail, dtype = self._layout[name]
            like = torch.empty((0, *tail), dtype=dtype, device=device)
            make = cache.state_buffers if of_states else cache.buffers
            state, gradient = make(self._key(name), like)
            for x, runs in self._moved(state, self._sent, self._received, of_states, group):
                for (begin, end), part in _parts(x, runs):
                    state[begin:end].copy_(part)
                    if gradient is not None:
                        gradient[begin:end].zero_()
        self.step.ranks.phase = before

    def _return(self, cache: PrefixCache, device: torch.device) -> None:
        self.step.gather({})  # the others may have failed meanwhile
        group, before = self._begin(device)
        for name in sorted(self._layout):
            of_states = self._layout[name][0]
            _, gradient = cache.read(self._key(name))
            assert gradient is not None
            for x, runs in self._moved(gradient, self._received, self._sent, of_states, group):
                for (begin, end), part in _parts(x, runs):
                    gradient[begin:end] += part
        self.step.ranks.phase = before

    def _begin(self, device: torch.device) -> tuple[dist.ProcessGroup, Phase]:
        """The group to send over, and the phase from before: from here on ranks wait for others
        whatever happens."""
        ranks = self.step.ranks
        before, ranks.phase = ranks.phase, "exchanging"
        return ranks.group_of(device), before

    def _moved(
        self,
        buffer: Tensor,
        sent: Mapping[int, Sequence[int]],
        received: Mapping[int, Sequence[int]],
        of_states: bool,
        group: dist.ProcessGroup,
    ) -> list[tuple[Tensor, list[Run]]]:
        """Send places of a buffer; return what arrives, with the places that it is of.

        `sent` and `received`: by rank, the numbers of prompts.
        """
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, list[Run]]] = []
        for rank, numbers in sorted(sent.items()):
            x = _taken(buffer, self._runs(numbers, of_states=of_states))
            operations.append(self._operation(dist.isend, x, rank, group))
        for rank, numbers in sorted(received.items()):
            runs = self._runs(numbers, of_states=of_states)
            x = _room(buffer, runs)
            arriving.append((x, runs))
            operations.append(self._operation(dist.irecv, x, rank, group))
        _complete(operations)
        return arriving

    def _operation(
        self, kind: object, x: Tensor, rank: int, group: dist.ProcessGroup
    ) -> dist.P2POp:
        return dist.P2POp(kind, x, self.step.ranks.global_ranks[rank], group)  # type: ignore[arg-type]

    def _named(self, cache: PrefixCache) -> Layout:
        return {
            (self._names[id(module)], name): each for (module, name), each in cache.layout().items()
        }

    def _key(self, name: tuple[str, str]) -> Key:
        return self._modules[name[0]], name[1]

    def _runs(self, numbers: Sequence[int], *, of_states: bool) -> list[Run]:
        """Places of these prompts in this rank's cache, in order, neighbours joined."""
        found: list[Run] = []
        for begin, end in self._places(numbers, of_states=of_states):
            if found and found[-1][1] == begin:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
        return found

    def _places(self, numbers: Sequence[int], *, of_states: bool) -> Iterator[Run]:
        plan = self._plan
        for number in numbers:
            segments = self._segments[number]
            if of_states:
                place = plan.state_of[segments[-1]]
                yield place, place + 1
                continue
            for segment in segments:
                begin = plan.cache_of[segment]
                yield begin, begin + int(plan.forest.length[segment])


def _taken(buffer: Tensor, runs: list[Run]) -> Tensor:
    """The places of a buffer back to back; a view where they are one run."""
    parts = [buffer[begin:end] for begin, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _room(buffer: Tensor, runs: list[Run]) -> Tensor:
    return buffer.new_empty((sum(end - begin for begin, end in runs), *buffer.shape[1:]))


def _parts(x: Tensor, runs: list[Run]) -> Iterator[tuple[Run, Tensor]]:
    return zip(runs, x.split([end - begin for begin, end in runs]), strict=True)


def _complete(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
