"""The benchmarks by name, and their command line."""

from collections.abc import Sequence

from forkpoint.apps.cli.app import App
from forkpoint.apps.cli.exit_codes import guarded

COMMANDS = {
    "attention": "attention:Attention",
    "groups": "steps.groups:Groups",
    "tree": "steps.tree:Tree",
    "peers": "steps.peers:Peers",
    "defaults": "steps.defaults:Defaults",
    "capacity": "steps.capacity:Capacity",
    "images": "steps.images:Images",
    "plain-loop": "steps.plain_loop:PlainLoop",
    "trl": "steps.trl_update:TrlUpdate",
    "verl": "steps.verl_update:VerlUpdate",
    "ranks": "ranks.bench:Ranks",
    "context": "ranks.context:Context",
    "pipeline": "ranks.pipeline:Pipeline",
    "compositions": "ranks.compositions:Compositions",
    "placement": "planning.placement:Placement",
    "stages": "planning.stages:Stages",
    "context-ways": "planning.context_ways:ContextWays",
    "results": "results_page:Results",
}
APP = App(
    prog="python -m benchmarks",
    about="",
    commands={name: f"benchmarks.{place}" for name, place in COMMANDS.items()},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; `argv` are its arguments, by default those of the process.

    Returns the exit code: 0 done, 1 a figure misses its bar or a check failed, 2 an error in what
    was given, 70 a defect, 130 interrupted.
    """
    return guarded(APP.run, argv)
