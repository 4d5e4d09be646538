"""Limit on the work that a small file may cause, unless more is asked for. Imports no torch.

A plan takes time in proportion to tokens, a model far more: attention takes it to their square.
"""

from pathlib import Path

from forkpoint.apps.cli.model_config import config_path, read_config
from forkpoint.apps.cli.options import Reading
from forkpoint.errors import ConfigError
from forkpoint.rollouts.formats.limits import bytes_on_disk
from forkpoint.tree.forest import IntArray
from forkpoint.units import shown

MOST_TOKENS = 1 << 16
MOST_PAIRS = 1 << 26
"""Tokens, and pairs of a token with one before it, that a model is always run on. A model of two
layers takes 10 to 20 seconds for either on two cores of a CPU."""
TOKENS_PER_BYTE = 16
"""More tokens than this for each byte on disk are not in a file that only shares what is repeated
in a group: real groups of eight to long prompts have five, compressed by zstd."""


def check_work(lengths: IntArray, file: Path, model: Path, reading: Reading) -> None:
    """Refuse to run a model on rollouts of these lengths [N] where a small file inflates to them,
    or where the model has no such positions. A memory limit that was set says that it is meant.

    Raises ConfigError, naming tokens and option.
    """
    tokens = int(lengths.sum())
    pairs = float((lengths.astype(float) ** 2).sum() / 2)
    if reading.memory_limit is not None or (tokens <= MOST_TOKENS and pairs <= MOST_PAIRS):
        return
    remedy = (
        "Take fewer rollouts (--limit), or, where it is meant to be so, set a memory limit "
        "(--memory-limit), such as 8GB."
    )
    disk_bytes = bytes_on_disk(file)
    if tokens > TOKENS_PER_BYTE * disk_bytes:
        raise ConfigError(
            f"{file} inflates: it has {shown(disk_bytes)}, and the model would run {tokens:,} "
            f"tokens of it; from so small a file at most {MOST_TOKENS:,} are run. {remedy}"
        )
    positions = read_config(config_path(model)).get("max_position_embeddings")
    longest = int(lengths.max())
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(
            f"{file} has a rollout of {longest:,} tokens, and {model} has max_position_embeddings "
            f"{positions:,}. {remedy}"
        )
