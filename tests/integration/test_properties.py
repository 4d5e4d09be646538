"""Random batches under random plans and losses: a step is that of ordinary training, in float64."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint import Config, RolloutBatch, wrap
from forkpoint.losses import GRPO, GSPO, LogLikelihood, LossBatch, LossOutputs
from forkpoint.losses.base import as_loss
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from strategies import COMBINATIONS, batches

BAR = 1e-10
"""Of the norm of the whole gradient, for each parameter's; absolute for log-probs and losses."""


def coupled(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    """A loss in which every rollout's gradient depends on every other's log-probs."""
    return batch.rollout_sum(batch.trained(outputs.logprobs) * batch.advantages).logsumexp(0)


LOSSES = {
    "grpo": GRPO(clip=0.2, clip_high=0.3, normalize="rollout"),
    "grpo-kl": GRPO(kl=0.1),
    "gspo": GSPO(clip=0.5, clip_high=1.0),
    "likelihood": LogLikelihood(),
    "coupled": coupled,
}


@cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=2, vocab_size=5)


@pytest.mark.slow
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    family=st.sampled_from(("llama", "qwen3")),
    batch=batches(logprobs=True),
    combination=st.sampled_from(COMBINATIONS),
    microbatch_tokens=st.integers(1, 60),
    name=st.sampled_from(sorted(LOSSES)),
    kernel=st.sampled_from(("reference", "cpu_flash")),
)
def test_a_step_is_that_of_dense_training(
    family: str, batch: RolloutBatch, combination, microbatch_tokens: int, name: str, kernel: str
) -> None:
    sharing, boundary = combination
    if boundary == "within":
        microbatch_tokens = max(microbatch_tokens, int(batch.lengths.max()))
    if name == "grpo-kl" and batch.reference_logprobs is None:
        name = "grpo"
    config = Config(
        sharing=sharing,
        boundary=boundary,
        max_microbatch_tokens=microbatch_tokens,
        attention_kernel=kernel,
        head_chunk_tokens=7,
    )
    model = model_of(family)
    model.zero_grad()
    with lifted_upcasts(model):
        dense = dense_run(model, batch, as_loss(LOSSES[name]))
        stats = wrap(model, config).forward_backward(batch, LOSSES[name])
    assert abs(stats.loss - dense.loss) <= BAR
    assert float((stats.logprobs - dense.logprobs_T).abs().max()) <= BAR
    wanted = {n: torch.zeros(1) if g is None else g for n, g in dense.gradients.items()}
    norm = float(np.linalg.norm([float(gradient.norm()) for gradient in wanted.values()]))
    for parameter_name, parameter in model.named_parameters():
        found = torch.zeros(1) if parameter.grad is None else parameter.grad
        error = float((found - wanted[parameter_name]).norm())
        assert error <= BAR * (norm or 1.0), f"{parameter_name} is off by {error:.1e} of {norm:.1e}"
