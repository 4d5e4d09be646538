"""`forkpoint bench step-grid` and its like: whole training steps, as rows of JSON."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from tyro.conf import DisallowNone, Positional, arg

from forkpoint.cli.options import Count, Flag, MemoryText
from forkpoint.cli.output import Output
from forkpoint.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from benchmarks.rows import ResultRow
    from benchmarks.steps.stepper import Deadline, Stepper

GIB = 1 << 30
Split = Literal["2048/10240", "6144/6144", "8192/4096", "10240/2048"]
Layers = DisallowNone[
    Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all of the shape)")]
]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Options of all benches of whole steps.

    Attributes:
        output: The file of JSON lines that rows are appended to, as they come.
        blocks: Whether decoder blocks are compiled, dense and shared alike.
        layers: Give the model fewer layers than its shape has.
        calibrate: Measure the device for this shape first, and let plans be priced by that; the
            figures are written beside the output.
        max_seconds: Begin nothing new after so many seconds; what is left out is named.
        tiny: A tiny model and lengths divided by 64, to try the command out, on a CPU as well.
        json: Print only the JSON line.
    """

    output: Path = Path("steps.jsonl")
    blocks: Literal["compiled", "eager"] = "compiled"
    layers: Layers = None
    calibrate: Flag = False
    max_seconds: Annotated[float, arg(metavar="S")] = 540.0
    tiny: Flag = False
    json: Flag = False

    def run(self) -> int:
        import time

        from benchmarks.rows import write_rows
        from benchmarks.steps.stepper import Deadline

        if self.layers is not None and self.layers < 1:
            raise ConfigError(f"layers is {self.layers}; it takes a whole number of at least 1.")
        out = Output(json_only=self.json)
        begin, deadline = time.perf_counter(), Deadline(self.max_seconds)
        rows: list[ResultRow] = []
        table = Table(title=self.name(), title_justify="left")
        for column in ("case", "figure", "value", "unit", "bound"):
            table.add_column(column, justify="right" if column == "value" else "left")
        for row in self.measure(deadline):
            write_rows([row], self.output)
            rows.append(row)
            bound = f"{row.bound:.4g}" if row.bound is not None else ""
            table.add_row(row.case, row.metric, f"{row.value:,.4g}", row.unit, bound)
        out.show(table)
        for what in deadline.left_out:
            out.show(f"left out, the time was up: {what}")
        out.result(
            {
                "command": "bench",
                "what": self.name(),
                "rows": len(rows),
                "left_out": deadline.left_out,
                "output": self.output,
                "seconds": time.perf_counter() - begin,
            }
        )
        return 0

    def name(self) -> str:
        return next(name for name, kind in BENCHES.items() if kind is type(self))

    def measure(self, deadline: "Deadline") -> Iterable["ResultRow"]:
        raise NotImplementedError

    def stepper(self, shape: str) -> "Stepper":
        """A model of that shape on the CUDA device; the tiny one on a CPU where there is none."""
        import torch

        from benchmarks.shapes import make_model
        from benchmarks.steps.stepper import Stepper

        cuda = torch.cuda.is_available()
        if not cuda and not self.tiny:
            raise ConfigError(
                f"bench {self.name()} measures steps of {shape} on a GPU, and torch sees no CUDA "
                "device here; run it on a machine with one, or try it out with --tiny."
            )
        device = torch.device("cuda" if cuda else "cpu")
        dtype = torch.bfloat16 if cuda else torch.float32
        name = "tiny" if self.tiny else shape
        compiled = self.blocks == "compiled"
        measured = None
        if self.calibrate:
            from forkpoint.calibrate.calibrator import Calibrator
            from forkpoint.hosts.transformers import TransformersHost

            def make(layers: int) -> "PreTrainedModel":
                return make_model(name, device, dtype=dtype, layers=layers)

            shape_of = TransformersHost(make(1)).shape
            measured = self.output.with_suffix(".calibration.json")
            Calibrator(make, compile_blocks=compiled).run(shape_of).save(measured)
        model = make_model(name, device, dtype=dtype, layers=self.layers)
        return Stepper(model, compile_blocks=compiled, calibration=measured)


