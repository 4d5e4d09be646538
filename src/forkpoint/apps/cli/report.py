"""`forkpoint report`: one HTML file of replays and of pipelines. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from forkpoint.apps.cli.options import Flag, require_extra
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make one HTML page of replays: whether gradients match, how fast, how far it drifted.
    Of steps on stages of a pipeline it shows a lane for each stage.

    The page needs no network and no other file. Needs forkpoint[report].

    Attributes:
        inputs: Folders that forkpoint replay --output wrote, where a replay may still be running,
            and files that forkpoint plan --lanes wrote.
        output: The HTML file; what was there is replaced.
        json: Print one line of JSON and nothing else.
    """

    inputs: Annotated[tuple[Path, ...], Positional, arg(metavar="INPUT...")]
    output: Annotated[Path, arg(metavar="FILE.html")] = Path("report.html")
    json: Flag = False

    def run(self) -> int:
        require_extra("report", "jinja2", "matplotlib")
        from forkpoint.apps.report.lanes import lanes_chapter
        from forkpoint.apps.report.page import check_page, write_page
        from forkpoint.apps.report.replay import read_run, replay_chapter

        if not self.inputs:
            raise ConfigError("there is nothing to report on; give the folder of a replay.")
        check_page(self.output)
        out = Output(json_only=self.json)
        chapters = [
            lanes_chapter(path) if path.is_file() else replay_chapter(read_run(path))
            for path in self.inputs
        ]
        size = write_page(self.output, chapters)
        for chapter in chapters:
            out.show(f"{chapter.title}: {chapter.subtitle}")
            for tile in chapter.tiles:
                remark = tile.remark.partition(". ")[0].removesuffix(".")
                out.show(f"  {tile.value} {tile.label} ({remark})")
        out.show(f"written: {self.output}, {size:,} bytes")
        out.result(
            {
                "command": "report",
                "output": self.output,
                "bytes": size,
                "inputs": list(self.inputs),
                "figures": [[figure.name for figure in c.figures] for c in chapters],
            }
        )
        return 0
