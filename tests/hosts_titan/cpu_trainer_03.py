"""torchtitan's Trainer (0.3) of a tiny Qwen3."""

from dataclasses import dataclass
from typing import Any

from titan_models_03 import configuration
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    default_adamw,
    register_moe_load_balancing_hook,
)
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from forkpoint.integrations.titan import NoData


@dataclass
class NoTokenizer:
    def build(self, **_: object) -> None:
        return None


def make_trainer(
    kind: Any,
    folder: str,
    *,
    family: str = "qwen3",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    checkpoint: str = "none",
    keep: bool = False,
    load_step: int = -1,
) -> Any:
    """checkpoint: of activations. keep: whether checkpoints are saved after every second step."""
    optimizer = default_adamw(lr=1e-2, eps=1e-3)
    optimizer.implementation = "for-loop"
    spec = ModelSpec(
        name="qwen3",
        flavor="tiny",
        model=configuration(family),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=None,
    )
    # The loss of torchtitan's own configurations, for which models leave their heads out.
    chunked = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=61))
    given: Any = {"tokenizer": NoTokenizer(), "dataloader": NoData.Config()}
    return kind(
        Trainer.Config(
            model_spec=spec,
            dump_folder=folder,
            metrics=MetricsProcessor.Config(log_freq=1),
            optimizer=optimizer,
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(
                local_batch_size=pp,  # torch's schedule wants a microbatch for each stage
                seq_len=64,
                steps=3,
                mixed_precision_param="float32",
                disable_cuda_graphs=True,
            ),
            parallelism=ParallelismConfig(
                spmd_backend="partial_dtensor",
                tensor_parallel_degree=tp,
                pipeline_parallel_degree=pp,
                expert_parallel_degree=ep,
            ),
            checkpoint=CheckpointManager.Config(enable=keep, interval=2, load_step=load_step),
            activation_checkpoint=FullAC.Config() if checkpoint == "full" else None,
            debug=DebugConfig(seed=1),
            loss=chunked,
            **given,
        )
    )
