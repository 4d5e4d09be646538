"""Steps of torchtitan's models, beside the models' own forward on one rollout at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from steps import (
    ACROSS,
    VOCAB,
    clear_gradients,
    forked_batch,
    gradients,
    model_state,
    relative_distance,
    step_error,
)
from titan_models import FLEX, HEAD, titan_model
from torch import nn

from forkpoint import Config, Rollout, RolloutBatch, UnsupportedError, losses, wrap
from forkpoint.rollouts.media import Media
from forkpoint.testing import lifted_upcasts

BATCH = forked_batch()
BAR = 1e-10
WITHIN = Config(sharing="tree", boundary="within")
RECOMPUTE = Config(
    sharing="tree", boundary="across", max_microbatch_tokens=12, activations="recompute"
)


@pytest.mark.parametrize(
    ("family", "loss", "config", "options"),
    [
        ("llama3", losses.GRPO(), ACROSS, {}),
        ("llama3", losses.GRPO(), Config(sharing="none", boundary="within"), {"n_kv_heads": None}),
        ("qwen3", losses.GSPO(), ACROSS, {}),
        ("qwen3", losses.GRPO(), WITHIN, {"qk_norm": False}),
        ("qwen3", losses.GRPO(), RECOMPUTE, {"enable_weight_tying": True}),
    ],
)
def test_gradients_are_dense_ones(
    family: str, loss: Any, config: Config, options: dict[str, Any]
) -> None:
    assert step_error(titan_model(family, **options), BATCH, loss, config) < BAR


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointing_of_plans(checkpointing: str) -> None:
    model = titan_model("qwen3")
    config = Config(
        sharing="tree",
        boundary="across",
        max_microbatch_tokens=12,
        checkpointing=checkpointing,  # pyright: ignore[reportArgumentType]
    )
    assert step_error(model, BATCH, losses.GRPO(), config) < BAR


@pytest.fixture
def shifted_positions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every microbatch has positions from 0 on."""
    from forkpoint.hosts.titan.entry import TitanEntry

    own = TitanEntry.run

    def run(self: Any, ids: Any, positions: Any, context: Any) -> Any:
        return own(self, ids, positions - positions.min(), context)

    monkeypatch.setattr(TitanEntry, "run", run)
    yield


def test_a_broken_boundary_is_found(shifted_positions: None) -> None:
    """By the comparison above, by the self-check and by verify."""
    model = titan_model("llama3")
    unchecked = Config(
        sharing="tree", boundary="across", max_microbatch_tokens=12, self_check=False
    )
    with pytest.raises(AssertionError):
        step_error(model, BATCH, losses.GRPO(), unchecked)
    assert not wrap(model, unchecked).verify(BATCH, losses.GRPO()).passed
    with pytest.raises(UnsupportedError, match="differ from the model's"):
        wrap(model, ACROSS).forward_backward(BATCH, losses.GRPO())


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_verify_passes(family: str, dtype: torch.dtype) -> None:
    report = wrap(titan_model(family, dtype=dtype)).verify(BATCH, losses.GRPO())
    assert report.passed, str(report)
    assert len(report.plans) == 2


