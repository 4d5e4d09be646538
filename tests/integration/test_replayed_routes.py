"""Rollouts with the experts that a sampler chose: steps send their tokens there, exactly."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from experts import chosen_experts
from router_losses import gradient_error, ragged_batch, routed_model
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint import Config, Policy, Rollout, RolloutBatch, wrap
from forkpoint.errors import RolloutError, UnsupportedError
from forkpoint.losses import GRPO, GSPO, RouterLoss
from forkpoint.losses.base import LossOutputs
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.plan import make_plan
from forkpoint.testing import lifted_upcasts, tiny_model
from lanes import slow_besides
from versions import checkpoint_blocks

BAR = 1e-10
LAYERS, EXPERTS, CHOSEN = 2, 8, 2
ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=12)
MODES = {
    "dense": Config(sharing="none"),
    "within": Config(sharing="tree", boundary="within"),
    "across": ACROSS,
    "recompute": replace(ACROSS, activations="recompute", checkpointing="selective"),
    "checkpointed": replace(ACROSS, checkpointing="full"),
    "mixed": Config(sharing="tree", boundary="mixed", max_microbatch_tokens=24),
}
FAMILIES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "glm4_moe"),
    *("deepseek_v3", "granitemoe"),
)


def routes_of(tokens: list[int], layers: int = LAYERS) -> np.ndarray:
    """Experts that follow from the tokens up to each, so that equal beginnings have equal ones."""
    found = []
    for end in range(1, len(tokens) + 1):
        digest = hashlib.blake2b(bytes(tokens[:end]), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        found.append([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(layers)])
    return np.array(found)


def routed_batch(layers: int = LAYERS) -> RolloutBatch:
    """Routes that part where tokens do; that of rollout 1 also within the prompt, that of rollout 5
    from its twin's in one layer, and of rollout 3 some that the router chooses."""
    found = []
    for number, rollout in enumerate(ragged_batch()):
        routes = routes_of(rollout.token_ids.tolist(), layers)
        if number in (1, 5):
            at = 2 if number == 1 else 9
            routes[at, -1] = (routes[at, -1] + 1) % EXPERTS
        if number == 3:
            routes[3:6, 0] = -1
        found.append(replace(rollout, routed_experts=routes))
    return RolloutBatch(found)


BATCH = routed_batch()


@cache
def tiny() -> PreTrainedModel:
    return routed_model("qwen3_moe")


