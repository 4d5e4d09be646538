"""Small tensors of batches, in the three forms that RolloutBatch takes."""

from typing import Any

import torch


def some(**changes: Any) -> dict[str, Any]:
    """Tensors of from_padded: rows of 5, 3 and 6 tokens, padded on the right, left, not at all."""
    fields: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 0], [0, 0, 0, 5, 6, 7], [5, 6, 1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1] * 6]),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 0]]),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
    }
    return fields | changes


def split(**changes: Any) -> dict[str, Any]:
    """Tensors of from_completions: two prompts of 2 and 1 tokens, completions of 2 and 3."""
    fields: dict[str, Any] = {
        "prompt_ids": [[5, 6], [0, 7]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[1, 2, 0], [3, 4, 2]],
        "completion_mask": [[1, 1, 0], [1, 1, 1]],
        "advantages": [1.0, 2.0],
    }
    return fields | changes


def rows(**changes: Any) -> dict[str, Any]:
    """Rows of from_jagged: rollouts of 3 and 2 tokens."""
    fields = {"input_ids": [[5, 6, 7], [8, 9]], "loss_mask": [[0, 1, 1], [0, 1]]}
    return fields | changes
