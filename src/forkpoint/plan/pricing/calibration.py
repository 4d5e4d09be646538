"""Measurements of a device for a model shape, as a file. Imports no torch.

`forkpoint calibrate` writes these files (step/calibrate/calibrator.py measures each figure);
`forkpoint.plan.pricing.meters` prices plans by them.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.disk import write_file
from forkpoint.rollouts.schema import MOST_WHOLE, SchemaError, parse_json, read, read_small

SCHEMA = 1
FOLDER_VARIABLE = "FORKPOINT_CALIBRATIONS"
MOST_BYTES = 1 << 24
RATES = ("causal", "rectangle")
HOST_TIMES = tuple(
    f"host_{name}_ms"
    for name in ("block", "rest", "launch", "later_launch", "write", "read", "long", "step")
)
"""Fields with two times of the host, of the forward and the backward, or of a step and a layer."""


@dataclass(frozen=True)
class Curve:
    """Values for forward and backward at ascending sizes `at`."""

    at: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = {len(self.at), len(self.forward), len(self.backward)}
        if len(counts) > 1 or 0 in counts:
            raise ConfigError(f"a curve has lists of {sorted(counts)} entries; it takes one length")
        if self.at[0] <= 0 or any(a >= b for a, b in pairwise(self.at)):
            raise ConfigError(f"the sizes of a curve are {short(self.at)}, which do not ascend")

    def time(self, size: float, *, backward: bool) -> float:
        """Milliseconds at a size, interpolated linearly between points.

        Above the points the time is proportional to the size, and below them it is that of the
        first point. A size of 0 takes 0 ms.
        """
        if size <= 0:
            return 0.0
        values = self.backward if backward else self.forward
        if size > self.at[-1]:
            return values[-1] * size / self.at[-1]
        return _interpolated(size, self.at, values)

    def rate(self, size: float, *, backward: bool) -> float:
        """Rate at a size, interpolated over the logarithm of the size. Beyond the points it is that
        of the nearest point."""
        values = self.backward if backward else self.forward
        return _interpolated(math.log2(max(size, 1.0)), self._at_log2, values)

    def scaled(self, factor: float) -> "Curve":
        """The same curve with all values multiplied by a factor."""
        figures = ([factor * x for x in values] for values in (self.forward, self.backward))
        return Curve(self.at, *map(tuple, figures))

    @cached_property
    def _at_log2(self) -> tuple[float, ...]:
        return tuple(map(math.log2, self.at))


def _interpolated(x: float, at: Sequence[float], values: Sequence[float]) -> float:
    """Linear interpolation. Beyond the points the value is that of the nearest point.

    numpy.interp takes as long for one number as for a thousand, and pricing a plan calls this
    thousands of times.
    """
    if x <= at[0]:
        return values[0]
    if x >= at[-1]:
        return values[-1]
    above = bisect_right(at, x)
    low, high = at[above - 1], at[above]
    slope = (values[above] - values[above - 1]) / (high - low)
    return slope * (x - low) + values[above - 1]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Measured rates of one process group, equal on all of its ranks.

    A transfer of n bytes takes the latency plus n divided by the rate.
    """

    ranks: int
    """Number of ranks of the measurement."""
    backend: str
    """Backend of the process group: nccl or gloo."""
    gather_bytes_per_ms: float
    """Bytes that each rank receives in an all-gather, per millisecond."""
    gather_latency_ms: float
    send_bytes_per_ms: float
    """Bytes that each rank sends to another rank while it receives as many, per millisecond."""
    send_latency_ms: float

    def describe(self) -> str:
        """Text such as "link of 2 ranks measured by nccl"."""
        return f"link of {self.ranks} ranks measured by {self.backend}"


@dataclass(frozen=True)
class LinkPrices:
    """Prices of a measured link, in milliseconds, for one model."""

    gathering: float
    """Time to receive the weights of all blocks, if other ranks held all of them."""
    calls: float
    """Sum of the latencies of these gathers."""
    byte: float
    """Time to send a byte to another rank."""
    transfer: float
    """Latency of one transfer."""


