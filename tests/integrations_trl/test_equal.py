"""Gradients, metrics and weights of the trainers beside those of stock TRL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
import torch
from cases_trl import DPO, GRPO, RLOO, Pair
from peft import LoraConfig
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from truth_trl import truth

from forkpoint.integrations.trl import shared_trainer

BAR = 2e-6
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", GRPO)
def test_grpo(name: str, tmp_path: Path) -> None:
    pair = Pair("grpo", tmp_path, **{"max_steps": 3, **GRPO[name]})
    assert pair.apart < BAR
    pair.check_metrics()
    computed, given = pair.tokens
    assert computed < 0.8 * given


@pytest.mark.parametrize("name", ["grpo", "dapo", "two iterations, KL", "entropy bonus"])
def test_grpo_by_the_code_of_trl_alone(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, **GRPO[name]}
    pair = Pair("grpo", tmp_path, streams=False, **options)
    assert pair.apart < BAR
    pair.check_metrics()


def test_streamed_steps_run_no_scores(tmp_path: Path) -> None:
    events: list[str] = []
    for streams in (None, False):
        pair = Pair("grpo", tmp_path / str(streams), streams=streams)
        plan = pair.ours.sharing.last_plan
        assert pair.ours.sharing.streams is (streams is None)
        assert len(plan.microbatches) > 1
        events.append("score" if plan.program.has_scores else "")
    assert events == ["", "score"]


def _correct(per_sequence: bool) -> Callable[[Any], None]:
    """Have a trainer's batches be as those of vLLM's samples with calls of tools are."""

    def change(trainer: Any) -> None:
        generate = trainer._generate_and_score_completions

        def generated(inputs: Any) -> dict[str, Any]:
            trainer.use_vllm = False
            found = generate(inputs)
            trainer.use_vllm = True
            shape = found["completion_ids"].shape
            generator = torch.Generator().manual_seed(7)
            ratio = torch.rand(shape, generator=generator) + 0.5
            found["importance_sampling_ratio"] = ratio[:, :1] if per_sequence else ratio
            found["tool_mask"] = (torch.rand(shape, generator=generator) < 0.8).long()
            return found

        trainer._generate_and_score_completions = generated

    return change


@pytest.mark.parametrize(
    ("loss_type", "per_sequence"), [("dapo", False), ("grpo", True), ("vespo", False)]
)
def test_tools_and_importance_sampling(loss_type: str, per_sequence: bool, tmp_path: Path) -> None:
    pair = Pair("grpo", tmp_path, changed=_correct(per_sequence), loss_type=loss_type)
    assert pair.ours.sharing.streams is (loss_type != "vespo")
    assert pair.apart < BAR
    pair.check_metrics()


@pytest.mark.parametrize("name", RLOO)
def test_rloo(name: str, tmp_path: Path) -> None:
    pair = Pair("rloo", tmp_path, **{"max_steps": 3, **RLOO[name]})
    assert pair.apart < BAR
    pair.check_metrics()


@pytest.mark.parametrize("name", DPO)
def test_dpo(name: str, tmp_path: Path) -> None:
    pair = Pair("dpo", tmp_path, **{"max_steps": 3, **DPO[name]})
    bar = BAR
    if name == "forward KL":
        # Exponentials of whole sequences, of which float32 keeps less: of stock TRL, too.
        exact = truth("dpo", tmp_path / "exact", **DPO[name])
        ours, theirs = (setups.apart(x, exact) for x in (pair.found, pair.expected))
        assert ours < 1.1 * theirs
        bar = 4e-6
    if name == "alpha divergence":
        bar = 4e-6  # exponentials as well, which TRL cannot compute in float64
    assert pair.apart < bar
    # On-policy the rewards of both are rounding, and which is the larger one means nothing.
    on_policy = name == "references beforehand"
    pair.check_metrics(but=("rewards/accuracies",) if on_policy else ())
    computed, given = pair.tokens
    assert computed < 0.8 * given


@pytest.mark.parametrize(("kind", "options"), [("grpo", {"beta": 0.1}), ("dpo", {})])
def test_lora(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """References are the model's own with its adapter off."""
    pair = Pair(kind, tmp_path, made={"peft_config": LORA}, max_steps=3, **options)
    assert pair.apart < BAR
    pair.check_metrics()


def test_a_subclass_of_a_trainer(tmp_path: Path) -> None:
    setups.CONFIGS["gmpo"] = GMPOConfig
    shared = shared_trainer(GMPOTrainer)
    pair = Pair("gmpo", tmp_path, stock=GMPOTrainer, shared=shared, max_steps=3)
    assert pair.ours.sharing.streams is False
    assert pair.apart < BAR
    pair.check_metrics()


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_weights_after_six_steps(kind: str, tmp_path: Path) -> None:
    pair = Pair(kind, tmp_path, max_steps=6)
    assert pair.weights_apart < 1e-5


def test_another_family(tmp_path: Path) -> None:
    pair = Pair("grpo", tmp_path, made={"model": setups.model("gemma3_text")})
    assert pair.apart < BAR
