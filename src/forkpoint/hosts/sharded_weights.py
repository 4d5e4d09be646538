"""Weights that fully_shard keeps in parts: whole for one step, prefetched, and forgotten.

torch's public methods serve where they say enough. What has to be put back as it was, and what is
left of a step that has failed, is read from its objects (`fsdp_versions`): there is no other way.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from forkpoint.engine.changes import Changes
from forkpoint.hosts.fsdp_versions import (
    add_zeros_to_partial,
    compute_dtype,
    drop_gradients,
    gradient_dtype,
    groups_of,
    has_gradient,
    is_due,
    left_in,
    reduce_gradients,
    reset,
    set_zeros,
    trained_of,
)
from forkpoint.parallel.ranks import DataRanks

AHEAD = 2
"""Groups of weights that are being gathered while another is copied to its place."""


class ShardedWeights:
    """The weights of a model that torch's fully_shard holds."""

    def __init__(self, model: FSDPModule, ranks: DataRanks) -> None:
        self.model = model
        self.ranks: DataRanks = ranks
        self.gathered: bool = False
        """Whether every weight is whole on this rank until the step ends."""
        self._aside: list[tuple[Any, str, Any]] = []
        """Objects, attributes, and gradients that were there before a step."""

    def modules(self) -> list[Any]:
        """Its sharded modules, the outermost first."""
        module = cast(nn.Module, self.model)
        return [m for m in module.modules() if isinstance(m, FSDPModule)]

    def groups(self) -> list[Any]:
        """Groups of parameters that are gathered together, each once."""
        found = chain.from_iterable(map(groups_of, self.modules()))
        return list({id(group): group for group in found}.values())

    def _trained(self) -> list[Any]:
        return list(chain.from_iterable(map(trained_of, self.groups())))

    # Sizes
    # ------------------------------------------------------------

    def group_bytes(self) -> list[int]:
        """By group: bytes of its whole weights, in the dtype that forwards have them in."""
        return [
            sum(_elements(p) * compute_dtype(p).itemsize for p in group.fsdp_params)
            for group in self.groups()
        ]

    def missing_bytes(self) -> int:
        """Bytes of the whole gradients that do not exist yet; until the reduction each rank has
        them."""
        return sum(
            _elements(p) * gradient_dtype(p).itemsize
            for p in self._trained()
            if not has_gradient(p)
        )

    def whole(self) -> Iterator[nn.Parameter]:
        """Whole parameters as far as they have been gathered before; memory comes and goes."""
        for group in self.groups():
            for parameter in group.fsdp_params:
                found = getattr(parameter, "_unsharded_param", None)
                if found is not None:
                    yield found

    # Gradients that were not reduced
    # ------------------------------------------------------------

    def set_aside(self, changes: Changes) -> None:
        """Take away what stock backwards have left unreduced, until the changes are undone."""
        self._aside = [each for group in self.groups() for each in left_in(group)]
        changes.later(self._put_back)
        for place, name, _ in self._aside:
            setattr(place, name, None)

    def _put_back(self) -> None:
        for place, name, gradient in self._aside:
            setattr(place, name, gradient)
        self._aside = []

    def lose(self) -> None:
        """Drop all gradients that were not reduced, those that were set aside as well."""
        self._aside = []
        self.forget()

    # Whole for a step
    # ------------------------------------------------------------

    def gather(self, changes: Changes) -> None:
        """Gather all weights, and keep them until the changes are undone. Collective.

        From here to `reduce` forwards and backwards issue no collective, so that each rank runs
        whatever it has to, in its own order.
        """
        root = cast(Any, self.model)._get_fsdp_state()
        root._lazy_init()  # which changes what is put back below
        changes.later(self.forget)
        for group in self.groups():
            changes.set(vars(group), "post_forward_mesh_info", None)
            changes.set(vars(group), "reshard_after_backward", False)
        under_way: deque[Any] = deque()
        for module in self.modules():
            under_way.append(module.unshard(async_op=True))
            if len(under_way) > AHEAD:
                under_way.popleft().wait()
        for handle in under_way:
            handle.wait()
        self.gathered = True
        self.ranks.phase = "alone"

    def reduce(self) -> None:
        """Reduce what the step's backwards have left on the ranks into `.grad`. Collective.

        fully_shard does it, as in a backward that is the last. It reduces the gradients of a group
        that are there, which must be the same on all ranks: where another rank has one this rank
        adds zeros.
        """
        trained = self._trained()
        own = [has_gradient(parameter) for parameter in trained]
        wanted = [any(column) for column in zip(*self.ranks.exchange(own), strict=True)]
        self.ranks.phase = "settled"
        for parameter, is_here, is_there in zip(trained, own, wanted, strict=True):
            if is_there and not is_here:
                set_zeros(parameter)
        self.model.set_requires_gradient_sync(True)
        self.model.set_is_last_backward(True)
        reduce_gradients(self.model)

    def reduce_earlier(self) -> None:
        """Reduce what backwards without synchronisation have left, where a backward would do so
        now. Collective if there is any, which is the same on all ranks."""
        due = [group for group in self.groups() if is_due(group)]
        for group in due:
            add_zeros_to_partial(group)
        if due:
            reduce_gradients(self.model)

    def forget(self) -> None:
        """Drop gradients that were not reduced and all that a failed pass has left, and shard."""
        for group in self.groups():
            drop_gradients(group)
        reset(self.model, self.modules())
        self.gathered = False
        self.shard()

    def shard(self) -> None:
        """Give every parameter the form in which the optimizer has it, unless weights stay whole
        for a step."""
        if self.gathered:
            return
        for group in self.groups():
            # Gathered ahead and not used: the next forward would take it, after weights changed.
            if group._all_gather_result is not None:
                group.wait_for_unshard()
        for module in self.modules():
            module.reshard()

    # Gathered for each forward and backward
    # ------------------------------------------------------------

    def prefetch(self, blocks: Sequence[nn.Module], changes: Changes) -> None:
        """Gather each block's weights while its neighbour runs, until the changes are undone.

        By itself fully_shard remembers the order of the last forward for backwards, and forgets it
        where backwards of other microbatches lie between. A module that users have given modules
        to prefetch keeps these. Every forward runs all blocks; the head, which some leave out, is
        not prefetched.
        """
        sharded = [block for block in blocks if isinstance(block, FSDPModule)]
        for one, next_ in pairwise(sharded):
            _prefetch(one, "_states_to_forward_prefetch", next_, changes)
            _prefetch(next_, "_states_to_backward_prefetch", one, changes)


def _prefetch(module: FSDPModule, name: str, other: FSDPModule, changes: Changes) -> None:
    state = cast(Any, module)._get_fsdp_state()
    if getattr(state, name):
        return
    changes.set(vars(state), name, [])
    if name == "_states_to_forward_prefetch":
        module.set_modules_to_forward_prefetch([other])
    else:
        module.set_modules_to_backward_prefetch([other])


def _elements(parameter: Any) -> int:
    return int(parameter._orig_size.numel())
