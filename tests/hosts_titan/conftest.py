"""Tests of torchtitan's models, which run where torchtitan is installed: make test-titan."""

import sys
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("hosts_titan", "integration", "parallel")]
BOTH = (
    *("test_there.py", "test_titan_steps.py", "test_titan_compiled.py"),
    *("test_titan_experts.py", "test_titan_trainer.py"),
)
"""Tests of every version of torchtitan."""
ONLY_03 = ("test_titan_03.py", "test_titan_split_03.py")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests of another version; without torchtitan one file tells that it is missing."""
    name = collection_path.name
    if not name.startswith("test_") or not name.endswith(".py") or name == "test_there.py":
        return None
    if find_spec("torchtitan") is None:
        return True
    # 0.3 has what models of 0.2 are made of elsewhere.
    is_03 = find_spec("torchtitan.models.common") is not None
    return True if (name not in BOTH) and (name in ONLY_03) != is_03 else None
