"""The folder of a replay, with its rows and the state from which it resumes.

    manifest.json     inputs that must stay equal (`fixed`), and further facts (`about`)
    calibration.json  measured prices of plans, if any
    rows.jsonl        one row for each step
    checkpoint.pt     tensors, random generators and rows up to the last saved step

Files other than rows.jsonl are written under a temporary name and renamed, so they are always
complete. A resumed replay writes the rows of the checkpoint again, and continues after them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from forkpoint.apps.replay.records import ReplayStep, step_of
from forkpoint.errors import ConfigError
from forkpoint.plan.pricing.calibration import Calibration
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.disk import TEMPORARY, replacing, write_file
from forkpoint.rollouts.schema import SchemaError, finite, parse_json, read

Side = tuple[nn.Module, torch.optim.Optimizer]
Schema = Literal[5]
MANIFEST, ROWS, CHECKPOINT = "manifest.json", "rows.jsonl", "checkpoint.pt"
CALIBRATION = "calibration.json"
MOST_NAMED = 8
"""Largest number of differences that an error names."""


class ReplayFolder:
    """Folder to which a replay writes, and from which it resumes.

    Attributes:
        path: the folder.
        begun: `fixed` of the resumed replay; None for a new replay.
        budget_bytes: memory budget of the resumed replay; None for a new replay or without a limit.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Raises ConfigError if the folder has files, except those of a replay to resume."""
        self.path = path
        self.begun: dict[str, Any] | None = None
        self.budget_bytes: int | None = None
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; a replay is a folder. Give another path.")
        if not (path / MANIFEST).is_file():
            # A replay that is killed at its start leaves a calibration and hidden files.
            names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
            if not all(name.startswith((".", CALIBRATION)) for name in names):
                raise ConfigError(
                    f"{path} has files, but no replay. Give an empty or a new folder."
                )
            return
        if not resume:
            raise ConfigError(
                f"{path} already has a replay. Add --resume to continue it, or give another folder."
            )
        try:
            manifest = read(Mapping[str, Any], parse_json((path / MANIFEST).read_bytes()), "")
            read(Schema, manifest.get("schema"), "schema")
            begun = read(Mapping[str, Any], manifest.get("fixed"), "fixed")
            held = read(Mapping[str, Any], begun.get("runs_on"), "fixed.runs_on")
            name = "memory_budget_bytes"
            self.budget_bytes = read(int | None, held.get(name), f"fixed.runs_on.{name}")
        except SchemaError as error:
            raise ConfigError(
                f"{path / MANIFEST} is not the manifest of a replay that this version writes: "
                f"{error}. Start in another folder."
            ) from None
        self.begun = begun

    def calibration(self) -> Calibration | None:
        """Calibration of the resumed replay; None for a new replay or without a calibration."""
        path = self.path / CALIBRATION
        return Calibration.load(path) if self.begun is not None and path.is_file() else None

    def open(
        self, fixed: Mapping[str, Any], about: Mapping[str, Any], prices: Calibration | None
    ) -> None:
        """Start a replay, or check that the resumed replay has the same inputs.

        Args:
            fixed: inputs that determine the results. A resumed replay must have equal ones.
            about: further facts, which are stored at the start.
            prices: the calibration of the plans, if any.

        Raises ConfigError, which names the differences, if inputs differ.
        """
        values = finite({"schema": get_args(Schema)[0], "fixed": fixed, "about": about})
        content = json.dumps(values, indent=1, default=str)
        if self.begun is None:
            self.path.mkdir(parents=True, exist_ok=True)
            if prices is not None:
                prices.save(self.path / CALIBRATION)
            write_file(self.path / MANIFEST, content.encode())
            return
        if changed := differences(self.begun, json.loads(content)["fixed"]):
            more = f"\nand {len(changed) - MOST_NAMED} more" * (len(changed) > MOST_NAMED)
            raise ConfigError(
                f"the replay in {self.path} was started with other inputs:\n"
                + "\n".join(f"  {line}" for line in changed[:MOST_NAMED])
                + f"{more}\nResume with the same inputs, or start in another folder."
            )

    def add_row(self, row: ReplayStep) -> None:
        """Append a row, which readers see at once."""
        with (self.path / ROWS).open("ab") as file:
            file.write(_line(row))

    def save(self, rows: Sequence[ReplayStep], sides: Mapping[str, Side]) -> None:
        """Save a checkpoint of the state after these rows."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        state = {
            "rows": [asdict(row) for row in rows],
            "generators": (torch.get_rng_state(), cuda),
            "sides": {
                name: (_trained(model), [optimizer.state.get(p, {}) for p in _of(optimizer)])
                for name, (model, optimizer) in sides.items()
            },
        }
        with replacing(self.path / CHECKPOINT) as file:
            torch.save(state, file)

    @torch.no_grad()
    def restore(self, sides: Mapping[str, Side]) -> list[ReplayStep]:
        """Restore the checkpoint, and return its rows; none without a checkpoint.

        Raises ConfigError for a file that is no checkpoint of these models.
        """
        path, rows = self.path / CHECKPOINT, list[ReplayStep]()
        for unfinished in self.path.glob(f".*{TEMPORARY}"):
            unfinished.unlink()
        if path.is_file():
            try:
                state = torch.load(path, weights_only=True)
                rows = [step_of(row) for row in state["rows"]]
                cpu, cuda = state["generators"]
                saved = {name: state["sides"][name] for name in sides}
                for name, (model, _) in sides.items():
                    weights, _ = saved[name]
                    if any(weights[k].shape != x.shape for k, x in _trained(model).items()):
                        raise ValueError("its parameters have other shapes")
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # damaged files raise many types
                raise ConfigError(
                    f"{path} is damaged, or not a checkpoint of this replay. Start in another "
                    "folder."
                ) from error
            for name, (model, optimizer) in sides.items():
                weights, states = saved[name]
                for key, tensor in _trained(model).items():
                    tensor.copy_(weights[key])
                # load_state_dict would cast the state to the dtype of the parameters.
                for parameter, held in zip(_of(optimizer), states, strict=True):
                    optimizer.state[parameter] = held
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda.cpu())
        write_file(self.path / ROWS, b"".join(map(_line, rows)))
        return rows


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Texts of all differences between two JSON trees, with the path and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in {**before, **now}
            for line in differences(
                before.get(key, "nothing"), now.get(key, "nothing"), f"{name}.{key}".lstrip(".")
            )
        ]
    if before == now:
        return []
    return [f"{name} was {short(before)} and is now {short(now)}"]


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _line(row: ReplayStep) -> bytes:
    values = finite(asdict(row))
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name. The digest covers all other parameters, and buffers."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
