"""Models that would train wrongly without an error: refused by name, and found by the sample."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from silent_models import EXACT, FORWARD, NAMED, REFUSED, model_of
from steps import ACROSS, forked_batch, step_error
from torch import Tensor

from forkpoint import Config, Policy, Rollout, RolloutBatch, UnsupportedError, losses, wrap
from forkpoint.engine.transaction import Transaction
from forkpoint.step import self_check as selfcheck
from forkpoint.testing import ReadOnlyHook, tiny_model
from lanes import slow_besides_every

BATCH = forked_batch(stretch=4)
LOSS = losses.GRPO()
UNCHECKED = Config(sharing="tree", boundary="across", max_microbatch_tokens=48, self_check=False)
CHECKED = replace(UNCHECKED, self_check=True)
"""Of a quarter of the microbatches that ACROSS has here."""


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a step of a model that changed after it was wrapped, before anything runs."""
    model = tiny_model("llama", dtype=torch.float32)
    policy = wrap(model, UNCHECKED)
    ran: list[int] = []
    model.get_input_embeddings().register_forward_hook(ReadOnlyHook(lambda *_: ran.append(1)))
    assert REFUSED[case](model, monkeypatch) is None
    with pytest.raises(UnsupportedError) as caught:
        policy.forward_backward(BATCH, LOSS)
    message = str(caught.value)
    assert len(message) > 80 and message.endswith("."), message
    assert not ran
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("without_lists")
@pytest.mark.parametrize("case", slow_besides_every(3, NAMED))
def test_a_sample_finds_it_without_the_lists(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FORWARD[case], monkeypatch)
    generator = torch.get_rng_state()
    with pytest.raises(UnsupportedError) as caught:
        wrap(model, ACROSS).forward_backward(BATCH, LOSS)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters()), "it was found after the step"
    message = str(caught.value)
    assert any(
        text in message
        for text in ("differ from the model's", "does not agree with itself", "ran twice", "raised")
    ), message


@pytest.mark.usefixtures("without_lists")
def test_a_module_captures_once_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FORWARD["block used twice"], monkeypatch)
    with pytest.raises(UnsupportedError, match="ran twice in one forward"):
        wrap(model, UNCHECKED).forward_backward(BATCH, LOSS)


