"""Compiled blocks that carry a state, and compiled blocks of models that checkpoint themselves."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import clear_gradients, forked_batch, gradients, relative_distance
from transformers import PreTrainedModel

from forkpoint import Config, wrap
from forkpoint.hosts.transformers.linear_attention import RECURRENT_FORWARDS
from forkpoint.losses import GRPO
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from hybrids import HYBRIDS, tiny_hybrid
from versions import checkpoint_blocks

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler looks at what warns
]
ACROSS = Config(sharing="tree", boundary="across", compile_blocks=True)
WITHIN = replace(ACROSS, boundary="within")
CHAINS = replace(ACROSS, max_microbatch_tokens=60)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def checkpointed(model: PreTrainedModel) -> None:
    checkpoint_blocks(model, use_reentrant=False)


def compiled_graphs(model: PreTrainedModel, configs: list[Config]) -> list[int]:
    """Graphs there are after each step; every step is that of dense training, in float64."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    with lifted_upcasts(model):
        for config in configs:
            policy = wrap(model, config)
            for seed, stretch in ((0, 3), (1, 5)):
                batch = forked_batch(seed=seed, stretch=stretch)
                wanted = dense_run(model, batch, GRPO()).gradients
                clear_gradients(model)
                policy.forward_backward(batch, GRPO())
                assert relative_distance(gradients(model), wanted) < 1e-10, (config, stretch)
                counts.append(graphs())
    assert counts[0] > 0
    return counts


@pytest.mark.slow
def test_sizes_of_weights_are_constants_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for channels whose number may change took up to five times as long on a GPU."""
    found: set[int] = set()

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        for node in module.graph.find_nodes(op="placeholder"):
            example = node.meta["example_value"]
            for size in example.shape if isinstance(example, torch.Tensor) else [example]:
                if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
                    assert size.node.hint is not None
                    found.add(size.node.hint)
        return module.forward

    compiles = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda own, **_: compiles(own, dynamic=True, backend=backend)
    )
    torch._dynamo.reset()
    model = tiny_hybrid("qwen3_5_text", kinds=("linear_attention",))
    policy = wrap(model, replace(WITHIN, self_check=False))
    batch = forked_batch(seed=0, stretch=3)
    (microbatch,) = policy.plan(batch).microbatches
    policy.forward_backward(batch, GRPO())
    layer: Any = model.model.layers[0].linear_attn
    assert microbatch.tokens in found
    assert not found & {layer.conv_dim, layer.key_dim, layer.value_dim}


# Experts and a gated delta rule; its code is below, Mamba-2 where models checkpoint themselves.
@pytest.mark.slow
@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.parametrize("family", ["qwen3_next"])
def test_steps_of_compiled_blocks_are_those_of_dense_training(family: str) -> None:
    """However microbatches are laid out and kept; lengths that change compile nothing more."""
    model = tiny_hybrid(family, kinds=("linear_attention", "full_attention"))
    counts = compiled_graphs(model, [ACROSS, WITHIN, replace(CHAINS, activations="recompute")])
    assert counts[0] < 20 and len(set(counts)) == 1, counts


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text"])
def test_steps_of_generated_code_are_those_of_dense_training(family: str) -> None:
    """Inductor's code; at other lengths and layouts as well."""
    model = tiny_hybrid(family, kinds=("linear_attention", "full_attention"))
    counts = compiled_graphs(model, [ACROSS, WITHIN])
    assert counts[0] < 20 and len(set(counts)) == 1, counts


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
def test_models_that_checkpoint_themselves(family: str) -> None:
    hybrid = family in HYBRIDS
    kinds = ("linear_attention", "full_attention")
    model = tiny_hybrid(family, kinds=kinds) if hybrid else tiny_model(family).train()
    checkpointed(model)
    counts = compiled_graphs(model, [CHAINS, WITHIN])
    assert len(set(counts)) == 1, counts
    flagged = [vars(m)["gradient_checkpointing"] for m in model.model.layers]
    assert flagged == [True] * len(flagged)
    assert not any("forward" in vars(m) for m in model.modules())


def test_forwards_have_no_variables_of_closures() -> None:
    """With them torch 2.11 goes on after the convolution with the globals of another module."""
    for forward in set(RECURRENT_FORWARDS.values()):
        assert forward.__code__.co_cellvars == (), forward.__name__  # type: ignore[attr-defined]
