"""Config(head_statistics=...) through plans that share, against the stock model's logits."""

import pytest
import torch
from steps import forked_batch, small_model

from forkpoint import Config, wrap
from forkpoint.config import HEAD_STATISTICS
from forkpoint.losses import GRPO
from forkpoint.testing import lifted_upcasts

BATCH = forked_batch()
MODES = [
    Config(sharing="tree", boundary="across", max_microbatch_tokens=12),
    Config(sharing="tree", boundary="within"),
    Config(sharing="none"),
]


@pytest.mark.parametrize(
    ("family", "config"), list(zip(("gemma2", "llama", "llama"), MODES, strict=True))
)
def test_scores_and_steps_have_them(family: str, config: Config) -> None:
    model = small_model(family)
    policy = wrap(model, config).with_config(head_statistics=HEAD_STATISTICS)
    wanted: dict[str, list[torch.Tensor]] = {name: [] for name in HEAD_STATISTICS}
    with lifted_upcasts(model):
        with torch.no_grad():
            for rollout in BATCH:
                ids = torch.tensor(rollout.token_ids)
                z_LV = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                z_LV = z_LV / rollout.temperature
                # A rollout's first token has nothing before it.
                for name, x in (
                    ("mean_logits", z_LV.mean(-1)),
                    ("is_top1", (z_LV.argmax(-1) == ids[1:]).double()),
                    ("log_sum_sq_probs", z_LV.softmax(-1).square().sum(-1).log()),
                ):
                    wanted[name] += [torch.zeros(1, dtype=x.dtype), x]
        found = [policy.score(BATCH), policy.forward_backward(BATCH, GRPO())]
    mask = torch.tensor(BATCH.loss_mask)
    for name, parts in wanted.items():
        expected_T = torch.where(mask, torch.cat(parts), 0.0)
        for result in found:
            torch.testing.assert_close(
                result.per_token[name], expected_T, rtol=1e-10, atol=1e-10, msg=name
            )


def test_without_the_option_there_are_none() -> None:
    policy = wrap(small_model("llama"))
    assert set(policy.score(BATCH, entropy=True).per_token) == {"logprobs", "entropies"}