@pytest.mark.usefixtures("without_lists")
@pytest.mark.parametrize(("roundings", "passes"), [(3, True), (40, False)])
def test_values_are_rounded_where_rounded_embeddings_move_nothing(
    roundings: int, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values off to one side by their last bits, as on some CPUs, and no noise measured."""
    model = tiny_model("llama", dtype=torch.float32)
    monkeypatch.setattr(selfcheck, "round_embeddings", lambda *_: None)
    shared = selfcheck.StockComparison.shared

    def off(self: selfcheck.StockComparison) -> Tensor:
        # The trained values lie between -8 and -4, where neighbours are 2**-21 apart.
        return shared(self) + roundings * 2.0**-21

    monkeypatch.setattr(selfcheck.StockComparison, "shared", off)
    policy = wrap(model, ACROSS)
    if passes:
        policy.score(BATCH)
    else:
        with pytest.raises(UnsupportedError, match="forkpoint's logprobs differ from the model's"):
            policy.score(BATCH)


@pytest.mark.parametrize("case", [name for name in FORWARD if name not in NAMED])
def test_the_sample_alone_finds_what_no_list_names(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any gradient is written, in a model that changed after it was wrapped."""
    model = tiny_model("llama", dtype=torch.float32)
    policy = wrap(model, CHECKED)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert FORWARD[case](model, monkeypatch) is None
    with pytest.raises(UnsupportedError):
        policy.forward_backward(BATCH, LOSS)
    assert all(p.grad is None or bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.parametrize("case", slow_besides_every(9, EXACT))
def test_what_looks_like_it_is_exact(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(EXACT[case], monkeypatch, dtype=torch.float64)
    for config in (CHECKED, Config(sharing="tree", boundary="within")):
        assert step_error(model, BATCH, LOSS, config) < 1e-10


@pytest.mark.usefixtures("without_lists")
def test_small_effects_are_found() -> None:
    """The limit in docs/howto/verify.md: ten times what a rounding of the embeddings does."""
    model = tiny_model("llama", dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda module, args, output: output * (1 + 1e-5))
    with pytest.raises(UnsupportedError, match="differ from the model's"):
        wrap(model, ACROSS).score(BATCH)


def checked(policy: Policy, batch: RolloutBatch, *, training: bool) -> selfcheck.SampleComparison:
    host, config = policy.host, policy.config
    return Transaction(host.device).run(
        lambda step: selfcheck.self_check(step, host, config, batch, training=training)
    )


@pytest.mark.parametrize("lengths", [[1], [3, 1], [8], [400, 3]])
@pytest.mark.parametrize("vocab", [1, 61])
def test_samples_of_any_batch(lengths: list[int], vocab: int) -> None:
    rng = np.random.default_rng(0)
    batch = RolloutBatch(Rollout(rng.integers(0, vocab, n), np.arange(n) > 0, 1.0) for n in lengths)
    policy = wrap(tiny_model("llama", dtype=torch.float32), ACROSS)
    sample = selfcheck.sample_of(batch, policy.host)
    assert len(sample) == 3 and len(set(sample.lengths.tolist())) == 1
    width = int(sample.lengths[0])
    assert width == min(max(max(lengths), selfcheck.LEAST_TOKENS), selfcheck.WIDTH_TOKENS)
    ids = sample.token_ids.reshape(3, width)
    assert (ids[0, : width // 2] == ids[2, : width // 2]).all() and (ids[0] != ids[2]).any()
    assert (ids[0, : width * 3 // 4] == ids[1, : width * 3 // 4]).all() and (ids[0] != ids[1]).any()
    assert ids.max() < max(vocab, 2)
    policy.score(batch)


@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_besides_every(
        3, [("llama", torch.bfloat16), ("qwen3", torch.float32), ("gemma2", torch.bfloat16)]
    ),
    ids=str,
)
def test_rounding_alone_is_never_refused(family: str, dtype: torch.dtype) -> None:
    """The largest ratio of a difference to what is allowed, over weights and tokens."""
    most = 0.0
    for seed in range(3):
        model: Any = tiny_model(family, seed=seed, dtype=dtype).eval()
        model.set_attn_implementation("eager")  # sdpa of older transformers knows no softcap
        policy = wrap(model, ACROSS)
        batch = forked_batch(seed=seed, stretch=6)
        found = checked(policy, batch, training=False)
        most = max(most, found.difference / found.allowed)
    assert most < 0.3, most


def test_a_model_whose_values_overflow_is_not_called_wrong() -> None:
    """Ordinary training has the same infinities."""
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    wrap(model, ACROSS).score(BATCH)


def test_overflow_here_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = selfcheck.Engine.score

    def overflowing(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        for values in result.per_token.values():
            values[values != 0] = torch.nan
        return result

    monkeypatch.setattr(selfcheck.Engine, "score", overflowing)
    with pytest.raises(UnsupportedError, match="by inf"):
        wrap(tiny_model("llama", dtype=torch.float32), ACROSS).score(BATCH)


def test_a_critic_is_compared_by_its_values() -> None:
    critic = tiny_model("llama", critic=True, dtype=torch.float32)
    policy = wrap(critic, ACROSS)
    found = checked(policy, BATCH, training=False)
    assert 0 < found.difference < found.allowed
    seen: list[Tensor] = []
    critic.score.register_forward_hook(ReadOnlyHook(lambda *args: seen.append(args[2])))
    policy.score(BATCH)
    assert seen


def test_a_softcap_that_sdpa_leaves_out() -> None:
    model: Any = tiny_model("gemma2", dtype=torch.float32)
    model.config._attn_implementation_internal = "sdpa"
    # Newer versions of transformers refuse it in the sample's stock forward.
    with pytest.raises((UnsupportedError, ValueError)):
        wrap(model, ACROSS).forward_backward(BATCH, LOSS)
    assert all(p.grad is None for p in model.parameters())
