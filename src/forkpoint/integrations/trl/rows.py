"""Rows of padded tokens that a trainer of TRL gives its model, as one batch of rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError
from forkpoint.rollouts.batch import RolloutBatch

IGNORED = -100
"""The label of a token that is not scored."""
REMEDIES = {
    "shift_labels": "Context parallelism is not supported: leave parallelism_config out.",
    "position_ids": "Rows without padding are not supported: set padding_free=False.",
    "pixel_values": "Images are not supported yet: train on a dataset without them.",
}
"""Arguments that TRL may give the model, and what to do about those that are refused."""


@dataclass(frozen=True, eq=False)
class Rows:
    """One call of a model: B rows of W columns.

    input_ids: int64 [B, W].
    present: bool [B, W]; False for padding.
    scored: bool [B, W]; tokens whose log-probs are asked for.
    routed: whether the load-balancing loss of a mixture's routers is asked for.
    """

    input_ids: Tensor
    present: Tensor
    scored: Tensor
    routed: bool = False

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any]) -> "Rows":
        """The rows of a call with these arguments.

        Raises UnsupportedError for arguments that change what is computed, and for labels that are
        not the tokens themselves.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        input_ids, labels = given.pop("input_ids"), given.pop("labels")
        mask = given.pop("attention_mask", None)
        routed = bool(given.pop("output_router_logits", False))
        for name in ("fused_lm_head", "use_cache"):  # TRL's head uses no cache whatever is given
            given.pop(name, None)
        for name in given:
            remedy = REMEDIES.get(name, "Leave out what makes the trainer pass it.")
            raise UnsupportedError(
                f"the trainer gives its model {name}, which forkpoint's trainers do not take: "
                f"input_ids, attention_mask and labels are allowed. {remedy}"
            )
        present = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        scored = labels != IGNORED
        scored[:, 0] = False  # nothing comes before it
        if bool((scored & (labels != input_ids)).any()):
            raise UnsupportedError(
                "the trainer's labels are other tokens than its input_ids; log-probs of the tokens "
                "themselves are what forkpoint computes. Use a loss of these."
            )
        return cls(input_ids, present, scored, routed)


class PackedRows:
    """Several calls' rows as one batch, and its values back in the calls' own shapes."""

    def __init__(self, calls: Sequence[Rows], temperature: float) -> None:
        """Raises UnsupportedError where a row's first token is scored, which stock TRL scores from
        padding; RolloutError for padding between tokens."""
        self.calls: tuple[Rows, ...] = tuple(calls)
        self.width: int = max(rows.input_ids.shape[1] for rows in calls)
        ids, present, scored = (
            torch.cat([self.widened(getattr(rows, name)) for rows in calls])
            for name in ("input_ids", "present", "scored")
        )
        first = present & (present.cumsum(1) == 1)
        if bool((first & scored).any()):
            raise UnsupportedError(
                "a row has a trained token and no token before it: its prompt is empty, so that "
                "TRL predicts the token from padding. Give every prompt at least one token, such "
                "as the tokenizer's bos_token."
            )
        self.batch: RolloutBatch = RolloutBatch.from_padded(
            ids, present, scored & present, temperatures=temperature
        )
        cells = np.flatnonzero(self.batch.layout.mask())
        self.cells: Tensor = torch.from_numpy(cells).to(ids.device)
        """int64 [T]: where the batch's tokens are in [N, width], flattened."""

    def widened(self, values_BW: Tensor) -> Tensor:
        """With columns of zeros on the right, to the width of the widest call."""
        return torch.nn.functional.pad(values_BW, (0, self.width - values_BW.shape[1]))

    def flat(self, values: Sequence[Tensor]) -> Tensor:
        """Values of the calls, each [B, W], for the batch's tokens: [T]."""
        return torch.cat([self.widened(x) for x in values]).flatten()[self.cells]

    def unpacked(self, values_T: Tensor) -> list[Tensor]:
        """Values of the batch's tokens, with their graph, in the shapes of TRL's outputs.

        Each is [B, W - 1]: column j belongs to the token of column j + 1, and is 0 where that is
        not scored.
        """
        count = sum(len(rows.input_ids) for rows in self.calls)
        every = values_T.new_zeros(count * self.width).index_put((self.cells,), values_T)
        found, begin = [], 0
        for rows in self.calls:
            size, width = rows.input_ids.shape
            found.append(every.view(count, self.width)[begin : begin + size, 1:width])
            begin += size
        return found
