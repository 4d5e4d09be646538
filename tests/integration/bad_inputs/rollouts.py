"""Rollouts and batches with values that are not allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import forkpoint
from bad_inputs.kind import Kind, with_field
from forkpoint import Policy, Rollout, RolloutBatch, load_rollouts, losses, wrap
from forkpoint.errors import RolloutError
from forkpoint.testing import tiny_model


def rollout(**changes: Any) -> Rollout:
    fields = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "advantage": 0.5, "rollout_id": "a"}
    return Rollout(**(fields | changes))


def policy(dtype: torch.dtype = torch.float64) -> Policy:
    return wrap(tiny_model("llama", dtype=dtype))


def value_kind(call: Callable[[], object], message: str) -> Kind:
    """Values that only Python can give, or only a model can refuse."""
    return Kind(error=RolloutError, message=message, call=call)


def line_kind(lines: str, message: str) -> Kind:
    """Lines of JSON that neither a batch of `load_rollouts` nor `forkpoint plan` takes."""
    return Kind(
        error=RolloutError,
        message=message,
        prepare=lambda _: Path("bad.jsonl").write_text(lines),
        call=lambda: RolloutBatch(load_rollouts("bad.jsonl")),
        argv=("plan", "bad.jsonl"),
    )


ROLLOUTS = (
    line_kind(
        with_field("loss_mask", "[1,1]"),
        "bad.jsonl, line 1: Rollout 'a': loss_mask has 2 entries, but token_ids has 3. Every "
        "per-token field has one entry per token, and it belongs to that token. Use 0 for tokens "
        "without a value, such as the prompt.",
    ),
    line_kind(
        with_field("loss_mask", "[1,1,1]"),
        "bad.jsonl, line 1: Rollout 'a': loss_mask[0] is 1, but no earlier token predicts token 0. "
        "Set it to 0, or put the prompt (at least a start token) before the trained tokens.",
    ),
    line_kind(
        with_field("advantage", "NaN"),
        "bad.jsonl, line 1: Rollout 'a': advantage is nan; it takes one finite number, or one per "
        "token. Look for a division by 0 or for text in the code that computes it.",
    ),
    line_kind(
        with_field("old_logprobs", "[0,-1,NaN]"),
        "bad.jsonl, line 1: Rollout 'a': old_logprobs[2] is nan, and this token is trained. The "
        "log-prob of a token that was sampled is finite; compute it again, as policy.score(batch) "
        "does, or set loss_mask to 0 at that token.",
    ),
    line_kind(
        with_field("old_logprobs", "[0,-1,0.7]"),
        "bad.jsonl, line 1: Rollout 'a': old_logprobs[2] is 0.7; the logarithm of a probability is "
        "at most 0, and rounding to 16 bits adds at most 0.125. Give log-probs rather than "
        "probabilities or their negatives.",
    ),
    value_kind(
        lambda: wrap(tiny_model("llama")).forward_backward(RolloutBatch([]), losses.SFT()),
        "There are no rollouts",
    ),
    value_kind(
        lambda: forkpoint.place([], ranks=2, model=None),
        "there are no rollouts to place; give every rank all rollouts of the step.",
    ),
    value_kind(
        lambda: policy().score(RolloutBatch([rollout(token_ids=[5, 61, 7])])),
        "Rollout 'a': token_ids[1] is 61, but the vocabulary has 61 entries (ids from 0 to 60). "
        "Use the model whose tokenizer made these rollouts.",
    ),
    value_kind(
        lambda: policy(torch.float32).forward_backward(
            RolloutBatch([rollout(advantage=1e39)]), losses.GRPO()
        ),
        "Rollout 'a': advantage is 1e+39 at its token 1",
    ),
    value_kind(
        lambda: policy(torch.float32).score(RolloutBatch([rollout(temperature=1e-300)])),
        "Rollout 'a': temperature is 1e-300",
    ),
)
