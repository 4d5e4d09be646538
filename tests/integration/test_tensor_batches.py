"""Steps over batches that were made from tensors: those over the same rollouts, bit for bit."""

from typing import Any

import pytest
import torch
from steps import VOCAB, clear_gradients, gradients
from torch import Tensor

from forkpoint import Config, Rollout, RolloutBatch, losses, wrap
from forkpoint.losses.base import LossBatch, LossOutputs
from forkpoint.testing import tiny_model

PROMPTS, COMPLETIONS, EACH = 3, 4, 9


def tensors() -> dict[str, Any]:
    """Columns of TRL: prompts, padded on the left, each with its completions, one of them empty."""
    generator = torch.Generator().manual_seed(0)

    def logprobs() -> Tensor:
        return -4 * torch.rand(PROMPTS * COMPLETIONS, EACH, generator=generator)

    prompts = torch.randint(0, VOCAB, (PROMPTS, 7), generator=generator)
    shown = torch.arange(7) >= torch.tensor([[0], [3], [5]])
    lengths = torch.randint(1, EACH + 1, (PROMPTS * COMPLETIONS, 1), generator=generator)
    lengths[5] = 0
    kept = torch.arange(EACH) < lengths
    completions = torch.randint(0, VOCAB, kept.shape, generator=generator)
    completions[1] = completions[0]
    return {
        "prompt_ids": prompts.repeat_interleave(COMPLETIONS, 0),
        "prompt_mask": shown.repeat_interleave(COMPLETIONS, 0).long(),
        "completion_ids": completions,
        "completion_mask": kept.long(),
        "tool_mask": (torch.rand(kept.shape, generator=generator) < 0.8).long(),
        "advantages": torch.randn(len(kept), generator=generator),
        "old_logprobs": torch.where(kept, logprobs(), torch.nan),
        "reference_logprobs": logprobs(),
        "weights": torch.rand(kept.shape, generator=generator),
    }


def rollouts(columns: dict[str, Any]) -> list[Rollout]:
    made = []
    for n in range(PROMPTS * COMPLETIONS):
        row = {name: values[n] for name, values in columns.items()}
        prompt = row["prompt_ids"][row["prompt_mask"].bool()]
        inside = row["completion_mask"].bool()

        def over(values: Tensor, lead: int = len(prompt), inside: Tensor = inside) -> Tensor:
            return torch.cat([values.new_zeros(lead), values[inside]])

        made.append(
            Rollout(
                torch.cat([prompt, row["completion_ids"][inside]]),
                over(row["tool_mask"]),
                row["advantages"],
                **{n: over(row[n]) for n in ("old_logprobs", "reference_logprobs", "weights")},
            )
        )
    return made


@pytest.mark.parametrize("config", [Config(), Config(sharing="tree", boundary="across")])
@pytest.mark.parametrize("loss", [losses.GRPO(kl=0.1, entropy=0.01), losses.GSPO()])
def test_steps_are_those_of_the_rollouts(loss: losses.Loss, config: Config) -> None:
    columns = tensors()
    found, steps = [], []
    for batch in (RolloutBatch.from_completions(**columns), RolloutBatch(rollouts(columns))):
        model = tiny_model("llama", dtype=torch.float32)
        steps.append(wrap(model, config=config).forward_backward(batch, loss))
        found.append(gradients(model))
    one, other = steps
    assert one.loss == other.loss and one.events == other.events
    assert torch.equal(one.logprobs, other.logprobs)
    assert one.computed_tokens < one.logical_tokens
    for name, gradient in found[0].items():
        assert gradient is not None and torch.equal(gradient, found[1][name]), name


def test_a_loss_over_completions() -> None:
    """A trainer's own loss over [N, C], on log-probs that are padded within the graph."""
    columns = tensors() | {"weights": None, "reference_logprobs": None}
    batch = RolloutBatch.from_completions(**columns)
    mask = columns["completion_mask"] * columns["tool_mask"]
    old = columns["old_logprobs"].nan_to_num()

    def clipped(outputs: LossOutputs, _: LossBatch) -> Tensor:
        logprobs_NC = batch.to_completions(outputs.logprobs)
        ratios = ((logprobs_NC - old) * mask).exp()
        advantages = columns["advantages"][:, None]
        surrogate = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        return -(surrogate * mask).sum() / mask.sum()

    model = tiny_model("llama", dtype=torch.float64)
    policy = wrap(model)
    step = policy.forward_backward(batch, clipped)
    own = gradients(model)
    clear_gradients(model)
    wanted = policy.forward_backward(batch, losses.GRPO(clip=0.2))
    assert step.loss == pytest.approx(wanted.loss, rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-6, atol=1e-9)

    assert policy.verify(batch, losses.GRPO(clip=0.2)).passed
    scores = policy.score(batch)
    assert torch.equal(batch.to_completions(scores.logprobs) != 0, mask != 0)
