"""Steps that scripts/compare_commits.py runs at two commits: numbers and texts, without forkpoint.

Models, batches, losses and options are those of tests/integration (acceptance, activations,
hybrids, critics, adapters) and of tests/numerics/test_families.py, as whole products.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from compare_models import (
    ADAPTERS,
    FAMILIES,
    HYBRIDS,
    MOE,
    SPECIAL,
    WINDOW,
    Model,
    hybrid,
    plain_models,
)

Options = dict[str, Any]
Fields = dict[str, Any]
"""Arguments of one rollout."""

TIGHT, CHAIN = 24, 8
SHARINGS, BOUNDARIES = ("none", "group", "tree"), ("within", "across", "mixed")
EVERY = tuple(product(SHARINGS, BOUNDARIES))


@dataclass(frozen=True)
class Case:
    """One step, scores where `loss` is "score", or what `verify` finds of a loss.

    step: further arguments of forward_backward. parts: positions of rollouts, for a step of several
        calls whose means are over `counts` of tokens, rollouts and groups.
    """

    group: str
    model: Model
    batch: str
    loss: str
    options: Options = field(hash=False)
    step: dict[str, Any] = field(default_factory=dict, hash=False)
    parts: tuple[tuple[int, int], ...] = ()
    counts: tuple[float, float, float] | None = None

    @property
    def name(self) -> str:
        chosen = ", ".join(f"{key}={value}" for key, value in self.options.items())
        further = "".join(f", {key}={value}" for key, value in self.step.items())
        further += ", in parts" if self.parts else ""
        return f"{self.group}: {self.model.name}, {self.batch}, {self.loss}, {chosen}{further}"


@dataclass
class Outcome:
    """A case at one commit."""

    inputs: str = ""
    """Digest of the model's weights and of the batch."""
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    """Gradients by parameter, the loss, and what the model gave for each token."""
    events: tuple[str, ...] = ()
    """Operation, number of the microbatch by its first event, its tokens, padding included."""
    refused: str = ""
    """The error, if there was one."""


# Options -----------------------------------------------------------------------------------------


def option(
    sharing: str | None = None,
    boundary: str | None = None,
    tokens: int | None = None,
    **others: Any,
) -> Options:
    """Options by today's names; without sharing and boundary the planner chooses."""
    given = {"sharing": sharing, "boundary": boundary, "max_microbatch_tokens": tokens}
    return {name: value for name, value in given.items() if value is not None} | others


ACCEPTANCE: tuple[Options, ...] = (
    *(option(s, b) for s, b in EVERY),
    *(option(s, "within", TIGHT) for s in SHARINGS),
    *(option(s, "mixed", TIGHT) for s in SHARINGS[1:]),
    *(option(s, "across", CHAIN) for s in SHARINGS),
    *(option(s, "mixed", CHAIN) for s in SHARINGS[1:]),
    option(),
    option(tokens=CHAIN),
)
NESTED: tuple[Options, ...] = (
    option("group", "across"),
    option("none", "across", CHAIN),
    option("tree", "across", CHAIN),
    option("tree", "mixed", TIGHT),
)
HYBRID: tuple[Options, ...] = (
    *(option(s, b) for s, b in EVERY),
    option("tree", "mixed", TIGHT),
    option("tree", "within", TIGHT),
    *(option(s, "across", CHAIN) for s in ("none", "group")),
)
CRITIC: tuple[Options, ...] = (
    *(option(s, b) for s, b in EVERY),
    option("tree", "within", TIGHT),
    option("tree", "mixed", TIGHT),
    option("tree", "across", CHAIN),
    option("none", "across", CHAIN),
    option("tree", "across", CHAIN, activations="recompute"),
    option("tree", "across", CHAIN, activations="offload"),
)
FAMILY: tuple[Options, ...] = (
    *(option(s, b) for s, b in EVERY),
    option("tree", "across", 17),
    option("tree", "mixed", 17),
)
FORKED: tuple[Options, ...] = (option("tree", "across", 12), option("tree", "within"))
ACTIVATIONS = ("keep", "offload", "recompute")
CHECKPOINTS = ("none", "selective", "full")

# Batches -----------------------------------------------------------------------------------------

