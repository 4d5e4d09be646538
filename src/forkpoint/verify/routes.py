"""The routes of a mixture of experts that the runs of `verify` are held to."""

from collections.abc import Sequence

from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.engine.host import FoundRouter, Host
from forkpoint.engine.route_replay import ForcedRoutes, RouteReplay, Routes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.routers import find_routers, force_routers
from forkpoint.plan.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.verify.report import RouteCounts, RouteReport


class HeldRoutes:
    """The routes of a mixture of experts, which the reference records and the others are held to.

    Of a model without experts, of one whose routes cannot be held, and of one that needs no holding
    (in float64), nothing is held.
    """

    def __init__(
        self,
        host: Host,
        batch: RolloutBatch,
        changes: Changes,
        *,
        hold: bool,
        needed: bool = True,
        last_tokens: bool = False,
    ) -> None:
        """`last_tokens`: whether rollouts' last tokens run. Where several ranks hold the model,
        nothing is held."""
        self._host, self._batch, self._changes = host, batch, changes
        self._routers: Sequence[FoundRouter] = ()
        self._problem: str | None = None
        try:
            self._routers = find_routers(host.model, host.stock, changes) if needed else ()
        except UnsupportedError as error:
            self._problem = str(error)
        if self._routers and host.group is not None:
            self._routers, self._problem = (), "several ranks hold the model"
        elif self._routers and not hold:
            self._routers, self._problem = (), "hold_routes is False"
        self._routes: Routes | None = None
        if self._routers:
            self._routes = Routes.to_record(batch, last_tokens=last_tokens)

    def run(self, model: nn.Module, *, record: bool = False) -> ForcedRoutes | None:
        """Hold the model, or a copy of it, to the routes, until the changes are undone.

        None where no routes are held.
        """
        if self._routes is None:
            return None
        run = ForcedRoutes(self._routes, len(self._routers), self._host.device, record=record)
        force_routers(self._routers, run, self._changes, model)
        return run

    def replay(self, plan: Plan) -> RouteReplay | None:
        """The routes for a step of this plan; None where no routes are held."""
        if self._routes is None:
            return None
        layers, routers = len(self._routers), self._routers
        return RouteReplay(
            self._routes, layers, self._host.device, plan, self._batch, routers=routers
        )

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
