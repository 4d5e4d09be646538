"""One side of scripts/compare_commits.py: runs cases with the forkpoint that PYTHONPATH names.

Reads pickled cases from stdin, and writes one pickled `Outcome` for each to stdout. Names of today
are translated into those that the commit has.
"""

import contextlib
import hashlib
import os
import pickle
import re
import sys
import warnings
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
from compare_cases import BATCHES, Case, Outcome
from compare_models import Model

# Names and values of Config as they are now, and as they were.
EARLIER_NAMES = {
    "max_microbatch_tokens": "max_row_tokens",
    "max_leaf_tokens": "max_wave_tokens",
    "activations": "residency",
    "memory_budget": "memory_budget_bytes",
}
EARLIER_VALUES = {"within": "in_row", "across": "across_rows"}
LATER_OPTIONS = {"self_check"}
"""Options that earlier commits lack, and that change nothing of what a case compares."""
ALWAYS = {"memory_budget": None, "checkpointing": "none", "self_check": False}
NOT_COMPARED = re.compile("seconds|memory|bytes|^asked$")
"""Fields of reports of `verify` that vary, or that only earlier commits have."""
EARLIER_OPERATIONS = {"F": "forward", "R": "recompute", "B": "backward"}


def named_now(options: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Options by the names and values that a commit's Config has.

    known: its fields, each with its type.
    """
    found = {}
    for name, value in options.items():
        if name not in known and name in LATER_OPTIONS:
            continue
        name = name if name in known else EARLIER_NAMES[name]
        allowed = get_args(known[name])
        if isinstance(value, str) and allowed and value not in allowed:
            value = EARLIER_VALUES.get(value, value)
        found[name] = value
    return found


def numbered(events: tuple[str, ...], plan: Any) -> tuple[str, ...]:
    """Events with microbatches numbered as they first occur, whatever they are called.

    A score counts as a forward: once it had no name of its own.
    """
    rows = plan.microbatches if hasattr(plan, "microbatches") else plan.rows
    names = plan.microbatch_names if hasattr(plan, "microbatch_names") else plan.row_names
    known = ("tokens", "padded_tokens", "run_tokens", "slots")
    sizes = [next(getattr(row, n) for n in known if hasattr(row, n)) for row in rows]
    size_of = dict(zip(names, sizes, strict=True))
    number_of: dict[str, int] = {}
    found = []
    for event in events:
        operation, name = event.split(" ", 1)
        operation = EARLIER_OPERATIONS.get(operation, operation)
        operation = "forward" if operation == "score" else operation
        number = number_of.setdefault(name, len(number_of))
        found.append(f"{operation} {number} of {size_of[name]} tokens")
    return tuple(found)


# Models ------------------------------------------------------------------------------------------


def build(model: Model) -> Any:
    """The model, in training mode."""
    import torch
    from transformers import CONFIG_MAPPING

    from forkpoint.testing import PLAIN_ATTENTION, force_windows_and_sinks, tiny_model

    sizes = dict(model.sizes)
    if model.kinds:
        names = {"state": "linear_attention", "attention": "full_attention"}
        # Kinds of layers have other names in older versions of transformers.
        blocks = model.family == "granitemoehybrid" and CONFIG_MAPPING[model.family]()
        if blocks and blocks.layers_block_type[0] == "mamba":
            names = {"state": "mamba", "attention": "attention"}
        sizes["layer_types"] = [names[kind] for kind in model.kinds]
    built = tiny_model(model.family, critic=model.critic, **sizes)
    if hasattr(built, "set_experts_implementation"):
        built.set_experts_implementation("eager")  # the default's product has no float64
    if model.window or model.sinks:
        force_windows_and_sinks(built, window=model.window, sinks=model.sinks)
        built.set_attn_implementation(PLAIN_ATTENTION)
    if model.plain_attention:
        built.config._attn_implementation = PLAIN_ATTENTION
    if model.checkpointed:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(built, name) for name in names if hasattr(built, name))
        enable({"use_reentrant": False})
    for name, parameter in built.named_parameters() if model.learns else ():
        parameter.requires_grad_(any(part in name for part in model.learns))
    if model.adapters is not None:
        from peft import LoraConfig, TaskType, get_peft_model

        chosen: dict[str, Any] = {
            "target_modules": "all-linear",
            "task_type": TaskType.CAUSAL_LM,
            "r": 3,
        }
        torch.manual_seed(2)
        config = LoraConfig(**(chosen | {"init_lora_weights": False} | model.adapters))
        built = get_peft_model(built, config)
    return built.train()


def stock_numbers(model: Any, rollouts: list[dict[str, Any]]) -> list[np.ndarray]:
    """By the stock model alone: log-probs, or a critic's values, of each rollout's tokens."""
    import torch

    found = []
    with torch.no_grad():
        for rollout in rollouts:
            ids = torch.tensor(rollout["token_ids"])
            numbers = torch.zeros(len(ids), dtype=torch.float64)
            if len(ids) > 1:
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
                if logits.shape[-1] == 1:
                    numbers[1:] = logits[:, 0]
                else:
                    logits = logits / rollout.get("temperature", 1.0)
                    numbers[1:] = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            found.append(numbers.numpy())
    return found


def rollouts_of(case: Case, model: Any) -> list[dict[str, Any]]:
    """The batch's rollouts; those without log-probs get some scattered around the model's own."""
    rollouts = BATCHES[case.batch]()
    if "old_logprobs" in rollouts[0] or case.batch == "groups":
        return rollouts
    rng = np.random.default_rng(6)
    for rollout, own in zip(rollouts, stock_numbers(model, rollouts), strict=True):
        if case.model.critic:
            rollout["returns"] = own + rng.normal(size=own.shape)
            rollout["old_values"] = own + 0.6 * rng.normal(size=own.shape)
            continue
        for name in ("old_logprobs", "reference_logprobs"):
            rollout[name] = np.minimum(own + 0.2 * rng.normal(size=own.shape), 0)
        if case.loss == "likelihood":
            rollout["weights"] = rng.uniform(0.5, 2.0, own.shape)
    return rollouts


def digest(model: Any, rollouts: list[dict[str, Any]]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    for rollout in rollouts:
        for name, value in sorted(rollout.items()):
            found.update(name.encode() + np.asarray(value).tobytes())
    return found.hexdigest()


# Losses ------------------------------------------------------------------------------------------


@cache
def losses() -> dict[str, Any]:
    """Losses by the names of the cases."""
    from forkpoint import losses as given
    from forkpoint.losses.base import Loss

    def coupled(outputs: Any, batch: Any) -> Any:
        means_n = batch.rollout_mean(outputs.logprobs * batch.advantages)
        return means_n.logsumexp(0) + 0.1 * outputs.logprobs.sum() ** 2 / batch.denominators.tokens

    def value_coupled(outputs: Any, batch: Any) -> Any:
        errors_n = batch.rollout_mean((outputs.values - batch.returns).square())
        return errors_n.logsumexp(0) + 0.1 * outputs.values.sum() ** 2 / batch.denominators.tokens

    class SureRollouts(Loss):
        decomposition = "rollout"
        needs_entropy = True

        def __call__(self, outputs: Any, batch: Any) -> Any:
            sureness_n = batch.rollout_mean(-outputs.entropies).exp()
            likelihood_n = batch.rollout_mean(outputs.logprobs).exp()
            return (sureness_n * (1 + likelihood_n)).sum() / batch.denominators.rollouts

    class CoupledEntropies(Loss):
        decomposition = "joint"
        needs_entropy = True

        def __call__(self, outputs: Any, batch: Any) -> Any:
            entropies_n = batch.rollout_mean(outputs.entropies)
            return coupled(outputs, batch) + (entropies_n * entropies_n.roll(1)).sum()

    class EntropyGRPO(given.GRPO):
        needs_entropy = True

        def __call__(self, outputs: Any, batch: Any) -> Any:
            bonus = batch.total(outputs.entropies, "token")
            return super().__call__(outputs, batch) - 0.1 * bonus

    return {
        "grpo": given.GRPO(clip=0.2, clip_high=0.28, kl=0.05),
        "grpo_plain": given.GRPO(),
        "grpo_kl": given.GRPO(kl=0.1),
        "gspo": given.GSPO(clip=0.05, clip_high=0.06),
        "gspo_token": given.GSPO(clip=0.05, clip_high=0.06, level="token"),
        "dpo": given.DPO(beta=0.3),
        "dpo_ipo": given.DPO(beta=0.3, variant="ipo"),
        "simpo": given.SimPO(),
        "ppo": given.PPO(),
        "dapo": given.DAPO(),
        "dr_grpo": given.DrGRPO(max_tokens=20),
        "bnpo": given.BNPO(),
        "cispo": given.CISPO(),
        "sapo": given.SAPO(),
        "distillation": given.Distillation(),
        "likelihood": given.LogLikelihood(normalize="rollout"),
        "entropy": EntropyGRPO(clip=0.2, kl=0.05, normalize="rollout"),
        "rollout_entropy": SureRollouts(),
        "coupled_entropy": CoupledEntropies(),
        "coupled": coupled,
        "value": given.ValueLoss(clip=0.5),
        "value_rollouts": given.ValueLoss(clip=0.5, normalize="rollout"),
        "value_coupled": value_coupled,
    }


# Steps -------------------------------------------------------------------------------------------


class Inputs:
    """The last case's model and batches, which its neighbours have as well."""

    def __init__(self) -> None:
        self.of: Model | None = None
        self.model: Any = None
        self.batches: dict[tuple[str, bool], tuple[list[dict[str, Any]], str]] = {}

    def get(self, case: Case) -> tuple[Any, list[dict[str, Any]], str]:
        """The model, the batch's rollouts, and the digest of both."""
        if case.model != self.of:
            self.of, self.model, self.batches = case.model, build(case.model), {}
        key = case.batch, case.loss == "likelihood"
        if key not in self.batches:
            rollouts = rollouts_of(case, self.model)
            self.batches[key] = rollouts, digest(self.model, rollouts)
        return self.model, *self.batches[key]


def numbers_of(report: Any, name: str = "report") -> dict[str, np.ndarray]:
    """Numbers of a report of `verify`, by their place in it; those of time and memory vary."""
    if isinstance(report, dict):
        parts = [(key, value) for key, value in report.items() if not NOT_COMPARED.search(key)]
    elif isinstance(report, list | tuple):
        parts = list(enumerate(report))
    else:
        parts = []
    if parts:
        found = [numbers_of(value, f"{name} {key}") for key, value in parts]
        return {key: value for part in found for key, value in part.items()}
    if isinstance(report, bool | int | float):
        return {name: np.array(float(report))}
    return {}


def run(case: Case, inputs: Inputs) -> Outcome:
    """The case's step or scores, or what `verify` finds."""
    import forkpoint
    from forkpoint.losses import Denominators
    from forkpoint.testing import lifted_upcasts

    model, rollouts, digested = inputs.get(case)
    outcome = Outcome(inputs=digested)
    known = {each.name: each.type for each in fields(forkpoint.Config)}
    model.zero_grad()
    try:
        batch = forkpoint.RolloutBatch([forkpoint.Rollout(**each) for each in rollouts])
        policy = forkpoint.wrap(model, forkpoint.Config(**named_now(ALWAYS | case.options, known)))
        with lifted_upcasts(model):
            if case.loss.startswith("verify "):
                report = policy.verify(batch, losses()[case.loss.removeprefix("verify ")])
                return replace(outcome, numbers=numbers_of(report.to_dict()))
            if case.loss == "score":
                entropy: dict[str, Any] = {} if case.model.critic else {"entropy": True}
                results: list[Any] = [policy.score(batch, **entropy)]
            else:
                more = dict(case.step)
                if case.counts:
                    more["denominators"] = Denominators(
                        **dict(zip(("tokens", "rollouts", "groups"), case.counts, strict=True))
                    )
                parts = [batch.select(range(*part)) for part in case.parts] or [batch]
                loss = losses()[case.loss]
                results = [policy.forward_backward(part, loss, **more) for part in parts]
    except Exception as error:
        return replace(outcome, refused=f"{type(error).__name__}: {error}".splitlines()[0])
    for position, result in enumerate(results):
        for name, values in result.per_token.items():
            outcome.numbers[f"{name} {position}"] = values.detach().numpy().copy()
        if case.loss != "score":
            outcome.numbers[f"loss {position}"] = np.array(float(result.loss))
        outcome.events += numbered(result.events, result.plan)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            outcome.numbers[f"gradient {name}"] = parameter.grad.numpy().copy()
    return outcome


def main(source: Path) -> None:
    """Cases from stdin to outcomes on stdout; what else is printed goes to stderr."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import forkpoint

    assert Path(forkpoint.__file__).is_relative_to(source), f"{forkpoint.__file__} is imported"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cases: list[Case] = pickle.load(sys.stdin.buffer)
    inputs = Inputs()
    with contextlib.suppress(BrokenPipeError):
        for case in cases:
            pickle.dump(run(case, inputs), output)
            output.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
