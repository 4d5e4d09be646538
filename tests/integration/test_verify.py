"""`policy.verify` passes what is exact, catches each sabotage in every precision, disturbs nothing.

In float32 and float64 the models are tiny; in bfloat16 model and batch have the proportions of real
ones, for there the question is whether a bug stands out from the rounding of ordinary training.
"""

import gc
import json
import math
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from host_models import lora, real_model
from sabotage import ACROSS_MICROBATCHES, WITHIN, Sabotage, one_owner_counts
from steps import ACROSS, clear_gradients, forked_batch, gradients, model_state
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, VerifyReport, losses, wrap
from forkpoint.losses import Denominators
from forkpoint.step import plan as step_plan
from forkpoint.testing import tiny_model
from forkpoint.verify import comparison
from forkpoint.verify.comparison import Comparison
from forkpoint.verify.memory import PLAIN, SMALL, STREAMED, MemoryStrategy
from lanes import slow_besides_every
from watched import watched

TREE_IN_ROW = Config(sharing="tree", boundary="within")
GROUPS_ACROSS = Config(sharing="group", boundary="across", max_microbatch_tokens=400)
LOSS = losses.GRPO(kl=0.1)


def tiny_report(family: str, dtype: torch.dtype) -> VerifyReport:
    return wrap(tiny_model(family, dtype=dtype), ACROSS).verify(forked_batch(), LOSS)


def real_batch() -> RolloutBatch:
    """Two groups of eight: prompts of 300 tokens, responses of 50 to 100."""
    rng = np.random.default_rng(1)
    rollouts = []
    for group in range(2):
        prompt = rng.integers(0, 512, 300).tolist()
        rewards = rng.normal(size=8)
        for advantage in (rewards - rewards.mean()).tolist():
            response = rng.integers(0, 512, int(rng.integers(50, 101))).tolist()
            mask = [0] * len(prompt) + [1] * len(response)
            rollouts.append(Rollout(prompt + response, mask, advantage, group_id=group))
    return RolloutBatch(rollouts)


