"""Models that mix attention with layers that carry a state: what is refused, and left as it was."""

import pytest
import torch
import transformers
from steps import forked_batch

from forkpoint import Rollout, RolloutBatch, UnsupportedError, losses, wrap
from forkpoint.hosts.transformers.linear_attention import recurrent_modules
from hybrids import tiny_hybrid


def test_media_tokens_are_refused_by_name() -> None:
    name = "video_token_id"
    model = tiny_hybrid("qwen3_5_text")
    setattr(model.config, name, 17)
    text = Rollout([1, 5, 9], [0, 0, 1], 1.0)
    media = Rollout([1, 5, 17, 17, 9], [0, 0, 0, 0, 1], 1.0)
    with pytest.raises(
        UnsupportedError, match=rf"token 17 \({name}\) is at position 2 of rollout 1, and 2 in all"
    ):
        wrap(model).score(RolloutBatch([text, media]))


def test_media_tokens_of_released_models_are_known() -> None:
    """A text model's configuration does not have them; the whole model's does."""
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    from forkpoint.hosts.transformers.families import FAMILIES

    whole = configuration.Qwen3_5Config()
    media = FAMILIES["qwen3_5_text"].media
    assert media and all(getattr(whole, name) == value for name, value in media)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.10."), reason="it computes SiLU at all times"
)
def test_a_sample_finds_another_activation_of_the_convolution() -> None:
    model = tiny_hybrid("qwen3_5_text", hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="differ from the model's"):
        wrap(model).forward_backward(forked_batch(), losses.GRPO())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "called while a step of forkpoint runs it"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "passes cu_seq_lens_q to its recurrence"),
        ({"attention_mask": torch.ones(1, 3)}, "called with an attention mask"),
    ],
    ids=["no-microbatch", "lengths", "mask"],
)
def test_other_arguments_are_refused(arguments: dict, message: str) -> None:
    model = tiny_hybrid("qwen3_5_text")
    policy = wrap(model)
    (_, module), *_ = recurrent_modules(model).items()
    if arguments:
        arguments = {**arguments, "forkpoint_context": object()}
    with policy.host.entered(), pytest.raises(UnsupportedError, match=message):
        module(torch.zeros(1, 3, 32, dtype=torch.float64), **arguments)
