"""Critics: values, and steps on them, are those of ordinary training, whatever is shared."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from sabotage import ACROSS_MICROBATCHES
from scenarios import CHAIN, EVERY, TIGHT, acceptance_batch
from steps import ACROSS, forked_batch, model_state
from torch import Tensor, nn
from yardstick import faults_of_steps, measure

from forkpoint import (
    Config,
    ConfigError,
    RolloutBatch,
    UnsupportedError,
    wrap,
)
from forkpoint.losses import GRPO, Loss, LossBatch, LossOutputs, ValueLoss
from forkpoint.losses.base import as_loss
from forkpoint.testing import lifted_upcasts, tiny_model
from lanes import slow_besides_every
from versions import checkpoint_blocks

CONFIGS = (
    *EVERY,
    Config(sharing="tree", boundary="within", max_microbatch_tokens=TIGHT),
    Config(sharing="tree", boundary="mixed", max_microbatch_tokens=TIGHT),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=CHAIN),
    Config(sharing="none", boundary="across", max_microbatch_tokens=CHAIN),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=CHAIN, activations="recompute"),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=CHAIN, activations="offload"),
)
WINDOWED: dict[str, Any] = {"sliding_window": 7}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": WINDOWED,
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 8},
}

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def critic(family: str = "llama", **changes: Any) -> nn.Module:
    changes = {"num_hidden_layers": 2, **MODELS.get(family, {}), **changes}
    with warnings.catch_warnings():  # token ids of gemma's special tokens, beyond the vocabulary
        warnings.simplefilter("ignore")
        return tiny_model(family, critic=True, **changes).train()


def coupled(outputs: LossOutputs, batch: LossBatch) -> Tensor:
    """A plain function whose value and gradient depend on every trained token at once."""
    assert batch.returns is not None
    errors_n = batch.rollout_mean((outputs.values - batch.returns).square())
    return errors_n.logsumexp(0) + 0.1 * outputs.values.sum() ** 2 / batch.denominators.tokens


class OfWholeRollouts(Loss):
    """Rollout-additive, and rollouts that train nothing add to it too."""

    decomposition = "rollout"
    reads = "values"
    needs = ("returns",)

    def __call__(self, outputs: LossOutputs, batch: LossBatch) -> Tensor:
        assert batch.returns is not None
        errors_n = batch.rollout_mean((outputs.values - batch.returns).abs())
        return (1 + errors_n).log().exp().square().sum() / batch.denominators.rollouts


LOSSES: dict[str, Any] = {
    "clipped": ValueLoss(clip=0.5),
    "rollouts": ValueLoss(clip=0.5, normalize="rollout"),
    "whole": OfWholeRollouts(),
    "coupled": coupled,
}


def values_of(model: nn.Module, batch: RolloutBatch) -> Tensor:
    """By the stock model alone: the value at token i - 1 belongs to token i."""
    values = torch.zeros(batch.logical_tokens, dtype=torch.float64)
    with torch.no_grad():
        for rollout, begin in zip(batch, batch.offsets.tolist(), strict=False):
            if rollout.loss_mask.any():
                logits = model(input_ids=torch.tensor(rollout.token_ids)[None]).logits[0, :, 0]
                values[begin + 1 : begin + len(rollout)] = logits[:-1]
    return torch.where(torch.tensor(batch.loss_mask), values, 0)


def with_values(batch: RolloutBatch, values_T: Tensor) -> RolloutBatch:
    """The batch with returns and old values around the values.

    Owners of one shared token get different returns and old values.
    """
    rng = np.random.default_rng(3)
    values = values_T.double().numpy()
    advantages = rng.normal(size=batch.logical_tokens)
    old = values + 0.6 * rng.normal(size=batch.logical_tokens)
    return RolloutBatch(
        replace(
            rollout,
            advantage=advantages[begin:end],
            returns=(advantages + values)[begin:end],
            old_values=old[begin:end],
        )
        for rollout, begin, end in zip(batch, batch.offsets, batch.offsets[1:], strict=False)
    )


# Every family with one loss and every loss with one family, in a third of the ways each.
STEPS = {pair: CONFIGS[n::3] for n, pair in enumerate(zip(MODELS, LOSSES, strict=True))}


@pytest.mark.parametrize(("family", "loss"), slow_besides_every(2, STEPS))
def test_steps_are_those_of_dense_training(family: str, loss: str) -> None:
    model: Any = critic(family)
    with lifted_upcasts(model):
        batch = with_values(acceptance_batch(), values_of(model, acceptance_batch()))
    expected = measure(model, batch, as_loss(LOSSES[loss]))
    faults, _ = faults_of_steps(model, expected, LOSSES[loss], STEPS[family, loss])
    assert not faults, f"{len(faults)} differences from dense:\n" + "\n".join(faults[:20])


def estimated(model: nn.Module) -> RolloutBatch:
    return with_values(forked_batch(), wrap(model).score(forked_batch()).values.cpu())


def checkpointed(model: nn.Module) -> nn.Module:
    checkpoint_blocks(model, use_reentrant=False)
    return model


def frozen_trunk(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("score").requires_grad_(True)
    return model


def lora(model: nn.Module, **options: Any) -> nn.Module:
    """With peft's own task type, which trains a copy of `score`, unless told otherwise."""
    chosen = {"target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    config = LoraConfig(**{"task_type": TaskType.TOKEN_CLS, "r": 3, **chosen})
    config.init_lora_weights = False
    torch.manual_seed(2)
    return get_peft_model(model, config)  # type: ignore[arg-type]


def lora_on_the_score(model: nn.Module) -> nn.Module:
    return lora(model, target_modules=["q_proj", "score"], task_type=None)


STATES: list[Callable[[nn.Module], nn.Module]] = [
    checkpointed,
    frozen_trunk,
    nn.Module.eval,
    lora,
    lora_on_the_score,
]


@pytest.mark.parametrize("state", slow_besides_every(3, STATES))
def test_states_of_a_critic(state: Any) -> None:
    model = state(critic("qwen3"))
    report = wrap(model, ACROSS).verify(estimated(model), ValueLoss(clip=0.5))
    assert report.passed, report.table()
    assert report.nearest.worst[0].norm and report.head == "values"
    assert report.nearest.counts.computed_tokens < report.logical_tokens


def test_dtypes_follow_the_model() -> None:
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model = critic("qwen3", dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stats = wrap(model, ACROSS).forward_backward(estimated(model), ValueLoss())
        assert stats.values.dtype == torch.float32
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


def test_a_plan_keeps_no_logits() -> None:
    for config in (Config(head_logits="keep"), Config(memory_budget="1GiB")):
        assert "logits" not in wrap(critic(), config).plan(forked_batch()).explain()


def test_sabotage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = critic()
    batch = estimated(model)
    ACROSS_MICROBATCHES[0](monkeypatch)
    report = wrap(model, ACROSS).verify(batch, ValueLoss())
    assert not report.passed and report.nearest.shared_error > 1e-3, report.table()
    assert "values within" in report.table(width=200)


# What is refused ---------------------------------------------------------------------------------


def test_a_loss_of_the_other_kind_of_model() -> None:
    policy, batch = wrap(critic()), forked_batch()
    state = model_state(policy.host.model)
    for call in (policy.forward_backward, policy.verify):
        with pytest.raises(ConfigError, match=r"GRPO.*the model is a critic.*losses\.ValueLoss"):
            call(batch, GRPO())
        with pytest.raises(ConfigError, match="logprobs were asked for, but the model is a critic"):
            call(batch, lambda outputs, batch: outputs.logprobs.sum())
    with pytest.raises(ConfigError, match="the model is a critic"):
        _ = policy.score(batch).logprobs
    with pytest.raises(UnsupportedError, match="entropies were asked for"):
        policy.score(batch, entropy=True)
    assert model_state(policy.host.model) == state
    assert all(p.grad is None for p in policy.host.model.parameters())

    language = wrap(tiny_model("llama"))
    with pytest.raises(ConfigError, match=r"ValueLoss.*AutoModelForTokenClassification"):
        language.forward_backward(estimated(policy.host.model), ValueLoss())
    with pytest.raises(ConfigError, match="values were asked for"):
        _ = language.score(batch).values


def with_head(head: nn.Module) -> nn.Module:
    model = critic()
    model.score = head
    return model


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: critic(num_labels=2), "has 2 labels; .* num_labels=1"),
        (lambda: with_head(nn.Linear(32, 3)), "has 3 labels"),
        (lambda: with_head(nn.Sequential(nn.Linear(32, 1))), r"score of .* is a torch.*Sequential"),
    ],
    ids=["labels", "wide", "deep"],
)
def test_models_that_are_no_critics(build: Any, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        wrap(build())


def test_dropout_of_a_critic() -> None:
    model = critic(classifier_dropout=0.1)
    batch = estimated(model.eval())
    wrap(model).forward_backward(batch, ValueLoss())
    with pytest.raises(UnsupportedError, match=r"dropout has dropout 0\.1 in training mode"):
        wrap(model.train()).forward_backward(batch, ValueLoss())
