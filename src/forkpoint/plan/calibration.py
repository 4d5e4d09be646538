"""What was measured of a device and a model shape, and plans priced by it. Imports no torch.

`forkpoint calibrate` writes these files (bench/calibrate.py says how each figure is measured). A
row's time is then the sum of its blocks' products by how many tokens it has, of its attention
launches by their visible pairs and lengths, of its head by labelled tokens, and of the rest.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from forkpoint.errors import ConfigError
from forkpoint.plan.cost import ModelShape, visible_pairs
from forkpoint.plan.layout import COLUMNS, Row, full_table, windowed_table
from forkpoint.plan.meters import logits_bytes
from forkpoint.plan.plan import Plan

SCHEMA = 1
FOLDER_VARIABLE = "FORKPOINT_CALIBRATIONS"
CURVES = ("block", "rest", "head", "causal", "rectangle", "part")
RATES = ("causal", "rectangle")


@dataclass(frozen=True)
class Curve:
    """A forward and a backward figure over a size; `at` ascends."""

    at: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def time(self, size: float, *, backward: bool) -> float:
        """Milliseconds: between points on the line, above them in proportion, below as the least.

        A size of 0 takes none.
        """
        if size <= 0:
            return 0.0
        values = self.backward if backward else self.forward
        if size > self.at[-1]:
            return values[-1] * size / self.at[-1]
        return float(np.interp(size, self.at, values))

    def rate(self, size: float, *, backward: bool) -> float:
        """A rate: between points by the logarithm of the size, and beyond them that of the ends."""
        values = self.backward if backward else self.forward
        return float(np.interp(np.log2(max(size, 1.0)), np.log2(self.at), values))


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
    """Tokens of a row: ms of one decoder block without its attention."""
    rest: Curve
    """Tokens of a row: ms of what is done once a row, the head not counted."""
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
    that all of a row does besides."""
    working_bytes: tuple[float, float]
    """What a backward needs at most beyond what was kept: bytes for a row with a head, and bytes a
    token besides; zeros where the device does not say."""
    seconds: float
    """How long it took to measure."""

    def describe(self) -> str:
        compiled = "compiled" if self.compiled else "not compiled"
        return f"measured on {self.device}, blocks {compiled}, torch {self.versions.get('torch')}"

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
                f"this calibration was {self.describe()}, and here is {here}: its times say "
                "nothing of that. Run forkpoint calibrate here, or give no calibration."
            )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)
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
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"the calibration {path} cannot be read ({error.strerror}). Give a file that "
                "forkpoint calibrate wrote, or None."
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON ({error}), so it is no calibration.") from None
        schema = values.get("schema") if isinstance(values, dict) else None
        names = {item.name for item in fields(cls)}
        if schema != SCHEMA or values.keys() != {"schema", *names}:
            raise ConfigError(
                f"{path} has schema {schema!r} and this forkpoint reads calibrations of schema "
                f"{SCHEMA}; run forkpoint calibrate again."
            )
        del values["schema"]
        try:
            found = cls(**_from_json_values(values))
            found._check_values()
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the calibration {path} is damaged ({type(error).__name__}: {error}); run "
                "forkpoint calibrate again."
            ) from None
        return found

    def _check_values(self) -> None:
        """Raises ValueError or TypeError for what no measurement gives, so that no plan rests on
        it."""
        for name, wanted in (("device", str), ("compiled", bool), ("versions", Mapping)):
            if not isinstance(getattr(self, name), wanted):
                raise TypeError(f"{name} is {getattr(self, name)!r}")
        for name in CURVES:
            curve: Curve = getattr(self, name)
            sizes = {len(curve.at), len(curve.forward), len(curve.backward)}
            if len(sizes) > 1 or 0 in sizes:
                raise ValueError(f"{name} has no or not equally many sizes and figures")
            _check_numbers(f"{name}.at", curve.at, positive=True)
            if any(a >= b for a, b in pairwise(curve.at)):
                raise ValueError(f"{name}.at is {curve.at}, which does not ascend")
            for way in ("forward", "backward"):
                _check_numbers(f"{name}.{way}", getattr(curve, way), positive=name in RATES)
        for name in ("out_bytes_per_ms", "back_bytes_per_ms"):
            _check_numbers(name, (getattr(self, name),), positive=True)
        for policy in ("none", "selective", "full"):
            _check_numbers(f"kept_bytes.{policy}", self.kept_bytes[policy], count=2)
        _check_numbers("working_bytes", self.working_bytes, count=2)
        _check_numbers("measured_layers", self.measured_layers, count=2)
        _check_numbers("seconds", (self.seconds,))


