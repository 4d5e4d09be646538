"""accelerate's configuration of context parallelism, which only a trainer's steps use.

accelerate would give the ranks of one sequence the same rows, and TRL's trainers that generate
refuse that. Here TRL and accelerate see these ranks as data ranks. Each rank has other rows, and
batch sizes, generation, rewards, advantages and metrics are those of training without context
parallelism. A step runs the rows of all of these ranks together (`calls.PackedRows`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""The variable by which accelerate's launcher says that it has a configuration."""


@contextmanager
def as_data_ranks(args: Any) -> Iterator[int]:
    """Replace context ranks by data ranks in the parallelism configuration, inside the block.

    The configuration is that of the arguments, or of accelerate's launcher. Yields the number of
    ranks that run one sequence together.
    """
    given: Any = args.parallelism_config
    config = given
    if config is None and os.environ.get(_LAUNCHED, "").lower() == "true":
        config = import_module("accelerate").ParallelismConfig()
    size = 1 if config is None else config.cp_size
    if config is not None and size > 1:
        args.parallelism_config = import_module("accelerate").ParallelismConfig(
            dp_replicate_size=config.dp_replicate_size,
            dp_shard_size=config.dp_shard_size * size,
            tp_size=config.tp_size,
            cp_size=1,
            sp_size=config.sp_size,
        )
    try:
        yield size
    finally:
        args.parallelism_config = given
