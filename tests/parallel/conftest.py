"""Slow tests of several ranks have a lane of their own: `make test-ranks`."""

from pathlib import Path

import pytest

from forkpoint.parallel import watch

HERE = Path(__file__).parent


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that fail are missed in seconds in the place of tens of seconds."""
    for name, seconds in (("GRACE_S", 1.0), ("DEAD_S", 4.0), ("BEAT_S", 0.5), ("POLL_S", 0.1)):
        monkeypatch.setattr(watch, name, seconds)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves items out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.ranks)
