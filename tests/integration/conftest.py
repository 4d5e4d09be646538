"""The command line and the files that it is given."""

from pathlib import Path

import pytest
from commands import Shell, write_config, write_rollouts

from forkpoint.hosts.transformers import TransformersHost


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    return write_rollouts(tmp_path / "rollouts.jsonl")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.json")


@pytest.fixture
def without_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a model is refused by name."""
    monkeypatch.setattr(TransformersHost, "_check_model", lambda self: None)
    for name in ("check_random", "check_causal", "check_parameter_hooks", "check_checkpointing"):
        monkeypatch.setattr(f"forkpoint.hosts.refusals.{name}", lambda *_: None)
