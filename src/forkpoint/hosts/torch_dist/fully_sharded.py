"""Models that torch's fully_shard holds. Gradients are reduced once a step, and weights can stay
gathered for a step.

Public methods of torch are used where they suffice. Private objects (`fsdp_versions`) are used to
restore settings, and to remove the remains of a failed step.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from forkpoint.config import Gather
from forkpoint.engine.changes import Changes
from forkpoint.engine.distributed import Holder, local
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.torch_dist import fsdp_versions as fsdp
from forkpoint.hosts.torch_dist.replicated import check_held
from forkpoint.parallel.topology import Relation

AHEAD = 2
"""Number of groups of weights that are being gathered while another is copied to its place."""


class FullySharded(Holder):
    """torch's fully_shard (FSDP2), of one or two mesh dimensions (HSDP)."""

    lockstep = True
    gathers = True
    reduces = True

    def __init__(self, model: FSDPModule, experts: Collection[nn.Module] = ()) -> None:
        """`experts`: modules that are sharded over a separate mesh (expert parallelism)."""
        self.model = model
        inside = {module for each in experts for module in each.modules()}
        # torch has no public access to a module's mesh and policies.
        groups = self._groups()
        wide = (g for g in groups if not any(m in inside for m, _ in fsdp.holders_in(g)))
        meshes = {id(g.mesh_info.mesh): g.mesh_info.mesh for g in wide}
        if not meshes:
            raise UnsupportedError(
                "the model is sharded by fully_shard and has no parameters. Wrap a model with "
                "parameters."
            )
        if len({tuple(m.mesh.flatten().tolist()) for m in meshes.values()}) > 1:
            raise UnsupportedError(
                "parts of the model are sharded over different meshes, which has not been shown "
                "exact. Give one mesh to every fully_shard."
            )
        self._mesh = next(iter(meshes.values()))
        self.meshes: Sequence[DeviceMesh] = (self._mesh,)
        self.relations: Mapping[Relation, tuple[int, ...]] = {
            "data": tuple(int(rank) for rank in self._mesh.mesh.flatten())
        }
        self.gather: Gather = "microbatch"
        self._gathered = False
        """Whether every weight stays gathered on this rank until the step ends."""
        self._aside: list[tuple[Any, str, Any]] = []
        """Object, attribute and value of unreduced gradients from before the step."""
        self._has_experts = bool(experts)
        self._entered = False
        """Whether a step runs, so that unreduced gradients are those of the step."""
        self._factors: dict[nn.Parameter, float] = {}
        """Within a step: parameters that only this rank has, and divisors of their gradients."""
        dtypes = {p.mp_policy.param_dtype for group in groups for p in group.fsdp_params}
        self.param_dtypes: frozenset[torch.dtype] = frozenset(dtypes - {None})

    @property
    def gathered(self) -> bool:
        return self._gathered

    def use(self, gather: Gather, changes: Changes) -> None:
        changes.set(vars(self), "gather", gather)

    def held_bytes(self, gather: Gather) -> int:
        sizes = self.group_bytes()
        if gather == "step":
            return sum(sizes) + max(sizes)
        # The root's, a block's, and the next block's twice: also in the buffer that they are
        # gathered into.
        return min(sum(sizes), sizes[0] + 3 * max(sizes[1:], default=0))

    def factor(self, *, mean: bool) -> float:
        return 1.0 if mean else max(self._divisors(), default=1.0)

    def _divisors(self) -> set[float]:
        """Numbers by which fully_shard divides summed gradients, of all groups that train."""
        groups = self._groups()
        # The last stage of a pipeline computes the loss also if it trains nothing.
        trained = [group for group in groups if fsdp.trained_of(group)] or groups
        given = [group.gradient_divide_factor for group in trained]
        return {float(self._mesh.size() if factor is None else factor) for factor in given}

    def check(self, model: nn.Module, *, training: bool) -> None:
        if fsdp.is_within_backward(self._context):
            raise UnsupportedError(
                "an ordinary backward of the model is running or has failed, so that fully_shard "
                "cannot run the backwards of a step. After a failure, restart all processes from "
                "the last checkpoint, because torch keeps parts of the gradients."
            )
        for group in self._groups():
            _check_group(group)
        if not training:
            return
        for group in self._groups():
            if (by := _reduces_by(group)) is not None:
                raise UnsupportedError(
                    f"the model is sharded by fully_shard, and {by}, which has not been shown "
                    "exact. Leave it out; with a mesh of two dimensions fully_shard reduces over "
                    "replicas itself."
                )
        if len(divisors := self._divisors()) > 1:
            raise UnsupportedError(
                f"parts of the model divide gradients by different factors ({sorted(divisors)}); "
                "forkpoint's losses need one. Call set_gradient_divide_factor with one number on "
                "every sharded module."
            )
        # Parameters are read from modules, because others may have been loaded since.
        places = chain.from_iterable(map(fsdp.holders_in, self._groups()))
        held = {getattr(module, name) for module, name in places}
        check_held(model, "fully_shard", lambda _, parameter: parameter in held)

    def deferred_params(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        alone = self._unshared_params()
        return [parameter for parameter in parameters if parameter in alone]

    def _unshared_params(self) -> dict[nn.Parameter, float]:
        """Parameters of experts that no other rank has, and the divisors of their gradients."""
        return {
            getattr(module, name): float(group.gradient_divide_factor)
            for group in self._unshared()
            for module, name in fsdp.holders_in(group)
        }

    def _unshared(self) -> list[Any]:
        """Groups of experts that no other rank has and that divide gradients.

        They are sharded over one rank. torch 2.13 divides their gradients twice in 64 and 16 bits,
        so a step divides them itself.
        """
        if not self._has_experts:
            return []
        return [
            group
            for group in self._groups()
            if group.mesh_info.shard_mesh_size == 1 and group.gradient_divide_factor is not None
        ]

    def enter(
        self, changes: Changes, blocks: Sequence[nn.Module], whole: Iterable[nn.Parameter]
    ) -> None:
        self._factors = self._unshared_params()
        self._set_aside(changes)
        changes.set(vars(self), "_entered", True)  # undone before those gradients are restored
        for group in self._groups():
            changes.set(vars(group), "reduce_grads", False)
            changes.set(vars(group), "all_reduce_grads", False)
            # Of `set_unshard_in_backward(False)`: after the backward of one microbatch, weights
            # that ordinary training keeps for its backward are not there for the next one.
            changes.set(vars(group), "unshard_in_backward", True)
        changes.set(vars(self._context), "is_last_backward", False)
        if fsdp.SINCE_2_15:  # even if the user calls `finalize_backward`
            changes.set(vars(self._context), "manual_backward_finalization", False)
        for module in self._modules():
            # For the head this would round log-probs. In ordinary training, its outputs are logits,
            # which already have this dtype.
            state = module._get_fsdp_state()
            if state._mp_policy.output_dtype is not None:
                wide = replace(state._mp_policy, output_dtype=None)
                changes.set(vars(state), "_mp_policy", wide)
        if self.gather == "step" and not self.gathered:
            self._gather_all(changes)
        elif self.gather == "microbatch":
            self._prefetch_blocks(blocks, changes)
        for group in self._unshared():
            changes.set(vars(group), "gradient_divide_factor", 1.0)

    def end_forward(self) -> None:
        # Within a backward, fully_shard does not free weights after forwards.
        if self.gathered or torch._C._current_graph_task_id() == -1:
            return
        for group in self._groups():
            if group.post_forward_mesh_info is not None:
                group.reshard()

    def last(self) -> None:
        if self.gathered:  # reduced when all ranks have ended their programs
            return
        self.model.set_requires_gradient_sync(True)
        self.model.set_is_last_backward(True)

    def reduce(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], *, mean: bool
    ) -> list[Tensor | None]:
        for gradient, parameter in zip(gradients, parameters, strict=True):
            if gradient is not None and parameter in self._factors:
                local(gradient).detach().div_(self._factors[parameter])
        return list(gradients)

    def all_reduce(self, tensor: Tensor) -> None:
        for group in self._mesh.get_all_groups():
            dist.all_reduce(tensor, group=group)

    def reset(self, *, lost: bool) -> None:
        if lost:
            self._aside = []  # unreduced ones too
        if lost or self._entered:
            self._forget()

    def _modules(self) -> list[Any]:
        """The sharded modules, the outermost first."""
        module = cast(nn.Module, self.model)
        return [m for m in module.modules() if isinstance(m, FSDPModule)]

    def _groups(self) -> list[Any]:
        """Groups of parameters that are gathered together, each once."""
        found = chain.from_iterable(map(fsdp.groups_of, self._modules()))
        return list({id(group): group for group in found}.values())

    @property
    def _context(self) -> Any:
        """fully_shard's state of the running pass."""
        return cast(Any, self.model)._get_fsdp_state()._state_ctx

    def _trained(self) -> list[Any]:
        return list(chain.from_iterable(map(fsdp.trained_of, self._groups())))

    # Sizes
    # ------------------------------------------------------------

    def group_bytes(self) -> list[int]:
        """Bytes of the whole weights of each group, in the dtype of forwards."""
        return [
            sum(_elements(p) * fsdp.compute_dtype(p).itemsize for p in group.fsdp_params)
            for group in self._groups()
        ]

    def missing_bytes(self) -> int:
        """Bytes of unreduced whole gradients that do not exist yet. Each rank has them until the
        reduction."""
        return sum(
            _elements(p) * fsdp.gradient_dtype(p).itemsize
            for p in self._trained()
            if not fsdp.has_gradient(p)
        )

    def whole_parameters(self) -> Iterable[nn.Parameter]:
        """Whole parameters that were gathered before. Their memory may be free at present."""
        for group in self._groups():
            for parameter in group.fsdp_params:
                found = getattr(parameter, "_unsharded_param", None)
                if found is not None:
                    yield found

    # Gradients that were not reduced
    # ------------------------------------------------------------

    def _set_aside(self, changes: Changes) -> None:
        """Remove unreduced gradients of stock backwards, until the changes are undone."""
        self._aside = list(chain.from_iterable(map(fsdp.left_in, self._groups())))
        changes.later(self._put_back)
        for place, name, _ in self._aside:
            setattr(place, name, None)

    def _put_back(self) -> None:
        for place, name, gradient in self._aside:
            setattr(place, name, gradient)
        self._aside = []

    # Whole for a step
    # ------------------------------------------------------------

    def _gather_all(self, changes: Changes) -> None:
        """Gather all weights, and keep them gathered until the changes are undone. Collective.

        Until `reduce_held`, forwards and backwards issue no collective, so ranks may run different
        programs.
        """
        root = cast(Any, self.model)._get_fsdp_state()
        root._lazy_init()  # changes attributes that are restored below
        changes.later(self._forget)
        for group in self._groups():
            changes.set(vars(group), "post_forward_mesh_info", None)
            changes.set(vars(group), "reshard_after_backward", False)
        under_way: deque[Any] = deque()
        for module in self._modules():
            under_way.append(module.unshard(async_op=True))
            if len(under_way) > AHEAD:
                under_way.popleft().wait()
        for handle in under_way:
            handle.wait()
        self._gathered = True
        self.ranks.phase = "alone"

    def reduce_held(self) -> None:
        """Reduce the step's gradients into `.grad`. Collective.

        fully_shard reduces the existing gradients of a group, as after a last backward. They must
        be those of the same parameters on all ranks. So zeros are added if only another rank has a
        gradient.
        """
        trained = self._trained()
        own = [fsdp.has_gradient(parameter) for parameter in trained]
        wanted = [any(column) for column in zip(*self.ranks.exchange(own), strict=True)]
        self.ranks.phase = "settled"
        for parameter, is_here, is_there in zip(trained, own, wanted, strict=True):
            if is_there and not is_here:
                fsdp.set_zeros(parameter)
        self.model.set_requires_gradient_sync(True)
        self.model.set_is_last_backward(True)
        fsdp.reduce_gradients(self.model)

    def reduce_earlier(self) -> None:
        """Reduce gradients of backwards without synchronisation, if a backward would do so now.
        Collective if there are any, which is the same on all ranks."""
        due = False
        for group in self._groups():
            partial, trained = group._partial_reduce_output, fsdp.trained_of(group)
            whole = any(map(fsdp.has_gradient, group.fsdp_params))
            if (whole and group.reduce_grads) or (partial is not None and group.all_reduce_grads):
                due = True
            else:
                continue
            # Gradients that were reduced over one mesh dimension are reduced over the other
            # together with the next gradients of the same parameters.
            sizes = (p.padded_sharded_param_size.numel() for p in trained)
            if not whole and sum(sizes) == partial.numel():
                for parameter in trained:
                    fsdp.set_zeros(parameter)
        if due:
            fsdp.reduce_gradients(self.model)

    def _forget(self) -> None:
        """Drop unreduced gradients and the state of a failed pass, and free gathered weights."""
        for place, name, _ in chain.from_iterable(map(fsdp.left_in, self._groups())):
            setattr(place, name, None)
        fsdp.reset(self.model, self._modules())
        self._gathered = False
        self.reshard()

    def reshard(self) -> None:
        """Free gathered weights, unless they stay gathered for a step."""
        if self.gathered:
            return
        for group in self._groups():
            # Gathered ahead and not used. The next forward would use it, although weights may have
            # changed.
            if group._all_gather_result is not None:
                group.wait_for_unshard()
        for module in self._modules():
            module.reshard()

    # Gathered for each forward and backward
    # ------------------------------------------------------------

    def _prefetch_blocks(self, blocks: Sequence[nn.Module], changes: Changes) -> None:
        """Gather each block's weights while its neighbour runs, until the changes are undone.

        Without this, fully_shard prefetches in backwards by the order of the last forward, and
        loses it after backwards of other microbatches. Prefetching that users have set on a module
        stays. The head is not prefetched, because some forwards do not run it.
        """
        sharded = [block for block in blocks if isinstance(block, FSDPModule)]
        states = [vars(cast(Any, block)._get_fsdp_state()) for block in sharded]
        for (block, of_block), (later, of_later) in pairwise(zip(sharded, states, strict=True)):
            if not of_block["_states_to_forward_prefetch"]:
                changes.set(of_block, "_states_to_forward_prefetch", [])
                block.set_modules_to_forward_prefetch([later])
            if not of_later["_states_to_backward_prefetch"]:
                changes.set(of_later, "_states_to_backward_prefetch", [])
                later.set_modules_to_backward_prefetch([block])


