"""`policy.verify` passes what is exact, catches each sabotage in every precision, disturbs nothing.

In float32 and float64 the models are tiny; in bfloat16 model and batch have the proportions of real
ones, for there the question is whether a bug stands out from the rounding of ordinary training.
"""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from sabotage import ACROSS_MICROBATCHES, WITHIN, Sabotage, one_owner_counts
from steps import ACROSS, clear_gradients, forked_batch, gradients
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, VerifyReport, losses, wrap
from forkpoint import verify as verify_module  # the function is policy.verify
from forkpoint.losses import Denominators
from forkpoint.testing import DenseRun, dense_run, tiny_model
from lanes import slow_besides

TREE_IN_ROW = Config(sharing="tree", boundary="within")
DENSE = Config(sharing="none")
GROUPS_ACROSS = Config(sharing="group", boundary="across", max_microbatch_tokens=400)
GROUPS_IN_ROW = Config(sharing="group", boundary="within")
LOSS = losses.GRPO(kl=0.1)


def tiny_report(family: str, dtype: torch.dtype, config: Config, *, seed: int = 0) -> VerifyReport:
    model = tiny_model(family, dtype=dtype, seed=seed)
    return wrap(model, config).verify(forked_batch(seed=seed), LOSS)


def real_model(family: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Four layers of width 128 as the family initialises them."""
    config = AutoConfig.for_model(
        family,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def real_batch(seed: int = 1) -> RolloutBatch:
    """Two groups of eight: prompts of 300 tokens, responses of 50 to 100."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(2):
        prompt = rng.integers(0, 512, 300).tolist()
        rewards = rng.normal(size=8)
        for advantage in (rewards - rewards.mean()).tolist():
            response = rng.integers(0, 512, int(rng.integers(50, 101))).tolist()
            mask = [0] * len(prompt) + [1] * len(response)
            rollouts.append(Rollout(prompt + response, mask, advantage, group_id=group))
    return RolloutBatch(rollouts)


@pytest.fixture
def remembered_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense runs of real models, which are all of one batch, are done once a family and dtype."""

    def run(model: PreTrainedModel, *args: Any) -> DenseRun:
        key = (model.config.model_type, model.dtype)
        if key not in DENSE_RUNS:
            DENSE_RUNS[key] = dense_run(model, *args)
        return DENSE_RUNS[key]

    monkeypatch.setattr(verify_module, "dense_run", run)


DENSE_RUNS: dict[Any, DenseRun] = {}


# What is exact passes ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DENSE, TREE_IN_ROW, ACROSS, Config()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_untouched_model_passes(family: str, dtype: torch.dtype, config: Config) -> None:
    """In float32 one rounding can decide over so few tokens, and each CPU has its own: of several
    models and batches two have to pass, and what is wrong passes none."""
    reports = [tiny_report(family, dtype, config)]
    while dtype == torch.float32 and sum(r.passed for r in reports) < 2 and len(reports) < 5:
        reports.append(tiny_report(family, dtype, config, seed=len(reports)))
    report = reports[0]
    wanted = 1 if dtype == torch.float64 else 2
    assert sum(r.passed for r in reports) >= wanted, report.table()
    assert report.logical_tokens == 184
    assert report.computed_tokens == (172 if config is DENSE else 60)
    assert (report.dtype, report.reference_dtype) == (str(dtype).removeprefix("torch."), "float64")
    if dtype == torch.float64:
        assert report.shared_error < 1e-13
        assert report.dense_error == 0  # ordinary training is its own reference
    else:
        # If the reference were computed in float32 too, dense would have no error.
        assert 1e-7 < report.dense_error < 1e-5
        assert 1e-7 < report.shared_error < 1e-5


@pytest.mark.usefixtures("remembered_dense")
@pytest.mark.parametrize(
    ("family", "config"),
    slow_besides(
        [("llama", GROUPS_ACROSS)],
        [("llama", GROUPS_ACROSS), ("qwen3", GROUPS_IN_ROW), ("qwen3", DENSE)],
    ),
)
def test_an_untouched_bfloat16_model_passes(family: str, config: Config) -> None:
    report = wrap(real_model(family), config).verify(real_batch(), losses.GRPO())
    assert report.passed, report.table()
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    assert 1e-3 < report.dense_error < 2e-2
    assert 0.5 < report.shared_error / report.dense_error < 1.1


def test_autocast_is_verified_in_its_own_precision() -> None:
    model = real_model("qwen3", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        report = wrap(model, GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert report.passed, report.table()
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    assert 1e-3 < report.dense_error < 2e-2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "config",
    slow_besides([GROUPS_ACROSS], [GROUPS_ACROSS, GROUPS_IN_ROW]),
    ids=["across", "within"],
)
def test_float32_adapters_on_a_bfloat16_base(config: Config) -> None:
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
    model = get_peft_model(real_model("qwen3"), adapters)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    report = wrap(model, config).verify(real_batch(), losses.GRPO())
    assert report.passed, report.table()
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    norms = {e.name: e.norm for e in report.worst}
    assert all((norm > 0) == ("lora" in name) for name, norm in norms.items())


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = tiny_report("llama", torch.float64, ACROSS)
    assert report.dtype == "float64"
    assert report.passed, report.table()


@pytest.mark.parametrize("loss", [losses.GSPO(), losses.GRPO(normalize="rollout")], ids=repr)
def test_any_loss_and_denominators(loss: losses.Loss) -> None:
    policy = wrap(tiny_model("qwen3"), ACROSS)
    given = Denominators(tokens=17.0, rollouts=5.0, groups=3.0)
    report = policy.verify(forked_batch(), loss, denominators=given)
    own = policy.verify(forked_batch(), loss)
    assert report.passed and own.passed
    assert report.worst[0].norm != own.worst[0].norm


# What is not is caught ---------------------------------------------------------------------------


@pytest.mark.parametrize("sabotage", [*ACROSS_MICROBATCHES, one_owner_counts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sabotage_across_microbatches_is_caught(
    family: str, dtype: torch.dtype, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    report = tiny_report(family, dtype, ACROSS)
    assert not report.passed, report.table()
    assert report.shared_error > 1e-3


@pytest.mark.parametrize("sabotage", [*WITHIN, one_owner_counts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sabotage_in_a_microbatch_is_caught(
    family: str, dtype: torch.dtype, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    report = tiny_report(family, dtype, TREE_IN_ROW)
    assert not report.passed, report.table()
    assert report.shared_error > 1e-3


@pytest.mark.usefixtures("remembered_dense")
@pytest.mark.parametrize("sabotage", ACROSS_MICROBATCHES)
def test_sabotage_across_microbatches_is_caught_in_bfloat16(
    sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    report = wrap(real_model("llama"), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert not report.passed, report.table()
    assert report.worst[0].excess > 1.5  # not by a hair


@pytest.mark.usefixtures("remembered_dense")
@pytest.mark.parametrize("sabotage", WITHIN)
def test_sabotage_in_a_microbatch_is_caught_in_bfloat16(
    sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    report = wrap(real_model("qwen3"), GROUPS_IN_ROW).verify(real_batch(), losses.GRPO())
    assert not report.passed, report.table()
    assert report.worst[0].excess > 1.5


# Where the bars are ------------------------------------------------------------------------------


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change what the shared step returns: a function of (gradients, stats)."""
    shared = verify_module._shared

    def tamper(change: Any) -> None:
        monkeypatch.setattr(verify_module, "_shared", lambda *args: change(*shared(*args)))

    return tamper


def scaled(factor: float, only: str = "") -> Any:
    def change(found: dict[str, Any], stats: Any) -> Any:
        return {n: g * factor if only in n else g for n, g in found.items()}, stats

    return change


@pytest.mark.parametrize(("off", "passes"), [(0.5e-10, True), (2e-10, False)])
def test_the_bar_of_float64(tampered: Any, off: float, passes: bool) -> None:
    tampered(scaled(1 + off))
    assert tiny_report("llama", torch.float64, ACROSS).passed == passes


@pytest.mark.parametrize(("off", "passes"), [(1e-8, True), (1e-5, False)])
def test_the_bar_of_float32(tampered: Any, off: float, passes: bool) -> None:
    tampered(scaled(1 + off))
    assert tiny_report("llama", torch.float32, ACROSS).passed == passes


@pytest.mark.usefixtures("remembered_dense")
@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (0.05, False)])
def test_one_small_parameter_alone_fails_in_bfloat16(
    tampered: Any, off: float, passes: bool
) -> None:
    """A norm inside attention has the smallest gradient there is, and few elements."""
    tampered(scaled(1 + off, only="layers.2.self_attn.q_norm"))
    report = wrap(real_model("qwen3"), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert report.passed == passes, report.table()
    assert report.shared_error < report.allowed, "over all parameters it does not show"
    if not passes:
        assert report.worst[0].name == "model.layers.2.self_attn.q_norm.weight"


@pytest.mark.usefixtures("remembered_dense")
@pytest.mark.parametrize(("ratio", "passes"), [(1.05, True), (1.3, False), (1.7, False)])
def test_the_bars_of_bfloat16(ratio: float, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1 times dense over all parameters, 1.5 for each of many elements."""
    errors_of = verify_module._parameter_errors

    def scaled_errors(*args: Any) -> list[Any]:
        return [replace(e, shared_error=ratio * e.dense_error) for e in errors_of(*args)]

    monkeypatch.setattr(verify_module, "_parameter_errors", scaled_errors)
    report = wrap(real_model("qwen3"), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert report.passed == passes, report.table()
    wide = [e.excess for e in report.worst if "proj" in e.name]
    assert (max(wide) <= 1) == (ratio < 1.5)


@pytest.mark.parametrize("name", ["loss", "per_token"])
def test_float64_compares_losses_and_logprobs(tampered: Any, name: str) -> None:
    def off(value: Any) -> Any:
        return {"logprobs": value["logprobs"] + 1e-9} if name == "per_token" else value + 1e-9

    tampered(lambda found, stats: (found, replace(stats, **{name: off(getattr(stats, name))})))
    report = tiny_report("llama", torch.float64, ACROSS)
    assert not report.passed
    assert all(entry.excess < 1 for entry in report.worst)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_gradient_that_is_missing_or_no_number_fails(tampered: Any, value: float | None) -> None:
    spoilt = "model.layers.1.mlp.up_proj.weight"

    def spoil(found: dict[str, Any], stats: Any) -> Any:
        return {**found, spoilt: None if value is None else found[spoilt] * value}, stats

    tampered(spoil)
    report = tiny_report("llama", torch.float32, ACROSS)
    assert not report.passed
    assert report.worst[0].name == spoilt
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert json.loads(text)["worst"][0]["name"] == spoilt


def test_a_gradient_that_should_not_be_there_fails(tampered: Any) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    model.lm_head.weight.requires_grad_(False)

    def add(found: dict[str, Any], stats: Any) -> Any:
        assert found["lm_head.weight"] is None
        return {**found, "lm_head.weight": torch.ones_like(model.lm_head.weight)}, stats

    assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed
    tampered(add)
    assert not wrap(model, ACROSS).verify(forked_batch(), LOSS).passed


# The report --------------------------------------------------------------------------------------


def test_the_table_names_the_worst_parameters_and_the_verdict(tampered: Any) -> None:
    good = tiny_report("qwen3", torch.float32, ACROSS)
    tampered(scaled(1.5, only="layers.1.mlp.down_proj"))
    bad = tiny_report("qwen3", torch.float32, ACROSS)
    assert "passed: float32, tree + across, 60 of 184 tokens run" in good.table(width=200)
    table = bad.table(width=200).splitlines()
    assert any("FAILED: float32, tree + across" in line for line in table)
    assert any("against float64 training" in line for line in table)
    first = next(line for line in table if "weight" in line)
    assert "model.layers.1.mlp.down_proj.weight" in first
    assert f"{bad.worst[0].excess:.3f}" in first
    assert any("all, relative to the global norm" in line for line in table)
    assert sum(".weight" in line for line in table) == 10
    assert sum(".weight" in line for line in bad.table(most=2).splitlines()) == 2
    assert all(len(line) <= 80 for line in bad.table(width=80).splitlines())
    excesses = [entry.excess for entry in bad.worst]
    assert excesses == sorted(excesses, reverse=True)


def test_the_report_as_json() -> None:
    model = tiny_model("qwen3", dtype=torch.float32)
    report = wrap(model, ACROSS).verify(forked_batch(), LOSS)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["passed"] is True
    assert (found["dtype"], found["reference_dtype"]) == ("float32", "float64")
    assert (found["sharing"], found["boundary"]) == ("tree", "across")
    assert (found["logical_tokens"], found["computed_tokens"]) == (184, 60)
    assert found["shared_error"] == report.shared_error <= found["allowed"]
    assert len(found["worst"]) == 10
    assert found["worst"][0] == {
        "name": report.worst[0].name,
        "norm": report.worst[0].norm,
        "shared_error": report.worst[0].shared_error,
        "dense_error": report.worst[0].dense_error,
        "allowed": report.worst[0].allowed,
        "excess": report.worst[0].excess,
    }
    assert {entry.name for entry in report.worst} == {n for n, _ in model.named_parameters()}


def test_a_zero_gradient_is_said_to_prove_little() -> None:
    batch = RolloutBatch([Rollout([1, 2, 3, n], [0, 0, 1, 1], 0.0) for n in range(4)])
    report = wrap(tiny_model("llama"), ACROSS).verify(batch, losses.GRPO())
    assert report.passed and report.shared_error == 0
    assert "the gradient is zero, which proves little" in " ".join(report.table().split())
    assert "proves little" not in tiny_report("llama", torch.float64, ACROSS).table()


# It disturbs nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_and_model_are_as_before(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3", dtype=dtype).train()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) if index % 2 else None
    objects, values = {n: p.grad for n, p in model.named_parameters()}, gradients(model)
    configuration, attributes = model.config.to_dict(), set(vars(model))
    rng = torch.get_rng_state()

    assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed

    for name, parameter in model.named_parameters():
        assert parameter.grad is objects[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])
        assert torch.equal(parameter, weights[name])
    assert model.config.to_dict() == configuration
    assert model.config._attn_implementation == "sdpa"
    assert set(vars(model)) == attributes
    assert model.training
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_step_that_fails_puts_gradients_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    objects = [p.grad for p in model.parameters()]

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(losses.GRPO, "__call__", broken)
    with pytest.raises(ZeroDivisionError):
        wrap(model, ACROSS).verify(forked_batch(), losses.GRPO())
    assert all(p.grad is g for p, g in zip(model.parameters(), objects, strict=True))
    assert all(bool((g == 1).all()) for g in objects if g is not None)


def test_it_refuses_what_a_step_refuses() -> None:
    model = tiny_model("llama", attention_dropout=0.1).train()
    with pytest.raises(UnsupportedError, match="dropout"):
        wrap(model).verify(forked_batch(), LOSS)
    assert all(p.grad is None for p in model.parameters())


def test_it_works_where_gradients_are_switched_off() -> None:
    model: nn.Module = tiny_model("llama")
    with torch.no_grad():
        assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed
    clear_gradients(model)