WIDE_PAIRS = 1 << 26
"""Number of pairs (query, key) from which other kernels may run a launch without a mask: torch's
cuDNN if FlashAttention-4 is not installed."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one device for one model shape."""

    device: str
    versions: Mapping[str, str]
    compiled: bool
    shape: ModelShape
    """Number of layers of the model. Fewer layers were measured."""
    measured_layers: tuple[int, int]
    block: Curve
    """By tokens of a microbatch: ms of one decoder block without its attention."""
    rest: Curve
    """By tokens of a microbatch: ms of work outside of blocks, without the head."""
    head: Curve
    """By labelled tokens: ms of the head."""
    causal: Curve
    """By length of a segment: visible pairs (query, key) per ms of causal attention in one
    layer."""
    rectangle: Curve
    """By number of keys: pairs per ms of attention to an ancestor in one layer."""
    part: Curve
    """By tokens with ancestors: ms of an additional launch in one layer, with its merge."""
    out_bytes_per_ms: float
    back_bytes_per_ms: float
    kept_bytes: Mapping[str, tuple[float, float]]
    """For each checkpointing policy: bytes per token that one block keeps for the backward, and
    bytes per token that the rest of a microbatch keeps."""
    working_bytes: tuple[float, float]
    """Largest additional memory of a backward: bytes for a microbatch with a head, and bytes per
    token. Zeros if the device does not report memory."""
    seconds: float
    """Duration of the measurement, with `first_seconds`."""
    host_block_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host to issue one block, forward and backward, on devices that work
    asynchronously. On a CPU and in files of earlier versions, other times include it."""
    host_rest_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host to issue the work outside of blocks."""
    host_launch_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host for the first additional launch of a block's attention; zeros if not
    measured."""
    host_later_launch_ms: tuple[float, float] | None = None
    """Time of the host for each later one; None: as for the first, in files of earlier versions."""
    walk_ms: tuple[float, float] = (0.0, 0.0)
    """Smallest time of an additional launch in one layer: forward per key of its longest sequence,
    and backward per query. A block of queries reads all keys one after another."""
    host_write_ms: tuple[float, float] = (0.0, 0.0)
    """Additional time of the host for each block of a microbatch that others read."""
    host_read_ms: tuple[float, float] = (0.0, 0.0)
    """Additional time of the host for each block of a microbatch that reads another, without the
    time of its additional launch."""
    host_long_ms: tuple[float, float] = (0.0, 0.0)
    """Additional time of the host in each block for each causal sequence of at least
    `tree.LONG_TOKENS`; zeros where these run with the others."""
    host_step_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host to check the model, prepare a step and end it, while the device is idle: per
    step, and per layer."""
    host_token_ms: float = 0.0
    """Time of the host to prepare a step, per token of the rollouts, while the device is idle."""
    wide: tuple[float, float] = (0.0, 0.0)
    """Pairs per ms of attention to an ancestor in launches of at least WIDE_PAIRS, forward and
    backward; zeros if not measured."""
    first_seconds: float = 0.0
    """Part of `seconds` for first runs. These compile blocks and kernels, which the next step needs
    too."""
    link: Link | None = None
    """Link between ranks; None if one process measured alone."""

    def __post_init__(self) -> None:
        # Values that cannot be measured are refused, so that no plan depends on them.
        positive = {
            "out_bytes_per_ms": self.out_bytes_per_ms,
            "back_bytes_per_ms": self.back_bytes_per_ms,
            **{
                name: min(*getattr(self, name).forward, *getattr(self, name).backward)
                for name in RATES
            },
            **{
                f"link.{name}": rate
                for name, rate in (vars(self.link) if self.link else {}).items()
                if name.endswith("bytes_per_ms")
            },
        }
        for name, least in positive.items():
            if least <= 0:
                raise ConfigError(f"{name} is {least:g}; it takes a number above 0")
        if self.kept_bytes.keys() != {"none", "selective", "full"}:
            raise ConfigError(
                f"kept_bytes has {short(sorted(self.kept_bytes))}; it takes none, selective, full"
            )
        for name, pairs in (
            ("working_bytes", (self.working_bytes,)),
            ("kept_bytes", self.kept_bytes.values()),
        ):
            if (most := max(map(max, pairs))) > MOST_WHOLE:
                raise ConfigError(f"{name} is {most:g}; it takes at most {MOST_WHOLE}")

    def describe(self) -> str:
        compiled = "compiled" if self.compiled else "not compiled"
        link = "" if self.link is None else f", {self.link.describe()}"
        torch = self.versions.get("torch")
        return f"measured on {self.device}, blocks {compiled}, torch {torch}{link}"

    def with_slower_host(self, factor: float) -> "Calibration":
        """This with times of the host that are `factor` times as long."""
        slower = {name: getattr(self, name) for name in HOST_TIMES if getattr(self, name)}
        return replace(
            self,
            host_token_ms=factor * self.host_token_ms,
            **{name: (factor * forward, factor * back) for name, (forward, back) in slower.items()},
        )

    def check_shape(self, shape: ModelShape) -> None:
        """Raise ConfigError if this was measured for a model with other sizes than this, except the
        number of layers and their windows."""
        wanted, found = _comparable(shape), _comparable(self.shape)
        if wanted != found:
            wrong = ", ".join(
                f"{name} {found[name]} (the model has {wanted[name]})"
                for name in found
                if found[name] != wanted[name]
            )
            raise ConfigError(
                f"this calibration was measured for another model: {wrong}. Run forkpoint "
                "calibrate for this model."
            )

    def check_device(self, device: str, *, compiled: bool) -> None:
        """Raise ConfigError for another device than this was measured on, or for blocks compiled
        differently."""
        if (device, compiled) != (self.device, self.compiled):
            here = f"{device}, blocks {'compiled' if compiled else 'not compiled'}"
            raise ConfigError(
                f"this calibration was {self.describe()}, and here is {here}: its times do not "
                "apply. Run forkpoint calibrate here, or give no calibration."
            )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        if self.link is None:  # earlier versions read the file too
            del values["link"]
        # Times do not depend on chunks, and files hold no negative numbers.
        values["shape"]["windows"] = list(map(abs, self.shape.windows))
        text = json.dumps({"schema": SCHEMA, **values}, indent=1)
        # Policies find the file automatically, and refuse a part of one.
        write_file(path, f"{text}\n".encode())

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read a calibration that `save` wrote.

        Raises:
            ConfigError: the file does not exist, is damaged, or has another kind or version.
        """
        try:
            values = parse_json(read_small(path, MOST_BYTES))
        except OSError as error:
            raise ConfigError(
                f"the calibration {path} cannot be read ({error.strerror}). Give a file that "
                "forkpoint calibrate wrote, or None."
            ) from None
        except SchemaError as error:
            raise ConfigError(
                f"{path} is {error}. Give a file that forkpoint calibrate wrote."
            ) from None
        schema = values.get("schema") if isinstance(values, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise ConfigError(
                f"{path} has schema {short(schema)} and this forkpoint reads calibrations of "
                f"schema {SCHEMA}; run forkpoint calibrate again."
            )
        try:
            del values["schema"]
            return read(cls, values, "")
        except (ConfigError, SchemaError) as error:
            raise ConfigError(
                f"the calibration {path} is damaged: {str(error).rstrip('.')}. Run forkpoint "
                "calibrate again."
            ) from None


def _comparable(shape: ModelShape) -> dict[str, Any]:
    exchanged = ("recurrent_key_heads", "recurrent_key_elements", "recurrent_elements")
    differ = ("layers", "windows", "checkpointed", "compiled", "context", *exchanged)
    return {k: v for k, v in asdict(shape).items() if k not in differ}


def calibrations_folder() -> Path:
    """The folder of the environment variable FORKPOINT_CALIBRATIONS, or `forkpoint/calibrations` in
    the user's cache folder. For a user without a home it is in the folder of temporary files."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        cache = Path(tempfile.gettempdir())
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else cache / "forkpoint" / "calibrations"


def calibration_path(
    device: str, shape: ModelShape, *, compiled: bool, measured_for: object = None
) -> Path:
    """Path at which policies look for the calibration of a device and model shape.

    measured_for: versions and kernels of a policy's automatic measurement; None for the file of
    `forkpoint calibrate`.
    """
    which = [_comparable(shape), compiled]
    which += [] if measured_for is None else [measured_for]
    key = json.dumps(which, sort_keys=True)
    digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"
    return calibrations_folder() / f"{name}-{digest}{'' if measured_for is None else '.auto'}.json"


def find_calibration(device: str, shape: ModelShape, *, compiled: bool) -> Calibration | None:
    """The calibration of this device and model shape; None if there is no file at
    `calibration_path`."""
    path = calibration_path(device, shape, compiled=compiled)
    return Calibration.load(path) if is_stored(path) else None


def is_stored(path: Path) -> bool:
    """Whether a file is at a path. False if its folder cannot be searched."""
    try:
        return path.is_file()
    except OSError:
        return False
