"""Training of TRL in float64, from all logits, which both trainers are measured against."""

import copy
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import setups_trl as setups
import torch
from cases_trl import STOCK
from torch import Tensor
from trl import GRPOTrainer

from forkpoint.integrations.trl.calls import HeadAnswer
from forkpoint.testing import lifted_upcasts


def _dense(model: Any, temperature: float = 1.0) -> None:
    """Answer TRL's calls of its fused head in float64, from the model's own logits."""
    plain = type(model).forward

    def forward(
        self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any
    ) -> HeadAnswer:
        found = plain(self, input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits_BLV, labels_BL = found.logits[:, :-1] / temperature, labels[:, 1:]
        assert logits_BLV.dtype == torch.float64
        logp_BLV, mask_BL = logits_BLV.log_softmax(-1), labels_BL != -100
        taken_BL = logp_BLV.gather(-1, labels_BL.clamp(min=0)[..., None])[..., 0]
        values = {
            "log_probs": taken_BL,
            "entropy": -(logp_BLV.exp() * logp_BLV).sum(-1),
            "log_sum_sq_probs": (2 * logp_BLV).logsumexp(-1),
            "mean_logits": logits_BLV.mean(-1),
            "is_top1": logits_BLV.argmax(-1) == labels_BL,
        }
        return HeadAnswer(**{name: x * mask_BL for name, x in values.items()})

    model.forward = types.MethodType(forward, model)


def truth(kind: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Gradients of the first optimizer step of stock TRL in float64. Of trainers that sample none:
    the models' sampling is not in float64."""
    trainer = setups.trainer(kind, STOCK[kind], folder, **options)
    with ExitStack() as stack:
        for model in (trainer.model, trainer.ref_model):
            _dense(model.double())
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
    _dense(trainer.exact, trainer.temperature)
    found = setups.run(trainer)[0]
    exact = trainer.exact.named_parameters()
    return found, {name: p.grad for name, p in exact if p.grad is not None}
