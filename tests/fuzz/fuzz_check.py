"""A case run shared and dense. Dense here is what a user would write without forkpoint.

All rollouts, padded on the right, go through the stock model in one forward, with the masks and the
attention of transformers ("eager"); then a log-softmax, the loss, and one backward. Nothing of
forkpoint runs but the loss itself and the tensors that it is shown.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from fuzz_batches import with_logprobs
from fuzz_cases import Case
from fuzz_models import build
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint import RolloutBatch, UnsupportedError, wrap
from forkpoint.errors import PlanError
from forkpoint.losses import LossOutputs
from forkpoint.losses.views import LossViews, batch_denominators
from forkpoint.plan.runs import labels_run
from forkpoint.testing import lifted_upcasts
from versions import checkpoint_blocks

BAR = 1e-10
"""Of the norm of the whole gradient, for each parameter's; for log-probs and losses absolute, and
relative where the loss is larger than 1."""
WOBBLES = 300.0
"""Where a gradient is beyond BAR it may be off by as many times what dense's own moves by as each
weight moves by its last bit. A recurrence leaves next to nothing of a token, say, and the norm
behind it makes that a token of usual size ..."""
WOBBLING_BAR = 1e-9
"""... and by this at most. Log-probs, losses and entropies are held to BAR all the same."""
CANCELLED = 1e-2
"""Where the gradients of tokens cancel (a pair of twins), or that of a token the model is sure of,
what is left is rounding. A gradient is taken to be no smaller than this much of what it came from:
of the loss's gradient by log-probs and entropies, and of what those of single tokens add up to."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Results of ordinary training on a batch; log-probs and entropies are flat over it."""

    loss: float
    logprobs_T: Tensor
    entropies_T: Tensor
    gradients: dict[str, Tensor | None]
    origin: float
    """The size of what the gradient came from: see CANCELLED."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a case. It is exact if it was not refused and there are no faults."""

    refused: str | None = None
    faults: tuple[str, ...] = ()
    gradient_error: float = 0.0
    """Of the worst parameter, relative to the norm of the whole gradient."""
    wobbles: bool = False
    """Whether a gradient is beyond BAR, in a model that multiplies rounding by so much."""
    cancelled: bool = False
    """Whether nothing is trained, or next to nothing is left of the gradient."""
    saved_tokens: int = 0
    """That dense would have run besides, which leaves out the same."""
    depth: int = 0
    """Microbatches above microbatches, at most: forks between microbatches, and chains of one
    rollout."""

    @property
    def telling(self) -> bool:
        """Whether something was trained and computed otherwise than dense, else little is shown."""
        return not self.cancelled and (self.saved_tokens > 0 or self.depth > 0)

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        return "; ".join(self.faults) or "exact"


class Refused(Exception):
    """transformers builds no such model, or forkpoint does not support it and says so."""


def check(case: Case) -> Outcome:
    """Run a case both ways. What raises but a refusal by name is raised."""
    outcome = _compare(case, BAR)
    if outcome.faults:
        bar = min(WOBBLING_BAR, WOBBLES * wobble(case))
        if bar > BAR:
            outcome = replace(_compare(case, bar), wobbles=True)
    return outcome


def wobble(case: Case) -> float:
    """How far dense's gradient moves as each weight moves up or down by its last bit: of its norm,
    the parameter that moves most, the median of five times."""
    model = _model(case)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    moves: list[float] = []
    with lifted_upcasts(model):
        _, dense = _dense(model, case)
        unit = max(_norm(dense.gradients.values()), CANCELLED * dense.origin)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in model.named_parameters():
                up = torch.rand(parameter.shape, generator=generator) < 0.5
                ends = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
                with torch.no_grad():
                    parameter.copy_(torch.nextafter(own[name], ends))
            _, moved = _dense(model, case)
            pairs = ((moved.gradients[name], g) for name, g in dense.gradients.items())
            apart = (_norm([a - b]) for a, b in pairs if a is not None and b is not None)
            moves.append(max(apart, default=0.0))
    return statistics.median(moves) / (unit or 1.0)


