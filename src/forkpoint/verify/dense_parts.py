"""Ordinary forwards whose logits are made a part at a time, where they do not fit at once.

The decoder runs once. The model's own forward then runs again and again from the decoder's output
on, each time for some tokens, so that scaling and capping of logits stay the model's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes


def run_in_parts(
    model: nn.Module,
    ids_L: Tensor,
    places_n: Tensor,
    part_tokens: int,
    use: Callable[[slice, Tensor], Tensor | None],
    aside: Callable[[], Tensor | None] = lambda: None,
) -> None:
    """Run one sequence, and its backward, with the logits of at most `part_tokens` tokens alive.

    Args:
        model: a causal language model of transformers, or a peft model around one.
        ids_L: int64 [L].
        places_n: int64 [n], the places whose logits are wanted.
        part_tokens: the most logits at a time, in tokens.
        use: called with the part of `places_n` and its logits [m, V]; a tensor of one element that
            it returns is what the part's backward starts from.
        aside: called once the decoder has run; a tensor of one element that it returns is what the
            decoder's backward starts from as well.
    """
    decoder = decoder_of(model)
    own = decoder.forward
    ran: list[tuple[Any, Tensor, Tensor]] = []
    besides: list[Tensor] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            outputs = own(*args, **kwargs)
            hidden = outputs.last_hidden_state
            leaf = hidden.detach().requires_grad_(hidden.requires_grad)
            outputs.last_hidden_state = leaf
            ran.append((outputs, hidden, leaf))
            found = aside()
            if found is not None and found.requires_grad:
                besides.append(found)
        return ran[0][0]

    with Changes() as changes:
        changes.replace_forward(decoder, once)
        for begin in range(0, len(places_n), part_tokens):
            part = slice(begin, min(begin + part_tokens, len(places_n)))
            outputs = model(
                input_ids=ids_L[None],
                use_cache=False,
                return_dict=True,
                logits_to_keep=places_n[part],
            )
            total = use(part, outputs.logits[0])
            del outputs
            if total is not None and total.requires_grad:
                total.backward()
    _, hidden, leaf = ran[0]
    roots, gradients = [*besides], [None for _ in besides]
    if leaf.grad is not None:
        roots, gradients = [hidden, *roots], [leaf.grad, *gradients]
    if roots:
        torch.autograd.backward(roots, gradients)


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a causal language model below its head."""
    inner: Any = model
    if type(model).__module__.split(".")[0] == "peft":
        inner = inner.get_base_model()
    return getattr(inner, inner.base_model_prefix)
