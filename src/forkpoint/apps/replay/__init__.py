"""Real optimizer steps on frozen batches, shared beside dense, recorded step by step.

`records` and `folder` need no torch, so that what a replay left can be read without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkpoint.apps.replay.loop import replay as replay
    from forkpoint.apps.replay.records import ReplayReport as ReplayReport
    from forkpoint.apps.replay.records import ReplayStep as ReplayStep

_LAZY = {
    "replay": "forkpoint.apps.replay.loop",
    "MakeOptimizer": "forkpoint.apps.replay.loop",
    "ReplayReport": "forkpoint.apps.replay.records",
    "ReplayStep": "forkpoint.apps.replay.records",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
