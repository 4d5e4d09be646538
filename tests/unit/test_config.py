"""Options: what is allowed, and what a refusal says."""

import dataclasses
import re

import numpy as np
import pytest

from forkpoint import Config, ConfigError, Rollout, RolloutBatch, VerifyReport


@pytest.mark.parametrize(
    "name", ["max_microbatch_tokens", "head_chunk_tokens", "memory_budget", "host_memory"]
)
def test_sizes_that_are_none(name: str) -> None:
    for value in (0, -1, 1.0, True, "70 gigs", float("nan"), np.arange(2)):
        with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}; it takes a "):
            Config(**{name: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [(1, 1), ("1", 1), ("70GiB", 70 << 30), ("80 GB", 80 * 10**9), ("1.5mib", 3 << 19)],
)
def test_memory_in_bytes(value: int | str, size_bytes: int) -> None:
    config = Config(memory_budget=value, host_memory=value)
    assert config.memory_budget_bytes == config.host_memory_bytes == size_bytes
    assert Config().memory_budget_bytes is None


def test_limits_may_be_left_to_the_planner_but_the_head_needs_its_chunk() -> None:
    config = Config(max_microbatch_tokens=None, memory_budget=None)
    assert (config.max_microbatch_tokens, config.memory_budget) == (None, None)
    with pytest.raises(ConfigError, match="head_chunk_tokens is None; it takes a whole number"):
        Config(head_chunk_tokens=None)  # pyright: ignore[reportArgumentType]


def test_a_config_cannot_be_changed_and_its_changes_are_checked() -> None:
    config = Config(sharing="tree")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sharing = "none"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="boundary is 'inside'"):
        dataclasses.replace(config, boundary="inside")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [Config, Rollout, RolloutBatch, VerifyReport])
def test_help_documents_every_field(kind: type) -> None:
    names = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
    documented = (kind.__doc__ or "").partition("Attributes:")[2]
    entries = re.findall(r"^ +(\w+(?:, \w+)*): ", documented, re.MULTILINE)
    assert names <= {name for entry in entries for name in entry.split(", ")}