OPENING = (1, 7, 22)
PROMPT_A = (*OPENING, 30, 4, 18, 51, 9, 33, 2, 45, 12)
PROMPT_B = (*OPENING, 8, 16, 40)
LEFT, LEFT_UP, LEFT_UP_A, LEFT_UP_B = (5, 37, 14, 20), (28, 6, 49), (11, 58), (43, 3, 25, 10)
LEFT_DOWN, RIGHT, RIGHT_UP, RIGHT_DOWN = (50, 19), (31, 27, 46, 13, 21), (44,), (36, 60, 17)
PATHS = {
    "deep-a": (PROMPT_A, LEFT, LEFT_UP, LEFT_UP_A),
    "deep-b": (PROMPT_A, LEFT, LEFT_UP, LEFT_UP_B),
    "prefix": (PROMPT_A, LEFT, LEFT_UP[:2]),
    "twin-0": (PROMPT_A, LEFT, LEFT_DOWN),
    "twin-1": (PROMPT_A, LEFT, LEFT_DOWN),
    "right": (PROMPT_A, RIGHT, RIGHT_UP),
    "masked": (PROMPT_A, RIGHT, RIGHT_DOWN),
    "token": (PROMPT_A[:1],),
    "warm-0": (PROMPT_A, LEFT, LEFT_DOWN),
    "warm-1": (PROMPT_A, LEFT, LEFT_UP),
    "beta-0": (PROMPT_B, (53, 24, 15), (34, 29)),
    "beta-1": (PROMPT_B, (53, 24, 15), (55,)),
    "beta-2": (PROMPT_B, (23,)),
    "gamma": ((2, 47, 39, 26), (42, 59, 32)),
}
PAIRS = (
    ("deep-a", "twin-0"),
    ("prefix", "deep-b"),
    ("right", "twin-1"),
    ("warm-1", "warm-0"),
    ("beta-0", "beta-1"),
    ("gamma", "beta-2"),
)
WARM_FIRST = 0
"""First token of the rollouts at a temperature of their own, where they are to share no other's."""


def scenario(*, apart: bool) -> list[Fields]:
    """The acceptance test's 14 rollouts in 3 groups, at two temperatures.

    apart: the warm rollouts begin with another token, so that they share with each other alone.
    """
    rng = np.random.default_rng(5)
    rollouts = []
    for position, (name, parts) in enumerate(PATHS.items()):
        tokens = [token for part in parts for token in part]
        mask = np.arange(len(tokens)) >= len(parts[0])
        if name == "masked":
            mask[:] = False
        if name == "deep-b":
            mask[len(PROMPT_A) + 1 : len(PROMPT_A) + 3] = False
        if name == "gamma":
            mask = np.arange(len(tokens)) >= 1
        warm = name.startswith("warm")
        if warm and apart:
            tokens[0] = WARM_FIRST
        advantage = rng.normal(size=len(tokens)) if position % 3 == 0 else float(rng.normal())
        rollouts.append(
            {
                "token_ids": tokens,
                "loss_mask": mask.tolist(),
                "advantage": advantage,
                "temperature": 0.7 if warm else 1.0,
                "group_id": name.split("-")[0] if name[:4] in ("beta", "gamm") else "alpha",
                "rollout_id": name,
            }
        )
    return rollouts


def pairs() -> list[Fields]:
    """Those that train anything, as pairs of a chosen and a rejected one."""
    given = {rollout["rollout_id"]: rollout for rollout in scenario(apart=True)}
    return [
        {**given[name], "advantage": advantage, "group_id": f"pair-{pair}"}
        for pair, names in enumerate(PAIRS)
        for name, advantage in zip(names, (1.0, 0.0), strict=True)
    ]


def forked(stretch: int = 1) -> list[Fields]:
    """Two groups, three levels of forks, a prefix of another, two identical ones."""
    rng = np.random.default_rng(0)

    def piece(length: int) -> list[int]:
        return rng.integers(0, 61, length * stretch).tolist()

    rollouts = []
    for group, prompt_tokens in enumerate((9, 5)):
        prompt, first, second = piece(prompt_tokens), piece(4), piece(3)
        endings = [first + second + piece(5), first + second + piece(2), first + second]
        endings += [first + piece(4), first + piece(4), piece(6)]
        endings[4] = endings[3]
        for member, ending in enumerate(endings):
            tokens = prompt + ending
            mask = [False] * len(prompt) + [True] * len(ending)
            mask[len(prompt) + 1] = False
            rollouts.append(
                {
                    "token_ids": tokens,
                    "loss_mask": mask,
                    "advantage": float(rng.normal()),
                    "old_logprobs": -4 + 0.1 * rng.normal(size=len(tokens)),
                    "reference_logprobs": -4 + 0.1 * rng.normal(size=len(tokens)),
                    "group_id": f"g{group}",
                    "rollout_id": f"g{group}r{member}",
                }
            )
    return rollouts


