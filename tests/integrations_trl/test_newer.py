"""Versions of TRL that do not exist yet: another head, another loss, other state, other options."""

import logging
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setups_trl as setups
import torch
import trl
from cases_trl import OURS, Pair
from newer_trl import change_head, replace_method
from transformers import TrainerCallback

from forkpoint import Config
from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl import heads
from forkpoint.integrations.trl.options import check_version
from forkpoint.integrations.trl.undo import CLONED_BYTES, LossState

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = r"at one token TRL has -\d.*, and forkpoint -\d.* at temperature (0\.9|1\.0)\."


@pytest.mark.parametrize(("kind", "options"), [("grpo", {"bf16": True}), ("rloo", {"beta": 0.1})])
def test_a_head_that_does_not_divide_by_the_temperature(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_head(monkeypatch, temperature=1.0)
    trainer = setups.trainer(kind, OURS[kind], tmp_path, **options)
    with pytest.raises(UnsupportedError, match=BOTH):
        trainer.train()
    assert all(p.grad is None for p in trainer.model.parameters())
    # What is the same at a temperature of 1 trains.
    setups.trainer(kind, OURS[kind], tmp_path / "1", **options, temperature=1.0).train()


def test_a_head_that_scales_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_head(monkeypatch, logit_scale=0.9)
    trainer = setups.trainer("dpo", OURS["dpo"], tmp_path)
    with pytest.raises(UnsupportedError, match=BOTH):
        trainer.train()
    own = {"forkpoint": Config(self_check=False)}
    setups.trainer("dpo", OURS["dpo"], tmp_path / "off", own=own).train()


def test_a_head_that_is_set_during_training(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        class Heads(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                trl.trainer.utils.add_fused_lm_head(
                    trainer.model, temperature=0.5, outputs=("log_probs", "entropy")
                )

        trainer.add_callback(Heads())

    trainer = setups.trainer("grpo", OURS["grpo"], tmp_path, max_steps=2)
    change(trainer)
    with pytest.raises(UnsupportedError, match=BOTH):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_later_trainer_with_the_same_model(tmp_path: Path) -> None:
    """TRL keeps one head in a model, with the temperature of the last trainer: 1 in DPO."""
    first = setups.trainer("grpo", OURS["grpo"], tmp_path / "first")
    args = setups.CONFIGS["dpo"](output_dir=str(tmp_path / "second"), **setups.COMMON)
    second = OURS["dpo"](
        first.model,
        ref_model=setups.model(),
        args=args,
        processing_class=setups.tokenizer(),
        train_dataset=setups.pairs(),
    )
    second.train()
    with pytest.raises(UnsupportedError, match=r"temperature 0\.9.*a model of its own"):
        first.train()


def test_a_model_whose_results_depend_on_padding(tmp_path: Path) -> None:
    """HunYuan normalizes queries after their rotation, so that positions count by themselves: TRL
    counts padding on the left, and rollouts have none."""
    made = {"model": setups.model("hunyuan_v1_dense")}
    trainer = setups.trainer("grpo", OURS["grpo"], tmp_path, made=made)
    with pytest.raises(UnsupportedError, match=BOTH):
        trainer.train()
    pair = Pair("dpo", tmp_path / "dpo", made=made)
    assert pair.apart < 2e-6


@pytest.mark.parametrize("masks", [False, True])
def test_few_tokens_are_compared_with_those_of_their_prompts(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences at one token say little about the size of rounding; masked completions have no
    tokens."""
    compared: list[int] = []
    known = heads._compared

    def spied(policy: Any, model: Any, rows: Any, *rest: Any) -> str:
        compared.append(int((rows.scored & rows.present).sum()))
        return known(policy, model, rows, *rest)

    monkeypatch.setattr(heads, "_compared", spied)
    pair = Pair("grpo", tmp_path, max_completion_length=1, mask_truncated_completions=masks)
    assert len(compared) == 1 and compared[0] > 4
    assert any(bool(gradient.any()) for gradient in pair.expected.values()) is not masks
    assert masks or pair.apart < 2e-6


STATEFUL = """
def _compute_loss(self, model, inputs):
    if not hasattr(self, "new_tensor"):
        self.new_tensor = torch.zeros(3)
        self.new_deque = __import__("collections").deque(maxlen=3)
        self.new_dict = {"a": [0], "b": (1, [2])}
    loss = known(self, model, inputs)
    self.new_count = getattr(self, "new_count", 0) + 1
    self.new_tensor += 1
    self.new_deque.append(self.new_count)
    self.new_dict["a"].append(self.new_count)
    self.new_dict["b"][1].append(self.new_count)
    return loss * (1 + self.new_count % 2) * float(self.new_tensor[0])
"""


@pytest.mark.parametrize("streams", [None, False])
def test_new_state_that_a_loss_writes(
    streams: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It weights micro-batches by what it has written, and is computed as often as in stock."""
    replace_method(monkeypatch, trl.GRPOTrainer, "_compute_loss", STATEFUL)
    pair = Pair("grpo", tmp_path, streams=streams, max_steps=2)
    assert pair.apart < 2e-6
    pair.check_metrics()
    for name in ("new_count", "new_deque", "new_dict"):
        assert getattr(pair.ours, name) == getattr(pair.stock, name)
    assert pair.ours.new_tensor.tolist() == pair.stock.new_tensor.tolist() == [4.0] * 3


def test_a_loss_of_another_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
    def _compute_loss(self, model, inputs):
        inputs["advantages"] = inputs["advantages"] ** 3
        return known(self, model, inputs)
    """
    replace_method(monkeypatch, trl.GRPOTrainer, "_compute_loss", source)
    with caplog.at_level(logging.WARNING, "forkpoint"):
        pair = Pair("grpo", tmp_path)
    assert pair.ours.sharing.streams is False
    assert any("has other gradients than" in record.getMessage() for record in caplog.records)
    assert pair.apart < 2e-6


def test_everything_plain_is_put_back() -> None:
    inner, big, made = [1, {"x": 2}], torch.zeros(CLONED_BYTES), object()
    trainer = SimpleNamespace(
        number=1,
        text="a",
        nothing=None,
        pair=(1, inner),
        names={"a"},
        queue=deque([1, 2], maxlen=2),
        counts=defaultdict(list, a=[1]),
        tensor=torch.ones(2),
        weight=torch.nn.Parameter(torch.ones(2)),
        big=big,
        made=made,
    )
    loop: list[Any] = ["a"]
    loop.append(loop)
    trainer.loop = loop
    with torch.inference_mode():
        trainer.inference = torch.ones(2)
    kept, version = LossState(trainer), trainer.weight._version
    for _ in range(2):
        trainer.number, trainer.text, trainer.nothing, trainer.new = 2, "b", 3, 4
        inner[1]["x"] = 5
        inner.append(6)
        trainer.names.add("b")
        trainer.queue.append(3)
        loop.clear()
        trainer.counts["b"].append(1)
        trainer.counts["a"].clear()
        trainer.tensor += 1
        trainer.made = None
        del trainer.pair
        kept.restore()
        assert (trainer.number, trainer.text, trainer.nothing) == (1, "a", None)
        assert trainer.pair == (1, [1, {"x": 2}]) and trainer.pair[1] is inner
        assert trainer.names == {"a"} and trainer.queue == deque([1, 2]) and trainer.made is made
        assert trainer.counts == {"a": [1]} and trainer.counts.default_factory is list
        assert loop[0] == "a" and loop[1] is loop
        assert trainer.tensor.tolist() == [1, 1] and not hasattr(trainer, "new")
    assert trainer.weight._version == version, "what is not written is not touched"
    big += 1
    with pytest.raises(UnsupportedError, match="trainer's big, a tensor of 4,194,304 bytes"):
        kept.restore()


@pytest.mark.parametrize(
    ("version", "warns"),
    [("1.14.1", True), ("1.15.0", False), ("1.16.2", False), ("1.17.0.dev0", True), ("2.0", True)],
)
def test_a_version_that_has_not_been_tested(
    version: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_version.cache_clear()
    with caplog.at_level(logging.WARNING, "forkpoint"):
        check_version(version)
        check_version(version)
    found = [r.getMessage() for r in caplog.records]
    assert len(found) == warns
    assert all(f"TRL {version} is installed" in x and "TRL 1.15 to 1.16" in x for x in found)
