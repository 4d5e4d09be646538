"""`cast_lm_head_to_fp32` of GRPO: a head in float32 above a model in 16 bits, beside stock TRL."""

import copy
from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
import torch
from cases_trl import LATER, Pair
from transformers import PreTrainedModel

BAR = 2e-6
HEAD = "lm_head.weight"
pytestmark = pytest.mark.filterwarnings("ignore")


def _pair(folder: Path, model: PreTrainedModel, **options: Any) -> Pair:
    return Pair("grpo", folder, made={"model": model}, **options)


@pytest.mark.parametrize(
    ("options", "tied"), [({"importance_sampling_level": "sequence"}, False), (LATER, True)]
)
def test_equal_to_stock_in_float32(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    model = setups.model(tie_word_embeddings=tied)
    more = {"max_steps": 3, "beta": 0.1, **options}
    pair = _pair(tmp_path, model, cast_lm_head_to_fp32=True, **more)
    assert pair.apart < BAR
    pair.check_metrics()


def _without_blocks(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose blocks add nothing, so that last hidden states are those of a token alone."""
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize("way", ["autocast", "16-bit weights"])
def test_the_product_is_in_float32(way: str, tmp_path: Path) -> None:
    """Where nothing below the head depends on what is shared, it is equal to the last digits."""
    model = _without_blocks(setups.model())
    options: dict[str, Any] = {"bf16": way == "autocast"}
    if way != "autocast":
        model = model.to(torch.bfloat16)
    wide = _pair(tmp_path / "wide", model, cast_lm_head_to_fp32=True, **options)
    assert wide.found[HEAD].dtype == wide.expected[HEAD].dtype == torch.float32
    assert _apart(wide.found, wide.expected) < BAR
    wide.check_metrics(but=("grad_norm",))
    plain = _pair(tmp_path / "plain", model, **options)
    assert _apart(plain.expected, wide.expected) > 1e-3


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return setups.apart({HEAD: found[HEAD]}, {HEAD: expected[HEAD]})


def test_as_near_to_float32_as_stock(tmp_path: Path) -> None:
    ours, theirs = 0.0, 0.0
    for seed in (0, 1):
        model = setups.model(seed=seed, tie_word_embeddings=True)
        options: dict[str, Any] = {"cast_lm_head_to_fp32": True}
        low = _pair(tmp_path / f"low {seed}", copy.deepcopy(model), bf16=True, **options)
        high = _pair(tmp_path / f"high {seed}", model, **options)
        ours += setups.apart(low.found, high.expected) ** 2
        theirs += setups.apart(low.expected, high.expected) ** 2
    assert 1e-3 < theirs**0.5 < 0.1
    assert ours**0.5 < 1.2 * theirs**0.5


def test_evaluation(tmp_path: Path) -> None:
    made = {"model": setups.model(), "eval_dataset": setups.prompts(4)}
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    pair = Pair("grpo", tmp_path, made=made, cast_lm_head_to_fp32=True, max_steps=2, **options)
    pair.check_metrics()
