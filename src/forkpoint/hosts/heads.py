"""Heads over a decoder's last hidden states: log-probs of labels, or a critic's values."""

from contextlib import nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts import refusals
from forkpoint.hosts.arguments import CallContext, refuse_call
from forkpoint.hosts.coverings import in_float32
from forkpoint.hosts.families import Family
from forkpoint.hosts.foreign_calls import refuse_calls
from forkpoint.hosts.local_heads import check_local_head, local_head
from forkpoint.hosts.parallel_forwards import parallel_forward
from forkpoint.losses.outputs import Head
from forkpoint.ops.head import token_outputs


class ModelHead(Protocol):
    """The head of a model; made anew of it whenever it is used."""

    gives: Head

    def check(self) -> None:
        """Raises UnsupportedError where the head is not one that has been shown exact."""
        ...

    def width(self) -> int:
        """Outputs for one token."""
        ...

    def enter(self, changes: Changes) -> None:
        """Run within the call of the head's module from now on, until the changes are undone: hooks
        around it gather its weights."""
        ...

    def forward(self, hidden_nC: Tensor, context: CallContext) -> dict[str, Tensor]:
        """Outputs for the context's head places, from their last hidden states: [n]."""
        ...


class LogprobHead:
    """A causal language model's, computed in chunks instead of as logits of a whole microbatch."""

    gives: Head = "logprobs"

    def __init__(self, causal: PreTrainedModel, family: Family) -> None:
        self.causal: PreTrainedModel = causal
        self.family: Family = family
        self._called: bool = False
        """Whether the module's own call computes log-probs."""
        self._in_float32: bool = False
        """Where it does, whether its product is in float32."""

    def check(self) -> None:
        head = refusals.plain_head(self.causal)
        if parallel_forward("the output head", head) is not None:
            check_local_head(head)

    def width(self) -> int:
        return refusals.plain_head(self.causal).out_features

    def enter(self, changes: Changes) -> None:
        changes.set(vars(self), "_in_float32", in_float32(refusals.plain_head(self.causal)))
        changes.set(vars(self), "_called", True)
        changes.replace_forward(refusals.plain_head(self.causal), self._logprobs)
        refuse_calls([refusals.plain_head(self.causal)], changes)

    def forward(self, hidden_nC: Tensor, context: CallContext) -> dict[str, Tensor]:
        if self._called:
            return refusals.plain_head(self.causal)(hidden_nC, context)
        return self._logprobs(hidden_nC, context)

    def _logprobs(self, hidden_nC: Tensor, context: CallContext | None = None) -> dict[str, Tensor]:
        if context is None:
            refuse_call()
        head, inputs = refusals.plain_head(self.causal), context.inputs
        weight, bias, shard = local_head(head)
        around, keeps = nullcontext(), inputs.microbatch.keeps_logits
        if self._in_float32 if self._called else in_float32(head):
            around = torch.autocast(hidden_nC.device.type, enabled=False)
            # Plans count logits in the model's dtype: wider ones are computed again.
            keeps = keeps and hidden_nC.dtype == torch.float32
            hidden_nC, weight = hidden_nC.float(), weight.float()
            bias = None if bias is None else bias.float()
        with around:
            return token_outputs(
                hidden_nC,
                weight,
                inputs.head_labels,
                bias_V=bias,
                shard=shard,
                temperature_T=inputs.head_temperatures,
                entropy=context.entropy,
                chunk_tokens=context.kernels.head_chunk_tokens,
                keep_logits=keeps,
                statistics=context.kernels.head_statistics,
                **self.family.head_options(self.causal),
            )


class ValueHead:
    """A critic's: the model's own `score` of one label, which needs neither labels nor chunks.

    The place of an edge holds the token before the label, so that the value of a trained token is
    that of the tokens before it: V(s) of the state in which the token is the action.
    """

    gives: Head = "values"

    def __init__(self, critic: PreTrainedModel) -> None:
        self.critic = critic

    def check(self) -> None:
        score = self.critic.score
        for wrapped in ("original_module", "base_layer"):  # of peft's modules_to_save and LoRA
            score = getattr(score, wrapped, score)
        name = type(self.critic).__name__
        if type(score) is not nn.Linear:
            raise UnsupportedError(
                f"score of {name} is a {type(score).__module__}.{type(score).__name__}; values of "
                "a plain torch.nn.Linear, as transformers makes it, have been shown exact."
            )
        if score.out_features != 1:
            raise UnsupportedError(
                f"{name} has {score.out_features} labels; a critic gives one value a token. Load "
                "it with num_labels=1."
            )

    def width(self) -> int:
        return 1

    def enter(self, changes: Changes) -> None:
        """Nothing changes: `score` is called as it is."""

    def forward(self, hidden_nC: Tensor, context: CallContext) -> dict[str, Tensor]:
        dropout = cast(nn.Module, self.critic.dropout)
        score = cast(nn.Module, self.critic.score)
        values_n = score(dropout(hidden_nC)).sum(-1)  # of one label; no view, for fully_shard
        return {"values": values_n.to(torch.promote_types(values_n.dtype, torch.float32))}
