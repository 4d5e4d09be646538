"""The routes of a mixture of experts that the runs of `verify` are held to."""

from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.routes import RoutedRun, Router, Routes, find_routers
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.verify.report import RouteCounts, RouteReport


class HeldRoutes:
    """The routes of a mixture of experts, which the reference records and the others are held to.

    Of a model without experts, of one whose routes cannot be held, and of one that needs no holding
    (in float64), nothing is held.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: RolloutBatch,
        changes: Changes,
        *,
        hold: bool,
        needed: bool = True,
        ranks: bool = False,
        last_tokens: bool = False,
    ) -> None:
        """`ranks`: whether several ranks hold the model, where routes are not held. `last_tokens`:
        whether rollouts' last tokens run."""
        self._changes = changes
        self._routers: tuple[Router, ...] = ()
        self._problem: str | None = None
        try:
            self._routers = find_routers(model, changes) if needed else ()
        except UnsupportedError as error:
            self._problem = str(error)
        if self._routers and ranks:
            self._routers, self._problem = (), "several ranks hold the model"
        elif self._routers and not hold:
            self._routers, self._problem = (), "hold_routes is False"
        self._routes: Routes | None = (
            Routes(batch, last_tokens=last_tokens) if self._routers else None
        )

    def run(self, model: nn.Module, *, record: bool = False) -> RoutedRun | None:
        """Hold the model, or a copy of it, to the routes, until the changes are undone.

        None where no routes are held.
        """
        if self._routes is None:
            return None
        return RoutedRun(model, self._routers, self._routes, self._changes, record=record)

    def report(self, shared: RoutedRun | None, dense: RoutedRun | None) -> RouteReport | None:
        if self._problem is not None:
            return RouteReport(held=False, reason=self._problem, shared=None, dense=None)
        if shared is None or dense is None:
            return None
        counts = (RouteCounts(run.decisions, run.elsewhere) for run in (shared, dense))
        return RouteReport(True, None, *counts)