def stock_logprobs(model: nn.Module, batch: RolloutBatch) -> torch.Tensor:
    found = []
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.tensor(batch.token_ids[begin:end].copy())[None]
        every = model(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(nn.functional.pad(every, (1, 0)))
    return torch.cat(found)


def test_score_and_logprobs() -> None:
    """Log-probs are the model's own, and a loss over them in plain torch has its gradients."""
    model = titan_model("llama3")
    policy = wrap(model, ACROSS)
    mask = torch.tensor(BATCH.loss_mask)
    weight = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    with lifted_upcasts(model):
        wanted = stock_logprobs(model, BATCH)
        (wanted * weight)[mask].sum().backward()
        dense = gradients(model)
        clear_gradients(model)
        scored = policy.score(BATCH).logprobs
        assert (scored - wanted.detach())[mask].abs().max() < BAR
        (policy.logprobs(BATCH) * weight)[mask].sum().backward()
    assert relative_distance(gradients(model), dense) < BAR


def test_the_model_is_left_as_it_was() -> None:
    """Its own forward and backward after steps are bit for bit those of a model without."""
    model, other = (titan_model("qwen3", dtype=torch.float32) for _ in range(2))
    before = model_state(model)
    wrap(model, ACROSS).forward_backward(BATCH, losses.GRPO())
    clear_gradients(model)
    assert model_state(model) == before
    for each in (model, other):
        stock_logprobs(each, BATCH).sum().backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_models_of_few_layers(family: str) -> None:
    """By which calibrations measure layers, with rows longer than the model's rollouts may be.

    In float64: weights of torchtitan 0.3.0 are so large that float32 would not suffice.
    """
    model = wrap(titan_model(family)).host.shallow(2)
    assert model is not None and len(model.layers) == 2  # pyright: ignore[reportArgumentType]
    ids = np.random.default_rng(0).integers(0, 64, (2, 300))
    ids[:, :280] = ids[0, :280]
    long = [Rollout(row, np.arange(300) >= 280, 1.0, group_id="long") for row in ids]
    for batch in (BATCH, RolloutBatch(long)):
        assert step_error(model, batch, losses.GRPO()) < BAR


def test_models_of_more_layers_than_the_model_has() -> None:
    """Calibrations divide times by a difference in layers, so the layers repeat."""
    model: Any = wrap(titan_model("qwen3")).host.shallow(5)
    assert len(model.layers) == 5
    assert len([*model.layers.parameters()]) == 5 * len([*model.layers["0"].parameters()])
    assert step_error(model, BATCH, losses.GRPO()) < BAR


# Refusals
# ------------------------------------------------------------


def test_attention_of_other_kinds_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"FlexAttention.*(attn_type|inner_attention)"):
        wrap(titan_model("qwen3", **FLEX))


def test_a_stage_of_a_pipeline_is_refused() -> None:
    model = titan_model("llama3")
    setattr(model, HEAD, None)
    with pytest.raises(UnsupportedError, match="no stage of a pipeline"):
        wrap(model)


def test_models_that_are_not_known_are_refused() -> None:
    class Mine(type(titan_model("llama3"))):  # type: ignore[misc]
        pass

    model = titan_model("llama3")
    model.__class__ = Mine
    with pytest.raises(UnsupportedError, match="Mine has not been shown exact"):
        wrap(model)


def test_a_converted_linear_is_refused() -> None:
    class Float8Linear(nn.Linear):
        pass

    model: Any = titan_model("llama3")
    model.layers["0"].attention.wo = Float8Linear(32, 32, bias=False)
    with pytest.raises(UnsupportedError, match=r"layers.0.attention.wo.*converters"):
        wrap(model)


def test_images_are_refused() -> None:
    medium = Media("image", {"pixel_values": np.zeros((4, 3))}, 2)
    types = np.array([0, 1, 1, 0, 0])
    rollout = Rollout([1, 2, 2, 3, 4], [0, 0, 0, 1, 1], 1.0, media=(medium,), media_types=types)
    with pytest.raises(UnsupportedError, match=r"have media.*text alone"):
        wrap(titan_model("llama3")).score(RolloutBatch([rollout]))


def test_rollouts_beyond_the_rotary_embeddings_are_refused() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, 33)
    batch = RolloutBatch([Rollout(ids, np.arange(33) > 3, 1.0)])
    with pytest.raises(UnsupportedError, match=r"33 tokens.*32 positions"):
        wrap(titan_model("llama3", max_seq_len=32)).forward_backward(batch, losses.GRPO())


def test_calls_of_others_within_a_step_are_refused() -> None:
    model = titan_model("llama3")

    def loss(outputs: Any, view: Any) -> torch.Tensor:
        model(torch.zeros(1, 2, dtype=torch.int64))
        return outputs.logprobs.sum()

    with pytest.raises(UnsupportedError, match="called while a step"):
        wrap(model, ACROSS).forward_backward(BATCH, loss)
