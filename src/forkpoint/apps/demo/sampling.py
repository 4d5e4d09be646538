"""Sampling the responses of groups: each prompt is read once, for all of its responses."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forkpoint.errors import ConfigError


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompt_ids_GP: Tensor,
    *,
    responses: int,
    tokens: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw responses token by token from the model's own distribution, at temperature 1.

    The prompts go through the model once; their keys and values are then repeated in the model's
    cache for every response, and each further forward is of one token a response.

    Args:
        model: a causal model whose cache holds keys and values alone.
        prompt_ids_GP: int64 token ids of the prompts, all of one length.
        responses: how many to each prompt.
        tokens: the length of every response.
        generator: the source of randomness, on the model's device.

    Returns the token ids [G, N, R], and the log-probs with which each was drawn, in the dtype of
    the model.

    Raises:
        ConfigError: the model's logits are not finite, so that there is nothing to draw from.
    """
    cache = DynamicCache(config=model.config)
    seen = model(
        input_ids=prompt_ids_GP, past_key_values=cache, use_cache=True, logits_to_keep=1
    ).logits
    cache.batch_repeat_interleave(responses)
    logits_BV = seen[:, -1].repeat_interleave(responses, dim=0)
    drawn, logprobs = [], []
    while True:
        every_BV = logits_BV.log_softmax(-1)
        if not torch.isfinite(every_BV).all():
            raise ConfigError(
                "the model's logits are not finite, because training has diverged. Use a lower "
                "learning rate."
            )
        next_B1 = torch.multinomial(every_BV.exp(), 1, generator=generator)
        drawn.append(next_B1)
        logprobs.append(every_BV.gather(-1, next_B1))
        if len(drawn) == tokens:
            break
        logits_BV = model(input_ids=next_B1, past_key_values=cache, use_cache=True).logits[:, -1]
    shape = (len(prompt_ids_GP), responses, tokens)
    return torch.cat(drawn, 1).view(shape), torch.cat(logprobs, 1).view(shape)
