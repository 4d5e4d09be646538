"""Rollouts and batches with values that are not allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bad_inputs.kind import GOOD, Kind, file_kind, with_field
from forkpoint import Policy, Rollout, RolloutBatch, load_rollouts, losses, wrap
from forkpoint.errors import RolloutError
from forkpoint.testing import tiny_model


def rollout(**changes: Any) -> Rollout:
    fields = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "advantage": 0.5, "rollout_id": "a"}
    return Rollout(**(fields | changes))


def policy(dtype: torch.dtype = torch.float64) -> Policy:
    return wrap(tiny_model("llama", dtype=dtype))


def value_kind(
    name: str, call: Callable[[], object], *, message: str, means: str, remedy: str
) -> Kind:
    """Values that only Python can give, or only a model can refuse."""
    return Kind(
        name=name, error=RolloutError, message=message, means=means, remedy=remedy, call=call
    )


ROLLOUTS = (
    file_kind(
        "A token id below 0",
        with_field("token_ids", "[1,-100,3]"),
        message="bad.jsonl, line 1: Rollout 'a': token_ids[1] is -100; it takes whole "
        "numbers from 0 to 2147483647, the ids that the model read.",
        means="No token has such an id; -100 is what some trainers put where nothing is trained.",
        remedy="Give the ids that the model read, and mark what is trained in loss_mask.",
    ),
    file_kind(
        "A token id that is no whole number",
        with_field("token_ids", "[1,2.0,3]"),
        message="bad.jsonl, line 1: Rollout 'a': token_ids[1] is 2.0; it takes whole "
        "numbers from 0 to 2147483647, the ids that the model read, in a "
        "one-dimensional list or array, without padding.",
        means="Ids have been through a float somewhere, where large ones are rounded.",
        remedy="Keep ids as integers all the way.",
    ),
    file_kind(
        "A token id that is true",
        with_field("token_ids", "[1,true,3]"),
        message="bad.jsonl, line 1: Rollout 'a': token_ids[1] is True; it takes whole "
        "numbers from 0 to 2147483647, the ids that the model read, in a "
        "one-dimensional list or array, without padding.",
        means="Masks and ids have been mixed up.",
        remedy="Look at the order of the fields where the line is written.",
    ),
    file_kind(
        "A token id beyond 32 bits",
        with_field("token_ids", "[1,2,2147483648]"),
        message="bad.jsonl, line 1: Rollout 'a': token_ids[2] is 2147483648; it takes whole "
        "numbers from 0 to 2147483647, the ids that the model read.",
        means="Kernels index vocabularies with 32 bits.",
        remedy="Look for an overflow or a hash where ids are made.",
    ),
    file_kind(
        "Token ids in nested lists",
        with_field("token_ids", "[[1,2],[3]]"),
        message="bad.jsonl, line 1, row 0: loss_mask has 3 rows, but token_ids has 2. Where "
        "token_ids holds lists, each is a rollout, and every other list has as many "
        "entries; one rollout has one list of ids.",
        means="A rollout is one sequence, with its prompt and response in it.",
        remedy="Join the lists; turns of a conversation follow one another.",
    ),
    file_kind(
        "A rollout without tokens",
        with_field("token_ids", "[]").replace("[0,1,1]", "[]"),
        message="bad.jsonl, line 1: Rollout 'a': token_ids is empty; a rollout has at least one "
        "token. Leave this rollout out.",
        means="There is nothing to run.",
        remedy="Leave it out where the file is written.",
    ),
    value_kind(
        "A padded matrix of token ids",
        lambda: rollout(token_ids=np.zeros((2, 3), int)),
        message="Rollout 'a': token_ids has 2 dimensions (2 x 3); it takes whole "
        "numbers from 0 to 2147483647, the ids that the model read, in a "
        "one-dimensional list or array, without padding.",
        means="A matrix holds several rollouts, and padding would be taken for tokens.",
        remedy="Make one Rollout of each line, without its padding.",
    ),
    file_kind(
        "A loss mask of another length",
        with_field("loss_mask", "[1,1]"),
        message="bad.jsonl, line 1: Rollout 'a': loss_mask has 2 entries, but token_ids has 3. "
        "Every per-token field has one entry per token of these, and it belongs to that token. "
        "Fill up with 0 where there is no value, as over the prompt.",
        means="Entry i belongs to token i, and here it is not known which token is meant. Often "
        "the mask is that of the response alone.",
        remedy="Put a 0 for every token of the prompt before it.",
    ),
    file_kind(
        "A loss mask with other numbers than 0 and 1",
        with_field("loss_mask", "[0,1,2]"),
        message="bad.jsonl, line 1: Rollout 'a': loss_mask[2] is 2; it takes 0 and 1, "
        "or booleans: 1 where the token is trained, one per token, in a one-dimensional list or "
        "array.",
        means="A mask says which tokens are trained, not how much.",
        remedy="Put factors into weights.",
    ),
    file_kind(
        "A loss mask of floats",
        with_field("loss_mask", "[0,1,0.5]"),
        message="bad.jsonl, line 1: Rollout 'a': loss_mask[2] is 0.5; it takes 0 and 1, "
        "or booleans: 1 where the token is trained, one per token, in a one-dimensional list or "
        "array.",
        means="A mask says which tokens are trained, not how much.",
        remedy="Put factors into weights.",
    ),
    file_kind(
        "A first token that is trained",
        with_field("loss_mask", "[1,1,1]"),
        message="bad.jsonl, line 1: Rollout 'a': loss_mask[0] is 1, but no earlier token predicts "
        "token 0. Set it to 0, or put the prompt (at least a start token) before the "
        "trained tokens.",
        means="A model predicts a token from those before it, and there are none.",
        remedy="Put the start token that the model read before the others, with a mask of 0.",
    ),
    file_kind(
        "An advantage that is missing",
        with_field("advantage", "null"),
        message="bad.jsonl, line 1: Rollout 'a': advantage is None; it takes one finite number, or "
        "one per token. Look for a division by 0, or for text where a number belongs, "
        "where it is made.",
        means="Without it nothing says in which direction to train.",
        remedy="Give a number; 1 for plain likelihood, whose loss does not use it.",
    ),
    file_kind(
        "An advantage that is NaN",
        with_field("advantage", "NaN"),
        message="bad.jsonl, line 1: Rollout 'a': advantage is nan; it takes one finite number, or "
        "one per token. Look for a division by 0, or for text where a number belongs, "
        "where it is made.",
        means="It would reach every gradient. Mostly it comes from rewards that are all equal, "
        "divided by their standard deviation of 0.",
        remedy="Add a small number to that standard deviation, or give such groups 0.",
    ),
    file_kind(
        "An infinite advantage of one token",
        with_field("advantage", "[0,1,Infinity]"),
        message="bad.jsonl, line 1: Rollout 'a': advantage[2] is inf, and token 2 is trained. "
        "Its number must be finite; look for a division by 0 where the numbers are made.",
        means="It would reach every gradient.",
        remedy="Look for a division by 0 where it is made.",
    ),
    file_kind(
        "An advantage that is text",
        with_field("advantage", '"0.5"'),
        message="bad.jsonl, line 1: Rollout 'a': advantage is '0.5'; it takes one finite number, "
        "or one per token. Look for a division by 0, or for text where a number belongs, "
        "where it is made.",
        means="A number was written as text.",
        remedy="Convert it with float() before it is written.",
    ),
    file_kind(
        "Advantages of another length",
        with_field("advantage", "[0.5,0.5]"),
        message="bad.jsonl, line 1: Rollout 'a': advantage has 2 entries, but token_ids has 3. "
        "Every per-token field has one entry per token of these, and it belongs to that token. "
        "Fill up with 0 where there is no value, as over the prompt.",
        means="Entry i belongs to token i, and here it is not known which token is meant.",
        remedy="Give one number for all tokens, or fill up with 0 over the prompt.",
    ),
    file_kind(
        "A log-prob of a trained token that is NaN",
        with_field("old_logprobs", "[0,-1,NaN]"),
        message="bad.jsonl, line 1: Rollout 'a': old_logprobs[2] is nan, and token 2 is "
        "trained. The log-prob of a token that was sampled is finite; compute it again, as "
        "policy.score(batch) does, or set loss_mask to 0 at that token.",
        means="It would reach the ratio, and so every gradient. At tokens that are not trained NaN "
        "is accepted.",
        remedy="Look at what the sampler returned for this token.",
    ),
    file_kind(
        "A log-prob of a trained token that is minus infinity",
        with_field("reference_logprobs", "[0,-1,-Infinity]"),
        message="bad.jsonl, line 1: Rollout 'a': reference_logprobs[2] is -inf, and token 2 is "
        "trained. The log-prob of a token that was sampled is finite; compute it again, as "
        "policy.score(batch) does, or set loss_mask to 0 at that token.",
        means="The ratio or the KL divergence would be infinite. Samplers give it for tokens that "
        "top-k, top-p or a grammar has excluded. At tokens that are not trained it is accepted.",
        remedy="Compute log-probs without those restrictions, or do not train the token.",
    ),
    file_kind(
        "A log-prob above 0",
        with_field("old_logprobs", "[0,-1,0.7]"),
        message="bad.jsonl, line 1: Rollout 'a': old_logprobs[2] is 0.7; the logarithm of a "
        "probability is at most 0, and rounding to 16 bits adds at most 0.125. Give log-probs "
        "rather than probabilities or their negatives.",
        means="Probabilities are at most 1. This is a probability, or its sign was lost. Values "
        "up to 0.125 are accepted and kept: rounding of logits to 16 bits gives such.",
        remedy="Take the logarithm, or the sign back.",
    ),
    file_kind(
        "Log-probs of another length",
        with_field("old_logprobs", "[-1,-1]"),
        message="bad.jsonl, line 1: Rollout 'a': old_logprobs has 2 entries, but token_ids has 3. "
        "Every per-token field has one entry per token of these, and it belongs to that token. "
        "Fill up with 0 where there is no value, as over the prompt.",
        means="A log-prob stands at the token that it is the log-prob of; those of the response "
        "alone, or shifted by one, would be taken for others.",
        remedy="Put a 0 for every token of the prompt before them.",
    ),
    file_kind(
        "One log-prob for all tokens",
        with_field("reference_logprobs", "-1.0"),
        message="bad.jsonl, line 1: Rollout 'a': reference_logprobs is -1.0; it takes numbers, "
        "one per token, in a one-dimensional list or array.",
        means="A sum over the rollout cannot be taken apart again.",
        remedy="Give the log-prob of each token.",
    ),
    file_kind(
        "null for the log-prob of a trained token",
        with_field("old_logprobs", "[null,null,-1]"),
        message="bad.jsonl, line 1: Rollout 'a': old_logprobs[1] is None, and token 1 is "
        "trained. The log-prob of a token that was sampled is finite; compute it again, as "
        "policy.score(batch) does, or set loss_mask to 0 at that token.",
        means="Some servers give null for tokens whose log-prob they have not computed. At tokens "
        "that are not trained it is accepted.",
        remedy="Ask the server for the log-prob of every sampled token.",
    ),
    value_kind(
        "A tensor whose numbers cannot be read",
        lambda: rollout(old_logprobs=torch.tensor([0.0, -1, -1]).to_sparse()),
        message="Rollout 'a': old_logprobs is a Tensor of torch.float32, torch.sparse_coo, on cpu, "
        "whose numbers cannot be read. Give an ordinary tensor of this rollout alone: .to_dense() "
        "of a sparse one, .dequantize() of a quantized one, .full_tensor() of a distributed one, "
        "one part of a nested one.",
        means="Tensors of any real dtype, device and strides are read, but not sparse, nested, "
        "quantized or distributed ones, nor those without storage (device meta).",
        remedy="Make an ordinary tensor of it.",
    ),
    value_kind(
        "A numpy array with masked entries",
        lambda: rollout(weights=np.ma.masked_array([0.0, 1, 1], [0, 0, 1])),
        message="Rollout 'a': weights is a numpy array with masked entries, which have no value. "
        "Fill them with .filled(0).",
        means="A masked entry says that there is no number, and the rollout needs one.",
        remedy=".filled(0), or the number that belongs there.",
    ),
    file_kind(
        "A weight that is infinite",
        with_field("weights", "Infinity"),
        message="bad.jsonl, line 1: Rollout 'a': weights is inf; it takes one finite number, or "
        "one per token. Look for a division by 0, or for text where a number belongs, "
        "where it is made.",
        means="It would reach every gradient. Mostly it is an importance ratio that overflowed.",
        remedy="Cap it; forkpoint.losses.importance_weights does.",
    ),
    file_kind(
        "A temperature of 0",
        with_field("temperature", "0"),
        message="bad.jsonl, line 1: Rollout 'a': temperature is 0; it takes one finite number "
        "above 0. Give the temperature of the sampling; for greedy decoding give 1.",
        means="Log-probs are those of logits divided by it.",
        remedy="For greedy decoding give 1: the log-probs of a deterministic choice are all 0.",
    ),
    file_kind(
        "A group_id that is neither text nor a whole number",
        with_field("group_id", "1.5"),
        message="bad.jsonl, line 1: Rollout 'a': group_id is 1.5; it takes text, a whole number or "
        "None. Write it as text.",
        means="Ids are compared, and floats that look equal may differ.",
        remedy="Write it as text.",
    ),
    file_kind(
        "A rollout_id that is a list",
        with_field("rollout_id", "[1]"),
        message="bad.jsonl, line 1: A rollout: rollout_id is [1]; it takes text, a whole number or "
        "None. Write it as text.",
        means="An id names one rollout.",
        remedy='Join its parts to text, such as "7/1".',
    ),
    value_kind(
        "No rollouts in a batch",
        lambda: wrap(tiny_model("llama")).forward_backward(RolloutBatch([]), losses.SFT()),
        message="There are no rollouts; a batch takes at least one, but for a rank that has none "
        "in a step of several ranks.",
        means="A step over nothing has no loss.",
        remedy="Skip the step where a filter leaves nothing.",
    ),
    value_kind(
        "A batch of things that are no rollouts",
        lambda: RolloutBatch([{"token_ids": [1]}]),  # type: ignore[list-item]
        message="Item 0 is {'token_ids': [1]} of type dict; a batch takes Rollout objects. Make "
        "them with Rollout(...) or load_rollouts(path).",
        means="Only a Rollout has been validated.",
        remedy="Rollout(**record) makes one of a dict with its fields.",
    ),
    value_kind(
        "A rollout in place of a list of them",
        lambda: RolloutBatch(rollout()),  # type: ignore[arg-type]
        message="The rollouts are Rollout(rollout_id='a', group_id=None, 3 tokens, 2 trained) of "
        "type Rollout; a batch takes a list of Rollout objects. Put a single one into a "
        "list; load_rollouts(path) reads a file.",
        means="A batch is made of a list, even of one rollout.",
        remedy="RolloutBatch([rollout]).",
    ),
    value_kind(
        "A path in place of rollouts",
        lambda: RolloutBatch("rollouts.jsonl"),  # type: ignore[arg-type]
        message="The rollouts are 'rollouts.jsonl' of type str; a batch takes a list of Rollout "
        "objects. Put a single one into a list; load_rollouts(path) reads a file.",
        means="A batch does not read files.",
        remedy='RolloutBatch(load_rollouts("rollouts.jsonl")).',
    ),
    value_kind(
        "A rollout_id twice in a batch",
        lambda: RolloutBatch([rollout(), rollout(rollout_id="b"), rollout()]),
        message="rollout_id 'a' is given twice, at positions 0 and 2; each rollout of a batch "
        "needs its own. Rename one, or leave rollout_id out.",
        means="Results are named by rollout_id and could not be told apart.",
        remedy="Leave rollout_id out: the batch fills in positions.",
    ),
    Kind(
        name="Log-probs of some rollouts alone",
        error=RolloutError,
        message="Rollout 'a' has old_logprobs and rollout 'b' has not; a batch needs it of all of "
        "its rollouts or of none. Add what is missing, or make two batches.",
        means="A loss reads a field of the whole batch, or runs without it.",
        remedy="Compute what is missing with policy.score, or train the two kinds apart.",
        prepare=lambda _: Path("bad.jsonl").write_text(
            with_field("old_logprobs", "[0,-1,-1]") + "\n" + GOOD.replace('"a"', '"b"')
        ),
        call=lambda: RolloutBatch(load_rollouts("bad.jsonl")),
        argv=("plan", "bad.jsonl"),
    ),
    value_kind(
        "A rollout in place of a batch",
        lambda: policy().forward_backward(rollout(), losses.GRPO()),  # type: ignore[arg-type]
        message="the batch is Rollout(rollout_id='a', group_id=None, 3 tokens, 2 trained) of type "
        "Rollout; it takes a RolloutBatch, or a list of Rollout objects.",
        means="Steps, scores, plans and verify take a RolloutBatch, or make one of a list.",
        remedy="RolloutBatch([rollout]), or [rollout].",
    ),
    value_kind(
        "A token id beyond the model's vocabulary",
        lambda: policy().score(RolloutBatch([rollout(token_ids=[5, 61, 7])])),
        message="Rollout 'a': token_ids[1] is 61, but the vocabulary has 61 entries, so that ids "
        "go from 0 to 60. Use the model whose tokenizer made these rollouts.",
        means="The rollouts were made with another tokenizer than the model's.",
        remedy="Take the model that sampled, or tokenize again.",
    ),
    value_kind(
        "A number that overflows in float32",
        lambda: policy(torch.float32).forward_backward(
            RolloutBatch([rollout(advantage=1e39)]), losses.GRPO()
        ),
        message="Rollout 'a': advantage is 1e+39 at its token 1; this model's losses are computed "
        "in float32, which holds numbers up to 3.4e+38. Look for a division by nearly 0 "
        "where it is made.",
        means="Rollouts hold float64, and losses are computed in float32 unless the model is "
        "float64: there it would be infinite.",
        remedy="Look for a standard deviation of nearly 0 that it was divided by.",
    ),
    value_kind(
        "A temperature that is 0 in float32",
        lambda: policy(torch.float32).score(RolloutBatch([rollout(temperature=1e-300)])),
        message="Rollout 'a': temperature is 1e-300; this model's log-probs are computed in "
        "float32, where it takes at least 2.94e-39. For greedy decoding give 1.",
        means="Logits are divided by it and would be infinite.",
        remedy="Give the temperature of the sampling; for greedy decoding give 1.",
    ),
)