@contextmanager
def sent_to(routes_TLK: np.ndarray) -> Iterator[None]:
    """Within it torch.topk among all experts gives these, one layer after the other."""
    topk, layers = torch.topk, iter(range(routes_TLK.shape[1]))

    def given(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        values, own = topk(scores, k, *args, **kwargs)
        if scores.dim() != 2 or scores.shape[-1] != EXPERTS:
            return values, own  # groups of experts
        wanted = torch.as_tensor(routes_TLK[:, next(layers)].astype(np.int64))
        wanted = torch.where(wanted < 0, own, wanted)
        return scores.gather(-1, wanted), wanted

    tensor_topk = torch.Tensor.topk
    torch.topk, torch.Tensor.topk = given, given  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = topk, tensor_topk  # type: ignore[method-assign]
    assert next(layers, None) is None, "a router did not choose by topk"


def ordinary(
    model: PreTrainedModel, batch: RolloutBatch, loss: Any
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of the stock model, one rollout at a time."""
    assert batch.routed_experts is not None
    model.zero_grad()
    parts = []
    for begin, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids = torch.tensor(batch.token_ids[begin:end].astype(np.int64))
        with sent_to(batch.routed_experts[begin:end]):
            logps = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        taken = logps[:-1].gather(-1, ids[1:, None])[:, 0]
        parts += [taken.new_zeros(1), taken]
    mask = torch.tensor(batch.loss_mask)
    views = LossViews(batch, batch_denominators(batch), torch.device("cpu"), torch.float64)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    value = loss(LossOutputs(logprobs=torch.where(mask, torch.cat(parts), 0.0)), view)
    value.backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return float(value.detach()), found


def faults(
    policy: Policy,
    model: PreTrainedModel,
    batch: RolloutBatch = BATCH,
    loss: Any = None,
    wanted: Any = None,
) -> list[str]:
    loss = loss or GRPO()
    with lifted_upcasts(model):
        value, gradients = wanted or ordinary(model, batch, loss)
        stats = policy.forward_backward(batch, loss)
    errors = {"loss": abs(stats.loss - value), "gradient": gradient_error(model, gradients)}
    model.zero_grad()
    return [f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= BAR]


@pytest.mark.parametrize("family", slow_besides(["qwen3_moe", "deepseek_v3"], FAMILIES))
def test_tokens_are_sent_where_the_sampler_sent_them(family: str) -> None:
    model = routed_model(family)
    layers = wrap(model).host.routers.layers
    assert not faults(wrap(model, ACROSS), model, routed_batch(layers))


@pytest.mark.parametrize("mode", slow_besides(["dense", "recompute"], MODES))
def test_every_mode(mode: str) -> None:
    wanted = ordinary_of_tiny()
    assert not faults(wrap(tiny(), MODES[mode]), tiny(), wanted=wanted)


@cache
def ordinary_of_tiny() -> Any:
    with lifted_upcasts(tiny()):
        return ordinary(tiny(), BATCH, GRPO())


@pytest.mark.slow
def test_models_that_checkpoint_and_losses_that_couple() -> None:
    model = routed_model("qwen3_moe")
    with lifted_upcasts(model):  # before it is checkpointed: its recomputation would route itself
        wanted = ordinary(model, BATCH, GSPO())
    checkpoint_blocks(model, use_reentrant=False)
    assert not faults(wrap(model, ACROSS), model, loss=GSPO(), wanted=wanted)


def test_logprobs_and_scores_are_routed_as_well() -> None:
    policy = wrap(tiny(), ACROSS)
    with lifted_upcasts(tiny()):
        logprobs = policy.logprobs(BATCH)
        scores = policy.score(BATCH)
        plain = policy.score(ragged_batch())
        _, wanted = ordinary(tiny(), BATCH, lambda outputs, _: outputs.logprobs.sum())
        assert isinstance(logprobs, Tensor)
        logprobs.sum().backward()
        assert gradient_error(tiny(), wanted) <= BAR
    tiny().zero_grad()
    assert torch.equal(scores.logprobs, logprobs.detach())
    assert float((scores.logprobs - plain.logprobs).abs().max()) > 1e-3


# What shares ------------------------------------------------------------------------------------


def plans(*routes: list[int]) -> Any:
    """The forest of rollouts of the tokens 5, 6, 7, 8 with these experts, of one layer."""
    rollouts = [
        Rollout([5, 6, 7, 8], [0, 1, 1, 1], 1.0, routed_experts=np.array(each)[:, None, None])
        for each in routes
    ]
    return make_plan(RolloutBatch(rollouts), config=Config(sharing="tree")).forest


@pytest.mark.parametrize("at", [0, 3])
def test_rollouts_fork_where_routes_first_differ(at: int) -> None:
    """Edge i reads token i, so that a route that differs at token i parts edge i."""
    other = [1, 1, 1, 1]
    other[at] = 2
    forest = plans([1, 1, 1, 1], other)
    # The last token does not run, so that its route decides nothing.
    assert forest.edges == 3 + (3 - at)
    shared = forest.length[forest.multiplicity == 2]
    assert shared.tolist() == ([at] if at else [])


def test_the_order_of_experts_decides_nothing() -> None:
    routes = routes_of(list(range(6)))
    rollouts = [
        Rollout([9] * 6, [0] + [1] * 5, 1.0, routed_experts=r) for r in (routes, routes[..., ::-1])
    ]
    assert make_plan(RolloutBatch(rollouts), config=Config(sharing="tree")).forest.edges == 5


def test_plans_are_those_of_the_routes() -> None:
    policy = wrap(tiny(), ACROSS)
    plain, routed = policy.plan(ragged_batch()), policy.plan(BATCH)
    assert (
        plain.computed_tokens < routed.computed_tokens < policy.plan(BATCH).logical_tokens
        and plain.fingerprint != routed.fingerprint
    )
    router = RouterLoss(load_balancing=0.1)
    longer = policy.plan(BATCH, router=router)
    assert longer.computed_tokens > routed.computed_tokens


# Counts -----------------------------------------------------------------------------------------


def own_routes(batch: RolloutBatch) -> RolloutBatch:
    """The batch with the routes that the model takes by itself."""
    found = []
    for rollout in batch:
        ids = torch.tensor(rollout.token_ids)[None]
        with chosen_experts(tiny()) as chosen, torch.no_grad():
            tiny()(input_ids=ids, use_cache=False)
        routes = np.stack([experts.numpy() for _, experts in chosen], 1)
        found.append(replace(rollout, routed_experts=routes[:-1]))
    return RolloutBatch(found)


@pytest.mark.slow
def test_choices_that_would_have_gone_elsewhere_are_counted() -> None:
    batch = own_routes(ragged_batch())
    policy = wrap(tiny(), ACROSS)
    stats = policy.forward_backward(batch, GRPO())
    assert stats.routes is not None
    edges = int((batch.lengths - 1).sum())
    # The last block's routers are left out below prefixes that train nothing.
    assert stats.routes.decisions_L[0] == edges >= int(stats.routes.decisions_L[1])
    assert stats.routes.elsewhere_L.tolist() == [0, 0] and stats.routes.elsewhere == 0
    # A shared token counts once for every rollout through it.
    assert batch.routed_experts is not None
    changed = []
    for number, rollout in enumerate(batch):
        assert rollout.routed_experts is not None
        routes = rollout.routed_experts.copy()
        if number < 4:  # all of group 0
            routes[0, 0] = np.setdiff1d(np.arange(EXPERTS), routes[0, 0])[:CHOSEN]
        changed.append(replace(rollout, routed_experts=routes))
    for config in (ACROSS, replace(ACROSS, activations="recompute", checkpointing="full")):
        stats = wrap(tiny(), config).forward_backward(RolloutBatch(changed), GRPO())
        assert stats.routes is not None and stats.routes.elsewhere_L[0] >= 4
        assert stats.routes.decisions_L[0] == edges
    tiny().zero_grad()
    assert wrap(tiny()).score(ragged_batch()).routes is None


def test_experts_that_were_given_are_counted() -> None:
    policy = wrap(tiny(), ACROSS)
    stats = policy.forward_backward(BATCH, GRPO(), expert_counts=True)
    tiny().zero_grad()
    given = BATCH.routed_experts
    assert stats.expert_counts is not None and given is not None
    free = (given[:, 0, 0] < 0).sum()
    counts = np.bincount(given[:, 1].flatten(), minlength=EXPERTS)
    assert stats.expert_counts[1].tolist() == counts.tolist() and free == 3


# Files, and what is refused ---------------------------------------------------------------------


GOOD = routes_of([5, 6, 7])


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (GOOD[:1], r"is of shape \(1, 2, 2\)"),
        (GOOD[:, 0], r"is of shape \(3, 2\)"),
        (GOOD.astype(float), "type float64"),
        ([[[1, 2]], [[1]], [[2, 3]]], "lists of different lengths"),
        (np.where(GOOD[1, 0, 0] == GOOD, -2, GOOD), "is -2"),
        (np.full_like(GOOD, 3), r"routed_experts\[0, 0\] is \[3, 3\]"),
        (np.stack([GOOD[..., 0], np.full_like(GOOD[..., 0], -1)], -1), "must differ"),
        (np.full((3, 1, 1), 40_000), "is 40000"),
    ],
)
def test_what_is_no_route_is_refused(routes: Any, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        Rollout([5, 6, 7], [0, 1, 1], 1.0, routed_experts=routes)


def short_of(change: Callable[[np.ndarray], np.ndarray]) -> RolloutBatch:
    return RolloutBatch(
        replace(rollout, routed_experts=change(np.array(rollout.routed_experts)))
        for rollout in BATCH
    )


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (short_of(lambda r: r[:, :1]), "1 layers with 2 experts a token, and the model has 2"),
        (short_of(lambda r: r[:, :, :1]), "with 1 experts a token.*to 2 experts"),
        (short_of(lambda r: np.where(r == 7, 8, r)), "expert 8, and the model's routers choose"),
    ],
    ids=["layers", "experts", "numbers"],
)
def test_routes_of_another_model_are_refused(batch: RolloutBatch, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        wrap(tiny()).forward_backward(batch, GRPO())


def test_what_cannot_hold_routes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the model has no routers"):
        wrap(tiny_model("qwen3")).score(BATCH)
    with pytest.raises(UnsupportedError, match="verify compares with a stock model"):
        wrap(tiny()).verify(BATCH, GRPO())
    with pytest.raises(RolloutError, match="all but the first size must be equal"):
        RolloutBatch(
            [BATCH[0], replace(BATCH[1], routed_experts=np.array(BATCH[1].routed_experts)[:, :1])]
        )
    with pytest.raises(RolloutError, match="has routed_experts and rollout"):
        RolloutBatch([BATCH[0], replace(BATCH[1], routed_experts=None)])
