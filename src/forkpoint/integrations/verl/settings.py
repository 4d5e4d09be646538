"""Options of the engines, from the file that an environment variable names.

verl's configuration has no fields for them.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import short

VARIABLE = "FORKPOINT_VERL_CONFIG"
Decomposition = Literal["auto", "joint"]
FIXED_KEYS = ("head_statistics", "all_logprobs")
CONFIG_KEYS = [f.name for f in fields(Config) if f.name not in FIXED_KEYS]
"""Keys of the table `config`. verl reads no statistics of the head, and its metrics read log-probs
of all rollouts."""
NO_VALUE = "none"
"""Text for None, which TOML lacks."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of all engines of a process.

    config: options of forkpoint's steps, the table `config` of the file.
    decomposition: `auto` finds out whether the loss is a sum of independent terms of tokens or of
        rollouts. A step then needs one pass. `joint` is correct for each loss. It needs one more
        forward if a mini-batch has several microbatches.
    """

    config: Config = field(default_factory=Config)
    decomposition: Decomposition = "auto"


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Load the settings from the file that `FORKPOINT_VERL_CONFIG` names; without the variable, the
    defaults.

    Raises ConfigError, naming file and key, if the file is missing or not valid TOML, or if a key
    or a value is not allowed.
    """
    name = environment.get(VARIABLE, "")
    if not name:
        return Settings()
    try:
        given: dict[str, Any] = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE} is {name!r}, which cannot be read ({error.strerror}). It takes the path "
            "of a TOML file that every worker can read. Unset it to use the defaults."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name}, which {VARIABLE} names, is not valid TOML: {error}. An example is in "
            "docs/start/verl.md."
        ) from error
    table: dict[str, Any] = given.setdefault("config", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: config is {short(table)}; it takes a table, [config].")
    allowed = [f.name for f in fields(Settings)]
    for prefix, keys, known in (("", given, allowed), ("config.", table, CONFIG_KEYS)):
        for key in keys:
            if key not in known:
                raise ConfigError(
                    f"{name}: {prefix}{key} is not known; allowed are {', '.join(known)}. "
                    "docs/start/verl.md says what each does."
                )
    decomposition = given.get("decomposition", "auto")
    if decomposition not in get_args(Decomposition):
        raise ConfigError(
            f"{name}: decomposition is {short(decomposition)}; allowed are "
            f"{', '.join(map(repr, get_args(Decomposition)))}."
        )
    if table.get("memory_budget") == NO_VALUE:
        table["memory_budget"] = None
    try:
        config = Config(**table)
    except ConfigError as error:
        raise ConfigError(f"{name}, table [config]: {error}") from error
    return Settings(config=config, decomposition=decomposition)
