"""Options of benchmarks of whole training steps, and the model that they run."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from transformers import PreTrainedModel
from tyro.conf import DisallowNone, arg

from benchmarks.runner import Benchmark, Seconds
from benchmarks.shapes import make_model
from benchmarks.steps.stepper import Stepper
from forkpoint.apps.calibrate.calibrator import Calibrator
from forkpoint.apps.cli.options import Flag
from forkpoint.errors import ConfigError
from forkpoint.hosts.libraries import host_of

Split = Literal["2048/10240", "6144/6144", "8192/4096", "10240/2048"]
Layers = DisallowNone[
    Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all of the shape)")]
]


def check_at_least_one(name: str, value: int | None) -> None:
    """Raises ConfigError for a count below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it takes a whole number of at least 1.")


@dataclass(frozen=True, kw_only=True)
class Steps(Benchmark):
    """Options of benchmarks of whole steps.

    Attributes:
        max_seconds: Begin nothing new after so many seconds; what is left out is named.
        blocks: Whether decoder blocks are compiled, dense and shared alike.
        layers: Give the model fewer layers than its shape has.
        calibrate: Measure the device for this shape first, and let plans be priced by that; the
            figures are written beside the output.
        tiny: A tiny model and lengths divided by 64, to try the command out, on a CPU as well.
    """

    max_seconds: Seconds = 540.0
    blocks: Literal["compiled", "eager"] = "compiled"
    layers: Layers = None
    calibrate: Flag = False
    tiny: Flag = False

    def check(self) -> None:
        check_at_least_one("layers", self.layers)

    def stepper(self, shape: str) -> Stepper:
        """A model of that shape on the CUDA device; the tiny one on a CPU where there is none."""
        cuda = torch.cuda.is_available()
        if not cuda and not self.tiny:
            raise ConfigError(
                f"{self.NAME} measures steps of {shape} on a GPU, and torch sees no CUDA device "
                "here; run it on a machine with one, or try it out with --tiny."
            )
        device = torch.device("cuda" if cuda else "cpu")
        dtype = torch.bfloat16 if cuda else torch.float32
        name = "tiny" if self.tiny else shape
        compiled = self.blocks == "compiled"
        measured = None
        if self.calibrate:

            def make(layers: int) -> PreTrainedModel:
                return make_model(name, device, dtype=dtype, layers=layers)

            shape_of = host_of(make(1)).shape
            measured = self.path.with_suffix(".calibration.json")
            Calibrator(make, compile_blocks=compiled).run(shape_of).save(measured)
        model = make_model(name, device, dtype=dtype, layers=self.layers)
        return Stepper(model, compile_blocks=compiled, calibration=measured)
