"""`forkpoint bench`: measurements beside the alternatives, as rows of JSON."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from tyro.conf import DisallowNone, Positional, arg

from forkpoint.cli.options import Count, Flag
from forkpoint.cli.output import Output
from forkpoint.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.rows import ResultRow

Suite = Literal["dualkv", "prompt-caching", "ragged", "small", "smoke"]
SUITES: dict[str, tuple[Suite, ...]] = {
    "attention": ("dualkv", "prompt-caching", "ragged", "small"),
    "hybrid": ("prompt-caching", "smoke"),
}
SMOKE: Suite = "smoke"
"""Tiny shapes, on any device: it shows that the benchmark runs, and measures nothing."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure shared-prefix attention on this GPU, or steps of a hybrid model, beside dense.

    attention: dense and other ways to share, by kernel. hybrid: whole training steps in the shapes
    of Qwen3.5-4B, whose layers mix attention with gated linear attention. Whole steps of other
    models are measured by step-grid, policy-update, memory, capacity and tree, and figures drawn by
    plot, each with options of its own: forkpoint bench step-grid --help.

    Numbers are checked, and every figure is written as a row of JSON with its device, versions,
    commit and command.

    Attributes:
        what: What to measure.
        suite: Which shapes; several may be named. smoke is tiny, runs on CPUs too and is only
            for hybrid. By default all but smoke.
        kernels: Attention kernels to measure; by default those that can run here. Only for
            attention.
        dtypes: Data types to measure. Only for attention; hybrid is bfloat16.
        only: Parts of the names of cases to measure, such as R64; by default every case.
        layers: How many layers the hybrid model has; by default all of its 32.
        blocks: Whether the hybrid model's decoder blocks are compiled, dense and shared alike; on
            CPUs they are not.
        repeats: How often a step of the hybrid model is timed.
        output: The file of JSON lines that rows are appended to; by default WHAT.jsonl.
        json: Print only the JSON line.
    """

    what: Annotated[Literal["attention", "hybrid"], Positional] = "attention"
    suite: tuple[Suite, ...] = ()
    kernels: tuple[str, ...] = ()
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    only: tuple[str, ...] = ()
    layers: DisallowNone[
        Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 32)")]
    ] = None
    blocks: Literal["compiled", "eager"] = "compiled"
    repeats: Count = 3
    output: DisallowNone[
        Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: WHAT.jsonl)")]
    ] = None
    json: Flag = False

    def run(self) -> int:
        import torch

        from benchmarks.rows import write_rows

        suites = self.suite or tuple(s for s in SUITES[self.what] if s != SMOKE)
        self._check(suites, cuda=torch.cuda.is_available())
        out = Output(json_only=self.json)
        output = self.output or Path(f"{self.what}.jsonl")
        measured = self._hybrid(suites) if self.what == "hybrid" else self._attention(suites)
        rows: list[ResultRow] = []
        cases = 0
        begin = time.perf_counter()
        for name, found in measured:
            write_rows(found, output)
            rows += found
            cases += 1
            out.show(_table(name, found))
        if not cases:
            raise ConfigError(
                f"no case of {', '.join(suites)} has {' or '.join(self.only) or 'such dtypes'} in "
                "its name; leave --only out to see their names."
            )
        failed = [r.case for r in rows if r.note and r.note.startswith("FAILED")]
        out.result(
            {
                "command": "bench",
                "what": self.what,
                "suites": suites,
                "cases": cases,
                "rows": len(rows),
                "failed": failed,
                "output": output,
                "seconds": time.perf_counter() - begin,
            }
        )
        return 1 if failed else 0

    def _check(self, suites: tuple[Suite, ...], *, cuda: bool) -> None:
        wrong = [suite for suite in suites if suite not in SUITES[self.what]]
        if wrong:
            raise ConfigError(
                f"bench {self.what} has no suite {', '.join(wrong)}; it has "
                f"{', '.join(SUITES[self.what])}."
            )
        for name, value in (("layers", self.layers), ("repeats", self.repeats)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it takes a whole number of at least 1.")
        from forkpoint.ops.attention import KERNELS

        known = [kernel.name for kernel in KERNELS]
        for name in self.kernels:
            if name not in known:
                raise ConfigError(f"kernels has {name!r}; allowed are {', '.join(known)}.")
        if not self.dtypes:
            raise ConfigError(
                "dtypes names none, so there is nothing to measure; name at least one."
            )
        if self.output and (not self.output.parent.is_dir() or self.output.is_dir()):
            raise ConfigError(
                f"output is {self.output}, which is a folder or lies in none; give the path of a "
                "file to append to, in a folder that exists."
            )
        if not cuda and set(suites) != {SMOKE}:
            raise ConfigError(
                f"bench {self.what} measures GPU kernels, and torch sees no CUDA device here; run "
                "it on a machine with one (bench hybrid --suite smoke runs anywhere)."
            )

    def _wants(self, case: str) -> bool:
        return not self.only or any(part in case for part in self.only)

    def _attention(self, suites: tuple[Suite, ...]) -> "Iterator[tuple[str, list[ResultRow]]]":
        import torch

        from benchmarks.attention import compare as attention

        kernels = self.kernels or attention.available_kernels()
        for suite in suites:
            for case in attention.cases(suite):
                named = str(case.dtype).removeprefix("torch.") in self.dtypes
                if named and self._wants(case.name):
                    yield case.name, list(attention.run_case(case, kernels))
                    torch.cuda.empty_cache()

    def _hybrid(self, suites: tuple[Suite, ...]) -> "Iterator[tuple[str, list[ResultRow]]]":
        import torch

        from benchmarks.steps import hybrid
        from benchmarks.steps.stepper import Stepper

        for suite in suites:
            model: Any
            if suite == SMOKE:
                model = hybrid.make_model(hybrid.TINY, self.layers, torch.float32, "cpu")
            else:
                model = hybrid.make_model(hybrid.QWEN35_4B, self.layers, torch.bfloat16, "cuda")
            stepper = Stepper(model, compile_blocks=None if self.blocks == "compiled" else False)
            for case in filter(lambda c: self._wants(c.name), hybrid.SUITES[suite]):
                yield case.name, list(hybrid.run_case(case, stepper, repeats=self.repeats))
            del model, stepper


def _table(title: str, rows: "list[ResultRow]") -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        bound = f"of {row.bound:.2f}" if row.bound else ""
        table.add_row(row.metric, row.baseline or "", f"{row.value:.4g}", row.unit, bound)
    return table
