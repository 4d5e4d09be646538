"""Reference models that a loss asks itself, as DPO's does: scored for a whole window at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module

import torch

from forkpoint.integrations.trl.rows import PackedRows, Rows
from forkpoint.integrations.trl.sharing import Sharing
from forkpoint.integrations.trl.stand_ins import HeadAnswer, Scorer


class ReferenceSharing(Sharing):
    """Steps of trainers whose loss calls `ref_model`, or the model with its adapters off."""

    @property
    def _asks(self) -> bool:
        """Whether the loss calls a reference model, and not the passes before it."""
        trainer = self.trainer
        return hasattr(trainer, "precompute_ref_logps") and not trainer.precompute_ref_logps

    @property
    def _statistics(self) -> tuple[str, ...]:
        trainer = self.trainer
        if not hasattr(trainer, "use_weighting"):
            return ()
        more = ("log_sum_sq_probs",) if trainer.use_weighting else ()
        return ("mean_logits", "is_top1", *more)

    def _references(self, packed: PackedRows) -> list[HeadAnswer] | None:
        if not self._asks:
            return None
        trainer = self.trainer
        model, adapters = trainer.ref_model, nullcontext()
        if model is None:
            model = trainer.accelerator.unwrap_model(trainer.model)
            name = "ref" if "ref" in model.peft_config else None
            adapters = import_module("trl.trainer.utils").use_adapter(model, adapter_name=name)
        with torch.no_grad(), adapters:
            self._check_head(model, packed.calls[0])
            found = self.policy(model).score(packed.batch)
        return self._answers(packed, found.per_token)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the reference model is a stand-in that scores rows as they come."""
        trainer = self.trainer
        if not self._asks:
            yield
            return
        before = trainer.ref_model

        def score(rows: Rows) -> HeadAnswer:
            packed = PackedRows([rows], self.temperature)
            trainer.ref_model = before
            try:
                found = self._references(packed)
            finally:
                trainer.ref_model = stand_in
            assert found is not None
            return found[0]

        stand_in = Scorer(before, score)
        trainer.ref_model = stand_in
        try:
            yield
        finally:
            trainer.ref_model = before
