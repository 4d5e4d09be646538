"""The file of options of the engines for verl; verl itself is not needed here."""

from dataclasses import fields
from pathlib import Path

import pytest

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.integrations.verl.settings import (
    CONFIG_KEYS,
    VARIABLE,
    Settings,
    load_settings,
)

ROOT = Path(__file__).parents[2]


def loaded(folder: Path, text: str) -> Settings:
    path = folder / "forkpoint.toml"
    path.write_text(text)
    return load_settings({VARIABLE: str(path)})


def test_without_a_file_there_are_the_defaults(tmp_path: Path) -> None:
    assert load_settings({}) == load_settings({VARIABLE: ""}) == Settings()
    assert loaded(tmp_path, "") == Settings()


def test_options_are_those_of_the_file(tmp_path: Path) -> None:
    text = """
decomposition = "joint"
[config]
sharing = "tree"
max_microbatch_tokens = 4096
memory_budget = "none"
"""
    config = Config(sharing="tree", max_microbatch_tokens=4096, memory_budget=None)
    assert loaded(tmp_path, text) == Settings(config=config, decomposition="joint")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharing = 'tree'", "sharing is not known; allowed are config, decomposition."),
        ("[config]\nshare = 'tree'", "config.share is not known; allowed are sharing, boundary"),
        ("config = 3", "config is 3; it takes a table, [config]."),
        ("[config]\nsharing = 'all'", "table [config]: sharing is 'all'; allowed are 'auto'"),
        ("decomposition = 'rows'", "decomposition is 'rows'; allowed are 'auto', 'joint'."),
        ("a = ", "names, is no TOML"),
    ],
)
def test_what_is_not_allowed_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        loaded(tmp_path, text)
    assert message in str(found.value)
    assert "forkpoint.toml" in str(found.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({VARIABLE: str(tmp_path / "none.toml")})


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "start" / "verl.md").read_text(encoding="utf-8")
    for name in [*(f.name for f in fields(Settings)), *CONFIG_KEYS]:
        assert f"`{name}`" in page, name
