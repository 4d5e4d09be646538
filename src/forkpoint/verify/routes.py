"""The routes of a mixture of experts that all runs of `verify` use."""

from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.route_replay import ForcedRoutes, RouteReplay, Routes
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.routers import force_routers, routers_of_copy
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.verify.report import RouteCounts, RouteReport


class HeldRoutes:
    """Records the experts that the reference chooses, and forces other runs to choose them.

    It does nothing for a model without experts, for a float64 model, and if several ranks hold the
    model.
    """

    def __init__(
        self,
        host: ModelHost,
        batch: RolloutBatch,
        changes: Changes,
        *,
        hold: bool,
        last_tokens: bool,
    ) -> None:
        """`hold`: argument `hold_routes` of verify. `last_tokens`: whether last tokens run."""
        self._host, self._batch, self._changes = host, batch, changes
        self._routers = host.routers.found
        self._problem: str | None = None
        self._routes: Routes | None = None
        if host.compute_dtype.itemsize == 8 or not host.shape.expert_layers:
            return
        if not host.group.ranks.is_alone:
            self._problem = "several ranks hold the model"
        elif not hold:
            self._problem = "hold_routes is False"
        elif not self._routers:
            self._problem = "this transformers version does not record the model's routers"
        else:
            self._routes = Routes.to_record(batch, last_tokens=last_tokens)

    def run(self, model: nn.Module, *, record: bool = False) -> ForcedRoutes | None:
        """Force the routers of the model, or of a copy, until the changes are undone.

        Returns the forced routes; None if no routes are forced.
        """
        if self._routes is None:
            return None
        run = ForcedRoutes(self._routes, len(self._routers), self._host.device, record=record)
        force_routers(routers_of_copy(self._routers, model), run, self._changes)
        return run

    def replay(self, plan: Plan) -> RouteReplay | None:
        """Routes for a step of this plan; None if no routes are forced."""
        if self._routes is None:
            return None
        layers = len(self._routers)
        return RouteReplay(self._routes, layers, self._host.device, plan, self._batch)

    def report(self, shared: ForcedRoutes | None, dense: ForcedRoutes | None) -> RouteReport | None:
        if self._problem is not None:
            return RouteReport(held=False, reason=self._problem, shared=None, dense=None)
        if shared is None or dense is None:
            return None
        counts = (
            RouteCounts(int(run.routes.decisions_L.sum()), int(run.routes.elsewhere_L.sum()))
            for run in (shared, dense)
        )
        return RouteReport(True, None, *counts)
