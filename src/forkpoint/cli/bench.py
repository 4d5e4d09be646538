"""`forkpoint bench`: measurements beside the alternatives, as rows of JSON."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.table import Table
from tyro.conf import Positional

from forkpoint.cli.options import Flag
from forkpoint.cli.output import Output
from forkpoint.errors import ConfigError

Suite = Literal["dualkv", "prompt-caching", "ragged", "small"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure shared-prefix attention on this GPU beside dense and other ways to share.

    Numbers are checked before anything is timed. Every figure is written as a row of JSON with its
    device, versions, commit and command.

    Attributes:
        what: What to measure.
        suite: Which shapes; several may be named.
        kernels: Attention kernels to measure; by default those that can run here.
        dtypes: Data types to measure.
        output: The file of JSON lines that rows are appended to.
        json: Print only the JSON line.
    """

    what: Annotated[Literal["attention"], Positional] = "attention"
    suite: tuple[Suite, ...] = ("dualkv", "prompt-caching", "ragged", "small")
    kernels: tuple[str, ...] = ()
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    output: Path = Path("attention.jsonl")
    json: Flag = False

    def run(self) -> int:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "bench attention measures GPU kernels, and torch sees no CUDA device here; run it "
                "on a machine with one."
            )
        from forkpoint.bench import attention
        from forkpoint.bench.rows import ResultRow, write_rows

        out = Output(json_only=self.json)
        kernels = self.kernels or attention.available_kernels()
        cases = [
            case
            for suite in self.suite
            for case in attention.cases(suite)
            if str(case.dtype).removeprefix("torch.") in self.dtypes
        ]
        rows: list[ResultRow] = []
        begin = time.perf_counter()
        for case in cases:
            found = list(attention.run_case(case, kernels))
            write_rows(found, self.output)
            rows += found
            out.show(_table(case.name, found))
            torch.cuda.empty_cache()
        failed = [r.case for r in rows if r.note and r.note.startswith("FAILED")]
        out.result(
            {
                "command": "bench",
                "what": self.what,
                "kernels": kernels,
                "cases": len(cases),
                "rows": len(rows),
                "failed": failed,
                "output": self.output,
                "seconds": time.perf_counter() - begin,
            }
        )
        return 1 if failed else 0


def _table(title: str, rows: list) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows:
        bound = f"of {row.bound:.2f}" if row.bound else ""
        table.add_row(row.metric, row.baseline or "", f"{row.value:.4g}", row.unit, bound)
    return table
