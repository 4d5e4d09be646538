"""Tensors that no batch is made from, and what the messages name."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from batch_fields import rows, some, split
from forkpoint import RolloutBatch
from forkpoint.errors import RolloutError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def refusal(*parts: str) -> str:
    """A pattern for a message that holds all the parts, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


def at(rows: Any, n: int, column: int, value: Any) -> Any:
    """A copy with one entry changed."""
    copied = torch.as_tensor(rows).clone()
    if isinstance(value, float):
        copied = copied.to(torch.float64)
    copied[n, column] = value
    return copied


IDS = some()["input_ids"]
ATTENTION = some()["attention_mask"]
MASK = some()["loss_mask"]
LOGPROBS = -torch.ones(3, 6)
TAKES_IDS = "whole numbers from 0 to 2147483647"


def sparse() -> torch.Tensor:
    return LOGPROBS.to_sparse()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # ids
        ({"input_ids": at(IDS, 0, 2, -100)}, ["Rollout '0': input_ids[0, 2] is -100", TAKES_IDS]),
        ({"input_ids": at(IDS, 1, 4, 2**31)}, ["Rollout '1': input_ids[1, 4] is 2147483648"]),
        ({"input_ids": IDS.to(torch.float32)}, ["input_ids[0, 0] is 5.0 (float32)", TAKES_IDS]),
        ({"input_ids": IDS.bool()}, ["input_ids[0, 0] is True (bool)"]),
        ({"input_ids": IDS[0]}, ["input_ids has the shape 6;", "[N, W]"]),
        ({"input_ids": IDS[None]}, ["input_ids has the shape 1 x 3 x 6"]),
        ({"input_ids": torch.tensor(3)}, ["input_ids is array(3)"]),
        ({"input_ids": None}, ["input_ids is None"]),
        ({"input_ids": "ids"}, ["input_ids is 'ids'"]),
        ({"input_ids": [[1, 2], [3]]}, ["input_ids[0] has 2 entries and input_ids[1] has 1"]),
        ({"input_ids": [[1, 2.5]]}, ["input_ids[0][1] is 2.5"]),
        ({"input_ids": [[1, None]]}, ["input_ids[0][1] is None"]),
        ({"input_ids": [[[1]]]}, ["input_ids[0][0] is [1]"]),
        ({"input_ids": []}, ["There are no rollouts"]),
        ({"input_ids": np.zeros((0, 5), int)}, ["There are no rollouts"]),
        ({"input_ids": IDS.to("meta")}, ["input_ids is a Tensor", "on meta", "cannot be read"]),
        (
            {"input_ids": IDS.numpy().astype(np.uint64) + np.uint64(2**63)},
            ["input_ids[0, 0] is 9223372036854775813", TAKES_IDS],
        ),
        # attention masks
        ({"attention_mask": ATTENTION[:, :5]}, ["attention_mask has the shape 3 x 5", "3 x 6"]),
        ({"attention_mask": ATTENTION[:2]}, ["attention_mask has the shape 2 x 6", "3 x 6"]),
        ({"attention_mask": at(ATTENTION, 1, 5, 2)}, ["Rollout '1': attention_mask[1, 5] is 2"]),
        ({"attention_mask": at(ATTENTION, 1, 5, 0.5)}, ["attention_mask[1, 5] is 0.5", "0 and 1"]),
        ({"attention_mask": at(ATTENTION, 1, 0, math.nan)}, ["attention_mask[1, 0] is nan"]),
        ({"attention_mask": torch.where(ATTENTION == 1, 0.0, -math.inf)}, ["[0, 5] is -inf"]),
        (
            {"attention_mask": at(ATTENTION, 0, 2, 0)},
            [
                "Rollout '0': attention_mask[0, 2] is 0 between tokens",
                "from column 0 to 4",
                "loss mask",
            ],
        ),
        (
            {"attention_mask": at(at(ATTENTION, 1, 1, 1), 1, 3, 0)},
            ["Rollout '1': attention_mask[1, 2] is 0 between tokens", "from column 1 to 5"],
        ),
        (
            {"attention_mask": ATTENTION * torch.tensor([[1], [0], [1]])},
            ["Rollout '1': attention_mask has no 1 in row 1", "at least one token"],
        ),
        ({"attention_mask": None}, ["attention_mask is None"]),
        ({"attention_mask": ATTENTION[:, None, None, :]}, ["the shape 3 x 1 x 1 x 6"]),
        # loss masks
        ({"loss_mask": MASK[:, 1:]}, ["loss_mask has the shape 3 x 5, but input_ids has 3 x 6"]),
        ({"loss_mask": at(MASK, 0, 0, 1)}, ["Rollout '0': loss_mask[0, 0] is 1", "token 0"]),
        (
            {"loss_mask": at(MASK, 1, 3, 1)},
            ["Rollout '1': loss_mask[1, 3] is 1", "predicts token 0"],
        ),
        (
            {"loss_mask": at(MASK, 0, 5, 1)},
            ["Rollout '0': loss_mask[0, 5] is 1, where there is padding", "from column 0 to 4"],
        ),
        ({"loss_mask": at(MASK, 1, 0, 1)}, ["loss_mask[1, 0] is 1, where there is padding"]),
        ({"loss_mask": at(MASK, 1, 0, math.nan)}, ["loss_mask[1, 0] is nan, where there is padd"]),
        ({"loss_mask": at(MASK, 2, 1, 0.25)}, ["Rollout '2': loss_mask[2, 1] is 0.25", "0 and 1"]),
        ({"loss_mask": IDS}, ["loss_mask[0, 0] is 5"]),
        ({"loss_mask": None}, ["loss_mask is None"]),
        # numbers
        ({"advantages": torch.ones(2)}, ["advantages has the shape 2", "[3]", "[3, 6]"]),
        ({"advantages": torch.ones(3, 5)}, ["advantages has the shape 3 x 5", "3 x 6"]),
        ({"advantages": torch.ones(3, 6, 1)}, ["advantages has the shape 3 x 6 x 1"]),
        (
            {"advantages": [1.0, math.nan, 1.0]},
            ["Rollout '1': advantages[1] is nan", "one finite number, or one per token"],
        ),
        ({"advantages": math.inf}, ["Rollout '0': advantages is inf"]),
        ({"advantages": [1.0, None, 1.0]}, ["advantages[1] is None"]),
        ({"advantages": "abc"}, ["advantages is 'abc'"]),
        ({"advantages": torch.ones(3, dtype=torch.complex64)}, ["advantages[0] is (1+0j)"]),
        (
            {"advantages": at(LOGPROBS, 2, 4, math.inf)},
            ["Rollout '2': advantages[2, 4] is inf, and token 4 is trained"],
        ),
        (
            {"weights": at(LOGPROBS, 1, 5, math.nan)},
            ["Rollout '1': weights[1, 5] is nan, and token 2 is trained"],
        ),
        ({"returns": torch.ones(3, 2)}, ["returns has the shape 3 x 2, but input_ids has 3 x 6"]),
        ({"old_values": torch.ones(3)}, ["old_values has the shape 3", "[3, 6] as input_ids"]),
        ({"old_values": 1.0}, ["old_values is 1.0"]),
        # log-probs
        (
            {"old_logprobs": at(LOGPROBS, 0, 4, math.nan)},
            ["Rollout '0': old_logprobs[0, 4] is nan, and token 4 is trained", "policy.score"],
        ),
        (
            {"old_logprobs": at(LOGPROBS, 1, 5, -math.inf)},
            ["old_logprobs[1, 5] is -inf, and token 2"],
        ),
        ({"old_logprobs": at(LOGPROBS, 1, 5, 0.5)}, ["old_logprobs[1, 5] is 0.5", "16 bits"]),
        ({"reference_logprobs": [[-1.0] * 6] * 2 + [[-1.0] * 5 + ["a"]]}, ["[2][5] is 'a'"]),
        (
            {"reference_logprobs": [[-1.0] * 6] * 2 + [[None] * 6]},
            ["Rollout '2': reference_logprobs[2, 2] is None, and token 2 is trained"],
        ),
        ({"old_logprobs": torch.zeros(3, 6, dtype=torch.bool)}, ["[0, 0] is False (bool)"]),
        ({"old_logprobs": sparse()}, ["old_logprobs is a Tensor", "sparse_coo", ".to_dense()"]),
        ({"old_logprobs": np.ma.masked_array(LOGPROBS, MASK)}, ["masked entries"]),
        # the rest
        ({"temperatures": [1.0, 0.0, 1.0]}, ["Rollout '1': temperature is 0.0", "above 0"]),
        ({"temperatures": [1.0, 1.0]}, ["temperatures has the shape 2", "[3]"]),
        ({"temperatures": torch.ones(3, 1)}, ["temperatures has 2 dimensions (3 x 1)"]),
        ({"group_ids": ["a", "b"]}, ["group_ids has 2 entries, but there are 3 rollouts"]),
        ({"group_ids": torch.ones(3)}, ["group_ids[0] is 1.0", "text, a whole number"]),
        ({"group_ids": torch.ones(3, 1, dtype=int)}, ["group_ids has the shape 3 x 1"]),
        ({"group_ids": "abc"}, ["group_ids is 'abc' of type str"]),
        ({"rollout_ids": ["a", "b", "a"]}, ["rollout_id 'a' is given twice, at positions 0 and 2"]),
        ({"rollout_ids": [1, "1", 2]}, ["rollout_id '1' is given twice, at positions 0 and 1"]),
        ({"extras": [1, None, None]}, ["extras[0] is 1", "a dict or None"]),
        ({"extras": {"a": 1}}, ["extras is {'a': 1} of type dict"]),
    ],
)
def test_padded_tensors_that_are_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RolloutError, match=refusal(*parts)) as caught:
        RolloutBatch.from_padded(**some(**changes))
    assert len(str(caught.value)) < 420


