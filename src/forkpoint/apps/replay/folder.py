"""The folder of a replay: manifest.json says what ran, and rows.jsonl has a row for each step."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forkpoint.apps.replay.records import ReplayStep
from forkpoint.errors import ConfigError
from forkpoint.rollouts.schema import finite

MANIFEST, ROWS = "manifest.json", "rows.jsonl"


class ReplayFolder:
    """Folder to which a replay writes. It is created with the first row."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """`about`: content of the manifest.

        Raises ConfigError for a folder with files, so that no earlier replay is lost.
        """
        self.path = path
        self.about = about
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; a replay is a folder. Give another path.")
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"{path} has files. Give an empty or a new folder.")

    def add_row(self, row: ReplayStep) -> None:
        """Append a row, which readers see at once. NaN and infinities become null."""
        if row.step == 1:
            self.path.mkdir(parents=True, exist_ok=True)
            manifest = json.dumps(finite(self.about), indent=1, default=str)
            (self.path / MANIFEST).write_text(manifest, encoding="utf-8")
        line = json.dumps(finite(asdict(row)), allow_nan=False, separators=(",", ":"))
        with (self.path / ROWS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
