"""Forces routers to choose given experts: those of a batch, or those of an earlier run.

If scores of experts are nearly equal, rounding decides which are chosen, and the gradient jumps.
So steps use the choices of the sampler (routing replay: arXiv 2510.11370), and `verify` and the
self-check record the choices of one run and force the other runs to choose the same.

Only the choice is forced. The model's own code computes the weights of the chosen experts from the
live router's scores, so that gradients reach the router.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forkpoint.device import on_device
from forkpoint.engine.feature import Feature, Links
from forkpoint.engine.host import RouterSet
from forkpoint.engine.microbatches import MicrobatchInputs
from forkpoint.errors import UnsupportedError
from forkpoint.parallel.topology import Places
from forkpoint.plan.plan import Plan
from forkpoint.plan.program import BACKWARD, Instruction
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.tree.forest import IntArray, build_forest, sort_rollouts


@dataclass(frozen=True, eq=False)
class ReplayedRoutes:
    """Counts of forced choices, by layer with a router. A shared token counts once for each
    rollout."""

    decisions_L: Tensor
    """int64 [L]: number of forced choices."""
    elsewhere_L: Tensor
    """int64 [L]: number of forced choices that differ from the router's choice."""

    @property
    def elsewhere(self) -> float:
        """The fraction of forced choices that differ from those of the routers."""
        decisions = int(self.decisions_L.sum())
        return int(self.elsewhere_L.sum()) / decisions if decisions else 0.0