def test_refusals_name_the_rollout() -> None:
    fields = some(rollout_ids=["a", "b", "c"], old_logprobs=at(LOGPROBS, 1, 5, math.nan))
    with pytest.raises(
        RolloutError, match=r"Rollout 'b': old_logprobs\[1, 5\] is nan, and token 2"
    ):
        RolloutBatch.from_padded(**fields)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"prompt_ids": [[5, 6]]},
            ["prompt_ids has the shape 1 x 2, but completion_ids has 2 x 3", "repeat"],
        ),
        ({"prompt_ids": [[5, -1], [0, 7]]}, ["Rollout '0': prompt_ids[0, 1] is -1"]),
        ({"prompt_ids": [[5, 6], [0, -7]]}, ["Rollout '1': prompt_ids[1, 1] is -7"]),
        ({"completion_ids": [[1, 2, 0], [3, 4, -2]]}, ["Rollout '1': completion_ids[1, 2] is -2"]),
        ({"prompt_mask": [[1, 1]]}, ["prompt_mask has the shape 1 x 2, but prompt_ids has 2 x 2"]),
        (
            {"completion_mask": [[1, 0, 1], [1, 1, 1]]},
            ["completion_mask[0, 1] is 0 between tokens"],
        ),
        (
            {"prompt_mask": [[0, 0], [1, 1]], "completion_mask": [[0, 0, 0], [1, 1, 1]]},
            ["Rollout '0': prompt_mask and completion_mask have no 1 in row 0"],
        ),
        ({"prompt_mask": [[0, 0], [1, 1]]}, ["Rollout '0': completion_mask[0, 0] is 1", "token 0"]),
        (
            {"prompt_mask": [[0, 0], [1, 1]], "loss_mask": [[1, 1, 0], [1, 1, 1]]},
            ["Rollout '0': loss_mask[0, 0] is 1", "token 0"],
        ),
        ({"loss_mask": [[1, 1, 1], [1, 1, 1]]}, ["loss_mask[0, 2] is 1, where there is padding"]),
        ({"loss_mask": [[1, 1, 0]] * 2, "tool_mask": [[1, 1, 1]] * 2}, ["both loss_mask and tool"]),
        ({"tool_mask": [[1, 1, 1], [1, 2, 1]]}, ["Rollout '1': tool_mask[1, 1] is 2"]),
        ({"advantages": [[1.0] * 5] * 2}, ["advantages has the shape 2 x 5, but completion_ids"]),
        (
            {"old_logprobs": [[-1, math.nan, 0], [-1] * 3]},
            ["Rollout '0': old_logprobs[0, 1] is nan, and token 3 is trained"],
        ),
        ({"prompt_ids": []}, ["There are no rollouts"]),
    ],
)
def test_completions_that_are_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RolloutError, match=refusal(*parts)):
        RolloutBatch.from_completions(**split(**changes))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"input_ids": torch.arange(5)}, ["input_ids is flat, and offsets are not given"]),
        ({"offsets": [0, 3, 5]}, ["offsets are given, and input_ids has rows of its own"]),
        ({"input_ids": torch.arange(5), "offsets": [0, 3]}, ["offsets is [0, 3]", "from 0 to 5"]),
        ({"input_ids": torch.arange(5), "offsets": [0, 4, 3, 5]}, ["offsets is [0, 4, 3, 5]"]),
        ({"input_ids": torch.arange(5), "offsets": [1, 5]}, ["offsets is [1, 5]"]),
        ({"input_ids": torch.arange(5), "offsets": []}, ["offsets is []"]),
        ({"input_ids": torch.arange(5), "offsets": [0.0, 5]}, ["offsets[0] is 0.0"]),
        ({"input_ids": torch.arange(5), "offsets": [0, 0, 5]}, ["Rollout '0': input_ids has no"]),
        ({"input_ids": [[5, 6, 7], []]}, ["Rollout '1': input_ids has no entry in row 1"]),
        ({"input_ids": [[5, 6, 7], [8, -9]]}, ["Rollout '1': input_ids[1, 1] is -9"]),
        ({"input_ids": [[5, 6, 7], [8, 9.0]]}, ["input_ids[1][1] is 9.0"]),
        ({"input_ids": []}, ["There are no rollouts"]),
        ({"loss_mask": [[0, 1, 1]]}, ["loss_mask has 1 rows, but input_ids has 2"]),
        (
            {"loss_mask": [[0, 1], [0, 1]]},
            ["Rollout '0': loss_mask has 2 entries, but input_ids has 3"],
        ),
        ({"loss_mask": [0, 1, 1, 0]}, ["loss_mask has 4 entries, but input_ids has 5"]),
        ({"loss_mask": [0, 1, 1, 1, 1]}, ["Rollout '1': loss_mask[1, 0] is 1", "token 0"]),
        ({"advantages": [1.0, 2.0, 3.0]}, ["advantages has 3 entries, but input_ids has 5"]),
        ({"old_logprobs": [[0, -1], [0, -1]]}, ["Rollout '0': old_logprobs has 2 entries"]),
        ({"old_logprobs": [0, -1, math.nan, 0, -1]}, ["old_logprobs[0, 2] is nan, and token 2"]),
        ({"response_lengths": [2, 3]}, ["Rollout '1': response_lengths[1] is 3", "has 2 tokens"]),
        ({"response_lengths": [2, -1]}, ["response_lengths[1] is -1"]),
        ({"response_lengths": [2]}, ["response_lengths has the shape 1", "[2]"]),
        ({"response_lengths": [2, 1]}, ["loss_mask has 3 entries, but response_lengths has 2"]),
        (
            {"response_lengths": [2, 0], "loss_mask": [[1, 1], []], "advantages": [1.0, 2.0]},
            ["advantages has 2 entries", "could belong to either", "[N, 1]"],
        ),
        (
            {"input_ids": torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.jagged)},
            ["input_ids is a nested tensor of 3 dimensions"],
        ),
    ],
)
def test_jagged_tensors_that_are_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RolloutError, match=refusal(*parts)):
        RolloutBatch.from_jagged(**rows(**changes))


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="advantage"):
        RolloutBatch.from_padded(**some(), advantage=1.0)  # type: ignore[call-arg]
