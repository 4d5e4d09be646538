"""verl with its CPU platform of tests, where it is installed: `make test-verl`."""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

# This folder is in no package of that name, so that `import verl` cannot mean it.
if importlib.util.find_spec("verl") is not None:
    os.environ.update(
        VERL_PLATFORM="cpu",
        VERL_ENGINE_DEVICE="cuda",
        VERL_ENGINE_VENDOR="forkpoint",
        VERL_USE_EXTERNAL_MODULES="cpu_platform",
        VERL_LOGGING_LEVEL="ERROR",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.workers.engine_workers  # noqa: F401


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, as verl loads it."""
    from harness import save_model

    return save_model(tmp_path_factory.mktemp("model"))
