"""From one whole number to a case: a model, a batch, a loss and how the step is run.

Each part is drawn from a stream of its own, so that what is changed in the drawing of one part, or
a family that is added, leaves the other parts of the cases that were kept as they are.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from fuzz_batches import draw_batch, with_zeros
from fuzz_models import SPECIAL, Settings, between, chance, draw_settings, one_of
from numpy.random import Generator
from transformers import CONFIG_MAPPING

from forkpoint import Config, RolloutBatch
from forkpoint.losses import (
    BNPO,
    CISPO,
    DAPO,
    DPO,
    GRPO,
    GSPO,
    PPO,
    SAPO,
    Denominators,
    Distillation,
    DrGRPO,
    LogLikelihood,
    Loss,
    SimPO,
    as_loss,
)
from integration.scenarios import CoupledEntropies, SureRollouts, coupled

MOST_ROWS = 16
"""About how many microbatches a step has at most, for the sake of speed."""


SHOWN = ("frozen", "checkpointed", "training", "accumulates", "config", "budget_share")
SHOWN += ("loss", "denominators", "scale")


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that is drawn from a seed; `str` shows it."""

    seed: int
    family: str
    settings: Settings
    frozen: str
    """Which parameters do not train: "none", "lower" (embeddings and first layers), "some"."""
    checkpointed: bool
    training: bool
    batch: RolloutBatch
    old: str
    reference: str
    """How log-probs are made for the batch: see `fuzz_batches.with_logprobs`."""
    loss: Loss
    denominators: Denominators | None
    scale: float
    accumulates: bool
    """Whether there are gradients already, of about the size of the new ones."""
    budget_share: float | None
    """`memory_budget` over what the step is predicted to need without one."""
    config: Config

    def stream(self, part: str) -> Generator:
        return stream(self.seed, part)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.family}"]
        lines += [f"  {name} = {value!r}" for name, value in self.settings.items()]
        for name in SHOWN:
            lines.append(f"{name}: {re.sub(' at 0x[0-9a-f]+', '', repr(getattr(self, name)))}")
        lines.append(f"{self.batch!r}, old log-probs {self.old}, reference {self.reference}")
        for rollout in self.batch:
            trained = "".join(".x"[int(value)] for value in rollout.loss_mask)
            lines.append(
                f"  group {rollout.group_id}, temperature {rollout.temperature}: "
                f"{' '.join(map(str, rollout.token_ids))} | {trained}"
            )
        return "\n".join(lines)


