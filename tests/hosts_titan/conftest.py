"""Tests of torchtitan's models, which run where torchtitan is installed: make test-titan."""

import sys
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("hosts_titan", "integration", "parallel")]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torchtitan one file is collected, whose test says so."""
    name = collection_path.name
    if find_spec("torchtitan") is None and name.startswith("test_") and name != "test_there.py":
        return True
    return None
