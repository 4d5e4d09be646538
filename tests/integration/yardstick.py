"""Tiny models, their ordinary dense run, and what in a step differs from it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from scenarios import LOSSES, acceptance_batch, paired_batch, with_logprobs
from steps import with_options
from torch import Tensor
from transformers import PreTrainedModel

from forkpoint import Config, Plan, RolloutBatch, StepStats, wrap
from forkpoint.losses import Denominators, LogLikelihood, Loss
from forkpoint.losses.base import as_loss
from forkpoint.plan.runs import labels_run
from forkpoint.testing import DenseRun, dense_run, lifted_upcasts, tiny_model
from plain_attention import PLAIN_ATTENTION, force_windows_and_sinks
from versions import checkpoint_blocks

BAR = 1e-10
"""Of the norm of the whole gradient, for each parameter's; absolute for log-probs and losses."""


@dataclass(frozen=True)
class Variant:
    """A model of the acceptance test."""

    family: str
    window: int | None = None
    sinks: bool = False
    checkpointed: bool = False

    def __str__(self) -> str:
        marks = {f"window{self.window}": self.window, "sinks": self.sinks}
        marks["ckpt"] = self.checkpointed
        return "-".join([self.family, *(mark for mark, on in marks.items() if on)])

    def build(self) -> PreTrainedModel:
        """The model in training mode; equal families have equal weights, and equal sinks."""
        model = tiny_model(self.family, num_hidden_layers=2)
        if self.window or self.sinks:
            force_windows_and_sinks(model, window=self.window, sinks=self.sinks)
            model.set_attn_implementation(PLAIN_ATTENTION)
        if self.checkpointed:
            checkpoint_blocks(model, use_reentrant=False)
        return model.train()


@dataclass(frozen=True)
class Truth:
    """A batch and what ordinary training makes of it."""

    batch: RolloutBatch
    dense: DenseRun
    norm: float
    """Of the gradients of all parameters together."""


def measure(
    model: PreTrainedModel,
    batch: RolloutBatch,
    loss: Loss,
    denominators: Denominators | None = None,
) -> Truth:
    """The dense run of a float64 model, which must reach every parameter."""
    with lifted_upcasts(model):
        dense = dense_run(model, batch, loss, denominators)
    norms = [0.0 if g is None else float(g.norm()) for g in dense.gradients.values()]
    assert min(norms) > 1e-6 * max(norms), "a parameter without a gradient would prove nothing"
    return Truth(batch, dense, float(np.linalg.norm(norms)))


def own_logprobs(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """[T], by a dense forward of a float64 model."""
    with lifted_upcasts(model), torch.no_grad():
        return dense_run(model, batch, LogLikelihood()).per_token["logprobs"]


@cache
def truth(variant: Variant, loss: str) -> Truth:
    """The dense run of the scenario under a loss of LOSSES, once for all plans.

    The model is not checkpointed, whatever the variant.
    """
    model = replace(variant, checkpointed=False).build()
    batch = paired_batch() if loss == "dpo" else acceptance_batch()
    batch = with_logprobs(batch, own_logprobs(model, batch), weighted=loss == "likelihood")
    return measure(model, batch, as_loss(LOSSES[loss]))


def label(config: Config, plan: Plan) -> str:
    """A combination as messages name it."""
    auto = "auto, that is " if config.sharing == "auto" else ""
    limit = config.max_microbatch_tokens or "any number of"
    return (
        f"{auto}{plan.sharing} + {plan.boundary}, microbatches of "
        f"{limit} tokens, "
        f"kernel {config.attention_kernel}"
    )


def value_faults(name: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    """By how much two tensors differ, as one text, if by more than the bar."""
    error = float((found - expected).abs().max())
    if not error <= BAR:
        yield f"{name} off by {error:.1e}"


def gradient_faults(
    model: PreTrainedModel, expected: Truth, before: dict[str, Tensor] | None = None
) -> Iterator[str]:
    """The parameters whose gradient is not the dense one, added to what was there before."""
    for name, parameter in model.named_parameters():
        dense = expected.dense.gradients[name]
        assert parameter.grad is not None and dense is not None, f"{name} has no gradient"
        added = parameter.grad if before is None else parameter.grad - before[name]
        error = float((added - dense).norm()) / expected.norm
        if not error <= BAR:
            yield f"{name} off by {error:.1e} of the gradient"


def step_faults(model: PreTrainedModel, stats: StepStats, expected: Truth) -> Iterator[str]:
    """All that differs from the dense run after one step from gradients of None."""
    yield from value_faults("loss", torch.tensor(stats.loss), torch.tensor(expected.dense.loss))
    # Those of rollouts whose terms are 0 are NaN.
    run_T = torch.from_numpy(labels_run(expected.batch.offsets, stats.plan.run_lengths))
    run_T |= torch.from_numpy(~expected.batch.loss_mask)
    name = "values" if "values" in stats.per_token else "logprobs"
    found_T, dense_T = stats.per_token[name], expected.dense.per_token[name]
    assert bool((found_T.isnan() == ~run_T).all())
    yield from value_faults(name, found_T[run_T], dense_T[run_T])
    yield from gradient_faults(model, expected)


def faults_of_steps(
    model: PreTrainedModel, expected: Truth, loss: Any, configs: Iterable[Config]
) -> tuple[list[str], list[Plan]]:
    """All that differs from the dense run in a step of each configuration, and the plans."""
    faults: list[str] = []
    plans: list[Plan] = []
    with lifted_upcasts(model):
        policy = wrap(model)
        for config in configs:
            model.zero_grad()
            stats = with_options(policy, config).forward_backward(expected.batch, loss)
            name = label(config, stats.plan)
            faults += [f"{name}: {fault}" for fault in step_faults(model, stats, expected)]
            plans.append(stats.plan)
    return faults, plans