@dataclass(frozen=True, kw_only=True)
class StepGrid(Steps):
    """Time one group's step of Llama3-8B's shape: four splits of 12,288 tokens, 4 to 32 rollouts.

    The planner chooses how each cell runs. Dense is compiled as well, with its best row size. Then
    come cells where sharing gains least.

    Attributes:
        counts: How many rollouts a prompt has; several may be named.
        splits: Prompt and response, of which several may be named; small are the cells where
            sharing gains least. By default all.
    """

    counts: tuple[Literal[2, 4, 8, 16, 32], ...] = (4, 8, 16, 32)
    splits: tuple[Split | Literal["small"], ...] = ()

    def measure(self, deadline: "Deadline") -> Iterable["ResultRow"]:
        from benchmarks.steps.step_grid import step_grid

        return step_grid(
            self.stepper("llama3-8b"),
            deadline,
            tiny=self.tiny,
            counts=self.counts,
            splits=self.splits,
        )


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate(Steps):
    """Time the update and the log-prob pass of a group in Qwen3's shapes.

    Attributes:
        shape: Whose sizes the model has. qwen3-8b gets 32 responses to 8,192 tokens, qwen3-4b four
            in contexts of 4,096 and 8,192.
    """

    shape: Literal["qwen3-8b", "qwen3-4b"] = "qwen3-8b"

    def measure(self, deadline: "Deadline") -> Iterable["ResultRow"]:
        from benchmarks.steps.policy_update import policy_update

        return policy_update(self.stepper(self.shape), deadline, name=self.shape, tiny=self.tiny)


@dataclass(frozen=True, kw_only=True)
class MemoryBench(Steps):
    """Measure peaks and times of keep, offload and recompute beside dense, for the grid's splits.

    Attributes:
        count: How many rollouts the prompt has.
        leaf_tokens: The most tokens in a row of responses, which holds at least one.
        splits: Prompt and response, of which several may be named. By default all.
    """

    count: Count = 16
    leaf_tokens: Count = 1
    splits: tuple[Split, ...] = ()

    def measure(self, deadline: "Deadline") -> Iterable["ResultRow"]:
        from benchmarks.steps.memory import memory

        return memory(
            self.stepper("llama3-8b"),
            deadline,
            tiny=self.tiny,
            count=self.count,
            leaf_tokens=self.leaf_tokens,
            splits=self.splits,
        )


@dataclass(frozen=True, kw_only=True)
class CapacityBench(Steps):
    """Find the largest total length that trains under one cap on memory, dense and shared.

    Attributes:
        device_gib: The most device memory for either side, in GiB.
        host_gib: The most pinned memory of the host, in GiB.
        most_tokens: Look no further than this total length.
        long_prompt: Then train one prompt of so many tokens by chains, without the cap; 0 leaves
            it out.
        only: Parts of the names of cases to measure, such as "longest prompt"; by default every
            case.
    """

    device_gib: Annotated[float, arg(metavar="G")] = 80.0
    host_gib: Annotated[float, arg(metavar="G")] = 100.0
    most_tokens: Count = 131_072
    long_prompt: Count = 262_144
    only: tuple[str, ...] = ()

    def measure(self, deadline: "Deadline") -> Iterable["ResultRow"]:
        from benchmarks.steps.capacity import capacity

        return capacity(
            self.stepper("llama3-8b"),
            deadline,
            cap_bytes=int(self.device_gib * GIB),
            host_bytes=int(self.host_gib * GIB),
            most_tokens=self.most_tokens,
            long_prompt=self.long_prompt,
            only=self.only,
            tiny=self.tiny,
        )


@dataclass(frozen=True, kw_only=True)
class TreeBench(Steps):
    """Time real rollouts that fork, against the counted bound of their trees.

    Attributes:
        file: Rollouts: one JSON object a line, plain, gzip or zstd.
        most_tokens: Leave out groups of more tokens than this.
        shape: Whose sizes the model has. qwen3.5-4b is a hybrid; both sides checkpoint its blocks.
        memory_limit: The most memory for the rollouts and for what is read to make them, such as
            8GB.
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    most_tokens: Count = 131_072
    shape: Literal["qwen3-4b", "qwen3.5-4b"] = "qwen3-4b"
    memory_limit: MemoryText = None

    def measure(self, deadline: "Deadline") -> Iterable["ResultRow"]:
        from benchmarks.shapes import checkpoint
        from benchmarks.steps.tree import tree

        stepper = self.stepper(self.shape)
        if self.shape == "qwen3.5-4b":
            checkpoint(stepper.model)
        return tree(
            stepper,
            deadline,
            label=self.shape,
            file=self.file,
            most_tokens=self.most_tokens,
            tiny=self.tiny,
            memory_limit=self.memory_limit,
        )


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Draw figures from the rows that benches wrote.

    Attributes:
        files: Files of rows.
        output: The folder for the figures, as SVG.
        json: Print only the JSON line.
    """

    files: Positional[Annotated[tuple[Path, ...], arg(metavar="FILE...")]]
    output: Path = Path("figures")
    json: Flag = False

    def run(self) -> int:
        from benchmarks.plots import draw_all, read_rows

        drawn = draw_all(read_rows(self.files), self.output)
        out = Output(json_only=self.json)
        out.show(*(f"drawn: {path}" for path in drawn))
        out.result({"command": "bench", "what": "plot", "figures": drawn})
        return 0


BENCHES: dict[str, Any] = {
    "step-grid": StepGrid,
    "policy-update": PolicyUpdate,
    "memory": MemoryBench,
    "capacity": CapacityBench,
    "tree": TreeBench,
    "plot": Plot,
}
