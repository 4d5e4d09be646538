"""`forkpoint report`: draws lanes of a pipeline. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from forkpoint.apps.cli.options import Flag, require_extra
from forkpoint.apps.cli.output import Output
from forkpoint.errors import ConfigError
from forkpoint.plan.lanes import read_lanes
from forkpoint.units import format_bytes

FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Draw a step on stages of a pipeline: a lane for each stage, predicted and measured.

    Needs forkpoint[report].

    Attributes:
        lanes: A file that forkpoint plan --lanes or stats.lanes.save wrote.
        output: File of the picture, as SVG, PNG or PDF. An existing file is replaced.
        json: Print one line of JSON and nothing else.
    """

    lanes: Annotated[Path, Positional, arg(metavar="LANES.json")]
    output: Annotated[Path, arg(metavar="FILE.svg")] = Path("lanes.svg")
    json: Flag = False

    def run(self) -> int:
        require_extra("report", "matplotlib")
        from forkpoint.apps.report import draw_lanes, idle_parts

        if self.output.suffix not in FORMATS:
            raise ConfigError(
                f"output is {self.output}; it takes a name that ends in {', '.join(FORMATS)}."
            )
        found, out = read_lanes(self.lanes), Output(json_only=self.json)
        draw_lanes(self.output, found)
        idle = {"predicted": idle_parts(found.predicted)}
        if found.measured:
            idle["measured"] = idle_parts(found.measured)
        for how, parts in idle.items():
            stages = ", ".join(f"{part:.0%}" for part in parts)
            mean = sum(parts) / len(parts)
            out.show(f"{how}: {mean:.1%} of the stages' time idle; by stage {stages}")
        if found.peak_bytes:
            peaks = ", ".join(format_bytes(round(peak)) for peak in found.peak_bytes)
            out.show(f"predicted peaks of activations and prefix cache by stage: {peaks}")
        out.show(f"written: {self.output}")
        out.result({"command": "report", "output": self.output, "idle": idle})
        return 0
