"""The command line and the files that it is given."""

from pathlib import Path

import pytest
from commands import Shell, write_config, write_rollouts


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.json")
