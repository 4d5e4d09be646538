"""Options of several commands. Imports no torch.

The texts under Attributes are the help of the command line.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import DisallowNone, Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from forkpoint.apps.cli.output import Output
from forkpoint.config import AUTO, Config
from forkpoint.errors import ConfigError, TraceError
from forkpoint.hosts.transformers.model_files import (
    dtype_of_model,
    load_tokenizer,
    parameters_of_model,
    shape_of_model,
)
from forkpoint.plan import ModelShape
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.rollouts.batch import Rollout, RolloutBatch, short
from forkpoint.rollouts.traces import RolloutFile, open_rollouts
from forkpoint.units import size_in_bytes

MAX_SEED = 2**63 - 1
"""Largest seed that every random generator accepts."""
PLAN_ROLLOUT_BYTES = 2560
PLAN_TOKEN_BYTES = 96
"""Bytes of a batch and its plan, for each rollout and for each token, without the arrays of the
rollouts. 1.3 KB and 70 to 90 bytes were measured with `forkpoint plan`."""
BATCH_TOKENS = 4_000_000
"""Number of tokens after which a batch of a long file ends, at the end of the present group or
after the same number again."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DtypeName = Literal["float32", "bfloat16", "float64"]
ModelDtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
DeviceName = Literal["auto", "cpu", "cuda"]
# fmt: off
FormatName = Literal["auto", "forkpoint", "verl", "verl-text", "trl", "openrlhf", "nemo-rl",
                     "prime-rl", "slime", "skyrl", "chat"]
# fmt: on


def whole_number(least: int, most: int | None = None) -> PrimitiveConstructorSpec[int]:
    """Parser of whole numbers within bounds, for tyro."""
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(words: list[str]) -> int:
        value = int(words[0]) if words[0].lstrip("-").isdecimal() else None
        if value is None or value < least or (most is not None and value > most):
            raise ValueError(f"{words[0]!r} is not a whole number {allowed}.")
        return value

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def require_extra(extra: str, *packages: str) -> None:
    """Raises ConfigError if packages of an extra are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this command needs {' and '.join(missing)}, which is not installed. Run pip install "
            f"'forkpoint[{extra}]'."
        )


def check_kernels(config: Config) -> None:
    """Raises ConfigError for names of kernels that do not exist, also if no layer uses them."""
    if config.attention_kernel == config.recurrence_kernel == AUTO:
        return  # torch need not be imported
    from forkpoint.ops.attention import KERNELS
    from forkpoint.ops.delta_rule import DELTA_KERNELS

    for option, kernels in (("attention_kernel", KERNELS), ("recurrence_kernel", DELTA_KERNELS)):
        name, known = getattr(config, option), [AUTO, *(kernel.name for kernel in kernels)]
        if name not in known:
            raise ConfigError(f"{option} is {short(name)}; allowed are {', '.join(known)}.")


WholeNumber: PrimitiveConstructorSpec[int] = whole_number(0)
File = Positional[Annotated[str, arg(metavar="FILE|URL")]]
ModelPath = Annotated[Path, arg(metavar="DIR|CONFIG.json")]
Flag = Annotated[bool, arg(help_behavior_hint="")]
Count = Annotated[int, WholeNumber]
Positive = Annotated[int, whole_number(1)]
Seed = Annotated[int, whole_number(0, MAX_SEED)]
Limit = Annotated[int | None, WholeNumber, arg(help_behavior_hint="(default: all)")]
Size = DisallowNone[
    Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="(default: no limit)")]
]
MemoryText = DisallowNone[
    Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="(default: by the size of FILE)")]
]
Tokenizer = DisallowNone[
    Annotated[str | None, arg(metavar="FILE|DIR|NAME", help_behavior_hint="(default: none)")]
]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Options that determine the memory of the model.

    Attributes:
        dtype: Dtype of the parameters and activations. auto takes the dtype of the model's
            configuration, or float32 if it names none.
        gradient_checkpointing: Enable the model's own checkpointing (gradient_checkpointing_enable
            of transformers), as in your training. The planner then cannot choose checkpointing.
            Otherwise use --checkpointing.
    """

    dtype: ModelDtype = "auto"
    gradient_checkpointing: Flag = False

    def shape(self, model: Path | None) -> ModelShape | None:
        """Sizes for counts of FLOPs and bytes; None without a model.

        `model` is a folder, a config.json, or else a name that `forkpoint.plan.known_name` knows.
        Raises ConfigError for anything else, and UnsupportedError for an unknown family.
        """
        if model is None:
            return None
        dtype = self.dtype_of(model)
        return shape_of_model(
            model, dtype_bytes=DTYPE_BYTES[dtype], checkpointed=self.gradient_checkpointing
        )

    def dtype_of(self, model: Path) -> str:
        """The dtype, a key of DTYPE_BYTES. Raises ConfigError if the configuration names another
        dtype."""
        # from_config builds such a model in float32. from_pretrained takes the dtype of the
        # weights, but commands do not read these.
        found = (dtype_of_model(model) or "float32") if self.dtype == "auto" else self.dtype
        if found not in DTYPE_BYTES:
            raise ConfigError(
                f"the configuration of {model} names the dtype {found!r}; allowed are "
                f"{', '.join(DTYPE_BYTES)}. Set the dtype of training with --dtype."
            )
        return found

    def dtype_text(self, model: Path) -> str:
        """The dtype and its source, such as "bfloat16, of the model's configuration"."""
        name = self.dtype_of(model)
        if self.dtype != "auto":
            return f"{name} (--dtype)"
        if dtype_of_model(model) is None:
            return f"{name}: the model's configuration names none; change it with --dtype bfloat16"
        return f"{name}, of the model's configuration"