def _compare(case: Case, gradient_bar: float) -> Outcome:
    try:
        model = _model(case)
    except Refused as error:
        return Outcome(refused=str(error))
    with lifted_upcasts(model):
        batch, dense = _dense(model, case)
        if case.checkpointed:
            checkpoint_blocks(model, use_reentrant=False)
        model.train(case.training)
        norm = _norm(dense.gradients.values())
        before = _gradients_before(model, case, norm)
        try:
            policy = wrap(model, case.config)
            if case.budget_share is not None:
                peak = policy.plan(batch, case.loss).predicted_peak_bytes
                assert peak is not None
                policy = policy.with_config(memory_budget=int(peak * case.budget_share) + 1)
            scores = policy.score(batch, entropy=True)
            stats = policy.forward_backward(
                batch, case.loss, denominators=case.denominators, scale=case.scale
            )
        except (UnsupportedError, PlanError) as error:
            return Outcome(refused=f"forkpoint: {type(error).__name__}: {error}")
    plan = stats.plan
    # Log-probs of rollouts whose terms are 0 are NaN.
    away_T = torch.from_numpy(batch.loss_mask & ~labels_run(batch.offsets, plan.run_lengths))
    known_T = torch.where(away_T, dense.logprobs_T, stats.logprobs)
    depths: list[int] = []
    for microbatch in plan.microbatches:
        depths.append(depths[microbatch.parent] + 1 if microbatch.parent >= 0 else 0)
    faults = [
        *_off("loss", abs(stats.loss - dense.loss), BAR, max(1.0, abs(dense.loss))),
        *_off("log-probs", _distance(known_T, dense.logprobs_T), BAR),
        *_off("scores", _distance(scores.logprobs, dense.logprobs_T), BAR),
    ]
    faults += _off("NaN", float((stats.logprobs.isnan() != away_T).sum()), 0.0)
    assert scores.entropies is not None
    faults += _off("entropies", _distance(scores.entropies, dense.entropies_T), BAR)
    unit = max(norm, CANCELLED * dense.origin) * case.scale
    errors: dict[str, float] = {}
    zero = torch.zeros(1, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        wanted, found = dense.gradients[name], parameter.grad
        added = (zero if found is None else found) - before.get(name, zero)
        errors[name] = float((added - (zero if wanted is None else wanted * case.scale)).norm())
        faults += _off(f"gradient of {name}", errors[name], gradient_bar, unit)
    return Outcome(
        faults=tuple(faults),
        gradient_error=max(errors.values()) / (unit or 1.0),
        cancelled=norm <= CANCELLED * dense.origin,
        saved_tokens=plan.dense.tokens - plan.computed_tokens,
        depth=max(depths, default=0),
    )


def _model(case: Case) -> PreTrainedModel:
    try:
        model = build(case.family, case.settings, case.seed)
    except Exception as error:  # of whatever kind, it comes from transformers alone
        raise Refused(f"transformers: {type(error).__name__}: {error}") from error
    parameters = dict(model.named_parameters())
    random = case.stream("frozen")
    if case.frozen == "some":
        for parameter in parameters.values():
            parameter.requires_grad_(bool(random.random() < 0.5))
    elif case.frozen == "lower":
        layers = int(random.integers(0, case.settings["num_hidden_layers"]))
        lower = [f".layers.{layer}." for layer in range(layers)] + ["embed"]
        for name, parameter in parameters.items():
            parameter.requires_grad_(not any(part in name for part in lower))
    # Something is to train, whatever was drawn: the last of the parameters before the head.
    [*parameters.values()][-2].requires_grad_(True)
    return model.eval()


def _gradients_before(model: PreTrainedModel, case: Case, norm: float) -> dict[str, Tensor]:
    """Copies of the gradients that the parameters are given, where the step is to add to some."""
    random = case.stream("gradients")
    before: dict[str, Tensor] = {}
    if case.accumulates:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and random.random() < 0.8:
                noise = torch.as_tensor(random.normal(size=parameter.shape))
                parameter.grad = noise * (norm / max(1, parameter.numel()) ** 0.5)
                before[name] = parameter.grad.clone()
    return before


def _dense(model: PreTrainedModel, case: Case) -> tuple[RolloutBatch, Dense]:
    """The batch with its log-probs, and ordinary training on it; leaves no gradients behind."""
    batch = case.batch
    logprobs, entropies = _dense_outputs(model, batch)
    own_T = logprobs.detach().numpy()
    batch = with_logprobs(batch, own_T, case.stream("log-probs"), case.old, case.reference)
    case.loss.check(batch)
    denominators = case.denominators or batch_denominators(batch)
    views = LossViews(batch, denominators, torch.device("cpu"), torch.float64)
    view, _ = views.of_rollouts(np.ones(len(batch), bool))
    value = case.loss(LossOutputs(logprobs=logprobs, entropies=entropies), view)
    assert torch.isfinite(value), f"the dense loss is {value}"
    outputs = [x for x in (logprobs, entropies) if x.requires_grad]
    for tensor in outputs:
        tensor.retain_grad()
    if value.requires_grad:
        value.backward(retain_graph=True)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is None or bool(g.isfinite().all()) for g in gradients.values())
    for parameter in model.parameters():
        parameter.grad = None
    weights = [torch.zeros_like(x) if x.grad is None else x.grad for x in outputs]
    origin = _norm(weights)
    if outputs:
        # With factors drawn for the tokens nothing cancels, and sizes add up in the mean.
        random = case.stream("factors")
        factors = [torch.as_tensor(random.normal(size=w.shape)) * w for w in weights]
        trained = [p for p in model.parameters() if p.requires_grad]
        origin = max(
            origin, _norm(torch.autograd.grad(outputs, trained, factors, allow_unused=True))
        )
    return batch, Dense(
        loss=float(value.detach()),
        logprobs_T=logprobs.detach(),
        entropies_T=entropies.detach(),
        gradients=gradients,
        origin=origin,
    )


