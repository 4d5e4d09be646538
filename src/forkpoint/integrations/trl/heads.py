"""Comparison of TRL's own forward with forkpoint's, on one or two rows, at the start of a training.

forkpoint computes the log-probs of TRL's fused head itself. A later TRL may scale logits or add
terms differently, without a change in the arguments of the call.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl.calls import IGNORED, HeadAnswer, Rows
from forkpoint.policy import Policy
from forkpoint.rollouts.media import ShownMedia
from forkpoint.step.self_check import NOISE_FACTOR, allowed_difference, rms, round_embeddings

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs")
"""Outputs of TRL's head that losses read."""
LEAST_TOKENS = 16
"""Smallest number of tokens to compare: differences at fewer say little about the size of rounding.
"""
TOLD_APART = 0.02
"""Smallest shift towards temperature 1, relative to the full shift, that counts as another
temperature. For 26 families with random weights in 16 bits, rounding shifted log-probs by at most
1.9 times the `noise` of `_points`; 10 times are allowed."""


class HeadChecks:
    """Comparisons of the heads of models in one training."""

    def __init__(self) -> None:
        self._known: list[tuple[nn.Module, Any]] = []
        """Models that were compared, each with the forward that TRL has set on it."""

    def forget(self) -> None:
        """Require a new comparison of every head."""
        self._known = []

    def check(
        self,
        trainer: Any,
        policy: Policy,
        model: nn.Module,
        rows: Rows,
        temperature: float,
        answered: Callable[[Rows, float], HeadAnswer],
    ) -> None:
        """Compare a model's head, unless it has been compared. Collective on several ranks.

        Llama 4's multimodal class is not compared. TRL's head asks its `base_model` for hidden
        states, and this model returns none.

        answered: computes forkpoint's outputs for rows at a temperature.

        Raises UnsupportedError on all ranks if outputs differ on one.
        """
        core: Any = cast(Any, policy.host).entry.core
        head = vars(core).get("forward")
        known = core.base_model is core or any(a is model and b is head for a, b in self._known)
        if known or not policy.config.self_check:
            return
        if not bool((rows.scored & rows.present).any()):  # completions may all be masked
            rows = rows.with_prompts()
        counts_B = (rows.scored & rows.present).sum(1)
        # The row with the most tokens, and the row that begins last, because results may depend on
        # padding.
        begins_B = rows.present.int().argmax(1) * (counts_B > 0)
        chosen = torch.stack([counts_B.argmax(), begins_B.argmax()]).unique()
        few = rows.of(chosen)
        if int(counts_B[chosen].sum()) < LEAST_TOKENS:
            few = few.with_prompts()
        found = _compared(policy, model, few, temperature, answered)
        told = torch.tensor(
            [float(bool(found)), float(counts_B.sum())], device=rows.input_ids.device
        )
        differs, count = trainer.accelerator.gather(told).view(-1, 2).amax(0).tolist()
        if differs:
            raise UnsupportedError(
                (found or "another rank has found a difference between TRL and forkpoint.")
                + f" TRL {import_module('trl').__version__} is installed; 1.15 and 1.16 are "
                "tested. A trainer that is made later with the same model gives TRL's head its own "
                "temperature; give each trainer a model of its own, or train with one before you "
                "make the next. Config(self_check=False) turns this comparison off."
            )
        if count:
            self._known.append((model, head))


def _compared(
    policy: Policy,
    model: nn.Module,
    rows: Rows,
    temperature: float,
    answered: Callable[[Rows, float], HeadAnswer],
) -> str:
    """A sentence about the difference; empty if there is none."""
    ours = answered(rows, temperature)
    # All ranks compute this, because it is collective.
    at_one = ours if temperature == 1.0 else answered(rows, 1.0)
    theirs = _run(model, policy, rows)
    host = policy.host
    with Changes() as changes:
        round_embeddings(host, changes)
        rounded = _run(model, policy, rows)
    there = (rows.scored & rows.present)[:, 1:]
    for name in FIELDS:
        here_N, own_N, rounded_N = (
            None if x is None else x[there].double()
            for x in (getattr(answer, name) for answer in (ours, theirs, rounded))
        )
        if here_N is None or own_N is None or rounded_N is None or not len(own_N):
            continue
        if not (own_N.isfinite().all() and rounded_N.isfinite().all()):
            continue  # if the model itself overflows, nothing can be compared
        noise, apart = rms(rounded_N - own_N), rms(here_N - own_N)
        allowed = allowed_difference(host, noise, rms(own_N))
        differs, beside = not apart <= allowed, f"more than rounding explains ({allowed:.3g})"
        if name == "log_probs" and not differs:
            # Rounding in 16 bits may hide a temperature; it does not point to another one.
            way_N = at_one.log_probs[there].double() - here_N
            differs = _points(own_N - here_N, way_N, noise)
            beside = "as with another temperature"
        if differs:
            worst = int((here_N - own_N).abs().nan_to_num(torch.inf).argmax())
            return (
                f"TRL's {name} differ from forkpoint's by {apart:.3g} (rms), {beside}; at one "
                f"token TRL has {float(own_N[worst]):.6g}, and forkpoint "
                f"{float(here_N[worst]):.6g} at temperature {temperature}."
            )
    return ""


def _points(error_N: Tensor, way_N: Tensor, noise: float) -> bool:
    """Whether differences look like those of another temperature, beyond noise."""
    size = float(way_N.norm())
    if not size:
        return False
    share = float(error_N @ way_N) / size**2
    return abs(share) > max(TOLD_APART, NOISE_FACTOR * noise / size)


def _run(model: nn.Module, policy: Policy, rows: Rows) -> Any:
    """Call the model like TRL's losses, without a graph."""
    images: dict[str, Tensor] = {}
    if rows.types is not None:
        host: Any = policy.host
        media = rows.media or tuple(() for _ in rows.input_ids)
        shown = ShownMedia(media, rows.types.cpu().numpy())
        images = host.entry.encoder.stock_arguments(shown, encodes=True)
    labels = rows.input_ids.masked_fill(~(rows.scored & rows.present), IGNORED)
    with torch.no_grad():
        return model(
            input_ids=rows.input_ids,
            attention_mask=rows.present.long(),
            labels=labels,
            fused_lm_head=True,
            **images,
        )
