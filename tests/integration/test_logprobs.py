"""Losses written in plain torch over `policy.logprobs`, against the stock model run densely."""

import gc
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from steps import (
    clear_gradients,
    forked_batch,
    gradients,
    relative_distance,
    small_model,
    with_options,
)
from torch import Tensor, nn
from torch.nn import functional as F

from forkpoint import Config, RolloutBatch, UnsupportedError, wrap
from forkpoint.testing import lifted_upcasts
from lanes import slow_besides
from watched import watched

BATCH = forked_batch()
MASK = torch.tensor(BATCH.loss_mask)
OWNER = torch.tensor(np.repeat(np.arange(len(BATCH)), BATCH.lengths))
ADVANTAGE = torch.tensor(BATCH.advantages)[MASK]
assert BATCH.old_logprobs is not None
OLD = torch.tensor(BATCH.old_logprobs)
MODES = [
    Config(sharing="tree", boundary="across", max_microbatch_tokens=12),
    Config(sharing="tree", boundary="within"),
    Config(sharing="tree", boundary="mixed", max_microbatch_tokens=40),
    Config(sharing="none", boundary="within"),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=12, activations="recompute"),
    Config(sharing="tree", boundary="across", max_microbatch_tokens=12, activations="offload"),
    Config(sharing="tree", boundary="across", grad_accumulation_dtype="float32"),
]
BAR = 1e-10


def sums(values: Tensor) -> Tensor:
    """[N] of trained tokens, by rollout."""
    return torch.zeros(len(BATCH), dtype=values.dtype).index_add(0, OWNER[MASK], values[MASK])


def means(values: Tensor) -> Tensor:
    return sums(values) / sums(torch.ones_like(values)).clamp(min=1)


def ppo_clip(lp: Tensor, _: Tensor) -> Tensor:
    ratio = (lp - OLD)[MASK].exp()
    return -torch.minimum(ratio * ADVANTAGE, ratio.clamp(0.8, 1.2) * ADVANTAGE).mean()


def entropy_bonus(lp: Tensor, entropies: Tensor) -> Tensor:
    return -(lp[MASK] * ADVANTAGE).mean() - 0.1 * entropies[MASK].mean()


def listwise(lp: Tensor, entropies: Tensor) -> Tensor:
    """All rollouts against each other, with a square of the entropies."""
    return -means(lp).log_softmax(0)[0] + means(entropies).square().sum()


LOSSES = [ppo_clip, entropy_bonus, listwise]


