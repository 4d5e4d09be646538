"""`forkpoint report`: one HTML file of a replay, or of what a file of rollouts would save.

Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import DisallowNone, Positional, arg

from forkpoint.apps.cli.options import (
    Flag,
    Limit,
    Memory,
    Planning,
    Reading,
    recorded_batches,
    require_extra,
    show_source,
)
from forkpoint.apps.cli.output import Output, options
from forkpoint.apps.cli.plan import AnyModel
from forkpoint.errors import ConfigError
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.runs import run_lengths
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.traces.trace import is_trace

if TYPE_CHECKING:
    from forkpoint.apps.report.page import Chapter


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make one HTML page of replays or rollouts: what was shared, when it ran, how far it drifted.

    The page needs no network and no other file. Runs no model. Needs forkpoint[report].

    Attributes:
        inputs: Folders that forkpoint replay --output wrote, or files of rollouts and
            traces. A replay may still be running.
        output: The HTML file; what was there is replaced.
        plots: A folder for the figures as PNG and SVG.
        model: For files of rollouts, a model's folder or its config.json; with it FLOPs and bytes
            are counted, not only tokens.
        limit: Read only the first N rollouts of a file.
        json: Print one line of JSON and nothing else.
    """

    inputs: Annotated[tuple[Path, ...], Positional, arg(metavar="INPUT...")]
    output: Annotated[Path, arg(metavar="FILE.html")] = Path("report.html")
    plots: DisallowNone[
        Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")]
    ] = None
    model: AnyModel = None
    limit: Limit = None
    json: Flag = False
    reading: Reading = field(default_factory=Reading)
    planning: Planning = field(default_factory=Planning)
    memory: Memory = field(default_factory=Memory)

    def run(self) -> int:
        out = Output(json_only=self.json)
        self._check()
        require_extra("report", "jinja2", "matplotlib")
        from forkpoint.apps.report.draw import write_plots
        from forkpoint.apps.report.page import render_page

        chapters = [self._chapter(path, out) for path in self.inputs]
        page = render_page(" · ".join(chapter.title for chapter in chapters), chapters)
        content = page.encode("utf-8")
        self.output.write_bytes(content)
        plots = []
        if self.plots is not None:
            named = {
                f"{number}-{Path(chapter.title).stem}-{figure.name}": figure.pictures
                for number, chapter in enumerate(chapters)
                for figure in chapter.figures
            }
            plots = write_plots(named, self.plots)
        for chapter in chapters:
            out.show(f"{chapter.title}: {chapter.subtitle}")
            for tile in chapter.tiles:
                remark = tile.remark.partition(". ")[0].removesuffix(".")
                out.show(f"  {tile.value} {tile.label} ({remark})")
        out.show(f"written: {self.output}, {len(content):,} bytes")
        out.result(
            {
                "command": "report",
                "output": self.output,
                "bytes": len(content),
                "inputs": list(self.inputs),
                "figures": [[figure.name for figure in c.figures] for c in chapters],
                "plots": plots,
            }
        )
        return 0

    def _check(self) -> None:
        """Refuse what would fail once all is read, and options that have no use here."""
        if not self.inputs:
            raise ConfigError(
                "there is nothing to report on; give the folder of a replay, or a file of rollouts."
            )
        if self.output.is_dir():
            raise ConfigError(
                f"output is {self.output}, which is a folder. Give the name of a file, such as "
                f"{self.output / 'report.html'}."
            )
        if self.output.exists() and self.output.suffix != ".html":
            raise ConfigError(
                f"output is {self.output}, which exists and is no page; it would be replaced. Give "
                "another name, such as report.html."
            )
        if self.plots is not None and self.plots.exists() and not self.plots.is_dir():
            raise ConfigError(
                f"plots is {self.plots}, which is a file. Give a folder; it need not exist."
            )
        if all(_is_replay(path) for path in self.inputs):
            usual = options(Report(inputs=self.inputs, output=self.output, plots=self.plots))
            given = {**options(self), "json": False}
            if unused := [name for name in given if given[name] != usual[name]]:
                raise ConfigError(
                    f"{', '.join(map(str, self.inputs))} is a replay, which is shown as it was "
                    f"run: {', '.join(unused)} has no meaning here. Leave it out."
                )

    def _chapter(self, path: Path, out: Output) -> "Chapter":
        if _is_replay(path):
            from forkpoint.apps.report.replay import read_run, replay_chapter

            return replay_chapter(read_run(path))
        from forkpoint.apps.report.rollouts import rollouts_chapter

        shape = self.memory.shape(self.model)
        source = self.reading.open(path, self.limit)
        # Batches of a trace are those of optimizer steps, which share nothing with each other.
        recorded = source.trace is not None and self.limit is None

        def planned() -> Iterator[tuple[RolloutBatch, Plan]]:
            batches = recorded_batches(source) if recorded else [RolloutBatch(source.read())]
            for batch in batches:
                if shape is not None:
                    batch.check_vocabulary(shape.vocab)
                # Of no known loss: what has no trained tokens is left out.
                config = self.planning.config()
                yield batch, make_plan(batch, shape, config, runs=run_lengths(batch))

        chapter = rollouts_chapter(path.name, planned(), recorded=recorded)
        show_source(source, out)
        return chapter


def _is_replay(path: Path) -> bool:
    """Whether it is read as a replay's folder: traces are folders as well."""
    return path.is_dir() and not is_trace(path)
