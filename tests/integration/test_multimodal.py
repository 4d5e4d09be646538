"""Text rows of multimodal models: the outer model is wrapped, and its encoders are not run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell
from host_models import checkpointing, lora, quiet_peft
from peft import PeftModel
from steps import ACROSS, clear_gradients, forked_batch, gradients, relative_distance
from test_images import BAR, CONFIGS, gradients_by_rollout, tower, weighted
from torch import Tensor
from transformers import AutoModelForCausalLM

from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, wrap
from forkpoint.hosts.transformers import calls
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.losses import GRPO, GSPO
from forkpoint.losses.base import as_loss
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.testing import ReadOnlyHook, dense_run, lifted_upcasts, tiny_model
from lanes import slow_besides
from multimodal_models import IMAGE, VISION, tiny_multimodal
from versions import skip_hidden_biases

BATCH = forked_batch()
FAST = ("qwen3_vl",)


def stock_gradients(model: Any, batch: RolloutBatch) -> dict[str, Tensor | None]:
    """With positions as the model finds them itself."""

    def positions(rollout: Rollout) -> dict[str, Tensor]:
        if not hasattr(model.base_model, "get_rope_index"):
            return {}
        ids = torch.tensor(rollout.token_ids)[None]
        found = model.model.get_rope_index(ids, mm_token_type_ids=torch.zeros_like(ids))[0]
        assert (found == torch.arange(ids.shape[1])).all()
        return {"position_ids": found}

    return gradients_by_rollout(model, batch, positions)


@pytest.mark.parametrize("family", slow_besides(FAST, MULTIMODAL))
def test_text_equals_the_stock_forward(family: str) -> None:
    model = tiny_multimodal(family)
    assert tower(model)
    with lifted_upcasts(model):
        policy = wrap(model)
        wanted = stock_gradients(model, BATCH)
        for config in CONFIGS:
            clear_gradients(model)
            policy.with_config(**vars(config)).forward_backward(BATCH, weighted)
            assert relative_distance(gradients(model), wanted) < BAR, config
            assert all(p.grad is None for p in tower(model).values())
            assert all(p.grad is not None for p in model.get_output_embeddings().parameters())


def test_every_family_is_tested() -> None:
    assert VISION.keys() == MULTIMODAL.keys()


def without_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "set_chunk", lambda *_: None)


def leaving_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last layer's keys and values are made by layers far before it."""
    monkeypatch.setattr(ModelShape, "leaves_early", True)


FAULTS = {without_chunks: "llama4", leaving_early: "gemma4"}


@pytest.mark.parametrize("fault", slow_besides([without_chunks], FAULTS))
def test_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the comparison with stock, by the self-check if values show them, and by verify."""
    model = tiny_multimodal(FAULTS[fault])
    with lifted_upcasts(model):
        wanted = stock_gradients(model, BATCH)
        fault(monkeypatch)
        policy = wrap(model, Config(sharing="tree", boundary="across", max_microbatch_tokens=9))
        unchecked = policy.with_config(self_check=False)
        unchecked.forward_backward(BATCH, weighted)
        assert relative_distance(gradients(model), wanted) > 1e-3
    assert not unchecked.verify(BATCH, GRPO()).passed
    if fault is not leaving_early:
        with pytest.raises(UnsupportedError, match="differ from the model's"):
            policy.forward_backward(BATCH, GRPO())


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_losses_scores_and_recomputation(family: str) -> None:
    """Losses of rollouts, scores, log-probs of a loss outside, and recomputation."""
    model = tiny_multimodal(family)
    with lifted_upcasts(model):
        policy = wrap(model, ACROSS)
        for loss in (GRPO(kl=0.1), GSPO()):
            dense = dense_run(model, BATCH, loss)
            clear_gradients(model)
            stats = policy.forward_backward(BATCH, loss)
            assert stats.loss == pytest.approx(dense.loss, rel=BAR)
            assert relative_distance(gradients(model), dict(dense.gradients)) < BAR
        dense = dense_run(model, BATCH, as_loss(weighted))
        assert (policy.score(BATCH).logprobs - dense.per_token["logprobs"]).abs().max() < BAR
        clear_gradients(model)
        found = policy.logprobs(BATCH)
        batch_mask = torch.tensor(BATCH.loss_mask)
        advantages = torch.tensor(BATCH.advantages)
        (-(found * advantages)[batch_mask].sum()).backward()
        assert relative_distance(gradients(model), dict(dense.gradients)) < BAR
        clear_gradients(model)
        policy.with_config(checkpointing="full").forward_backward(BATCH, weighted)
        assert relative_distance(gradients(model), dict(dense.gradients)) < BAR
        clear_gradients(model)
        checkpointing(model, use_reentrant=False)
        policy.forward_backward(BATCH, weighted)
        assert relative_distance(gradients(model), dict(dense.gradients)) < BAR


@pytest.mark.parametrize("family", slow_besides(["qwen3_vl"], MULTIMODAL))
def test_verify(family: str) -> None:
    report = wrap(tiny_multimodal(family)).verify(BATCH, GRPO())
    assert report.passed and len(report.plans) >= 2


@quiet_peft
@pytest.mark.parametrize("family", slow_besides(["qwen2_5_vl"], MULTIMODAL))
def test_adapters(family: str) -> None:
    """On the language model, the encoder and the head's inputs alike; peft saves their names."""
    skip_hidden_biases(family)
    base = tiny_multimodal(family)
    # peft wraps routers of Llama 4 as if they were plain linear layers, which fails.
    model: Any = lora(base, target_modules="all-linear", exclude_modules=["router"])
    assert isinstance(model, PeftModel)
    with lifted_upcasts(model):
        policy = wrap(model, CONFIGS[1])
        dense = dense_run(model, BATCH, GRPO())
        clear_gradients(model)
        policy.forward_backward(BATCH, GRPO())
    assert relative_distance(gradients(model), dict(dense.gradients)) < BAR
    adapters = {n: p for n, p in tower(model).items() if "lora_" in n}
    assert adapters and all(p.grad is None for p in adapters.values())