def stock_values(model: nn.Module, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [T] by the stock model, one rollout at a time."""
    found: list[list[Tensor]] = [[], []]
    for rollout in batch:
        ids = torch.tensor(rollout.token_ids)
        logps = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        picked = logps.gather(-1, ids[1:, None])[:, 0]
        mask = torch.tensor(rollout.loss_mask[1:])
        for values, each in zip((picked, -(logps.exp() * logps).sum(-1)), found, strict=True):
            each.append(F.pad(torch.where(mask, values, 0), (1, 0)))
    return torch.cat(found[0]), torch.cat(found[1])


HALVES = [(loss, half) for loss in LOSSES for half in (0, 1)]
"""Each loss with every second mode."""
IN_CORE = [*HALVES[:-2:2], HALVES[-1]]
"""Every loss, and every mode with one of them."""


@pytest.mark.parametrize(
    ("loss", "half"), slow_besides(IN_CORE, HALVES), ids=lambda x: getattr(x, "__name__", None)
)
def test_losses_by_hand(loss: Callable[[Tensor, Tensor], Tensor], half: int) -> None:
    model = small_model("qwen3")
    with lifted_upcasts(model):
        expected_loss = loss(*stock_values(model, BATCH))
        expected_loss.backward()
        expected = gradients(model)
        policy = wrap(model)
        for config in MODES[half::2]:
            clear_gradients(model)
            lp, entropies = with_options(policy, config).logprobs(BATCH, entropy=True)
            value = loss(lp, entropies)
            value.backward()
            assert abs(float((value - expected_loss).detach())) < BAR
            assert relative_distance(gradients(model), expected) < BAR, config


def test_values_are_those_of_score() -> None:
    model = small_model("llama")
    policy = wrap(model, MODES[0])
    scores = policy.score(BATCH, entropy=True)
    lp, entropies = policy.logprobs(BATCH, entropy=True)
    assert torch.equal(lp, scores.logprobs) and torch.equal(entropies, scores.entropies)
    assert lp.requires_grad and not bool(lp[~MASK].any())
    with torch.no_grad():
        assert not policy.logprobs(BATCH).requires_grad


def test_values_of_a_critic() -> None:
    critic = small_model("llama", critic=True)
    policy = wrap(critic, MODES[0])
    with lifted_upcasts(critic):
        policy.logprobs(BATCH)[MASK].square().sum().backward()
        found = gradients(critic)
        clear_gradients(critic)
        ids = [torch.tensor(r.token_ids) for r in BATCH]
        values = torch.cat(
            [F.pad(critic(input_ids=x[None]).logits[0, :-1, 0], (1, 0)) for x in ids]
        )
        values[MASK].square().sum().backward()
    assert relative_distance(found, gradients(critic)) < BAR


def test_gradients_outside_the_mask_are_ignored() -> None:
    model = small_model("llama")
    policy = wrap(model, MODES[0])
    policy.logprobs(BATCH)[MASK].sum().backward()
    expected = gradients(model)
    clear_gradients(model)
    lp = policy.logprobs(BATCH)
    lp.backward(torch.where(MASK, 1.0, float("nan")).to(lp))
    found = gradients(model)
    assert all(
        g is None or torch.equal(g, e)
        for g, e in zip(found.values(), expected.values(), strict=True)
    )


def test_it_works_beside_other_terms() -> None:
    """Two calls in one loss, and a term of the weights themselves."""
    model = small_model("llama")
    policy = wrap(model, MODES[0])

    def decay() -> Tensor:
        return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))

    with lifted_upcasts(model):
        (stock_values(model, BATCH)[0].sum() * 3 + decay()).backward()
        expected = gradients(model)
        clear_gradients(model)
        (policy.logprobs(BATCH).sum() + 2 * policy.logprobs(BATCH).sum() + decay()).backward()
    assert relative_distance(gradients(model), expected) < BAR


@pytest.mark.parametrize(
    "what", ["grad", "inputs", "graph", "inference", "twice", "change", "step", "fused"]
)
def test_what_a_backward_refuses(what: str) -> None:
    model = small_model("llama")
    policy = wrap(model, MODES[0])
    lp = policy.logprobs(BATCH)
    loss, parameters = lp.sum(), list(model.parameters())
    messages = {
        "grad": "torch.autograd.grad",
        "inputs": "inputs=",
        "graph": "create_graph",
        "inference": "under torch.inference_mode",
        "twice": "ran already",
        "change": "weights have changed",
        "step": "weights have changed",
        "fused": "weights have changed",
    }
    if what == "twice":
        loss.backward(retain_graph=True)
    if what in ("step", "fused"):  # torch counts no changes by its fused optimizers
        held = parameters[3:]
        held[0].grad = torch.ones_like(held[0])
        torch.optim.AdamW(held, fused=what == "fused").step()
        held[0].grad = None
    before = gradients(model)
    if what == "change":
        with torch.no_grad():
            parameters[3].mul_(1.5)
    with pytest.raises(UnsupportedError, match=messages[what]):
        if what == "grad":
            torch.autograd.grad(loss, parameters[:2])
        elif what == "inputs":
            loss.backward(inputs=parameters[:2])
        else:
            with torch.inference_mode(what == "inference"):
                loss.backward(create_graph=what == "graph")
    after = gradients(model)
    assert all(after[name] is g or torch.equal(after[name], g) for name, g in before.items())  # type: ignore[arg-type]
    if what == "grad":  # nothing was used up by the refusal
        lp = policy.logprobs(BATCH)
        weight = torch.ones((), requires_grad=True, dtype=lp.dtype)
        assert torch.autograd.grad((lp * weight).sum(), weight)[0] == lp.sum()


def test_autocast_of_the_forward_is_that_of_the_backward() -> None:
    model = small_model("llama", dtype=torch.float32)
    policy = wrap(model, MODES[0])
    found = []
    for within in (True, False):
        clear_gradients(model)
        autocast = torch.autocast("cpu", torch.bfloat16)
        with autocast:
            lp = policy.logprobs(BATCH)
        with autocast if within else nullcontext():
            lp.sum().backward()
        found.append(gradients(model))
    for one, other in zip(found[0].values(), found[1].values(), strict=True):
        assert one is None or torch.equal(one, other)


def test_forgetting_it_keeps_nothing() -> None:
    model = small_model("llama")
    policy = wrap(model, MODES[0])
    policy.score(BATCH)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    gc.freeze()  # what is there already, of which a process with many libraries has millions
    policy.logprobs(BATCH)
    before = tensors()
    kept = policy.logprobs(BATCH)
    assert tensors() <= before + 3  # the log-probs, and what a backward compares them with
    del kept
    assert tensors() <= before


def test_a_failed_backward_leaves_gradients() -> None:
    model = small_model("llama")
    policy = wrap(model, MODES[0])
    loss = policy.logprobs(BATCH).sum()

    def fail(event: str) -> None:
        if event.startswith("backward "):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, watched(fail):
        loss.backward()
    assert "may be tried again" in caught.value.__notes__[0]
    assert all(p.grad is None for p in model.parameters())
    assert policy.last_step is not None and policy.last_step.gradients == "unchanged"
