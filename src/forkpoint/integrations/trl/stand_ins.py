"""Objects that are called in the place of a model whose head TRL has fused.

TRL's losses ask the model for log-probs by `model(..., labels=labels, fused_lm_head=True)`. A
CaptureProxy learns in this way which rows a loss wants, an Answer gives it what forkpoint has
computed, and a Scorer computes it at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl.rows import Rows


@dataclass(eq=False)
class HeadAnswer:
    """Outputs of a fused head: [B, W - 1] each, or None where not asked for; names are TRL's."""

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    loss: Tensor | None = None
    aux_loss: Tensor | None = None


class Captured(BaseException):
    """The rows of the first call; not an Exception, so that no handler of a loss takes it."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows: Rows = rows


class StandIn:
    """Reads attributes from the model, and answers calls with `fused_lm_head=True` itself."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model: nn.Module | None = model

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.get("fused_lm_head"):
            return self.answered(kwargs)
        return self.other_call(*args, **kwargs)

    def answered(self, arguments: dict[str, Any]) -> HeadAnswer:
        raise NotImplementedError

    def other_call(self, *args: Any, **kwargs: Any) -> Any:
        """A call for something else than the fused head's outputs."""
        raise UnsupportedError(
            "the trainer's loss calls its model for something else than log-probs (arguments "
            f"{', '.join([*map(repr, map(type, args)), *kwargs]) or 'none'}), which forkpoint does "
            "not compute in a training step. Use a loss of log-probs and entropies, or the "
            "trainer of TRL itself."
        )


class CaptureProxy(StandIn):
    """Ends the loss at its first call, by raising Captured."""

    def answered(self, arguments: dict[str, Any]) -> HeadAnswer:
        raise Captured(Rows.of_call(arguments))


class Answer(StandIn):
    """Gives what has been computed for the rows that were captured."""

    def __init__(self, model: nn.Module | None, rows: Rows, answer: HeadAnswer) -> None:
        super().__init__(model)
        self.rows: Rows = rows
        self.answer: HeadAnswer = answer

    def answered(self, arguments: dict[str, Any]) -> HeadAnswer:
        asked, known = arguments["input_ids"], self.rows.input_ids
        if asked.shape != known.shape:
            raise UnsupportedError(
                f"the trainer's loss asks its model for rows of shape {tuple(asked.shape)} after "
                f"it asked for {tuple(known.shape)}; one call of one model, and one of the "
                "reference model with the same rows, are what forkpoint's trainers answer."
            )
        return self.answer


class Scorer(StandIn):
    """Computes the rows at once; other calls go to the model where gradients are not enabled."""

    def __init__(self, model: nn.Module | None, score: Callable[[Rows], HeadAnswer]) -> None:
        super().__init__(model)
        self._score = score

    def answered(self, arguments: dict[str, Any]) -> HeadAnswer:
        return self._score(Rows.of_call(arguments))

    def other_call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super().other_call(*args, **kwargs)
        assert self.model is not None
        return self.model(*args, **kwargs)
