"""Wrapping leaves a model usable as before, and steps remember nothing of it."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from host_models import BATCH, LOSS, checkpointing, frozen_below, lora, quiet_peft, resized
from steps import ACROSS, clear_gradients, model_state, small_model, step_error
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from forkpoint import wrap
from lanes import slow_besides

pytestmark = quiet_peft


def use(model: PreTrainedModel) -> list[torch.Tensor]:
    """Uses of a model besides training it."""
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        masked = model(
            input_ids=ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
        ).logits
    written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clear_gradients(model)
    return [logits, masked, written, loss.detach(), *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("adapted", slow_besides([True], [True, False]))
def test_a_wrapped_model_is_usable_as_before(adapted: bool) -> None:
    model: Any = small_model("qwen3", dtype=torch.float32)
    model = lora(model) if adapted else model
    wanted = use(model)
    state = model_state(model)
    policy = wrap(model, ACROSS)
    assert model_state(model) == state

    def check() -> None:
        assert model_state(model) == state
        for found, expected in zip(use(model), wanted, strict=True):
            assert torch.equal(found, expected)

    check()
    policy.forward_backward(BATCH, LOSS)
    clear_gradients(model)
    check()
    policy.score(BATCH, entropy=True)
    policy.verify(BATCH, LOSS)
    check()
    host = weakref.ref(policy.host)
    del policy
    gc.collect()
    assert host() is None, "something of the policy stays behind"
    check()


def test_saving_copying_and_pickling(tmp_path: Path) -> None:
    model = small_model("qwen3", dtype=torch.float32)
    policy = wrap(model, ACROSS)
    policy.forward_backward(BATCH, LOSS)
    clear_gradients(model)
    wanted = policy.score(BATCH).logprobs
    model.save_pretrained(tmp_path)
    assert "forkpoint" not in (tmp_path / "config.json").read_text()
    for twin in (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert torch.equal(wrap(twin, ACROSS).score(BATCH).logprobs, wanted)
        assert step_error(twin, BATCH, LOSS) < 2e-5


@pytest.mark.slow
def test_the_model_may_change_between_steps() -> None:
    """Nothing of it is remembered that a step depends on."""
    model = small_model("llama", dtype=torch.float32)
    policy = wrap(model, ACROSS)
    assert step_error(model, BATCH, LOSS, policy=policy) < 2e-5
    model.double()
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    resized(model)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    checkpointing(model, use_reentrant=False)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    model.lm_head = nn.Linear(32, 67, bias=True, dtype=torch.float64)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    frozen_below(model)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
