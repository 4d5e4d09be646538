"""Files that trainers' own code wrote.

They were written with verl 0.9.1, OpenRLHF 0.11.2 and prime-rl of 2026-08-21;
make_verl_openrlhf.py and make_prime_rl.py in tests/fixtures say how little has to be installed.
Those of TRL are in test_readers_trainers.py.
"""

from pathlib import Path

import numpy as np
import pytest

import dumps
import forkpoint
from dumps import same, truth
from forkpoint import RolloutError, load_rollouts
from forkpoint.rollouts.traces import open_rollouts

FIXTURES = Path(__file__).parents[1] / "fixtures"
ORDER = np.random.default_rng(1).permutation(len(truth()))


def test_a_batch_of_verl() -> None:
    """Batches that DataProto joined, put into another order, saved, and written as docs say."""
    rollouts = [truth()[n] for n in ORDER]
    file = open_rollouts(FIXTURES / "verl-batch.pt")
    found = file.read()
    assert (file.container, file.format) == ("torch", "verl")
    same(found, rollouts)
    assert [r.group_id for r in found] == [r.group_id for r in rollouts]
    assert {r.temperature for r in found} == {0.7}


def test_lines_of_verl() -> None:
    """Lines that its trainer's _write_generations logs with rollout_data_dir."""
    reader = open_rollouts(FIXTURES / "verl-lines.jsonl", tokenizer=lambda text: [*text.encode()])
    found = reader.read()
    assert reader.format == "verl-text"
    texts = [bytes(r.token_ids.tolist()).decode() for r in found]
    assert texts == ['Why? übe"cause', "Why? üso\nsaid", "How?\u2028"]
    assert [int(r.loss_mask.sum()) for r in found] == [8, 7, 3]
    assert found[0].group_id == found[1].group_id != found[2].group_id
    assert [r.advantage for r in found] == [1.0, -1.0, 0.0]


def test_uids_of_verls_trainer_with_a_queue(tmp_path: Path) -> None:
    """Its lines name each output: UID_ROLLOUT_OUTPUT (verl 0.9.1, trainer/ppo/v1/trainer_base.py,
    _log_rollout_data)."""
    line = {"input": "Why?", "output": "so", "score": 1.0}
    lines = [line | {"uid": f"{uid}_{n}_0"} for uid in ("a-b", "c-d") for n in range(2)]
    path = dumps.write_json(tmp_path / "7.jsonl", lines)
    found = load_rollouts(path, tokenizer=lambda text: [*text.encode()])
    assert [r.group_id for r in found] == ["a-b", "a-b", "c-d", "c-d"]


def test_an_experience_of_openrlhf() -> None:
    """Samples of several lengths that concat_experiences padded."""
    file = open_rollouts(FIXTURES / "openrlhf-experience.pt")
    same(file.read(), truth())
    assert (file.container, file.format) == ("torch", "openrlhf")


def test_lines_that_prime_rl_exports() -> None:
    """Packed samples that its TokenExporter took apart; what fills a row up is no line."""
    file = open_rollouts(FIXTURES / "prime-rl-tokens.jsonl")
    found = file.read()
    assert (file.container, file.format) == ("JSON lines", "prime-rl")
    same(in_order(found), in_order(truth()), "reference_logprobs")
    assert all(r.weights is None and r.reference_logprobs is None for r in found)
    with pytest.raises(RolloutError, match="line 1: has no advantage"):
        load_rollouts(FIXTURES / "prime-rl-tokens.jsonl", format="forkpoint")


def in_order(rollouts: list[forkpoint.Rollout]) -> list[forkpoint.Rollout]:
    """The rollouts by their tokens: prime-rl packs samples in an order of its own."""
    return sorted(rollouts, key=lambda rollout: rollout.token_ids.tolist())
