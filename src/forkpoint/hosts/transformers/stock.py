"""Stock forwards of a model of transformers: for references, and for comparisons with them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.transformers.upcasts import (
    lift_upcasts,
    run_plain_experts,
    run_plain_recurrences,
)


class TransformersStock:
    """The forward that users call, of a model of transformers or a copy of one."""

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = model
        inner: Any = model
        if type(model).__module__.split(".")[0] == "peft":
            inner = model.get_base_model()  # type: ignore[operator]
        self._inner = inner

    @property
    def is_critic(self) -> bool:
        """Whether it gives a value of each token instead of logits."""
        return type(self._inner).__name__.endswith("ForTokenClassification")

    def logits(self, ids_NL: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits [N, L, V], or a critic's values [N, L, 1].

        Args:
            ids_NL: int64.
            keep: int64 [n], the places whose logits are wanted: [N, n, V]. By default all.
        """
        kept = {} if keep is None else {"logits_to_keep": keep}
        return self.model(input_ids=ids_NL, use_cache=False, return_dict=True, **kept).logits

    def run_in_parts(
        self,
        ids_L: Tensor,
        places_n: Tensor,
        part_tokens: int,
        use: Callable[[slice, Tensor], Tensor | None],
        aside: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        """Run one sequence, and its backward, with the logits of at most `part_tokens` tokens
        alive.

        The decoder runs once. The model's own forward then runs again and again from the decoder's
        output on, each time for some tokens, so that scaling and capping of logits stay its own.

        Args:
            ids_L: int64 [L].
            places_n: int64 [n], the places whose logits are wanted.
            part_tokens: the most logits at a time, in tokens.
            use: called with the part of `places_n` and its logits [m, V]; a tensor of one element
                that it returns is the start of the part's backward.
            aside: called once the decoder has run; a tensor of one element that it returns is a
                start of the decoder's backward as well.
        """
        decoder = getattr(self._inner, self._inner.base_model_prefix)
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
                total = use(part, self.logits(ids_L[None], places_n[part])[0])
                if total is not None and total.requires_grad:
                    total.backward()
        _, hidden, leaf = ran[0]
        roots, gradients = [*besides], [None for _ in besides]
        if leaf.grad is not None:
            roots, gradients = [hidden, *roots], [leaf.grad, *gradients]
        if roots:
            torch.autograd.backward(roots, gradients)

    def compute_in(self, dtype: torch.dtype, changes: Changes) -> None:
        """Compute in `dtype` throughout, by code that takes any dtype, until the changes are
        undone."""
        run_plain_recurrences(self.model, changes)
        run_plain_experts(self.model, changes)
        if dtype == torch.float64:
            lift_upcasts(self.model, changes)
