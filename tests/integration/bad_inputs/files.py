"""Files of rollouts that cannot be read, or written."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_inputs.kind import GOOD, Kind, with_field
from forkpoint import Rollout, load_rollouts, save_rollouts
from forkpoint.errors import ConfigError, ForkpointError, RolloutError
from forkpoint.rollouts.formats.tensors import RECIPE

ROLLOUT = Rollout([1, 2], [0, 1], 1.0, rollout_id="b")


def read(content: str | bytes, message: str, file: str = "bad.jsonl") -> Kind:
    """A file that neither `load_rollouts` nor `forkpoint plan` takes."""
    data = content.encode() if isinstance(content, str) else content
    return Kind(
        error=RolloutError,
        message=message,
        prepare=lambda _: Path(file).write_bytes(data),
        call=lambda: load_rollouts(file),
        argv=("plan", file),
    )


def option(
    message: str,
    *argv: str,
    file: str = "ok.jsonl",
    error: type[ForkpointError] = ConfigError,
    prepare: Callable[[], object] = lambda: None,
    **options: Any,
) -> Kind:
    """An argument of `load_rollouts`, and an option of `forkpoint plan`."""
    return Kind(
        error=error,
        message=message,
        prepare=lambda _: prepare(),
        call=lambda: load_rollouts(file, **options),
        argv=("plan", file, *argv),
    )


def saved(message: str, path: str, rollouts: list[Rollout]) -> Kind:
    return Kind(
        error=RolloutError,
        message=message,
        call=lambda: save_rollouts(path, rollouts),
        prepare=lambda _: Path("folder.jsonl").mkdir(),
    )


ONE_OBJECT = (
    "Each line holds one whole JSON object, in UTF-8, plain or compressed once with gzip or zstd."
)
FILES = (
    option(
        "none.jsonl does not exist. Give the path of a file of rollouts, or the folder of a trace.",
        file="none.jsonl",
        error=RolloutError,
    ),
    option(
        "folder is a directory. Give the path of a file of rollouts, or the folder of a trace.",
        file="folder",
        error=RolloutError,
        prepare=lambda: Path("folder").mkdir(),
    ),
    read(
        "\n  \r\n",
        "bad.jsonl holds no rollouts: it is empty or has only blank lines. Check "
        "the program that wrote it.",
    ),
    read(
        f"{GOOD}\n{GOOD[:30]}",
        "bad.jsonl, line 2 is not JSON (Unterminated string starting at: line 1 column 22 "
        f"(char 21)). {ONE_OBJECT}",
    ),
    read(
        GOOD.replace('"advantage"', '"loss_mask"'),
        f"bad.jsonl, line 1 is an object that has the key 'loss_mask' twice. {ONE_OBJECT}",
    ),
    read(
        GOOD.replace("loss_mask", "mask").replace("advantage", "reward"),
        "bad.jsonl, line 1: has no loss_mask, advantage; its keys are ['token_ids', 'mask', "
        "'reward', 'rollout_id']. A rollout needs token_ids, loss_mask, advantage; rename the keys "
        "or add them.",
    ),
    read(
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i8'}",
        "bad.npy has an unknown file type, or is truncated: it begins with "
        "b'\\x93NUMPY\\x01\\x00'. Give JSON lines (plain, gzip or zstd), parquet, safetensors or a "
        "torch file.",
        "bad.npy",
    ),
    read(
        pickle.dumps([1]),
        f"bad.pkl is a pickle, which can run code when it is loaded, and is not read. {RECIPE}",
        "bad.pkl",
    ),
    read(
        f"{GOOD}\n\n{GOOD}\n",
        "bad.jsonl: rollout_id 'a' is on line 1 and again on line 3; ids must differ. Rename one, "
        "or leave rollout_id out.",
    ),
    read(
        with_field("extras", '{"reward":2},"reward":1'),
        "bad.jsonl, line 1: 'reward' is a key of the line and of its extras",
    ),
    option(
        "bad.jsonl, line 1: there is no prompts",
        *("--format", "verl"),
        file="bad.jsonl",
        error=RolloutError,
        prepare=lambda: Path("bad.jsonl").write_text(GOOD),
        format="verl",
    ),
    option(
        "limit is 0; it takes a whole number of at least 1. Leave it out to read all rollouts.",
        *("--limit", "0"),
        limit=0,
    ),
    option("memory_limit is '8 gigs'", *("--memory-limit", "8 gigs"), memory_limit="8 gigs"),
    saved(
        "rollouts.txt ends in '.txt'; allowed are .jsonl, .gz, .zst. Rename the file.",
        "rollouts.txt",
        [ROLLOUT],
    ),
    saved(
        "The folder none does not exist. Create it before saving.", "none/rollouts.jsonl", [ROLLOUT]
    ),
    saved(
        "folder.jsonl is a directory. Give the path of a file to write.", "folder.jsonl", [ROLLOUT]
    ),
    saved("There are no rollouts; a file takes at least one.", "rollouts.jsonl", []),
)
