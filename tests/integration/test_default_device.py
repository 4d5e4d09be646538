"""Where the user has set a default device, tensors are still made where the model is.

The meta device stands for any other: what is made there by mistake has no values, and fails.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import ACROSS, clear_gradients, forked_batch, gradients, small_model

from forkpoint import Config, wrap
from forkpoint.losses import GRPO, GSPO
from forkpoint.testing import lifted_upcasts
from hybrids import HYBRIDS, tiny_hybrid
from lanes import slow_besides

BATCH = forked_batch()
CONFIGS = {
    "across": ACROSS,
    "within": Config(sharing="tree", boundary="within"),
    "offload": replace(ACROSS, activations="offload"),
    "recompute": replace(ACROSS, activations="recompute", checkpointing="full"),
    "float32 sums": replace(ACROSS, grad_accumulation_dtype="float32"),
}
# Full attention in every plan; windows, sinks, a delta rule and a selective scan.
CASES = [("llama", name) for name in CONFIGS]
CASES += [
    (family, name)
    for family in ("gemma3_text", "gpt_oss", "qwen3_5_text", "granitemoehybrid")
    for name in ("across", "within")
]


KEPT = [("llama", "offload")]


@pytest.mark.parametrize(("family", "name"), slow_besides(KEPT, CASES))
def test_a_step_is_the_same(family: str, name: str) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "gpt_oss" else {}
    model = tiny_hybrid(family) if family in HYBRIDS else small_model(family, **experts)
    # A sample of each family, and no more of other plans.
    config = replace(CONFIGS[name], self_check=name == "across")
    if experts:
        model.set_experts_implementation("eager")  # the default's product has no float64
    found: list[Any] = []
    for device in ("cpu", "meta"):
        with torch.device(device), lifted_upcasts(model):
            policy = wrap(model, config)
            scores = policy.score(BATCH, entropy=True)
            policy.forward_backward(BATCH, GRPO(kl=0.1))
            policy.forward_backward(BATCH, GSPO())
        found.append((scores.logprobs, scores.entropies, *gradients(model).values()))
        clear_gradients(model)
    for ours, wanted in zip(*found, strict=True):
        assert (ours is None) == (wanted is None)
        assert ours is None or torch.equal(ours, wanted)


def test_verify_is_the_same() -> None:
    model = small_model("llama")
    with torch.device("meta"):
        report = wrap(model, ACROSS).verify(BATCH, GRPO())
    assert report.passed
