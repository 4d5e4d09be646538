"""`forkpoint calibrate`: measures the prices of plans on this device, for one model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import DisallowNone, arg

from forkpoint.apps.cli import torchrun
from forkpoint.apps.cli.options import Flag, Memory, ModelDtype, ModelPath
from forkpoint.apps.cli.output import Output, check_output
from forkpoint.errors import ConfigError
from forkpoint.plan.pricing.calibration import calibration_path, calibrations_folder

if TYPE_CHECKING:
    from forkpoint.plan.pricing.calibration import Calibration

File = DisallowNone[
    Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: where policies look)")]
]


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this device for a model's shape, to predict the time of plans in milliseconds.

    It takes under two minutes, with a few layers of random weights. Weights of the model are not
    read. Under torchrun (torchrun --nproc-per-node 8 -m forkpoint calibrate ...) the first rank
    measures its device, all ranks measure the link between them, and each host gets the same file.

    Attributes:
        model: A model's folder or its config.json.
        output: File to write. Policies find the default file. For another file set
            Config(calibration=...) or --calibration.
        dtype: Dtype of the model's parameters. auto takes that of the model's configuration, or
            float32 if it names none.
        device: Device to measure. auto takes a CUDA device if there is one.
        blocks: Whether decoder blocks are compiled, as they will be in training. auto compiles on
            CUDA.
        max_seconds: Time limit in seconds, without compilation. Microbatches that would end later
            are not measured.
        json: Print one line of JSON and nothing else.
    """

    model: ModelPath
    output: File = None
    dtype: ModelDtype = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    blocks: Literal["auto", "compiled", "eager"] = "auto"
    max_seconds: Annotated[float, arg(metavar="S")] = 110.0
    json: Flag = False

    def run(self) -> int:
        out = Output(json_only=self.json, silent=torchrun.rank() > 0)
        check_output("output", self.output or calibrations_folder() / "calibration.json")
        if not self.max_seconds > 0:
            raise ConfigError(f"max_seconds is {self.max_seconds}; it takes a number above 0.")
        with torchrun.process_group(self.device), out.waiting("measuring"):
            found, dtype = torchrun.from_the_first(self._measured)
            if torchrun.size() > 1:
                found = replace(found, link=torchrun.measured_link(self.device))
            path = self.output
            path = path or calibration_path(found.device, found.shape, compiled=found.compiled)
            if torchrun.local_rank() == 0:
                found.save(path)
        out.show(f"{found.describe()}; parameters in {dtype}", f"written: {path}")
        if found.link is not None:
            rates = (found.link.gather_bytes_per_ms, found.link.send_bytes_per_ms)
            gathering, sending = (f"{rate / 1e6:.3g} GB/s" for rate in rates)
            out.show(f"link between ranks: gathering {gathering}, sending {sending}")
        out.result(
            {
                "command": "calibrate",
                "output": path,
                "device": found.device,
                "dtype": dtype,
                "compiled": found.compiled,
                "seconds": found.seconds,
            }
        )
        return 0

    def _measured(self) -> "tuple[Calibration, str]":
        """The calibration, and the dtype that it was measured in."""
        from forkpoint.apps.cli.models import out_of_memory_explained, shallow_models
        from forkpoint.step.calibrate.calibrator import THOROUGH, calibrate

        dtype = Memory(dtype=self.dtype).dtype_of(self.model)
        make, shape = shallow_models(self.model, dtype=dtype, device=self.device)
        compiled = {"auto": None, "compiled": True, "eager": False}[self.blocks]
        efforts = {k: replace(e, max_seconds=self.max_seconds) for k, e in THOROUGH.items()}
        with out_of_memory_explained():
            return calibrate(make, shape, compile_blocks=compiled, efforts=efforts), dtype
