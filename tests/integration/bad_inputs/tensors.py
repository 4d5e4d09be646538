"""Tensors that no batch is made from, and values that do not fit the tensors of a batch."""

from typing import Any

import torch

from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy, value_kind
from forkpoint import RolloutBatch, losses
from forkpoint.errors import ConfigError


def padded(**changes: Any) -> RolloutBatch:
    """Two rollouts of 4 and 3 tokens in rows of 4."""
    fields = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    return RolloutBatch.from_padded(**(fields | changes))


def completions(**changes: Any) -> RolloutBatch:
    """Two rollouts of prompts of 2 tokens and completions of 2 and 1."""
    fields = {
        "prompt_ids": torch.tensor([[5, 6], [5, 6]]),
        "prompt_mask": torch.tensor([[1, 1], [1, 1]]),
        "completion_ids": torch.tensor([[7, 8], [9, 0]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([1.0, -1.0]),
    }
    return RolloutBatch.from_completions(**(fields | changes))


def jagged(**changes: Any) -> RolloutBatch:
    """Two rollouts of 3 and 2 tokens."""
    fields = {
        "input_ids": torch.tensor([5, 6, 7, 5, 6]),
        "loss_mask": torch.tensor([0, 1, 1, 0, 1]),
        "offsets": torch.tensor([0, 3, 5]),
    }
    return RolloutBatch.from_jagged(**(fields | changes))


TENSORS = (
    value_kind(
        "Padding between the tokens of a row",
        lambda: padded(attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])),
        message="Rollout '0': attention_mask[0, 1] is 0 between tokens, which go from column 0 to "
        "3. Padding lies before or after the tokens of a row; mark tokens that are not "
        "trained in the loss mask.",
        means="The tokens of a rollout follow one another, and positions count them. A hole would "
        "be taken out of the sequence.",
        remedy="Pad before or after a row's tokens. What is not trained, such as a tool's result, "
        "has a 1 in the attention mask and a 0 in the loss mask.",
    ),
    value_kind(
        "A row without tokens",
        lambda: padded(attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])),
        message="Rollout '1': attention_mask has no 1 in row 1; a rollout has at least one token. "
        "Leave this rollout out.",
        means="There is nothing to run. Rows that only fill up a batch are like this.",
        remedy="Leave the row out of every tensor.",
    ),
    value_kind(
        "A loss mask that trains padding",
        lambda: padded(loss_mask=torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])),
        message="Rollout '1': loss_mask[1, 3] is 1, where there is padding: the tokens of row 1 go "
        "from column 0 to 2. Set it to 0, or multiply the loss mask with the attention "
        "mask.",
        means="Padding is no token, whichever id it has.",
        remedy="Multiply the loss mask with the attention mask. TRL's tool_mask is 1 at padding: "
        "give it as tool_mask to from_completions.",
    ),
    value_kind(
        "An attention mask of other numbers than 0 and 1",
        lambda: padded(attention_mask=torch.tensor([[0.0] * 4, [0.0, 0.0, 0.0, -torch.inf]])),
        message="Rollout '1': attention_mask[1, 3] is -inf; it takes 0 and 1, or booleans: 1 where "
        "there is a token, 0 where there is padding.",
        means="Masks that are added to attention scores, 0 and minus infinity, are another kind.",
        remedy="Give the mask that the tokenizer returned.",
    ),
    value_kind(
        "Log-probs of completions for whole rows",
        lambda: padded(old_logprobs=torch.tensor([[-1.0, -1.0], [-1.0, 0.0]])),
        message="The batch: old_logprobs has the shape 2 x 2, but input_ids has 2 x 4. Every "
        "per-token field has one entry per token of these, and it belongs to that token. "
        "Give fields over completions alone to RolloutBatch.from_completions.",
        means="The entry at a token belongs to it, and here it is not known which token is meant.",
        remedy="Give prompts and completions apart to from_completions; its per-token fields are "
        "over completions.",
    ),
    value_kind(
        "A padded log-prob of a trained token that is NaN",
        lambda: padded(old_logprobs=torch.tensor([[0, 0, -1, -1], [0, 0, torch.nan, 0]])),
        message="Rollout '1': old_logprobs[1, 2] is nan, and token 2 is trained. The log-prob of a "
        "token that was sampled is finite; compute it again, as policy.score(batch) does, "
        "or set loss_mask to 0 at that token.",
        means="It would reach the ratio, and so every gradient. At padding, and at tokens that are "
        "not trained, NaN is accepted.",
        remedy="Look at what the sampler returned for this token.",
    ),
    value_kind(
        "Advantages of another number than there are rollouts",
        lambda: padded(advantages=torch.tensor([1.0, -1.0, 0.5])),
        message="The batch: advantages has the shape 3; it takes one number per rollout, [2], or "
        "one per token, [2, 4] as input_ids, one row per rollout.",
        means="Which rollout a number belongs to is not known.",
        remedy="Give one number per row, or one per token.",
    ),
    value_kind(
        "Rows of different lengths for a padded tensor",
        lambda: padded(input_ids=[[5, 6, 7, 8], [5, 6, 9]]),
        message="The batch: input_ids[0] has 4 entries and input_ids[1] has 3; it takes whole "
        "numbers from 0 to 2147483647, the ids that the model read, padded to [N, W], one "
        "row per rollout. RolloutBatch.from_jagged takes rows of different lengths.",
        means="Padded tensors have rows of one length.",
        remedy="Pad the rows, or give them to from_jagged as they are.",
    ),
    value_kind(
        "A nested tensor for a padded one",
        lambda: padded(
            old_logprobs=torch.nested.nested_tensor(
                [torch.zeros(4), torch.zeros(3)], layout=torch.jagged
            )
        ),
        message="The batch: old_logprobs[0] has 4 entries and old_logprobs[1] has 3; it takes "
        "numbers, [2, 4] as input_ids, one row per rollout. RolloutBatch.from_jagged takes "
        "rows of different lengths.",
        means="Padded tensors have rows of one length.",
        remedy="Give all per-token fields as nested tensors, to from_jagged.",
    ),
    value_kind(
        "Both a loss mask and a tool mask",
        lambda: completions(loss_mask=torch.ones(2, 2), tool_mask=torch.ones(2, 2)),
        message="The batch: both loss_mask and tool_mask are given. Give loss_mask alone, or TRL's "
        "tool_mask, which is read where completion_mask is 1.",
        means="Both say which tokens are trained; which one counts is not known.",
        remedy="Give one of them. At padding loss_mask must be 0, and tool_mask is not read.",
    ),
    value_kind(
        "Prompts that are not repeated",
        lambda: completions(prompt_ids=torch.tensor([[5, 6]]), prompt_mask=torch.tensor([[1, 1]])),
        message="The batch: prompt_ids has the shape 1 x 2, but completion_ids has 2 x 2. Both have"
        " one row per rollout: repeat a prompt for each of its completions.",
        means="Each completion has its prompt in the same row.",
        remedy="prompt_ids.repeat_interleave(completions_per_prompt, 0). Equal prompts are "
        "computed once all the same.",
    ),
    value_kind(
        "A completion without a prompt",
        lambda: completions(prompt_mask=torch.tensor([[0, 0], [1, 1]])),
        message="Rollout '0': completion_mask[0, 0] is 1, but no earlier token predicts token 0. "
        "Set it to 0, or put the prompt (at least a start token) before the trained tokens.",
        means="A model predicts a token from those before it, and there are none.",
        remedy="Give at least the start token that the model read as the prompt.",
    ),
    value_kind(
        "Flat ids without offsets",
        lambda: jagged(offsets=None),
        message="The batch: input_ids is flat, and offsets are not given; it takes whole numbers "
        "from 0 to 2147483647, the ids that the model read, as a nested tensor, a list of "
        "rows, or flat values [T] together with offsets [N + 1].",
        means="Where one rollout ends and the next begins is not known.",
        remedy="Give the offsets (cu_seqlens), or a nested tensor.",
    ),
    value_kind(
        "Offsets that are not those of the ids",
        lambda: jagged(offsets=torch.tensor([0, 3])),
        message="The batch: offsets is [0, 3]; it takes the starts of the rollouts in input_ids and"
        " its length, ascending from 0 to 5.",
        means="Tokens would be left out, or belong to no rollout.",
        remedy="Give N + 1 offsets: 0, the end of each rollout, the last of which is T.",
    ),
    value_kind(
        "Rows of responses for whole rollouts",
        lambda: jagged(old_logprobs=[[-1.0, -1.0], [-1.0]]),
        message="Rollout '0': old_logprobs has 2 entries, but input_ids has 3. Every per-token "
        "field has one entry per token of these, and it belongs to that token. Where fields"
        " are over responses alone, give response_lengths.",
        means="The entry at a token belongs to it, and here it is not known which token is meant.",
        remedy="Give response_lengths where the loss mask and all per-token fields are over "
        "responses alone.",
    ),
    value_kind(
        "A response that is longer than its rollout",
        lambda: jagged(response_lengths=torch.tensor([2, 3])),
        message="Rollout '1': response_lengths[1] is 3, and the rollout has 2 tokens. Give the "
        "tokens of its response, those of tools included.",
        means="Responses are the last tokens of rollouts.",
        remedy="Look at whether input_ids has prompts and responses.",
    ),
    value_kind(
        "A batch without advantages for a loss that uses them",
        lambda: policy().forward_backward(completions(advantages=None), losses.GRPO()),
        message="GRPO(kl=0.0, kl_estimator='k3', entropy=0.0, normalize='token', clip=0.2, "
        "clip_high=None, dual_clip=None) needs advantages, but the batch was made without "
        "any. Give them where the batch is made: one number per rollout, or one per token.",
        means="Their place is taken by 0, so that every policy gradient would be 0.",
        remedy="Give advantages, or take a loss that does not use them, such as losses.SFT.",
    ),
    value_kind(
        "Values of another length to pad",
        lambda: padded().to_padded(torch.zeros(8)),
        message="values has the shape (8,), and the batch has 7 tokens; it takes one value per "
        "token, of all rollouts one after another: [T] or [T, ...].",
        means="Flat values have one entry per token, and none at padding.",
        remedy="Give values in the batch's order, such as policy.score(batch).logprobs.",
    ),
    Kind(
        name="A fill that the values cannot be",
        error=ConfigError,
        message="fill is 0.5; it takes a number that torch.int64, the dtype of the values, can "
        "hold.",
        means="It would be rounded silently.",
        remedy="Convert the values to a floating dtype first, or take another fill.",
        call=lambda: padded().to_padded(torch.zeros(7, dtype=torch.int64), fill=0.5),
    ),
    value_kind(
        "Completions of a batch that has none apart",
        lambda: padded().to_completions(torch.zeros(7)),
        message="The batch has no completions apart from prompts: it was not made by "
        "from_completions, or by from_jagged with response_lengths. Use to_padded.",
        means="from_padded is not told where prompts end: a loss mask may begin later.",
        remedy="Take the columns of completions out of to_padded, or make the batch with "
        "from_completions.",
    ),
)