@dataclass(frozen=True, eq=False)
class Routes:
    """Chosen experts, by router and by the edge that reads a token.

    Rollouts that share an edge share its experts.
    """

    keys_T: IntArray
    """int64 [T]: for each token of the batch, the edge that reads it; -1 if none does."""
    edges: int
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Experts by router, int16 [edges + 1, K]; -1 if the router chooses. The last row is for tokens
    without an edge."""

    @classmethod
    def to_record(cls, batch: RolloutBatch, *, last_tokens: bool = False) -> "Routes":
        """Make empty routes for a run that records them, by any plan of the batch. The first
        recorded choice of an edge is kept.

        last_tokens: whether rollouts' last tokens run as well.
        """
        tokens, offsets = batch.token_ids, batch.offsets
        if last_tokens:
            # A token that no rollout has goes to the end of each: the label of the edge that reads
            # its last token.
            tokens = np.insert(tokens, offsets[1:], int(tokens.max(initial=0)) + 1)
            offsets = offsets + np.arange(len(offsets))
        medium = batch.media_of
        if medium is not None:
            medium = medium + 1
            if last_tokens:
                medium = np.insert(medium, batch.offsets[1:], 0)
        order = sort_rollouts(tokens, offsets, routes=medium)
        forest = build_forest(order, len(batch))
        keys = np.append(forest.token_edges(offsets)[1:], -1)
        if last_tokens:
            keys = np.delete(keys, offsets[1:] - 1)
        return cls(keys, forest.edges)

    def join(self, places: Places) -> None:
        """Add the choices that other ranks have recorded for their places of the same microbatches.
        Collective."""
        for layer in sorted(self.chosen):
            first, *others = places.all_of(self.chosen[layer])
            for found in others:
                first = torch.where(first[:, :1] < 0, found, first)
            self.chosen[layer] = first

    @classmethod
    def given(
        cls, plan: Plan, batch: RolloutBatch, device: torch.device, routers: RouterSet
    ) -> "Routes":
        """The `routed_experts` of the batch for these routers, by edges of this plan."""
        given_TLK = batch.routed_experts
        assert given_TLK is not None
        given_TLK = given_TLK[:, routers.first :][:, : len(routers.found)]
        forest = plan.forest
        first = forest.segment_tokens(batch.offsets) - forest.edge_offsets[:-1]
        token_E = np.repeat(first, forest.length) + np.arange(forest.edges)
        keys = np.full(len(given_TLK), -1, np.int64)
        keys[token_E] = np.arange(forest.edges)
        none_1LK = np.full_like(given_TLK, -1, shape=(1, *given_TLK.shape[1:]))
        table = on_device(np.concatenate([given_TLK[token_E], none_1LK]), device)
        return cls(keys, forest.edges, dict(enumerate(table.unbind(1))))


class ForcedRoutes:
    """Forces the experts of `routes` in one run of a model.

    `at` is called before each forward. The host calls `choose` (see `Host.watch_routers`).
    """

    def __init__(
        self,
        routes: Routes,
        layers: int,
        device: torch.device,
        *,
        record: bool = False,
    ) -> None:
        """`layers`: number of routers of the model. `record`: whether to add choices to `routes`
        for edges that have none."""
        self._routes = routes
        self._record = record
        self._device = device
        self._decisions_L: Tensor = torch.zeros(layers, dtype=torch.int64, device=device)
        self._elsewhere_L: Tensor = torch.zeros_like(self._decisions_L)
        self._edge_n: Tensor | None = None
        """int64 [n]: edges of the running tokens, -1 if the router chooses."""
        self._rollouts_n: Tensor | None = None
        """int64 [n]: how often each token counts; None if tokens are not counted."""
        self._counted: set[int] = set()

    @property
    def routes(self) -> ReplayedRoutes:
        """Counts of all tokens that have run."""
        return ReplayedRoutes(self._decisions_L, self._elsewhere_L)

    def gather(self, places: Places, links: Links, routers: RouterSet) -> None:
        """Add the counts of ranks that have run other places of the same microbatches, or other
        layers. Collective. `routers`: the routers of this rank."""

        def whole(own_L: Tensor) -> Tensor:
            all_L = own_L.new_zeros(routers.layers)
            all_L[routers.first :][: len(own_L)] = places.summed(own_L)
            return links.summed(all_L)

        self._decisions_L, self._elsewhere_L = whole(self._decisions_L), whole(self._elsewhere_L)

    def at(self, tokens: IntArray) -> None:
        """Force the experts of these tokens from now on.

        tokens: int64 [n], positions in the batch's flat tokens, in the order in which the model
            gets them. They are counted once, in the first forward that begins with this token.
        """
        edge_n = on_device(self._routes.keys_T[tokens], self._device)
        first = int(tokens[0]) if len(tokens) else -1
        self._force(edge_n, torch.ones_like(edge_n), first)

    def _force(self, edge_n: Tensor, rollouts_n: Tensor, counted_as: int | None) -> None:
        """`counted_as`: a key. Tokens are counted in the first call with this key; None: never."""
        self._edge_n = edge_n
        counts = counted_as is not None and counted_as not in self._counted
        self._rollouts_n = rollouts_n if counts else None
        if counted_as is not None:
            self._counted.add(counted_as)

    def choose(
        self, layer: int, name: str, scores_TE: Tensor, values_Tk: Tensor, own_Tk: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Replace the choices of a layer's router. Returns the new values and indices [T, k].

        Raises UnsupportedError if the router's tokens are not those of the run.
        """
        edge_T = self._edge_n
        if edge_T is None:
            return values_Tk, own_Tk
        if scores_TE.dim() != 2 or len(scores_TE) != len(edge_T):
            raise UnsupportedError(
                f"the router {name} chooses by scores of shape {tuple(scores_TE.shape)}, and "
                f"{len(edge_T)} tokens run, so that its experts cannot be forced. Call it when the "
                "step has ended, or leave routed_experts out; verify takes hold_routes=False."
            )
        if layer not in self._routes.chosen:
            rows = self._routes.edges + 1
            unknown = own_Tk.new_full((rows, own_Tk.shape[1]), -1, dtype=torch.int16)
            self._routes.chosen[layer] = unknown
        chosen = self._routes.chosen[layer]
        given_Tk = chosen[edge_T].to(own_Tk)
        known_T = given_Tk[:, 0] >= 0
        if self._record:
            new_T = ~known_T & (edge_T >= 0)
            chosen[edge_T[new_T]] = own_Tk[new_T].to(torch.int16)
            given_Tk = torch.where(new_T[:, None], own_Tk, given_Tk)
            known_T = known_T | new_T
        if self._rollouts_n is not None:
            # The order of a token's k experts has no effect.
            same_Tk = own_Tk.detach().sort(-1).values == given_Tk.sort(-1).values
            differs_T = known_T & ~same_Tk.all(-1)
            self._decisions_L[layer] += (known_T * self._rollouts_n).sum()
            self._elsewhere_L[layer] += (differs_T * self._rollouts_n).sum()
        forced_Tk = torch.where(known_T[:, None], given_Tk, own_Tk)
        return scores_TE.gather(-1, forced_Tk), forced_Tk


class RouteReplay(ForcedRoutes, Feature):
    """Forces the experts of `routes` in each microbatch of a step."""

    def __init__(
        self,
        routes: Routes,
        layers: int,
        device: torch.device,
        plan: Plan,
        *,
        record: bool = False,
    ) -> None:
        """`plan`: the plan that the step runs."""
        super().__init__(routes, layers, device, record=record)
        self._multiplicity: IntArray = plan.forest.multiplicity
        self._positions: dict[int, tuple[Tensor, Tensor]] = {}

    def before(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        """Force the microbatch's experts, also in backwards, which may recompute blocks."""
        if instruction.idle:
            self._edge_n = None
            return
        microbatch = inputs.microbatch
        if microbatch.index not in self._positions:
            padding = inputs.input_ids.shape[1] - len(inputs.tokens)
            keys = np.pad(self._routes.keys_T[inputs.tokens], (0, padding), constant_values=-1)
            rollouts = np.pad(self._multiplicity[inputs.segments], (0, padding))
            self._positions[microbatch.index] = (
                on_device(keys, self._device),
                on_device(rollouts, self._device),
            )
        counts = instruction.operation != BACKWARD and instruction.counts_routing
        self._force(*self._positions[microbatch.index], microbatch.index if counts else None)

    def after_forward(self, instruction: Instruction, inputs: MicrobatchInputs) -> None:
        self._rollouts_n = None
