"""Options of benchmarks of whole training steps, and the model that they run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from tyro.conf import DisallowNone, arg

from benchmarks.runner import Benchmark, Seconds
from benchmarks.shapes import make_model
from benchmarks.steps.stepper import Stepper
from forkpoint.apps.cli.options import Flag
from forkpoint.errors import ConfigError
from forkpoint.hosts.libraries import host_of
from forkpoint.step.calibrate.calibrator import calibrate

Layers = DisallowNone[
    Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all of the shape)")]
]


def check_at_least_one(name: str, value: int | None) -> None:
    """Raises ConfigError for a count below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} is {value}; it takes a whole number of at least 1.")


def check_groups(groups: int, size: int, rows: int, what: str) -> None:
    """Raises ConfigError for groups that GRPO cannot compare, or that rows do not divide.

    what: the name of the option that has `size`.
    """
    if size < 2:
        raise ConfigError(f"{what} is {size}; GRPO compares at least 2 of a prompt.")
    if groups * size % rows:
        raise ConfigError(
            f"rows is {rows}, and a step has {groups} * {size} {what}; give a divisor of that."
        )


def device_for(bench: str, *, tiny: bool) -> torch.device:
    """The CUDA device; with a tiny model the CPU where there is none, else raises ConfigError."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if tiny:
        return torch.device("cpu")
    raise ConfigError(
        f"{bench} measures steps on a GPU, and torch sees no CUDA device here; run it on a machine "
        "with one, or try it out with --tiny."
    )


@dataclass(frozen=True, kw_only=True)
class Steps(Benchmark):
    """Options of benchmarks of whole steps.

    Attributes:
        max_seconds: Start no measurement after so many seconds, and list the missing ones.
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

    def stepper(
        self, shape: str, make_model: Callable[..., Any] = make_model, **options: object
    ) -> Stepper:
        """A model of that shape on the CUDA device; the tiny one on a CPU where there is none.

        make_model: of the arguments of `benchmarks.shapes.make_model`.
        options: changes of the Config, which has no memory limit by default.
        """
        device = device_for(self.NAME, tiny=self.tiny)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        compiled = self.blocks == "compiled"
        measured = None
        make = partial(make_model, shape, device, dtype=dtype, tiny=self.tiny)
        if self.calibrate:
            measured = self.path.with_suffix(".calibration.json")
            shape_of_one = host_of(make(layers=1)).shape
            found = calibrate(lambda n: make(layers=n), shape_of_one, compile_blocks=compiled)
            found.save(measured)
        model = make(layers=self.layers)
        return Stepper(model, compile_blocks=compiled, **{"calibration": measured, **options})
