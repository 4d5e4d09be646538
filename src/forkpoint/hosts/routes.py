"""The experts that routers choose: recorded in one run of a model, and held in others.

A mixture of experts sends a token to the k experts whose scores are highest. Where scores are
nearly equal, rounding decides, and the gradient jumps: two runs in 16 bits then differ by more than
rounding, whatever differs between them. To compare two runs without these jumps, the choices of one
are recorded, and the other is held to them. Only the choice is held: a held expert's weight is
computed from the run's own scores, by the model's own code, so that gradients reach the router as
they do without holding.

    with Changes() as changes:
        routers = find_routers(model, changes)
        routes = Routes(batch)
        run = RoutedRun(model, routers, routes, changes, record=True)
        ...  # run.at(tokens) before each forward of the model
    with Changes() as changes:
        run = RoutedRun(model, routers, routes, changes)
        follow(run, policy, plan, batch, changes)
        policy.forward_backward(batch, loss, plan=plan)
    print(run.elsewhere, "of", run.decisions)

Every supported family chooses by `topk`, which is what is intercepted, within the module that calls
it. A model is asked once which of its modules do, so that no family is known by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forkpoint.engine import microbatches
from forkpoint.engine.changes import Changes
from forkpoint.engine.timing import Event, Observer
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import add_hook
from forkpoint.hosts.transformers.calls import configurations
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray, build_forest, sort_rollouts

TOPK = (torch.topk, torch.Tensor.topk)


class Observed(Protocol):
    """A policy, which tells its observer of every forward and backward before it runs."""

    observer: Observer | None


@dataclass(frozen=True)
class Router:
    """A module that chooses experts."""

    name: str
    """Its name in the model."""
    calls: int
    """How often one forward of it calls topk. The last call chooses the experts; those before it
    choose among groups of experts."""


class Routes:
    """Chosen experts, by router and by what a token is preceded by.

    Rollouts of a batch that share tokens share choices: the first to be recorded counts. Tokens
    that the recording run left out, as `dense_run` leaves out rollouts in which nothing is trained,
    have none: where others run them, they choose for themselves and are not counted.
    """

    def __init__(self, batch: RolloutBatch, *, last_tokens: bool = False) -> None:
        """last_tokens: whether rollouts' last tokens run as well."""
        tokens, offsets = batch.token_ids, batch.offsets
        if last_tokens:
            # Each rollout goes on by a token that none has: the label of the edge that reads its
            # last token.
            tokens = np.insert(tokens, offsets[1:], int(tokens.max(initial=0)) + 1)
            offsets = offsets + np.arange(len(offsets))
        order = sort_rollouts(tokens, offsets, np.zeros(len(batch), np.int64))
        forest = build_forest(order, len(batch))
        keys = np.append(forest.token_edges(offsets)[1:], -1)
        if last_tokens:
            keys = np.delete(keys, offsets[1:] - 1)
        self.keys_T: IntArray = keys
        """For each token of the batch, the edge that reads it; -1 for the last of each rollout
        where these do not run."""
        self.edges: int = forest.edges
        self.chosen: dict[str, Tensor] = {}
        """By router, int16 [edges, k]; -1 where nothing is recorded."""


