"""Four layers of Qwen3.5-4B on a CUDA device, in bfloat16: trees, in every way of running them."""

from typing import Any

import numpy as np
import pytest
from test_delta_rule_gpu import pytestmark as pytestmark
from test_delta_rule_gpu import with_fla as with_fla

from benchmarks.shapes import checkpoint, make_model
from forkpoint import Config, Rollout, RolloutBatch, wrap
from forkpoint.losses import GRPO

VOCAB = 8192
WAYS: dict[str, dict[str, Any]] = {
    "within": {"boundary": "within"},
    "mixed": {"boundary": "mixed", "max_microbatch_tokens": 1500},
    "across": {"boundary": "across", "max_microbatch_tokens": 1500},
    "offloaded": {"boundary": "across", "activations": "offload", "max_microbatch_tokens": 1500},
    "computed again": {
        "boundary": "across",
        "activations": "recompute",
        "max_microbatch_tokens": 600,
    },
}


def conversations() -> RolloutBatch:
    """Nine rollouts of one group: a prompt, three turns, and three answers to each."""
    random = np.random.default_rng(5)

    def tokens(count: int) -> list[int]:
        return random.integers(0, VOCAB, count).tolist()

    prompt = tokens(700)
    rollouts = []
    for turn in (tokens(300), tokens(65), tokens(129)):
        for length in (150, 1, 321):
            answer = tokens(length)
            mask = [0] * len(prompt) + [1] * len(turn) + [1] * len(answer)
            advantage = float(random.normal())
            rollouts.append(Rollout(prompt + turn + answer, mask, advantage, group_id=0))
    return RolloutBatch(rollouts)


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("way", WAYS)
def test_trees_are_as_exact_as_dense(way: str) -> None:
    model = make_model("qwen3.5-4b", "cuda", layers=4, vocab_size=VOCAB)
    checkpoint(model)
    policy, batch = wrap(model, Config(sharing="tree", **WAYS[way])), conversations()
    plan = policy.plan(batch)
    if way != "within":
        assert any(microbatch.parent >= 0 for microbatch in plan.microbatches)
    if "activations" in WAYS[way]:
        assert WAYS[way]["activations"] in {m.activations for m in plan.microbatches}
    report = policy.verify(batch, GRPO())
    assert report.passed, report.table()