@dataclass(frozen=True, kw_only=True)
class Runtime(Memory):
    """Options of the model and its device.

    Attributes:
        dtype: Dtype of the parameters.
        device: Device of the model. auto takes a CUDA device if there is one.
        seed: Seed of the random weights of a CONFIG.json. One seed gives different weights on a GPU
            and on a CPU.
    """

    dtype: DtypeName = "float32"
    device: DeviceName = "auto"
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Device:
    """Device to plan for. This machine need not have it.

    Attributes:
        device_memory: Memory of the device, such as 80GB. Weights, gradients and optimizer states
            (--optimizer-bytes-per-parameter) are subtracted, and the rest is the memory budget. The
            output says whether the step fits.
        trained_share: Part of the parameters that is trained, from 0 to 1, such as 0.01 with
            adapters.
        shard: Sharding of the model over --ranks. fully divides weights, gradients and optimizer
            states, as fully_shard does. none keeps all of them on each rank, as DDP does.
    """

    device_memory: Size = None
    trained_share: float = 1.0
    shard: Literal["fully", "none"] = "fully"

    def memory(
        self,
        model: Path | None,
        shape: ModelShape | None,
        config: Config,
        ranks: int | None,
    ) -> DeviceMemory | None:
        """Memory of the device, with that of weights; None without --device-memory.

        Raises ConfigError for --device-memory without a model, and for numbers that are not
        allowed.
        """
        total = size_in_bytes(self.device_memory, "device_memory")
        if not 0 <= self.trained_share <= 1:
            raise ConfigError(
                f"trained_share is {self.trained_share}; it takes a number from 0 to 1."
            )
        if total is None:
            return None
        if model is None or shape is None:
            raise ConfigError(
                f"device_memory is {self.device_memory}, but without a model bytes cannot be "
                "predicted. Add a model, such as --model Qwen/Qwen3-8B."
            )
        parameters, embeddings = parameters_of_model(model, shape)
        sums = 4 if config.grad_accumulation_dtype == "float32" else 0
        copies = shape.dtype_bytes if config.restore_grads else 0
        return DeviceMemory(
            total_bytes=total,
            parameters=parameters,
            dtype_bytes=shape.dtype_bytes,
            optimizer_bytes_per_parameter=config.optimizer_bytes_per_parameter,
            step_bytes_per_parameter=sums + copies,
            trained_share=self.trained_share,
            ranks=ranks or 1,
            sharded=self.shard == "fully",
            embeddings=embeddings,
            layers=shape.layers,
        )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for FILE: JSON lines (plain, gzip, zstd), parquet, safetensors, torch file, or trace.

    Attributes:
        format: Trainer that wrote the file, which decides the names of fields. auto detects it.
        on_error: Action for records that cannot be read. stop ends with an error. skip leaves such
            records out, and shows their number and the reasons.
        tokenizer: Tokenizer for files with text or messages: a tokenizer.json, a folder, or a name
            on the Hub. It is refused for files with token ids.
        memory_limit: Largest memory for reading FILE, for the rollouts and for their plan, such as
            8GB. By default half of the memory of the machine or its container, and for one line,
            row group or batch 640 MiB, or 16 times the size of FILE on disk if that is more.
    """

    format: FormatName = "auto"
    on_error: Literal["stop", "skip"] = "stop"
    tokenizer: Tokenizer = None
    memory_limit: MemoryText = None

    def open(self, file: str, limit: int | None, *, pixels: bool = True) -> RolloutFile:
        tokenizer = self.tokenizer
        if tokenizer is not None and not Path(tokenizer).is_file():
            tokenizer = load_tokenizer(tokenizer)
        source = open_rollouts(
            file,
            format=None if self.format == "auto" else self.format,
            on_error="raise" if self.on_error == "stop" else "skip",
            limit=limit,
            tokenizer=tokenizer,
            memory_limit=self.memory_limit,
            pixels=pixels,
        )
        source.memory.rollout_bytes = PLAN_ROLLOUT_BYTES
        source.memory.token_bytes = PLAN_TOKEN_BYTES
        return source


def load_batch(file: str, limit: int | None, reading: Reading, out: Output) -> RolloutBatch:
    """Read the rollouts of a file as one batch. Shows skipped records and notes."""
    source = reading.open(file, limit)
    batch = RolloutBatch(source.read())
    show_source(source, out)
    return batch


def batches_of(source: RolloutFile, count: int | None = None) -> Iterator[RolloutBatch]:
    """Yield the rollouts of a file as batches, in the memory of one batch.

    A batch has `count` rollouts. Without `count` it has BATCH_TOKENS, and the rest of its group if
    that is at most BATCH_TOKENS more. It counts towards the limit on memory until the next batch is
    requested.
    """
    held: list[Rollout] = []
    tokens = cost = 0
    for rollout in source:
        full = len(held) == count
        if count is None and tokens >= BATCH_TOKENS:
            full = tokens >= 2 * BATCH_TOKENS or _group(rollout) != _group(held[-1])
        if full:
            yield RolloutBatch(held)
            source.memory.release(cost)
            held, tokens, cost = [], 0, 0
        cost += source.memory.keep(rollout)
        held.append(rollout)
        tokens += len(rollout)
    if held:
        yield RolloutBatch(held)


def _group(rollout: Rollout) -> str | bytes:
    """Key of the group of a rollout, with the rules of a batch."""
    if rollout.group_id is not None:
        return rollout.group_id
    mask = rollout.loss_mask
    return rollout.token_ids[: mask.argmax() if mask.any() else len(mask)].tobytes()


def recorded_batches(source: RolloutFile) -> Iterator[RolloutBatch]:
    """Yield the batches of a trace. Raises TraceError if there are none yet."""
    assert source.trace is not None
    if not len(source.trace):
        raise TraceError(
            f"{source.path} has no complete batch yet. Wait until its recorder has added one, or "
            "record again."
        )
    return (step.batch for step in source.trace)


def show_source(source: RolloutFile, out: Output) -> None:
    """Show how a file was read, and add this to the JSON line."""
    skipped = source.skipped
    if source.format != "forkpoint" or skipped.count:
        out.show(f"{source.path.name}: {source.container}, format {source.format}")
    if skipped.count:
        out.show(f"{skipped}; first: {skipped.messages[0]}")
    for note in source.notes:
        out.show(f"Note: {note}")
    out.facts |= {
        "format": source.format,
        "skipped": {"records": skipped.count, "fields": dict(skipped.fields)},
    }