class RoutedRun:
    """A run of a model that chooses the experts that `routes` has, for the tokens given to `at`.

    It lasts until the changes are undone. With `record`, choices that `routes` does not have yet
    are the model's own and are kept in it. The model may run eagerly or compiled, with or without
    recomputation; routers run eagerly.

    Raises UnsupportedError, from within the forward, where a router does not do what `find_routers`
    saw of it.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: tuple[Router, ...],
        routes: Routes,
        changes: Changes,
        *,
        record: bool = False,
    ) -> None:
        self._modules = {router: model.get_submodule(router.name) for router in routers}
        self._routes = routes
        self._record = record
        self.changes: Changes = changes
        """Undone when the run ends, or with the step that it lies in."""
        self._tokens: IntArray | None = None
        self._forwards: dict[nn.Module, Callable] = {}
        self._seen: dict[str, Tensor] = {}
        self._elsewhere: dict[str, Tensor] = {}

    def at(self, tokens: IntArray) -> None:
        """Say which tokens the next forward runs, and the recomputation that belongs to it.

        tokens: int64 [n], positions in the batch's flat tokens, in the order in which the model
            gets them; -1 for padding, whose choices are its own.
        """
        # Not before: a step of forkpoint refuses modules whose forward has been replaced. And again
        # where a pass of a step has put back those that it had replaced itself.
        for router, module in self._modules.items():
            if (
                module not in self._forwards
                or vars(module).get("forward") is not (self._forwards[module])
            ):
                self._forwards[module] = _routed_forward(router, module.forward, self)
                self.changes.replace_forward(module, self._forwards[module])
        self._tokens = tokens

    @property
    def decisions(self) -> int:
        """Choices that were made: tokens that ran, times the routers that they passed."""
        return sum(int(seen_T.sum()) for seen_T in self._seen.values())

    @property
    def elsewhere(self) -> int:
        """Those among them whose own scores choose other experts than the recorded ones."""
        return sum(int(differs_T.sum()) for differs_T in self._elsewhere.values())

    def choose(self, name: str, scores_nE: Tensor, own: Any) -> tuple[Tensor, Tensor]:
        """Values and indices [n, k] for the router `name`, in place of its `own`."""
        values_nk, own_nk = own
        tokens = self._tokens
        if tokens is None or len(tokens) != len(own_nk):
            raise UnsupportedError(
                f"the router {name} got {len(own_nk)} tokens where "
                f"{'none' if tokens is None else len(tokens)} were expected, so that its routes "
                "cannot be held. Verify a float64 copy of the model, where routes need no holding."
            )
        tokens_n = torch.as_tensor(tokens, device=own_nk.device)
        real_n = tokens_n >= 0
        keys_n = torch.as_tensor(self._routes.keys_T[tokens], device=own_nk.device)
        chosen = self._routes.chosen.setdefault(
            name, own_nk.new_full((self._routes.edges, own_nk.shape[1]), -1, dtype=torch.int16)
        )
        known_nk = chosen[keys_n].to(own_nk)
        new_n = real_n & (known_nk[:, 0] < 0)
        if self._record:
            chosen[keys_n[new_n]] = own_nk[new_n].to(torch.int16)
        else:
            real_n = real_n & ~new_n
        known_nk = torch.where(new_n[:, None], own_nk, known_nk)
        # The order among the k decides nothing, so that where the experts are the same the run
        # goes on with its own.
        same_nk = own_nk.sort(-1).values == known_nk.sort(-1).values
        differs_n = real_n & ~same_nk.all(-1)
        for marks, marked_n in ((self._seen, real_n), (self._elsewhere, differs_n)):
            marks_T = marks.setdefault(
                name, real_n.new_zeros(len(self._routes.keys_T), dtype=torch.bool)
            )
            marks_T[tokens_n[marked_n]] = True
        if not differs_n.any():
            return values_nk, own_nk
        held_nk = torch.where(differs_n[:, None], known_nk, own_nk)
        return scores_nE.gather(-1, held_nk), held_nk


def find_routers(model: nn.Module, changes: Changes) -> tuple[Router, ...]:
    """The modules of a stock model that choose experts; none if it has no experts.

    Runs one token through the model. Raises UnsupportedError where a model has experts and its
    routers are not seen: then routes can be neither recorded nor held.
    """
    names = {module: name for name, module in model.named_modules()}
    every = [name for module, name in names.items() if _holds_experts(module, name)]
    # Adapters wrap experts in modules of their own.
    experts = [n for n in every if not any(n != other and _within(n, other) for other in every)]
    if not experts:
        return ()
    inside: list[nn.Module] = []
    calls: dict[str, int] = {}

    def enter(module: nn.Module, _: Any) -> None:
        inside.append(module)

    def leave(*_: Any) -> None:
        inside.pop()

    def count(_: Tensor, own: Any) -> Any:
        name = names[inside[-1]]
        calls[name] = calls.get(name, 0) + 1
        return own

    token = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    mark = changes.mark
    for config in configurations(model):
        if vars(config).get("output_router_logits"):  # whose loss calls topk as well
            changes.set(vars(config), "output_router_logits", False)
    for module in names:
        add_hook(changes, module._forward_pre_hooks, enter)
        add_hook(changes, module._forward_hooks, leave)
    with torch.no_grad(), Intercepted(count):
        model(input_ids=token, use_cache=False)
    changes.undo(mark)
    # A router chooses for the experts beside it, or for those in the module that it is.
    owners = {name.rpartition(".")[0] for name in experts}
    routers = tuple(Router(name, n) for name, n in calls.items())
    served = {o for o in owners if any(_within(r.name, o) for r in routers)}
    if served != owners:
        lost = min(owners - served)
        raise UnsupportedError(
            f"{lost} ({type(model.get_submodule(lost)).__name__}) has experts, but no call of topk "
            "chooses among them, so that the routes of two runs cannot be made the same."
        )
    return routers


def follow(
    run: RoutedRun, policy: Observed, plan: Plan, batch: RolloutBatch, changes: Changes
) -> None:
    """Tell `run` which tokens each microbatch of the plan runs, when the policy runs it."""
    before, at = policy.observer, following(run, plan, batch)

    def observe(event: Event) -> None:
        at(event)
        if before is not None:
            before(event)

    changes.set(vars(policy), "observer", observe)


def following(run: RoutedRun, plan: Plan, batch: RolloutBatch) -> Observer:
    """An observer that tells `run` which tokens each microbatch of the plan runs."""
    tokens = microbatch_tokens(plan, batch)
    return lambda event: run.at(tokens[event.microbatch])


def microbatch_tokens(plan: Plan, batch: RolloutBatch) -> list[IntArray]:
    """For each microbatch and each of its places, a token of the batch that is run there; -1 is
    padding."""
    found = []
    for microbatch in plan.microbatches:
        tokens, real = microbatches.microbatch_tokens(plan, batch, microbatch)
        found.append(np.where(real, tokens, -1))
    return found


class Intercepted(TorchFunctionMode):
    """Within it each topk's result is what `change` makes of its input and its own result."""

    def __init__(self, change: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        own = func(*args, **given)
        return self._change(args[0] if args else given["input"], own) if func in TOPK else own


def _routed_forward(router: Router, forward: Callable, run: RoutedRun) -> Callable:
    # Not compiled: compiled code would keep the choices of the microbatch that it was compiled for.
    @torch.compiler.disable()
    def routed_forward(*args: Any, **kwargs: Any) -> Any:
        calls = 0

        def change(scores: Tensor, own: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != router.calls:
                return own
            if scores.dim() != 2 or own[1].shape[0] != scores.shape[0]:
                raise UnsupportedError(
                    f"the router {router.name} chooses by scores of shape {tuple(scores.shape)}, "
                    "not [tokens, experts], so that its routes cannot be held."
                )
            return run.choose(router.name, scores, own)

        with Intercepted(change):
            result = forward(*args, **kwargs)
        if calls != router.calls:
            raise UnsupportedError(
                f"the router {router.name} called topk {calls} times and not {router.calls} times "
                "as before, so that its routes cannot be held."
            )
        return result

    return routed_forward


def _holds_experts(module: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__


def _within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(f"{owner}.")
