"""Train language models on rollouts that share tokens, computing every shared token once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forkpoint.version import __version__ as __version__

__all__ = [
    "Config",
    "ConfigError",
    "ForkpointError",
    "Media",
    "ModelShape",
    "Plan",
    "PlanError",
    "Policy",
    "Rollout",
    "RolloutBatch",
    "RolloutError",
    "Scores",
    "StepOutcome",
    "StepStats",
    "TraceError",
    "UnsupportedError",
    "VerifyReport",
    "cut",
    "load_rollouts",
    "losses",
    "place",
    "record",
    "save_rollouts",
    "traces",
    "wrap",
]

if TYPE_CHECKING:
    from forkpoint import losses as losses
    from forkpoint.config import Config as Config
    from forkpoint.errors import ConfigError as ConfigError
    from forkpoint.errors import ForkpointError as ForkpointError
    from forkpoint.errors import PlanError as PlanError
    from forkpoint.errors import RolloutError as RolloutError
    from forkpoint.errors import TraceError as TraceError
    from forkpoint.errors import UnsupportedError as UnsupportedError
    from forkpoint.parallel.placement import place as place
    from forkpoint.plan import ModelShape as ModelShape
    from forkpoint.plan import Plan as Plan
    from forkpoint.policy import Policy as Policy
    from forkpoint.policy import Scores as Scores
    from forkpoint.policy import StepOutcome as StepOutcome
    from forkpoint.policy import StepStats as StepStats
    from forkpoint.rollouts import traces as traces
    from forkpoint.rollouts.batch import Rollout as Rollout
    from forkpoint.rollouts.batch import RolloutBatch as RolloutBatch
    from forkpoint.rollouts.files import save_rollouts as save_rollouts
    from forkpoint.rollouts.media import Media as Media
    from forkpoint.rollouts.traces import load_rollouts as load_rollouts
    from forkpoint.rollouts.traces import record as record
    from forkpoint.verify.comparison import VerifyReport as VerifyReport
    from forkpoint.wrapping import cut as cut
    from forkpoint.wrapping import wrap as wrap

# Names are imported at first use. Plans and the help of the CLI need no torch. The command line
# handles interrupts only after this module is imported.
_LAZY = {
    name: f"forkpoint.{module}"
    for module, names in {
        "config": "Config",
        "errors": "ConfigError ForkpointError PlanError RolloutError TraceError UnsupportedError",
        "parallel.placement": "place",
        "plan": "ModelShape Plan",
        "policy": "Policy Scores StepOutcome StepStats",
        "rollouts.batch": "Rollout RolloutBatch",
        "rollouts.files": "save_rollouts",
        "rollouts.media": "Media",
        "rollouts.traces": "load_rollouts record",
        "verify.comparison": "VerifyReport",
        "wrapping": "cut wrap",
    }.items()
    for name in names.split()
}
_MODULES = {
    name: f"forkpoint.{name}" for name in ("config", "errors", "losses", "plan", "rollouts")
}
_MODULES["traces"] = "forkpoint.rollouts.traces"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