# What is exact passes ----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_untouched_bfloat16_model_passes() -> None:
    report = wrap(real_model("llama"), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert report.passed, report.table()
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    assert 1e-3 < report.dense_error < 2e-2
    assert 0.5 < report.nearest.shared_error / report.dense_error < 1.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_float32_adapters_on_a_bfloat16_base() -> None:
    report = wrap(lora(real_model("qwen3")), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert report.passed, report.table()
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    norms = {e.name: e.norm for e in report.nearest.worst}
    assert all((norm > 0) == ("lora" in name) for name, norm in norms.items())


def test_denominators_of_the_caller() -> None:
    policy, loss = wrap(tiny_model("qwen3"), ACROSS), losses.GSPO()
    given = Denominators(tokens=17.0, rollouts=5.0, groups=3.0)
    report = policy.verify(forked_batch(), loss, denominators=given)
    own = policy.verify(forked_batch(), loss)
    assert report.passed and own.passed
    assert report.nearest.worst[0].norm != own.nearest.worst[0].norm


def test_a_parameter_without_elements() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed


# What is not is caught ---------------------------------------------------------------------------


@pytest.mark.slow
def test_sabotage_is_caught_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    ACROSS_MICROBATCHES[2](monkeypatch)
    report = wrap(real_model("llama"), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert not report.passed, report.table()
    assert report.nearest.worst[0].excess > 1.5  # not by a hair


# Where the bars are ------------------------------------------------------------------------------


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change what the shared step returns: a function of (gradients, stats)."""
    shared = Comparison._shared

    def tamper(change: Any) -> None:
        monkeypatch.setattr(Comparison, "_shared", lambda *args: change(*shared(*args)))

    return tamper


def scaled(factor: float, only: str = "") -> Any:
    def change(found: dict[str, Any], stats: Any) -> Any:
        return {n: g * factor if only in n else g for n, g in found.items()}, stats

    return change


@pytest.mark.parametrize(
    ("dtype", "off", "passes"),
    [
        (torch.float64, 0.5e-10, True),
        (torch.float64, 2e-10, False),
        (torch.float32, 1e-8, True),
        (torch.float32, 1e-5, False),
    ],
)
def test_the_bars(tampered: Any, dtype: torch.dtype, off: float, passes: bool) -> None:
    tampered(scaled(1 + off))
    assert tiny_report("llama", dtype).passed == passes


@pytest.mark.slow
def test_one_small_parameter_alone_fails_in_bfloat16(tampered: Any) -> None:
    """A norm inside attention has the smallest gradient there is, and few elements."""
    tampered(scaled(1.05, only="layers.1.self_attn.q_norm"))
    report = wrap(real_model("qwen3"), GROUPS_ACROSS).verify(real_batch(), losses.GRPO())
    assert not report.passed, report.table()
    assert report.nearest.shared_error < report.nearest.allowed, (
        "over all parameters it does not show"
    )
    assert report.nearest.worst[0].name == "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.slow
def test_the_bars_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1 times dense over all parameters, 1.5 for each of many elements."""
    errors_of = comparison.parameter_errors

    def scaled_errors(*args: Any) -> list[Any]:
        return [replace(e, shared_error=1.3 * e.dense_error) for e in errors_of(*args)]

    monkeypatch.setattr(comparison, "parameter_errors", scaled_errors)
    batch = real_batch().select([0, 1, 8])
    report = wrap(real_model("qwen3"), GROUPS_ACROSS).verify(batch, losses.GRPO())
    assert not report.passed, report.table()
    assert max(e.excess for e in report.nearest.worst if "proj" in e.name) <= 1


@pytest.mark.parametrize("name", ["loss", "per_token"])
def test_float64_compares_losses_and_logprobs(tampered: Any, name: str) -> None:
    def off(value: Any) -> Any:
        return {"logprobs": value["logprobs"] + 1e-9} if name == "per_token" else value + 1e-9

    tampered(lambda found, stats: (found, replace(stats, **{name: off(getattr(stats, name))})))
    report = tiny_report("llama", torch.float64)
    assert not report.passed
    assert all(entry.excess < 1 for entry in report.nearest.worst)


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_gradient_that_is_missing_or_no_number_fails(tampered: Any, value: float | None) -> None:
    spoilt = "model.layers.1.mlp.up_proj.weight"

    def spoil(found: dict[str, Any], stats: Any) -> Any:
        return {**found, spoilt: None if value is None else found[spoilt] * value}, stats

    tampered(spoil)
    report = tiny_report("llama", torch.float32)
    assert not report.passed
    assert report.nearest.worst[0].name == spoilt
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


def test_the_report_as_a_table_and_as_json(tampered: Any) -> None:
    tampered(scaled(1.5, only="layers.1.mlp.down_proj"))
    report = tiny_report("qwen3", torch.float32)
    # If the reference were computed in float32 too, dense would have no error.
    assert report.reference_dtype == "float64" and 1e-7 < report.dense_error < 1e-5
    first = next(line for line in report.table(width=200).splitlines() if "weight" in line)
    assert "model.layers.1.mlp.down_proj.weight" in first
    assert sum(".weight" in line for line in report.table(most=2).splitlines()) == 2
    excesses = [entry.excess for entry in report.nearest.worst]
    assert excesses == sorted(excesses, reverse=True)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["passed"] is False
    for name in ("dtype", "reference_dtype"):
        assert found[name] == getattr(report, name)
    for name in ("sharing", "boundary", "shared_error", "allowed"):
        assert found[name] == getattr(report.nearest, name)
    assert (found["logical_tokens"], found["computed_tokens"]) == (184, 60)
    assert len(found["worst"]) == 10
    assert found["worst"][0] == {
        **vars(report.nearest.worst[0]),
        "excess": report.nearest.worst[0].excess,
    }
    assert {entry.name for entry in report.nearest.worst} == {
        name for name, _ in tiny_model("qwen3").named_parameters()
    }


def test_a_zero_gradient_is_said_to_prove_little() -> None:
    batch = RolloutBatch([Rollout([1, 2, 3, n], [0, 0, 1, 1], 0.0) for n in range(4)])
    report = wrap(tiny_model("llama"), ACROSS).verify(batch, losses.GRPO())
    assert report.passed and report.nearest.shared_error == 0
    assert "the gradient is zero, which proves little" in " ".join(report.table().split())


# It disturbs nothing -----------------------------------------------------------------------------


def test_gradients_and_model_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", dtype=torch.float32).train()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) if index % 2 else None
    objects, values = {n: p.grad for n, p in model.named_parameters()}, gradients(model)
    state = model_state(model)
    rng = torch.get_rng_state()

    assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed

    for name, parameter in model.named_parameters():
        assert parameter.grad is objects[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])
        assert torch.equal(parameter, weights[name])
    assert model_state(model) == state
    assert torch.equal(torch.get_rng_state(), rng)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(losses.GRPO, "__call__", broken)
    with pytest.raises(ZeroDivisionError):
        wrap(model, ACROSS).verify(forked_batch(), LOSS)
    assert all(p.grad is objects[name] for name, p in model.named_parameters())


def test_it_refuses_what_a_step_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "single_runs", pytest.fail)
    model = tiny_model("llama", attention_dropout=0.1).train()
    with pytest.raises(UnsupportedError, match="dropout"):
        wrap(model).verify(forked_batch(), LOSS)
    assert all(p.grad is None for p in model.parameters())


def test_it_works_where_gradients_are_switched_off() -> None:
    model: nn.Module = tiny_model("llama")
    with torch.no_grad():
        assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed
    clear_gradients(model)


# Both kinds of sharing ---------------------------------------------------------------------------


def unshared() -> RolloutBatch:
    return RolloutBatch([Rollout([n, 2, 3, 4, 5 + n], [0, 0, 1, 1, 1], 1.5 - n) for n in range(3)])


def test_attention_that_takes_few_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a model with FlashAttention runs in float64 without it."""

    def kernel(module: nn.Module, query: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        assert query.dtype != torch.float64
        return sdpa_attention_forward(module, query, *inputs, **named)

    kernel.__module__ = "transformers"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", kernel)
    model = tiny_model("qwen3", dtype=torch.float32)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert wrap(model, ACROSS).verify(forked_batch(), LOSS).passed
    assert model.config._attn_implementation == "flash_attention_2"


def test_sharing_within_and_across_microbatches_is_compared() -> None:
    """Though one microbatch holds the whole batch, prefix cache is written and read."""
    model = tiny_model("qwen3")
    seen: list[str] = []
    with watched(seen.append):
        report = wrap(model).verify(forked_batch(), LOSS)
    assert report.verdict == "passed" and report.left_out == ()
    within, across = report.plans
    assert (within.kind, across.kind) == ("within", "across")
    assert within.counts.with_children == 0 and within.counts.shared_segments > 0
    assert across.counts.read_across > 0 and across.counts.cache_tokens > 0
    for plan in report.plans:
        assert plan.counts.computed_tokens == 60 and plan.counts.saved_tokens == 112
        assert plan.passed and plan.shared_error < 1e-13
    assert any(event.startswith("backward prefix") for event in seen)
    text = " ".join(report.table(width=400).split())
    assert "passed: 2 of 2 plans, sharing within microbatches and across microbatches" in text
    kinds = [entry["kind"] for entry in report.to_dict()["plans"]]
    assert kinds == ["within", "across"]


@pytest.mark.parametrize(
    "sabotage", slow_besides_every(3, [*ACROSS_MICROBATCHES, *WITHIN, one_owner_counts])
)
def test_whatever_the_planner_chooses_sabotage_is_caught(
    sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    report = wrap(tiny_model("qwen3")).verify(forked_batch(), LOSS)
    assert report.verdict == "failed", report.table()
    assert not report.plans[-1].passed, "sharing across microbatches"


def test_it_cannot_pass_by_not_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that shares nothing, whatever it is asked, is found out before anything runs."""
    real = step_plan.make_plan

    def dense(batch: RolloutBatch, shape: Any, config: Config, **options: Any) -> Any:
        return real(batch, shape, replace(config, sharing="none"), **options)

    monkeypatch.setattr(step_plan, "make_plan", dense)
    report = wrap(tiny_model("llama")).verify(forked_batch(), LOSS)
    assert not report.passed
    assert report.verdict == "nothing to verify" and report.plans == ()
    assert report.reason is not None and "no plan shares the common tokens" in report.reason


def test_the_choice_of_not_sharing_is_compared_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that prefers dense training does not keep others from being compared."""
    real = step_plan.make_plan

    def dearer(batch: RolloutBatch, shape: Any, config: Config, **options: Any) -> Any:
        chosen = replace(config, sharing="none") if config.sharing == "auto" else config
        return real(batch, shape, chosen, **options)

    monkeypatch.setattr(step_plan, "make_plan", dearer)
    report = wrap(tiny_model("llama")).verify(forked_batch(), LOSS)
    assert [plan.kind for plan in report.plans] == ["within", "across", "chosen"]
    assert report.passed and report.plans[-1].counts.computed_tokens == 172


@pytest.mark.parametrize(
    ("config", "batch", "reason"),
    [
        (Config(sharing="none"), forked_batch(), "sharing is 'none', which is ordinary training"),
        (Config(), unshared(), "no two rollouts of the batch begin with the same two tokens"),
        (Config(sharing="group"), unshared(), "no two rollouts of one group begin"),
    ],
    ids=["none", "unshared", "groups"],
)
def test_nothing_to_verify(
    config: Config, batch: RolloutBatch, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "single_runs", pytest.fail)
    report = wrap(tiny_model("llama"), config).verify(batch, losses.GRPO())
    assert report.verdict == "nothing to verify" and not report.passed
    assert report.reason is not None and reason in report.reason
    assert "NOTHING TO VERIFY: " in report.table() and "passed" not in report.table()
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["passed"] is False and found["verdict"] == "nothing to verify"
    assert found["shared_error"] is None and found["plans"] == []


@pytest.mark.parametrize(
    ("config", "kinds", "reason"),
    [
        (TREE_IN_ROW, ["within"], "boundary is 'within'"),
        (Config(boundary="mixed", max_microbatch_tokens=12), ["across"], "boundary is 'mixed'"),
    ],
    ids=["within", "mixed"],
)
def test_options_leave_kinds_out_and_it_is_said(
    config: Config, kinds: list[str], reason: str
) -> None:
    report = wrap(tiny_model("llama"), config).verify(forked_batch(), LOSS)
    assert report.passed and [plan.kind for plan in report.plans] == kinds
    (left,) = report.left_out
    assert left.reason == reason
    assert f"because {reason}" in " ".join(report.table().split())
    for plan in report.plans:
        assert plan.boundary == config.boundary


def test_a_budget_for_one_rollout_at_a_time_leaves_sharing_within_out() -> None:
    ids = [[*range(40), *range(42 + 3 * n, 45 + 3 * n)] for n in range(4)]
    batch = RolloutBatch(Rollout(x, [0] * 40 + [1] * 3, 1.0, group_id="g") for x in ids)
    options: dict[str, Any] = {"sharing": "tree", "checkpointing": "none"}
    policy = wrap(tiny_model("llama"), Config(**options))
    one, two = (
        policy.with_config(boundary="within", max_microbatch_tokens=n).plan(batch, losses.GRPO())
        for n in (43, 46)
    )
    between = ((one.predicted_peak_bytes or 0) + (two.predicted_peak_bytes or 0)) // 2
    report = policy.with_config(memory_budget=between).verify(batch, losses.GRPO())
    assert report.passed and [plan.kind for plan in report.plans] == ["across"]
    (left,) = report.left_out
    assert left.reason.startswith("microbatches of 4") and "share nothing within" in left.reason


# Memory ------------------------------------------------------------------------------------------


def model_for_ways(family: str) -> PreTrainedModel:
    model = tiny_model(family, dtype=torch.float32)
    model.set_attn_implementation("eager")  # sdpa of older transformers knows no softcap
    return model


@cache
def plain_report(family: str) -> VerifyReport:
    return wrap(model_for_ways(family), ACROSS).verify(forked_batch(), LOSS)


@pytest.mark.parametrize(
    ("family", "way"), [("gemma2", SMALL), ("qwen3", STREAMED)], ids=["parts", "streamed"]
)
@pytest.mark.slow
def test_runs_that_save_memory_are_as_exact(
    family: str, way: MemoryStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits in parts of 2 tokens, checkpointed blocks, blocks that stay in the host's memory."""
    model, plain = model_for_ways(family), plain_report(family)
    monkeypatch.setattr(comparison, "has_room", lambda *_: False)
    monkeypatch.setattr(comparison, "STREAMED", replace(way, head_tokens=2))
    monkeypatch.setattr(comparison, "PLAIN", replace(SMALL, head_tokens=2))
    saving = wrap(model, ACROSS).verify(forked_batch(), LOSS)
    norms = {entry.name: entry.norm for entry in plain.nearest.worst}
    for entry in saving.nearest.worst:
        assert entry.norm == pytest.approx(norms[entry.name], rel=1e-12)
    assert saving.nearest.shared_error == pytest.approx(plain.nearest.shared_error, rel=1e-6)
    assert saving.dense_error == pytest.approx(plain.dense_error, rel=0.5)


def test_memory_that_runs_out_is_met_with_a_smaller_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    real = Comparison._train

    def failing(work: Any, model: Any, routed: Any, way: Any) -> Any:
        tried.append(way)
        if way == PLAIN:
            raise torch.OutOfMemoryError("injected")
        return real(work, model, routed, way)

    monkeypatch.setattr(Comparison, "_train", failing)
    model = tiny_model("llama", dtype=torch.float32)
    before = set(vars(model))
    assert wrap(model, ACROSS).verify(forked_batch(), LOSS).plans
    assert tried == [PLAIN, SMALL] * 2, "the reference and dense training"
    assert set(vars(model)) == before


def test_the_copy_is_gone_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    copy_in, runs = comparison.whole_copy, Comparison.single_runs

    def copied(*args: Any, **options: Any) -> Any:
        found = copy_in(*args, **options)
        copies.append(weakref.ref(found[0]))
        return found

    def checked(*args: Any, is_reference: bool) -> Any:
        gc.collect()
        assert [copy() for copy in copies] == [None] * (not is_reference)
        return runs(*args, is_reference=is_reference)

    monkeypatch.setattr(comparison, "whole_copy", copied)
    monkeypatch.setattr(Comparison, "single_runs", checked)
    wrap(tiny_model("llama", dtype=torch.float32), ACROSS).verify(forked_batch(), LOSS)
    assert len(copies) == 1
