"""Measurements of a device for a model shape, as a file. Imports no torch.

`forkpoint calibrate` writes these files (step/calibrate/calibrator.py measures each figure);
`forkpoint.plan.pricing.meters` prices plans by them.
"""

import hashlib
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.schema import SchemaError, parse_json, read

SCHEMA = 1
FOLDER_VARIABLE = "FORKPOINT_CALIBRATIONS"
MOST_BYTES = 1 << 24
RATES = ("causal", "rectangle")


@dataclass(frozen=True)
class Curve:
    """A forward and a backward figure over a size; `at` ascends."""

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
        """Milliseconds: between points on the line, above them in proportion, below as the least.

        A size of 0 takes none.
        """
        if size <= 0:
            return 0.0
        values = self.backward if backward else self.forward
        if size > self.at[-1]:
            return values[-1] * size / self.at[-1]
        return _interpolated(size, self.at, values)

    def rate(self, size: float, *, backward: bool) -> float:
        """A rate: between points by the logarithm of the size, and beyond them that of the ends."""
        values = self.backward if backward else self.forward
        return _interpolated(math.log2(max(size, 1.0)), self._at_log2, values)

    def scaled(self, factor: float) -> "Curve":
        """The same curve with all figures times a factor."""
        figures = ([factor * x for x in values] for values in (self.forward, self.backward))
        return Curve(self.at, *map(tuple, figures))

    @cached_property
    def _at_log2(self) -> tuple[float, ...]:
        return tuple(map(math.log2, self.at))


