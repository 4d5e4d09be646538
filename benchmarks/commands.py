"""The benchmarks by name, and their command line."""

import importlib
from collections.abc import Sequence
from typing import Any

import tyro
from rich.table import Table

from forkpoint.apps.cli.exit_codes import guarded
from forkpoint.apps.cli.options import TYRO_CONFIG
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError

COMMANDS = {
    "attention": "attention.compare:Attention",
    "step-grid": "steps.step_grid:StepGrid",
    "policy-update": "steps.policy_update:PolicyUpdate",
    "memory": "steps.memory:Memory",
    "capacity": "steps.capacity:Capacity",
    "tree": "steps.tree:Tree",
    "plain-loop": "steps.plain_loop:PlainLoop",
    "trl": "steps.trl_update:TrlUpdate",
    "verl": "steps.verl_update:VerlUpdate",
    "hybrid": "steps.hybrid:Hybrid",
    "moe": "steps.moe:Moe",
    "plan-variants": "steps.plan_variants:PlanVariants",
    "profile-step": "steps.profile:ProfileStep",
    "ranks": "ranks.bench:Ranks",
    "forest": "planning.forest:ForestOfAMillion",
    "align": "planning.align:Align",
    "placement": "planning.placement:Placement",
    "plot": "plots:Plot",
    "results": "results_page:Results",
}
"""Names, and where the class of each lies. Only the one that runs is imported."""


def command(name: str) -> Any:
    """The class of a command, whose fields are its options and whose `run` runs it."""
    module, _, kind = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), kind)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; `argv` are its arguments, by default those of the process.

    Returns the exit code: 0 done, 1 a figure misses its bar or a check failed, 2 an error in what
    was given, 70 a defect, 130 interrupted.
    """
    return guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        _list()
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(
            f"there is no benchmark {name!r}; there are {', '.join(COMMANDS)}. "
            "python -m benchmarks --help says what each measures."
        )
    prog = f"python -m benchmarks {name}"
    return tyro.cli(command(name), prog=prog, args=rest, config=TYRO_CONFIG).run()


def _list() -> None:
    table = Table(show_header=False, box=None)
    for name in COMMANDS:
        table.add_row(name, (command(name).__doc__ or "").split("\n\n")[0])
    out = Output(json_only=False)
    out.show("usage: python -m benchmarks NAME [OPTIONS]; NAME --help lists its options", table)