def _elements(parameter: Any) -> int:
    return int(parameter._orig_size.numel())


def _reduces_by(group: Any) -> str | None:
    """Describe the user's code that gathers or reduces for a group; None if it is torch's."""
    if group._all_reduce_hook is not None:
        return "set_all_reduce_hook has given it a function for gradients"
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        kind = type(getattr(group, name, None))
        if not kind.__module__.startswith(("torch.", "builtins")):
            return f"custom collectives are set ({kind.__module__}.{kind.__qualname__})"
    return None


def _check_group(group: Any) -> None:
    for policy in {parameter.mp_policy for parameter in group.fsdp_params}:
        if policy.output_dtype not in (None, policy.param_dtype):
            raise UnsupportedError(
                f"MixedPrecisionPolicy has output_dtype={policy.output_dtype} and "
                f"param_dtype={policy.param_dtype}, so that it rounds outputs to another dtype. "
                "Leave output_dtype out, or set it to param_dtype."
            )
    if any(fsdp.takes_any_gradient(parameter) for parameter in group.fsdp_params):
        raise UnsupportedError(
            "a parameter has grad_dtype=None and the model is sharded by fully_shard without a "
            "reduce_dtype, so that ranks may reduce in different dtypes. Give "
            "MixedPrecisionPolicy(reduce_dtype=...)."
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise UnsupportedError(
            "parameters are offloaded to the CPU (CPUOffloadPolicy), which has not been shown "
            "exact. Leave offload_policy out; Config(activations='offload') saves memory instead."
        )
