"""Compiled decoder blocks: one graph each, attention and its prefix cache included."""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from steps import ACROSS, forked_batch
from torch._dynamo.utils import counters

from forkpoint import Config, RolloutBatch, losses, wrap
from forkpoint.hosts import compiled_attention
from forkpoint.testing import tiny_model
from multimodal_models import tiny_multimodal
from versions import eager_experts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("graphs_alone"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler looks at what warns
]
CHAIN = replace(ACROSS, max_microbatch_tokens=12)
OPTIONS: dict[str, Config] = {
    "one microbatch a segment": ACROSS,
    "chains": CHAIN,
    "within": replace(ACROSS, boundary="within", max_microbatch_tokens=200),
    "recomputed": replace(CHAIN, activations="recompute"),
    "offloaded": replace(CHAIN, activations="offload"),
    "blocks checkpointed": replace(CHAIN, checkpointing="full"),
    "MLPs checkpointed": replace(CHAIN, checkpointing="selective"),
}


def gradients(model: Any, config: Config, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    wrap(model, config).forward_backward(batch, losses.GRPO())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_same(model: Any, config: Config, batch: RolloutBatch) -> None:
    """Compiled blocks leave the gradients of eager ones."""
    expected = gradients(copy.deepcopy(model), config, batch)
    found = gradients(model, replace(config, compile_blocks=True), batch)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("family", "name"), list(product(("gemma3_text", "gpt_oss"), ("chains", "within")))
)
def test_a_block_is_one_graph_and_exact(
    family: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With windows, softcaps and sinks. Blocks of one kind share their graph, at every length."""
    torch._dynamo.reset()
    counters.clear()
    model, batch = eager_experts(tiny_model(family, num_hidden_layers=4)), forked_batch()
    check_same(model, OPTIONS[name], batch)
    if family != "gpt_oss":  # whose experts loop over tensors
        assert not counters["graph_break"]
    assert counters["aot_autograd"]["total"] == counters["aot_autograd"]["ok"], "traced once"
    assert not compiled_attention._calls, "a step forgets its calls"
    assert "failed" not in caplog.text, "no block falls back"


@pytest.mark.parametrize("name", ["chains", "blocks checkpointed"])
@pytest.mark.parametrize("family", ["gemma4", "llama4"])
def test_layers_that_read_places_and_other_layers(
    family: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks, temperatures by place, and keys and values of layers before."""
    torch._dynamo.reset()
    model, batch = tiny_multimodal(family), forked_batch()
    check_same(model, OPTIONS[name], batch)
    assert "failed" not in caplog.text, "no block falls back"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("learns", ["all", "upper layers", "queries"])
def test_every_way_of_keeping_activations(
    name: str, learns: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()  # of one function, dynamo compiles eight graphs at most
    parts = {"all": "", "upper layers": "layers.2", "queries": "q_proj"}[learns]
    model, batch = tiny_model("qwen3", num_hidden_layers=3), forked_batch()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parts in parameter_name)
    check_same(model, OPTIONS[name], batch)
    assert "failed" not in caplog.text, "no block falls back"
