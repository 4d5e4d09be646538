"""Compiled blocks of torchtitan's models."""

from typing import Any

import pytest
import torch
from steps import forked_batch, step_error
from titan_models import titan_model

from forkpoint import Config, losses, wrap


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_compiled_blocks(family: str, graphs_alone: None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = Config(
        sharing="tree", boundary="across", max_microbatch_tokens=12, compile_blocks=True
    )
    model = titan_model(family)
    policy = wrap(model, config)
    assert step_error(model, forked_batch(), losses.GRPO(), config, policy=policy) < 1e-10
    assert policy.host.compiling.failure is None
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_generated_code() -> None:
    model = titan_model("llama3", dtype=torch.float32)
    policy = wrap(model, Config(compile_blocks=True))
    assert policy.verify(forked_batch(), losses.GRPO()).passed
    assert policy.host.compiling.failure is None


def test_torchtitan_s_own_compilation_is_taken_off_in_steps(graphs_alone: None) -> None:
    """As its apply_compile does it, block by block."""
    model: Any = titan_model("qwen3")
    for name, block in model.layers.named_children():
        compiled = torch.compile(block, dynamic=True, options=None)
        model.layers.register_module(name, compiled)
    assert step_error(model, forked_batch(), losses.GRPO()) < 1e-10
    assert all(type(block).__name__ == "OptimizedModule" for block in model.layers.values())