def _from_json_values(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a calibration from what JSON holds of them."""
    values = dict(given)
    for name in CURVES:
        values[name] = Curve(**{k: tuple(v) for k, v in values[name].items()})
    shape = values["shape"]
    values["shape"] = ModelShape(**{**shape, "windows": tuple(shape["windows"])})
    for name in ("measured_layers", "working_bytes"):
        values[name] = tuple(values[name])
    values["kept_bytes"] = {k: tuple(v) for k, v in values["kept_bytes"].items()}
    return values


def _check_numbers(
    name: str, values: Sequence[Any], *, count: int | None = None, positive: bool = False
) -> None:
    if count is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers, and there are {count}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} holds {value!r}, which is no number")
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            least = "above 0" if positive else "of at least 0"
            raise ValueError(f"{name} holds {value}; it takes finite numbers {least}")


def _comparable(shape: ModelShape) -> dict[str, Any]:
    differ = ("layers", "windows", "checkpointed", "compiled")
    return {k: v for k, v in asdict(shape).items() if k not in differ}


def calibration_path(device: str, shape: ModelShape, *, compiled: bool) -> Path:
    """Where the calibration of a device and model shape is looked for.

    The folder is that of the environment variable FORKPOINT_CALIBRATIONS, or `forkpoint` in the
    user's cache folder.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else cache / "forkpoint" / "calibrations"
    key = json.dumps([_comparable(shape), compiled], sort_keys=True)
    digest = hashlib.blake2b(key.encode(), digest_size=6).hexdigest()
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"
    return folder / f"{name}-{digest}.json"


class MeasuredMeter:
    """Milliseconds of a plan's rows by a calibration (see `forkpoint.plan.meters.Meter`)."""

    unit = "ms"

    def __init__(
        self, calibration: Calibration, plan: Plan, labelled_of_row: Sequence[int]
    ) -> None:
        assert plan.shape is not None
        self.calibration: Calibration = calibration
        self.plan: Plan = plan
        self.shape: ModelShape = plan.shape
        self.labelled_of_row = labelled_of_row
        attention = self.shape.linear_parameters / self.shape.layers
        attention -= 3 * self.shape.hidden * self.shape.intermediate
        # Queries, keys and values: about what a block does before its attention is called.
        self._before_attention = 0.75 * attention * self.shape.layers / self.shape.linear_parameters
        self._attention: dict[tuple[int, bool], float] = {}

    def forward(self, row: Row, *, boundary_only: bool = False) -> float:
        labelled = 0 if boundary_only else self.labelled_of_row[row.index]
        return self._pass(row, labelled, backward=False)

    def backward(self, row: Row) -> float:
        time = self._pass(row, self.labelled_of_row[row.index], backward=True)
        again = self.shape.repeated_flops_share(row.checkpointing)
        if again:
            blocks = self.shape.layers * self.calibration.block.time(row.slots, backward=False)
            time += again * blocks
        if again == 1.0:
            time += self._attention_ms(row, backward=False)
        if row.keeps_logits:
            # The backward that was measured computes them first, as the forward does.
            time -= self.calibration.head.time(self.labelled_of_row[row.index], backward=False)
        return max(time, 0.0)

    def copy(self, nbytes: int, *, out: bool) -> float | None:
        found = self.calibration
        return nbytes / (found.out_bytes_per_ms if out else found.back_bytes_per_ms)

    def kept_bytes(self, row: Row) -> int:
        policy = "full" if self.shape.checkpointed else row.checkpointing
        block, rest = self.calibration.kept_bytes[policy]
        # One block is whole while its backward computes it again.
        whole = self.calibration.kept_bytes["none"][0] if policy != "none" else 0.0
        kept = int(row.slots * (self.shape.layers * block + rest + whole))
        return kept + logits_bytes(row, self.shape, self.labelled_of_row[row.index])

    def working_bytes(self, row: Row) -> int:
        head, token = self.calibration.working_bytes
        return int(row.slots * token + (head if self.labelled_of_row[row.index] else 0.0))

    def _pass(self, row: Row, labelled: int, *, backward: bool) -> float:
        found = self.calibration
        layers = float(self.shape.layers)
        attention = self._attention_ms(row, backward=backward)
        if not labelled:
            # Such a row ends at the keys and values of its last layer.
            attention *= (layers - 1) / layers
            layers += self._before_attention - 1
        return (
            layers * found.block.time(row.slots, backward=backward)
            + attention
            + found.rest.time(row.slots, backward=backward)
            + found.head.time(labelled, backward=backward)
        )

    def _attention_ms(self, row: Row, *, backward: bool) -> float:
        """All layers' launches of a row."""
        if (row.index, backward) not in self._attention:
            each = {w: self._layer_ms(row, w, backward) for w in set(self.shape.windows)}
            self._attention[row.index, backward] = sum(each[w] for w in self.shape.windows)
        return self._attention[row.index, backward]

    def _layer_ms(self, row: Row, window: int, backward: bool) -> float:
        found, forest = self.calibration, self.plan.forest
        if window:
            segments = list(row.segments)
            pairs = visible_pairs(forest.start[segments], forest.length[segments], window)
            table = windowed_table(forest, row, self.plan.arena_of, window)
            length = min(window, row.slots / len(segments))
            copied = len(table.key_index) if table.key_index is not None else 0
            gather = found.part.time(copied, backward=backward)
            return pairs / found.causal.rate(length, backward=backward) + gather
        table = full_table(forest, row, self.plan.arena_of)
        time = 0.0
        for number, values in enumerate(table.launches.tolist()):
            launch: dict[str, int] = dict(zip(COLUMNS, values, strict=True))
            count = launch["count"]
            q, k = (
                np.diff(table.cu[launch[f"cu_{side}_at"] :][: count + 1]).astype(float)
                for side in "qk"
            )
            # The rate of each sequence by its own length: one may be a whole path, others short.
            if launch["causal"]:
                pairs, curve, lengths = q * (q + 1) / 2, found.causal, q
            else:
                pairs, curve, lengths = q * k, found.rectangle, k
            for length in np.unique(lengths):
                those = float(pairs[lengths == length].sum())
                time += those / curve.rate(float(length), backward=backward)
            if number:
                time += found.part.time(float(q.sum()), backward=backward)
        return time


def find_calibration(device: str, shape: ModelShape, *, compiled: bool) -> Calibration | None:
    """The calibration of this device and model shape, if one lies where it is looked for."""
    path = calibration_path(device, shape, compiled=compiled)
    return Calibration.load(path) if path.is_file() else None
