"""torchtitan's Trainer (0.2) of a tiny Qwen3."""

import functools
from dataclasses import replace
from typing import Any

from torchtitan.config import ConfigManager
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from benchmarks.ranks.titan import models_on_cpus
from forkpoint.integrations.titan import NoData

TINY = Qwen3ModelArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=61
)
ARGUMENTS = (
    "--model.name=of_tests",
    "--model.flavor=tiny",
    "--training.steps=3",
    "--training.seq_len=64",
    "--training.mixed_precision_param=float32",
    "--optimizer.eps=1e-3",
    "--optimizer.lr=1e-2",
    "--lr_scheduler.warmup_steps=0",
    "--metrics.log_freq=1",
    "--debug.seed=1",
)


@functools.cache
def register() -> None:
    spec = get_train_spec("qwen3")
    own = replace(
        spec,
        model_args={"tiny": TINY},
        build_dataloader_fn=NoData,
        build_tokenizer_fn=None,
        pipelining_fn=pipeline_llm,
    )
    register_train_spec("of_tests", own)


def make_trainer(
    kind: Any,
    folder: str,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    checkpoint: str = "none",
    keep: bool = False,
    load_step: int = -1,
) -> Any:
    """checkpoint: of activations. keep: whether checkpoints are saved after every second step."""
    models_on_cpus()
    register()
    given = [
        f"--job.dump_folder={folder}",
        f"--parallelism.tensor_parallel_degree={tp}",
        f"--parallelism.context_parallel_degree={cp}",
        f"--parallelism.pipeline_parallel_degree={pp}",
        f"--activation_checkpoint.mode={checkpoint}",
        *(("--checkpoint.enable", "--checkpoint.interval=2") if keep else ()),
        f"--checkpoint.load_step={load_step}",
    ]
    return kind(ConfigManager().parse_args([*ARGUMENTS, *given]))