def _interpolated(x: float, at: Sequence[float], values: Sequence[float]) -> float:
    """Between points on the line, beyond them as the nearest.

    numpy's takes as long for one number as for a thousand, and a plan is priced by thousands.
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
    """Rates of one process group, the same on all of its ranks.

    A transfer of n bytes takes a latency and n over a rate.
    """

    ranks: int
    """How many ranks it was measured with."""
    backend: str
    """Of the process group: nccl or gloo."""
    gather_bytes_per_ms: float
    """Bytes that each rank receives in an all-gather."""
    gather_latency_ms: float
    send_bytes_per_ms: float
    """Bytes that each rank sends to one other, while it receives as many from another."""
    send_latency_ms: float

    @property
    def rates(self) -> dict[str, float]:
        """Bytes a millisecond, by name."""
        return {n: x for n, x in vars(self).items() if n.endswith("bytes_per_ms")}

    def describe(self) -> str:
        """Such as "link of 2 ranks measured by nccl"."""
        return f"link of {self.ranks} ranks measured by {self.backend}"


@dataclass(frozen=True)
class LinkPrices:
    """Prices of a measured link, in milliseconds, for one model."""

    gathering: float
    """Receiving all weights of the blocks from other ranks, were all of them elsewhere."""
    calls: float
    """Latencies of these gathers."""
    byte: float
    """A byte sent to another rank."""
    transfer: float
    """Latency of one transfer."""


WIDE_PAIRS = 1 << 26
"""Pairs (query, key) of a launch without a mask from which other kernels may serve it: torch's
cuDNN where FlashAttention-4 is missing."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One device and model shape, as measured."""

    device: str
    versions: Mapping[str, str]
    compiled: bool
    shape: ModelShape
    """Of the model that was asked for; it was measured with fewer layers."""
    measured_layers: tuple[int, int]
    block: Curve
    """Tokens of a microbatch: ms of one decoder block without its attention."""
    rest: Curve
    """Tokens of a microbatch: ms of what is done once a microbatch, the head not counted."""
    head: Curve
    """Labelled tokens: ms of the head."""
    causal: Curve
    """Length of a segment: visible pairs (query, key) a ms, of causal attention in one layer."""
    rectangle: Curve
    """Length of the keys: the same of attention to an ancestor."""
    part: Curve
    """Tokens that have it: ms of a further launch in one layer, its call and its merge."""
    out_bytes_per_ms: float
    back_bytes_per_ms: float
    kept_bytes: Mapping[str, tuple[float, float]]
    """For each policy of checkpointing: bytes a token that one block keeps for the backward, and
    that all of a microbatch does besides."""
    working_bytes: tuple[float, float]
    """Most that a backward needs beyond what was kept: bytes for a microbatch with a head, and
    bytes a token besides; zeros where the device does not say."""
    seconds: float
    """How long it took, with `first_seconds`."""
    host_block_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host to issue one block, forward and backward, where the device works behind
    it. A CPU's times have it in them, as those of earlier versions do."""
    host_rest_ms: tuple[float, float] = (0.0, 0.0)
    """The same of what is done once a microbatch."""
    host_launch_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host for each further launch of a block's attention; zeros where that was not
    measured."""
    walk_ms: tuple[float, float] = (0.0, 0.0)
    """Least time of a further launch in one layer: forward for each key of its longest sequence,
    and backward for each query. A block of queries reads all keys in turn."""
    host_write_ms: tuple[float, float] = (0.0, 0.0)
    """Additional time of the host for each block of a microbatch that others read."""
    host_read_ms: tuple[float, float] = (0.0, 0.0)
    """Additional time of the host for each block of a microbatch that reads another, without the
    time of its further launch."""
    host_long_ms: tuple[float, float] = (0.0, 0.0)
    """Additional time of the host in each block for each causal sequence of at least
    `tree.LONG_TOKENS`; zeros where these run with the others."""
    host_step_ms: tuple[float, float] = (0.0, 0.0)
    """Time of the host to check the model, to prepare a step and to end it, while the device is
    idle: for a step, and for each layer."""
    host_token_ms: float = 0.0
    """Time of the host to prepare a token of the rollouts, while the device is idle."""
    wide: tuple[float, float] = (0.0, 0.0)
    """Pairs a ms of attention to an ancestor by launches of at least WIDE_PAIRS, forward and
    backward; zeros where that was not measured."""
    first_seconds: float = 0.0
    """Of `seconds`: the first run of each thing that was measured. It compiles blocks and kernels,
    which the step that follows needs as well."""
    link: Link | None = None
    """Between ranks; None where one process measured alone."""

    def __post_init__(self) -> None:
        # What no measurement gives is refused, so that no plan rests on it.
        positive = {
            "out_bytes_per_ms": self.out_bytes_per_ms,
            "back_bytes_per_ms": self.back_bytes_per_ms,
            **{
                name: min(*getattr(self, name).forward, *getattr(self, name).backward)
                for name in RATES
            },
            **{
                f"link.{name}": rate
                for name, rate in (self.link.rates if self.link else {}).items()
            },
        }
        for name, least in positive.items():
            if least <= 0:
                raise ConfigError(f"{name} is {least:g}; it takes a number above 0")
        if self.kept_bytes.keys() != {"none", "selective", "full"}:
            raise ConfigError(
                f"kept_bytes has {short(sorted(self.kept_bytes))}; it takes none, selective, full"
            )

    def describe(self) -> str:
        compiled = "compiled" if self.compiled else "not compiled"
        link = "" if self.link is None else f", {self.link.describe()}"
        torch = self.versions.get("torch")
        return f"measured on {self.device}, blocks {compiled}, torch {torch}{link}"

    def check_shape(self, shape: ModelShape) -> None:
        """Refuse a model that this was not measured for.

        Raises:
            ConfigError: sizes differ, in more than the number of layers and their windows.
        """
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
        """Refuse another device than this was measured on, or blocks compiled otherwise.

        Raises:
            ConfigError: with both values.
        """
        if (device, compiled) != (self.device, self.compiled):
            here = f"{device}, blocks {'compiled' if compiled else 'not compiled'}"
            raise ConfigError(
                f"this calibration was {self.describe()}, and here is {here}: its times do not "
                "apply. Run forkpoint calibrate here, or give no calibration."
            )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        if self.link is None:  # earlier versions read the file as well
            del values["link"]
        text = json.dumps({"schema": SCHEMA, **values}, indent=1)
        # Whole or not at all: policies find the file by themselves, and refuse half of one.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            ConfigError: there is no such file, or it is damaged, or of another kind or version.
        """
        try:
            if path.stat().st_size > MOST_BYTES:
                raise SchemaError(f"not a calibration (it has more than {MOST_BYTES} bytes)")
            values = parse_json(path.read_bytes())
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


def calibration_path(
    device: str, shape: ModelShape, *, compiled: bool, measured_for: object = None
) -> Path:
    """Where the calibration of a device and model shape is looked for.

    measured_for: versions and kernels that a policy's own measurement is for; None for the file of
    `forkpoint calibrate`.

    The folder is that of the environment variable FORKPOINT_CALIBRATIONS, or `forkpoint` in the
    user's cache folder.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else cache / "forkpoint" / "calibrations"
    which = [_comparable(shape), compiled]
    which += [] if measured_for is None else [measured_for]
    key = json.dumps(which, sort_keys=True)
    digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"
    return folder / f"{name}-{digest}{'' if measured_for is None else '.auto'}.json"


def find_calibration(device: str, shape: ModelShape, *, compiled: bool) -> Calibration | None:
    """The calibration of this device and model shape, if one lies where it is looked for."""
    path = calibration_path(device, shape, compiled=compiled)
    return Calibration.load(path) if path.is_file() else None
