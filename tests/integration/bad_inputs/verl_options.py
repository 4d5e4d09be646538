"""Options of verl, and of forkpoint's engines for it, that are not allowed. verl is not needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bad_inputs.kind import Kind
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.integrations.verl.refusals import check_options, check_strategy
from forkpoint.integrations.verl.settings import VARIABLE, load_settings


class Options(dict[str, Any]):
    """A configuration of verl, as far as the checks read one."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def checked(**engine: Any) -> None:
    check_options(Options(forward_only=False, **engine), Options())


def file_of_options(text: str) -> Callable[[pytest.MonkeyPatch], object]:
    return lambda monkeypatch: Path("forkpoint.toml").write_text(text)


def loaded() -> object:
    return load_settings({VARIABLE: "forkpoint.toml"})


VERL = (
    Kind(
        name="A strategy of verl that forkpoint has no engine for",
        error=UnsupportedError,
        call=lambda: check_strategy("fsdp", "language_model"),
        message="actor_rollout_ref.actor.strategy (or actor_rollout_ref.ref.strategy) is 'fsdp';",
    ),
    Kind(
        name="An option of verl's engine that has not been shown exact",
        error=UnsupportedError,
        call=lambda: checked(qat=Options(enable=True)),
        message="actor_rollout_ref.actor.fsdp_config.qat.enable is true;",
    ),
    Kind(
        name="No file of options for verl",
        error=ConfigError,
        call=loaded,
        message="FORKPOINT_VERL_CONFIG is 'forkpoint.toml', which cannot be read (No such file or",
    ),
    Kind(
        name="A key that the file of options for verl does not have",
        error=ConfigError,
        call=loaded,
        prepare=file_of_options('sharing = "tree"'),
        message="forkpoint.toml: sharing is not known; allowed are config, decomposition.",
    ),
    Kind(
        name="A value that the file of options for verl does not take",
        error=ConfigError,
        call=loaded,
        prepare=file_of_options('[config]\nsharing = "all"'),
        message="forkpoint.toml, table [config]: sharing is 'all';",
    ),
)
