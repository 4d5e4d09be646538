"""Scales that differ from the configuration: what a module's attribute says is what it computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import ACROSS, forked_batch, small_model
from test_logprobs import stock_values

from forkpoint import wrap
from lanes import slow_besides_every

BATCH = forked_batch(stretch=3)
BAR = 1e-4
pytestmark = pytest.mark.filterwarnings("ignore:.*eos_token_id.*")


def attribute(path: str, value: Any) -> Callable[[Any], None]:
    """Set an attribute of the model, of one of its modules, or of its configuration."""
    owner, _, name = path.rpartition(".")

    def change(model: Any) -> None:
        found = model
        for part in owner.split(".") if owner else ():
            found = getattr(found, part)
        setattr(found, name, value)

    return change


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


CASES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "attention's scaling": ("llama", attribute("model.layers.1.self_attn.scaling", 0.9)),
    "logits_scaling": ("granite", attribute("config.logits_scaling", 3.0)),
    "embedding_multiplier": ("granite", attribute("model.embedding_multiplier", 3.0)),
    "logit_scale of the model": ("cohere", attribute("logit_scale", 0.5)),
    "softcap of a layer": (
        "gemma2",
        attribute("model.layers.0.self_attn.attn_logit_softcapping", 1.0),
    ),
    "epsilon of a norm": ("llama", attribute("model.layers.0.input_layernorm.variance_epsilon", 9)),
    "rotary frequencies": ("llama", frequencies),
    "window": ("mistral", attribute("config.sliding_window", 3)),
    "experts of a token": ("gpt_oss", attribute("model.layers.0.mlp.router.top_k", 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_besides_every(3, CASES))
def test_a_changed_scale_is_exact(name: str) -> None:
    family, change = CASES[name]
    model: Any = small_model(family, dtype=torch.float32)
    model.set_attn_implementation("eager")  # sdpa of some versions knows no softcap
    policy = wrap(model, ACROSS)
    before = policy.score(BATCH).logprobs
    change(model)
    found = policy.score(BATCH).logprobs
    with torch.no_grad():
        expected, _ = stock_values(model, BATCH)
    torch.testing.assert_close(found, expected, rtol=0, atol=BAR)
    assert float((found - before).abs().max()) > 10 * BAR, "the change has no effect"