def stream(seed: int, part: str) -> Generator:
    digest = hashlib.sha256(f"{seed} {part}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def draw_case(seed: int, family: str | None = None) -> Case:
    """The case of a seed, the same on every machine; of the family that the seed draws, or the one
    given, which stays when families are added.
    """
    # The family whose number is largest, so that one more family takes only its share of seeds.
    known = [name for name in SPECIAL if name in CONFIG_MAPPING]
    family = family or max(known, key=lambda name: float(stream(seed, f"family {name}").random()))
    random = stream(seed, "loss")
    loss, old, reference = draw_loss(random)
    pairs = isinstance(loss, (DPO, SimPO))
    denominators = None
    if chance(random, 0.2):
        counts = random.uniform(1, 50, 3).tolist()
        denominators = Denominators(tokens=counts[0], rollouts=counts[1], groups=counts[2])
    scale = one_of(random, (1.0, 1.0, 0.25))
    batch = draw_batch(stream(seed, "batch"), pairs=pairs, weighted=loss.takes_weights)
    random = stream(seed, "zeros")
    if not pairs and chance(random, 0.25):
        batch = with_zeros(batch, random)
    if loss.decomposition == "joint" and not pairs and not batch.trained_tokens:
        loss = LogLikelihood()  # those there would divide by no tokens
    random = stream(seed, "model")
    checkpointed = chance(random, 0.3)
    config = draw_config(stream(seed, "config"), batch)
    memory = stream(seed, "memory")
    config = replace(
        config,
        prefix_cache=one_of(stream(seed, "prefix cache"), ("auto", "auto", "host")),
        activations=one_of(memory, ("auto", "keep", "keep", "offload", "recompute", "recompute")),
        checkpointing="none" if checkpointed else one_of(memory, ("none", "selective", "full")),
    )
    # The planner makes no microbatches of less than 64 tokens for the sake of a budget.
    limited = (
        config.max_microbatch_tokens is None and batch.logical_tokens > 100 and chance(random, 0.5)
    )
    return Case(
        seed=seed,
        family=family,
        settings=draw_settings(stream(seed, f"settings {family}"), family),
        frozen=one_of(random, ("none",) * 8 + ("lower", "some")),
        checkpointed=checkpointed,
        training=checkpointed or chance(random, 0.7),
        batch=batch,
        old=old,
        reference=reference,
        loss=loss,
        denominators=denominators,
        scale=scale,
        accumulates=chance(random, 0.2),
        budget_share=float(random.uniform(0.7, 1)) if limited else None,
        config=config,
    )


def draw_config(random: Generator, batch: RolloutBatch) -> Config:
    """Any combination, with microbatches that the batch's rollouts can be put into."""
    sharing = one_of(random, ("none", "group", "group", "tree", "tree", "tree", "auto"))
    boundary = one_of(random, ("within", "mixed", "across", "across", "auto"))
    longest = max(1, int(batch.lengths.max()) - 1)
    total = batch.logical_tokens
    size = one_of(random, ("any", "small", "small", "middle"))
    tokens: int | None = None
    if size == "small":
        tokens = between(random, 1, 12)
    elif size == "middle":
        tokens = between(random, max(1, longest // 2), max(longest, total // 2))
    if tokens is not None:
        tokens = max(tokens, total // MOST_ROWS, 1)
        if boundary == "within":
            tokens = max(tokens, longest)
    return Config(
        sharing=sharing,
        boundary=boundary,
        max_microbatch_tokens=tokens,
        attention_kernel=one_of(random, ("auto", "auto", "auto", "reference")),
        head_chunk_tokens=one_of(random, (1, 7, 1024)),
        # Not drawn: seeds that are kept shall stay the cases that they were.
        head_logits="keep" if total % 3 == 0 else "recompute" if total % 3 == 1 else "auto",
        restore_grads=chance(random, 0.1),
        grad_accumulation_dtype=one_of(random, ("parameter", "parameter", "float32")),
    )


# Losses ------------------------------------------------------------------------------------------


def draw_loss(random: Generator) -> tuple[Loss, str, str]:
    """A loss with random arguments, and which old and reference log-probs it is given."""
    loss = as_loss(one_of(random, LOSSES)(random))
    given = {name: one_of(random, ("none", "near", "near", "far")) for name in ("old", "reference")}
    if "reference_logprobs" in loss.needs and given["reference"] == "none":
        given["reference"] = "near"
    return loss, given["old"], given["reference"]


POLICY: dict[str, tuple] = {
    "kl": (0.0, 0.0, 0.1),
    "kl_estimator": ("k1", "k2", "k3"),
    "entropy": (0.0, 0.0, 0.05),
}
CLIPS: dict[str, tuple] = {
    "clip": (0.1, 0.2, inf),
    "clip_high": (None, 0.28, inf),
    "dual_clip": (None, None, 1.5),
}
MEAN: dict[str, tuple] = {"normalize": ("token", "rollout")}
DrawLoss = Callable[[Generator], Loss]


def _made(*kinds: Callable[..., Loss], **values: tuple) -> DrawLoss:
    """One of the kinds, each argument one of its values."""

    def draw(random: Generator) -> Loss:
        kind = one_of(random, kinds) if len(kinds) > 1 else kinds[0]
        return kind(**{name: one_of(random, some) for name, some in values.items()})

    return draw


def _gspo(random: Generator) -> Loss:
    clips = one_of(random, ({}, {"clip": 0.1, "clip_high": 0.3}, {"clip": inf}))
    level = one_of(random, ("sequence", "token"))
    return GSPO(level=level, **clips, **{n: one_of(random, x) for n, x in POLICY.items()})


def _dr_grpo(random: Generator) -> Loss:
    tokens = between(random, 1, 40)
    return DrGRPO(max_tokens=tokens, **{n: one_of(random, x) for n, x in POLICY.items()})


def _distillation(random: Generator) -> Loss:
    if chance(random, 0.5):
        return _made(Distillation, direction=("forward",), **MEAN)(random)
    return _made(Distillation, clip=(0.2, inf), **MEAN)(random)


def _dpo(random: Generator) -> Loss:
    variant = one_of(random, ("sigmoid", "sigmoid", "robust", "hinge", "ipo"))
    smoothing = 0.1 if variant in ("sigmoid", "robust") and chance(random, 0.5) else 0.0
    return DPO(
        variant=variant,
        label_smoothing=smoothing,
        beta=one_of(random, (0.05, 0.3)),
        length_normalized=chance(random, 0.5),
    )


GRPOS = _made(GRPO, **POLICY, **CLIPS, **MEAN)
LOSSES: tuple[DrawLoss, ...] = (
    GRPOS,
    GRPOS,
    _made(PPO, DAPO, BNPO, **POLICY, **CLIPS),
    _dr_grpo,
    _gspo,
    _gspo,
    _made(CISPO, clip_high=(0.2, 4.0), **POLICY, **MEAN),
    _made(SAPO, tau_pos=(1.0, 3.0), **POLICY, **MEAN),
    _made(LogLikelihood, normalize=("token", "rollout", "none")),
    _distillation,
    _dpo,
    _dpo,
    _made(SimPO, beta=(0.5, 2.0), gamma=(0.0, 1.0)),
    lambda _: as_loss(coupled),
    lambda _: SureRollouts(),
    lambda _: CoupledEntropies(),
)
