"""Subclasses that change a loss, or its backward, beside the same subclasses of stock TRL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
import torch
from cases_trl import LATER, OURS, STOCK, Pair
from changes_trl import backwards, counted, inner, outputs, pulled, scaled, squared, twice
from transformers import TrainerCallback

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl import shared_trainer

BAR = 2e-6
pytestmark = pytest.mark.filterwarnings("ignore")


CASES = [
    ("grpo", scaled, True),
    ("grpo", counted, False),
    ("grpo", inner, False),
    ("grpo", outputs, True),
    ("rloo", twice, True),
    ("dpo", squared, True),
    ("dpo", pulled, False),
    ("dpo", backwards, True),
]


@pytest.mark.parametrize(("kind", "change", "shares_last"), CASES)
def test_gradients_and_metrics_are_those_of_stock(
    kind: str, change: Callable[[Any], type], shares_last: bool, tmp_path: Path
) -> None:
    stock = change(STOCK[kind])
    shared = shared_trainer(stock) if shares_last else change(OURS[kind])
    pair = Pair(kind, tmp_path, stock=stock, shared=shared, max_steps=2)
    assert pair.apart < BAR
    assert pair.weights_apart < BAR
    pair.check_metrics()
    computed, given = pair.tokens
    assert computed < 0.9 * given


def test_the_load_balancing_loss_is_scaled_as_well(tmp_path: Path) -> None:
    kind = "dpo"
    made = {"model": setups.mixture()}
    stock, shared = scaled(STOCK[kind]), scaled(OURS[kind])
    pair = Pair(kind, tmp_path, stock=stock, shared=shared, made=made, max_steps=2)
    assert pair.apart < BAR
    pair.check_metrics()
    with pytest.raises(UnsupportedError, match=r"factors, 0, .*router_aux_loss_coef=0\.0"):
        setups.run(setups.trainer(kind, counted(OURS[kind]), tmp_path / "counted", made=made))


def test_the_scale_of_fp16_and_clipping(tmp_path: Path) -> None:
    found = []
    for scale in (None, 128.0):
        trainer = setups.trainer("dpo", counted(OURS["dpo"]), tmp_path)
        if scale:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            trainer.accelerator.native_amp = False
        found.append(setups.run(trainer)[0])
    # accelerate takes the scale off again before the optimizer's step.
    assert setups.apart(found[1], found[0]) < 1e-6
    stock, shared = counted(STOCK["dpo"]), counted(OURS["dpo"])
    pair = Pair("dpo", tmp_path, stock=stock, shared=shared, max_grad_norm=0.1, max_steps=2)
    assert pair.weights_apart < BAR
    pair.check_metrics()


def _batch(trainer: Any) -> dict[str, Any]:
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_direct_loss_fills_gradients_in_its_backward(kind: str, tmp_path: Path) -> None:
    found = []
    for name, cls in (("stock", STOCK[kind]), ("ours", OURS[kind])):
        trainer = setups.trainer(kind, cls, tmp_path / name, gradient_accumulation_steps=1)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        torch.manual_seed(3)
        inputs = _batch(trainer)
        parameters = dict(trainer.model.named_parameters())
        first, second = (trainer.compute_loss(trainer.model, inputs) for _ in range(2))
        assert all(p.grad is None for p in parameters.values())
        (3 * first).backward()
        once = {k: p.grad.clone() for k, p in parameters.items()}
        second.backward()
        found.append((float(first), once, {k: p.grad for k, p in parameters.items()}))
    (expected, *stock), (value, *ours) = found
    assert value == pytest.approx(expected, abs=1e-6)
    assert setups.apart(ours[0], stock[0]) < BAR and setups.apart(ours[1], stock[1]) < BAR
    loss = trainer.compute_loss(trainer.model, inputs)
    with pytest.raises(UnsupportedError, match="create_graph"):
        loss.backward(create_graph=True)
    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(loss, next(iter(parameters.values())))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="ran already"):
        loss.backward()
    loss = trainer.compute_loss(trainer.model, inputs)
    with torch.no_grad():
        next(iter(parameters.values())).mul_(1.1)
    with pytest.raises(UnsupportedError, match="weights have changed"):
        loss.backward()


def test_factors_of_a_backward_are_honoured_or_refused(tmp_path: Path) -> None:
    def patched(factors: list[float]) -> Callable[[Any], None]:
        def change(trainer: Any) -> None:
            backward, left = trainer.accelerator.backward, list(factors)
            trainer.accelerator.backward = lambda loss, **k: backward(loss * left.pop(0), **k)

        return change

    pair = Pair("grpo", tmp_path, changed=patched([3.0, 3.0]))
    assert pair.apart < BAR and pair.ours.sharing.streams
    with pytest.raises(UnsupportedError, match=r"factors, 1, 2, .*shared_trainer\(YourClass\)"):
        Pair("grpo", tmp_path, changed=patched([1.0, 2.0]))


def test_a_window_without_its_last_backward_is_refused(tmp_path: Path) -> None:
    class Skips(OURS["dpo"]):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            if not self.accelerator.sync_gradients:
                self.accelerator.backward(loss)
            return loss.detach()

    trainer = setups.trainer("dpo", Skips, tmp_path)
    with pytest.raises(UnsupportedError, match="gradients of 1 micro-batches have not"):
        trainer.train()


def test_an_interrupted_window_is_dropped(tmp_path: Path) -> None:
    """And a training that begins anew is as one that was never interrupted."""

    class Fails(OURS["dpo"]):
        fails = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.accelerator.sync_gradients and self.fails:
                raise RuntimeError("between micro-batches")
            return super().compute_loss(*args, **kwargs)

    trainer = setups.trainer("dpo", Fails, tmp_path)
    with pytest.raises(RuntimeError, match="between micro-batches"):
        trainer.train()
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.fails = False
    whole = setups.trainer("dpo", OURS["dpo"], tmp_path / "whole")
    ends = []
    for each in (trainer, whole):
        torch.manual_seed(3)
        each.train()
        ends.append({k: v.detach() for k, v in each.model.named_parameters()})
    assert setups.apart(*ends) < 1e-8


class Schedule(TrainerCallback):
    """Sets attributes of a trainer when an optimizer step ends."""

    def __init__(self, trainer: Any, values: dict[str, Any]) -> None:
        self.trainer, self.values = trainer, values

    def on_step_end(self, *_: Any, **__: Any) -> None:
        vars(self.trainer).update(self.values)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"beta": 0.4, "temperature": 0.5}, {"beta": 0.1}),
        ({"loss_type": "vespo"}, {"loss_type": "dapo", **LATER}),
        ({"epsilon_high": 0.001, "importance_sampling_level": "sequence"}, LATER),
    ],
    ids=["beta", "loss_type", "level"],
)
def test_callbacks_that_change_options(
    values: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """TRL reads all but the temperature, which its head has, at every loss."""

    def change(trainer: Any) -> None:
        trainer.add_callback(Schedule(trainer, values))

    pair = Pair("grpo", tmp_path, changed=change, max_steps=3, **options)
    assert pair.apart < BAR
    assert pair.weights_apart < 1e-5
    pair.check_metrics()


def test_a_changed_loss_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = setups.trainer("grpo", scaled(OURS["grpo"]), tmp_path, max_steps=2)
    with caplog.at_level("WARNING", "forkpoint"):
        trainer.train()
    found = [r.getMessage() for r in caplog.records if "one more forward" in r.getMessage()]
    assert len(found) == 1 and "Scaled.compute_loss is not TRL's" in found[0]
