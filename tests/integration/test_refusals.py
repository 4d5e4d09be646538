"""Refusals: by name, with a remedy, before anything runs, leaving everything as it was."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import torch
from bad_inputs.kind import QUIET
from bad_inputs.states import (
    STATES,
    StateKind,
    attention_dropout,
    dropout_module,
    reentrant_checkpointing,
)
from steps import ACROSS, forked_batch, model_state, small_model, step_error
from torch import nn

from forkpoint import ConfigError, Rollout, RolloutBatch, UnsupportedError, losses, wrap
from forkpoint.hosts.transformers.calls import ATTENTION_NAME
from forkpoint.testing import tiny_model
from lanes import id_of
from plain_attention import PLAIN_ATTENTION

BATCH = forked_batch()

pytestmark = QUIET


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")


# States in which nothing runs --------------------------------------------------------------------


IN_STATES = [kind for kind in STATES if isinstance(kind, StateKind)]


@pytest.mark.parametrize("kind", IN_STATES, ids=[kind.name for kind in IN_STATES])
def test_states_in_which_nothing_runs(model: nn.Module, kind: StateKind) -> None:
    kind.change(model)
    policy, state = wrap(model, ACROSS), model_state(model)
    with pytest.raises(UnsupportedError) as caught:
        policy.forward_backward(BATCH, losses.GRPO())
    assert kind.message in str(caught.value)
    if kind.training_only:
        assert len(policy.score(BATCH).logprobs) == BATCH.logical_tokens
    else:
        with pytest.raises(UnsupportedError) as caught:
            policy.score(BATCH)
        assert kind.message in str(caught.value)
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "change", [attention_dropout, dropout_module, reentrant_checkpointing], ids=id_of
)
def test_what_only_training_mode_does_is_fine_in_eval_mode(model: nn.Module, change: Any) -> None:
    change(model)
    assert step_error(model.eval(), BATCH, losses.GRPO()) < 1e-10


def test_inference_mode(model: nn.Module) -> None:
    policy = wrap(model, ACROSS)
    wanted = policy.score(BATCH).logprobs
    with torch.inference_mode():
        with pytest.raises(UnsupportedError, match=r"torch\.inference_mode"):
            policy.forward_backward(BATCH, losses.GRPO())
        assert torch.equal(policy.score(BATCH).logprobs, wanted)


def test_weights_of_inference_mode() -> None:
    """torch saves them for a backward only where no gradient goes through them."""
    with torch.inference_mode():
        model = tiny_model("qwen3").requires_grad_(False)
    policy = wrap(model)
    policy.score(BATCH)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    policy.forward_backward(BATCH, losses.GRPO())
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.clone())
    policy.forward_backward(BATCH, losses.GRPO())
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32).double())
    with pytest.raises(UnsupportedError, match=r"weight was made under torch\.inference_mode: "):
        policy.forward_backward(BATCH, losses.GRPO())


def test_a_hook_without_a_hash(model: nn.Module) -> None:
    @dataclass
    class Hook:
        def __call__(self, *_: Any) -> None: ...

    policy = wrap(model, ACROSS)
    model.lm_head.register_forward_hook(Hook())
    with pytest.raises(UnsupportedError, match=r"lm_head has a hook in _forward_hooks.*Hook"):
        policy.score(BATCH)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0] * 4,
    "factor": 4.0,
}


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 40), ("longrope", 20)])
def test_rope_that_depends_on_the_length(kind: str, limit: int) -> None:
    """Up to the limit rollouts agree on shared tokens, and beyond it they do not."""
    rope = DYNAMIC if kind == "dynamic" else {**LONGROPE, "original_max_position_embeddings": 20}
    model = tiny_model(
        "llama", max_position_embeddings=40, rope_parameters={"rope_theta": 1e4, **rope}
    )

    def batch(longest: int) -> RolloutBatch:
        prompt = [n % 61 for n in range(longest - 3)]
        endings = ([5, 6, 7], [5, 8, 9], [6, 4])
        return RolloutBatch(
            [Rollout(prompt + e, [0] * len(prompt) + [1] * len(e), 1.0) for e in endings]
        )

    policy = wrap(model, ACROSS)
    assert step_error(model, batch(limit), losses.GRPO(), policy=policy) < 1e-10
    message = (
        f"rope_type is '{kind}' and the longest rollout has {limit + 1} tokens: beyond {limit}"
    )
    for call in (policy.score, lambda batch: policy.forward_backward(batch, losses.GRPO())):
        with pytest.raises(UnsupportedError, match=message):
            call(batch(limit + 1))


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        ("config", "sliding_window", 512, "layer 0 has sliding_window=4096, and its mask has 512"),
        ("config", "layer_types", ["full_attention"] * 2, "sliding_window=4096, .* mask has None"),
        ("model.layers.1.self_attn", "sliding_window", 512, "layer 1 has .*=512, .* has None"),
    ],
)
def test_windows_that_differ_from_the_masks(
    where: str, name: str, value: Any, message: str
) -> None:
    """Beyond the tokens of a sample, so that the self-check does not find them."""
    model: Any = small_model("gemma2")
    policy = wrap(model, ACROSS)
    setattr(attrgetter(where)(model), name, value)
    with pytest.raises(UnsupportedError, match=message):
        policy.score(BATCH)
    model.set_attn_implementation(PLAIN_ATTENTION)  # it takes the window of the layer, and no mask
    assert step_error(model, BATCH, losses.GRPO(), policy=policy) < 1e-10


def test_rope_parameters_without_a_type(model: nn.Module) -> None:
    """As in transformers, the type is the legacy key `type`, or else the default."""
    config: Any = model.config
    config.rope_parameters = {"rope_theta": 1e4}
    policy = wrap(model, ACROSS)
    assert step_error(model, BATCH, losses.GRPO(), policy=policy) < 1e-10
    for refused in (
        {"type": "spiral"},
        {"sliding_attention": None, "full_attention": {"type": "spiral"}},
        {"rope_type": "default", "full_attention": {"rope_type": "spiral"}},
    ):
        config.rope_parameters = {"rope_theta": 1e4, **refused}
        with pytest.raises(UnsupportedError, match="rope_type is 'spiral'"):
            policy.score(BATCH)


def test_a_model_whose_attention_is_set_to_forkpoints(model: nn.Module) -> None:
    """It cannot be called by itself, but steps run, and leave the setting."""
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    stats = wrap(model, ACROSS).forward_backward(BATCH, losses.GRPO())
    assert stats.computed_tokens == 60
    assert model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("returned", [torch.ones(3), 1.0], ids=["vector", "float"])
def test_a_loss_that_returns_no_scalar(model: nn.Module, returned: Any) -> None:
    policy, state = wrap(model, ACROSS), model_state(model)
    with pytest.raises(ConfigError, match="must return a floating-point scalar"):
        policy.forward_backward(BATCH, lambda outputs, batch: returned)
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())