def test_a_forward_with_an_image_changes_nothing() -> None:
    """It leaves rope_deltas in the model, which steps do not read."""
    model = tiny_multimodal("qwen3_vl")
    policy = wrap(model)
    policy.forward_backward(BATCH, weighted)
    wanted, checked = gradients(model), policy.host.fingerprint()
    clear_gradients(model)
    grid = torch.tensor([[1, 4, 4]])
    ids = torch.tensor([[3, IMAGE, IMAGE, IMAGE, IMAGE, 4]])
    model.forward(
        input_ids=ids,
        pixel_values=torch.randn(16, 96, dtype=torch.float64),
        image_grid_thw=grid,
        mm_token_type_ids=(ids == IMAGE).long(),
    )
    assert model.model.rope_deltas is not None
    assert policy.host.fingerprint() == checked
    policy.forward_backward(BATCH, weighted)
    assert relative_distance(gradients(model), wanted) == 0


def test_what_lies_around_the_language_model_is_refused() -> None:
    """It is not run: hooks, and forwards that are set."""
    for change in (
        lambda inner: inner.register_forward_hook(ReadOnlyHook(print)),
        lambda inner: setattr(inner, "forward", torch.autocast("cpu")(inner.forward)),
    ):
        model = tiny_multimodal("qwen3_vl")
        change(model.model)
        with pytest.raises(UnsupportedError, match=r"^model has"):
            wrap(model)


def test_language_models_that_are_not_known() -> None:
    model = tiny_multimodal("llava", model_type="gpt_neox")
    with pytest.raises(UnsupportedError, match=r"language model of .* is a 'gpt_neox'"):
        wrap(model)


def test_dropout_of_the_tower_is_no_matter() -> None:
    model = tiny_multimodal("llava")
    next(m for n, m in model.named_modules() if "vision" in n).dropout = 0.1
    with lifted_upcasts(model):
        wanted = stock_gradients(model, BATCH)
        wrap(model, CONFIGS[1]).forward_backward(BATCH, weighted)
    assert relative_distance(gradients(model), wanted) < BAR


def test_a_tower_that_trains_alone_is_refused() -> None:
    """Text gives it no gradient, so a step would do nothing."""
    model = tiny_multimodal("llava")
    trained = {id(p) for p in tower(model).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    policy = wrap(model)
    with pytest.raises(UnsupportedError, match="no parameter of the language model"):
        policy.forward_backward(BATCH, GRPO())
    model.lm_head.weight.requires_grad_()
    policy.forward_backward(BATCH, GRPO())


def test_saved_and_loaded_as_before(tmp_path: Any) -> None:
    """AutoModelForCausalLM gives the multimodal class of Gemma 3, and names stay those of it."""
    model = tiny_multimodal("gemma3", dtype=torch.float32)
    policy = wrap(model)
    policy.forward_backward(BATCH, GRPO())
    names = set(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(loaded) is type(model) and set(loaded.state_dict()) == names
    wrap(loaded.train()).forward_backward(BATCH, GRPO())
    assert relative_distance(gradients(loaded), gradients(model)) < 2e-5


@pytest.mark.parametrize("family", slow_besides(FAST, MULTIMODAL))
def test_shallow_models(family: str) -> None:
    """Automatic calibration measures a language model of few layers."""
    policy = wrap(tiny_multimodal(family))
    for layers in (2, len(policy.host.blocks) + 1):
        model = policy.host.shallow(layers)
        assert model is not None
        few = wrap(model).host
        assert len(few.blocks) == layers
        assert few.shape.hidden == policy.host.shape.hidden


def test_the_command_verify_takes_a_folder(shell: Shell, rollouts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_multimodal("qwen3_vl", dtype=torch.float32).save_pretrained(folder)
    done = shell("verify", rollouts, "--model", folder, "--dtype", "float64", "--limit-groups", 2)
    assert done.code == 0, done.out
    assert shell("plan", rollouts, "--model", folder).code == 0


def test_a_tiny_model_is_one_of_text() -> None:
    """Sizes of a multimodal model are in parts of its configuration."""
    with pytest.raises(UnsupportedError, match="gemma3 is multimodal, and its model would have"):
        tiny_model("gemma3")
