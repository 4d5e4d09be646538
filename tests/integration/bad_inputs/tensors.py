"""Tensors that no batch is made from, and values that do not fit the tensors of a batch."""

from typing import Any

import torch

from bad_inputs.kind import Kind
from bad_inputs.rollouts import value_kind
from forkpoint import RolloutBatch


def padded(**changes: Any) -> RolloutBatch:
    """Two rollouts of 4 and 3 tokens in rows of 4."""
    fields = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    return RolloutBatch.from_padded(**(fields | changes))


TENSORS: tuple[Kind, ...] = (
    value_kind(
        lambda: padded(attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])),
        "The batch: attention_mask[0, 1] is 0 between tokens. Put padding before or after the "
        "tokens of a row. Set loss_mask to 0 for tokens that are not trained.",
    ),
    value_kind(
        lambda: padded(old_logprobs=torch.tensor([[-1.0, -1.0], [-1.0, 0.0]])),
        "The batch: old_logprobs has 2 entries in row 0, but input_ids has 4. Give one entry per "
        "token. For fields of responses only, use from_completions, or from_jagged with "
        "response_lengths.",
    ),
)