def _dense_outputs(model: PreTrainedModel, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, flat over the batch, 0 where nothing is trained."""
    lengths = batch.lengths
    ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
    for row, (begin, end) in zip(ids, zip(batch.offsets, batch.offsets[1:], strict=False)):  # noqa: B905
        row[: end - begin] = torch.as_tensor(batch.token_ids[begin:end].copy())
    logprobs = torch.zeros(batch.logical_tokens, dtype=torch.float64)
    trained = np.flatnonzero(batch.loss_mask)
    if not len(trained):
        return logprobs, logprobs.clone()
    rollout = np.searchsorted(batch.offsets, trained, side="right") - 1
    before = torch.as_tensor(trained - batch.offsets[rollout] - 1)
    rollout = torch.as_tensor(rollout)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[rollout, before]
    logits = logits / torch.as_tensor(batch.temperatures.copy())[rollout, None]
    every = logits.log_softmax(-1)
    labels = torch.as_tensor(batch.token_ids[trained].copy())[:, None]
    where = (torch.as_tensor(trained),)
    return (
        logprobs.index_put(where, every.gather(-1, labels)[:, 0]),
        logprobs.index_put(where, -(every.exp() * every).sum(-1)),
    )


def _norm(tensors: Iterable[Tensor | None]) -> float:
    return math.sqrt(sum(float(x.square().sum()) for x in tensors if x is not None))


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


def _off(name: str, error: float, bar: float, unit: float = 1.0) -> list[str]:
    if error <= bar * unit:
        return []
    return [f"{name} off by {error:.1e}, {error / unit if unit else math.inf:.1e} of its unit"]


@dataclass
class Tally:
    """Counts over many cases."""

    cases: int = 0
    telling: int = 0
    wobbling: int = 0
    worst: tuple[float, int] = (0.0, -1)
    """The largest gradient error and its seed, of those neither `cancelled` nor `wobbling`."""
    families: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[dict] = field(default_factory=list)

    def run(self, case: Case) -> None:
        """Check a case and count it."""
        self.cases += 1
        self.families[case.family] += 1
        try:
            outcome = check(case)
            what = "; ".join(outcome.faults)
        except Exception as error:
            outcome, what = Outcome(), f"{type(error).__name__}: {error}"
        if what:
            self.failures.append({"seed": case.seed, "what": what, "case": str(case)})
        if outcome.refused:
            self.refusals[re.sub(r"\d+", "N", outcome.refused)[:200]] += 1
        self.telling += outcome.telling
        self.wobbling += outcome.wobbles
        if not (outcome.cancelled or outcome.wobbles):  # what those are off by is rounding
            self.worst = max(self.worst, (outcome.gradient_error, case.seed))

    def __str__(self) -> str:
        refused = sum(self.refusals.values())
        return (
            f"{self.cases} cases, {len(self.failures)} failures, {refused} refused, "
            f"{self.telling} telling, worst gradient {self.worst[0]:.1e} of seed {self.worst[1]}"
        )
