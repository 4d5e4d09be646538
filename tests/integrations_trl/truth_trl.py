"""Training of TRL in float64, from all logits, which both trainers are measured against."""

import copy
import functools
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import setups_trl as setups
from cases_trl import STOCK
from torch import Tensor
from trl import GRPOTrainer

from forkpoint.integrations.trl.calls import HeadAnswer
from forkpoint.testing import lifted_upcasts


def dense_head(model: Any, temperature: float = 1.0) -> None:
    """Answer TRL's calls of its fused head from the model's own logits."""
    plain = type(model).forward

    @functools.wraps(plain)  # whose arguments `generate` looks at
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return plain(self, *args, **kwargs)
        labels = kwargs.pop("labels")
        found = plain(self, *args, **{**kwargs, "use_cache": False})
        logits_BLV, labels_BL = found.logits[:, :-1] / temperature, labels[:, 1:]
        assert logits_BLV.dtype == self.dtype
        logp_BLV, mask_BL = logits_BLV.log_softmax(-1), labels_BL != -100
        taken_BL = logp_BLV.gather(-1, labels_BL.clamp(min=0)[..., None])[..., 0]
        values = {
            "log_probs": taken_BL,
            "entropy": -(logp_BLV.exp() * logp_BLV).sum(-1),
            "log_sum_sq_probs": (2 * logp_BLV).logsumexp(-1),
            "mean_logits": logits_BLV.mean(-1),
            "is_top1": logits_BLV.argmax(-1) == labels_BL,
        }
        masked = {name: x * mask_BL for name, x in values.items()}
        return HeadAnswer(**masked, aux_loss=found.get("aux_loss"))

    model.forward = types.MethodType(forward, model)


def truth(kind: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Gradients of the first optimizer step of stock TRL in float64. Of trainers that sample none:
    the models' sampling is not in float64."""
    trainer = setups.trainer(kind, STOCK[kind], folder, **options)
    with ExitStack() as stack:
        for model in (trainer.model, trainer.ref_model):
            dense_head(model.double())
            stack.enter_context(lifted_upcasts(model))
        return setups.run(trainer)[0]


class WithTruth(GRPOTrainer):
    """Stock GRPO that adds to each loss that of a float64 copy of the model at the same rollouts.

    The copy is not trained, so it has the gradients of one optimizer step.
    """

    exact: Any

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        with lifted_upcasts(self.exact):
            return loss + super().compute_loss(self.exact, inputs, *args, **kwargs)


def run_with_truth(trainer: WithTruth) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the trainer's only optimizer step, and those in float64 for the same rollouts.

    Rollouts are sampled by the float32 model.
    """
    trainer.exact = copy.deepcopy(trainer.model).double()
    dense_head(trainer.exact, trainer.temperature)
    found = setups.run(trainer)[0]
    exact = trainer.exact.named_parameters()
    return found, {name: p.grad for name, p in exact if p.grad is not None}
