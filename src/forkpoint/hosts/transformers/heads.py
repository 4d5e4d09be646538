"""Heads of transformers' models: log-probs of a language model, values of a critic."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.heads import LogprobHead, ModelHead
from forkpoint.hosts.modules import plain_class
from forkpoint.hosts.transformers import refusals
from forkpoint.hosts.transformers.families import Family
from forkpoint.losses.outputs import Head


def head_of(core: Any, family: Family, splits: Sequence[Any]) -> ModelHead:
    """The head of a model. `splits`: modules that are split over ranks."""
    if plain_class(core).__name__ == family.critic_class:
        return ValueHead(core)
    return LogprobHead(
        lambda: refusals.plain_head(core),
        lambda: family.head_options(core),
        frozenset(module for _, module, _ in splits),
    )


class ValueHead:
    """The head of a critic: the model's own `score` with one label. It needs no labels and no
    chunks.

    The value of a trained token is computed from the tokens before it: V(s) of the state s in which
    the token is the action.
    """

    gives: Head = "values"

    def __init__(self, critic: Any) -> None:
        """`critic`: a model with `dropout` and `score`, such as transformers' token classifiers."""
        self.critic = critic

    def check(self) -> None:
        score = self.critic.score
        for wrapped in ("original_module", "base_layer"):  # of peft's modules_to_save and LoRA
            score = getattr(score, wrapped, score)
        name = type(self.critic).__name__
        if type(score) is not nn.Linear:
            raise UnsupportedError(
                f"score of {name} is a {type(score).__module__}.{type(score).__name__}; only a "
                "plain torch.nn.Linear has been shown exact. Leave score out of adapters and "
                "quantization."
            )
        if score.out_features != 1:
            raise UnsupportedError(
                f"{name} has {score.out_features} labels; a critic gives one value a token. Load "
                "it with num_labels=1."
            )

    def width(self) -> int:
        return 1

    def keeps_logits(self, dtype_bytes: int) -> bool:
        return False

    def enter(self, changes: Changes) -> None:
        """Does nothing, because `score` is called unchanged."""

    def forward(self, hidden_nC: Tensor, context: CallContext) -> dict[str, Tensor]:
        values_n1 = self.critic.score(self.critic.dropout(hidden_nC))
        values_n = values_n1.sum(-1)  # of one label; no view, for fully_shard
        return {"values": values_n.to(torch.promote_types(values_n.dtype, torch.float32))}