def groups() -> list[Fields]:
    """Groups of 1, 2, 4 and 9 with responses of 1 to 40 tokens; some responses share a start."""
    rng = np.random.default_rng(0)
    rollouts = []
    for group, size in enumerate((1, 2, 4, 9)):
        prompt = rng.integers(0, 61, int(rng.integers(3, 20))).tolist()
        start = rng.integers(0, 61, 3).tolist()
        for member in range(size):
            length = int(rng.integers(1, 41)) if member else (1, 40)[group % 2]
            response = (start if member % 3 == 2 else []) + rng.integers(0, 61, length).tolist()
            tokens = prompt + response
            rollouts.append(
                {
                    "token_ids": tokens,
                    "loss_mask": [False] * len(prompt) + [True] * len(response),
                    "advantage": float(rng.normal()),
                    "reference_logprobs": -np.abs(rng.normal(size=len(tokens))),
                    "group_id": group,
                }
            )
    return rollouts


BATCHES = {
    "scenario": lambda: scenario(apart=True),
    "temperatures that share": lambda: scenario(apart=False),
    "pairs": pairs,
    "forked": forked,
    "forked, long": lambda: forked(15),
    "groups": groups,
}

# Cases -------------------------------------------------------------------------------------------

ALL_LOSSES = ("ppo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "gspo_token", "distillation")
PAIR_LOSSES = ("dpo", "dpo_ipo", "simpo")


def batch_for(loss: str) -> str:
    return "pairs" if loss in PAIR_LOSSES else "scenario"


def cases() -> Iterator[Case]:
    """Every case, those of one model one after the other."""
    yield from _acceptance()
    yield from _activations()
    yield from _hybrids()
    yield from _critics()
    yield from _adapters()
    yield from _families()
    yield from _verified()


def _acceptance() -> Iterator[Case]:
    models = plain_models()
    first, last = models[0], models[-1]
    for model in models:
        for loss, options in product(("grpo", "gspo", "dpo", "coupled"), ACCEPTANCE):
            yield Case("acceptance", model, batch_for(loss), loss, options)
            if loss == "grpo" and not model.checkpointed:
                other = options | {"attention_kernel": "reference"}
                yield Case("acceptance", model, "scenario", loss, other)
        if model in (first, last):
            losses = ("likelihood", "entropy", "rollout_entropy", "coupled_entropy")
            for loss, options in product(losses, ACCEPTANCE):
                yield Case("entropies and weights", model, "scenario", loss, options)
        if model is last or not model.checkpointed:
            for options in ACCEPTANCE:
                yield Case("scores", model, "scenario", "score", options)
    for loss, options in product((*ALL_LOSSES, *PAIR_LOSSES[1:]), NESTED):
        yield Case("other losses", first, batch_for(loss), loss, options)
    for loss, options in product(("grpo", "gspo", "coupled", "entropy"), ACCEPTANCE):
        yield Case("temperatures", first, "temperatures that share", loss, options)
    further = (
        {"head_chunk_tokens": 3},
        {"head_logits": "keep"},
        {"head_logits": "recompute"},
        {"grad_accumulation_dtype": "float32"},
        {"max_leaf_tokens": 12},
        {"restore_grads": True},
    )
    for loss, options, more in product(("grpo", "coupled"), NESTED, further):
        if options["boundary"] == "across" or "max_leaf_tokens" not in more:
            yield Case("other options", first, "scenario", loss, options | more)
    for loss, options in product(("grpo", "gspo", "coupled"), NESTED):
        yield Case("scale and parts", first, "scenario", loss, options, {"scale": 0.25})
    for loss, options in product(("grpo", "gspo"), NESTED):
        parts, counts = ((0, 5), (5, 11), (11, 14)), (160.0, 32.0, 6.0)
        yield Case("scale and parts", first, "scenario", loss, options, {}, parts, counts)


def _activations() -> Iterator[Case]:
    models = {model.name: model for model in plain_models()}
    for name in ("llama", "qwen3 window sinks", "llama window checkpointed"):
        model = models[name]
        for loss, options, activations, checkpoints in product(
            ("grpo", "gspo", "coupled_entropy"), NESTED, ACTIVATIONS, CHECKPOINTS
        ):
            if checkpoints == "none" or not model.checkpointed:
                moved = {"activations": activations, "checkpointing": checkpoints}
                yield Case("activations", model, "scenario", loss, options | moved)
    frozen = Model("qwen3 upper layer learns", "qwen3", learns=("layers.2", "lm_head"))
    experts = Model(
        "qwen3_moe", "qwen3_moe", {**MOE, "num_experts": 4, "moe_intermediate_size": 24}
    )
    for model in (frozen, experts, hybrid("qwen3_next"), hybrid("granitemoehybrid")):
        for activations, checkpoints in product(ACTIVATIONS, CHECKPOINTS):
            moved = {"activations": activations, "checkpointing": checkpoints}
            yield Case("activations", model, "forked", "grpo_plain", FORKED[0] | moved)


def _hybrids() -> Iterator[Case]:
    stock = hybrid("qwen3_5_text")
    checkpointed = replace(stock, name=f"{stock.name} checkpointed", checkpointed=True)
    for model, loss, options in product(
        (stock, checkpointed), ("grpo", "gspo", "dpo", "coupled"), HYBRID
    ):
        yield Case("hybrids", model, batch_for(loss), loss, options)
    for options in HYBRID:
        yield Case("hybrids", stock, "scenario", "score", options)
    for boundary in ("across", "mixed"):  # shorter than the convolution
        yield Case("hybrids", stock, "scenario", "grpo", option("tree", boundary, 2))
    for kernel in ("chunked", "reference"):
        options = option("tree", "mixed", TIGHT, recurrence_kernel=kernel)
        yield Case("hybrids", stock, "scenario", "grpo", options)
    limited = hybrid("granitemoehybrid", time_step_limit=(1.3, 1.4))
    limited = replace(limited, name="granitemoehybrid, limits of time steps")
    for options in HYBRID[3:7]:
        yield Case("hybrids", limited, "scenario", "grpo", options)
    for family, kinds in product(HYBRIDS[1::2], (("state",), ("attention", "state"))):
        for options in HYBRID[3:11]:
            yield Case("hybrids", hybrid(family, kinds), "scenario", "grpo", options)
    for family, (sharing, boundary), tokens in product(HYBRIDS, EVERY[3:], (None, 200)):
        if boundary != "within" or tokens is None:
            options = option(sharing, boundary, tokens)
            yield Case("hybrids", hybrid(family), "forked, long", "grpo", options)


def _critics() -> Iterator[Case]:
    windowed = {"sliding_window": WINDOW}
    sizes: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mistral": windowed}
    sizes["gemma2"] = {**windowed, "query_pre_attn_scalar": 8}
    for family, changes in sizes.items():
        model = Model(f"{family} critic", family, {"num_hidden_layers": 2, **changes}, critic=True)
        for loss, options in product(("value", "value_rollouts", "value_coupled"), CRITIC):
            yield Case("critics", model, "scenario", loss, options)
        for options in CRITIC:
            yield Case("critics", model, "scenario", "score", options)


def _adapters() -> Iterator[Case]:
    for family, (name, changes) in product(("llama", "qwen3"), ADAPTERS.items()):
        model = Model(f"{family} adapters on {name}", family, adapters=changes)
        for options in FORKED:
            yield Case("adapters", model, "forked", "grpo_kl", options)


def _families() -> Iterator[Case]:
    for family, checkpointed in product(FAMILIES, (False, True)):
        kinds = ("state", "state", "attention", "state") if family in HYBRIDS else ()
        sizes = {"num_hidden_layers": 4, **SPECIAL.get(family, {})}
        name = f"{family}{' checkpointed' if checkpointed else ''}"
        model = Model(name, family, sizes, checkpointed=checkpointed, kinds=kinds)
        model = replace(model, plain_attention=True)
        for options in FAMILY:
            yield Case("families", model, "groups", "grpo_kl", options)


def _verified() -> Iterator[Case]:
    experts = Model(
        "qwen3_moe", "qwen3_moe", {**MOE, "num_experts": 4, "moe_intermediate_size": 24}
    )
    critic = Model("llama critic", "llama", {"num_hidden_layers": 2}, critic=True)
    for model in (*plain_models(), experts, hybrid("qwen3_5_text")):
        for loss, options in product(("grpo", "gspo", "dpo"), (*NESTED, option())):
            yield Case("verify", model, batch_for(loss), f"verify {loss}", options)
    for options in (*NESTED, option()):
        yield Case("verify", critic, "scenario", "verify value", options)
