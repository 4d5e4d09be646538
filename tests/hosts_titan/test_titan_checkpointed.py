"""Models whose activations torchtitan recomputes."""

from typing import Any

import pytest
from steps import forked_batch, step_error
from titan_models import titan_model
from torch import nn
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

from forkpoint import Config, UnsupportedError, losses, wrap

BATCH = forked_batch()
ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=12)


def checkpointed(family: str, **options: Any) -> nn.Module:
    model = titan_model(family)
    apply_ac(model, ActivationCheckpoint(**options), op_sac_save_list=_op_sac_save_list)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"mode": "full", "early_stop": True},
        {"mode": "selective", "selective_ac_option": "2"},
        {"mode": "selective", "selective_ac_option": "op"},
    ],
)
def test_gradients(options: dict[str, Any]) -> None:
    model = checkpointed("qwen3", **options)
    assert step_error(model, BATCH, losses.GRPO(), ACROSS) < 1e-10
    assert any(type(m).__name__ == "CheckpointWrapper" for m in model.modules())


def test_compiled_within_checkpoints(graphs_alone: None) -> None:
    model = checkpointed("llama3", mode="full")
    config = Config(
        sharing="tree", boundary="across", max_microbatch_tokens=12, compile_blocks=True
    )
    policy = wrap(model, config)
    assert step_error(model, BATCH, losses.GRPO(), config, policy=policy) < 1e-10
    assert policy.host.compiling.failure is None


def test_verify() -> None:
    report = wrap(checkpointed("llama3", mode="full")).verify(BATCH, losses.GRPO())
    assert report.passed, str(report)


def test_checkpoints_of_both_are_refused() -> None:
    config = Config(sharing="tree", boundary="across", checkpointing="full")
    with pytest.raises(UnsupportedError, match="checkpoints itself"):
        wrap(checkpointed("llama3", mode="full"), config).forward_backward(BATCH, losses.GRPO())
