"""Steps of models that transformers splits over ranks, beside the same step in one process."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import device
from scenarios_of_ranks import DEEP, UNEQUAL, distance, gradients
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.engine.changes import Changes
from forkpoint.hosts.transformers.stock import run_plain_recurrences
from forkpoint.hosts.upcasts import lift_upcasts
from forkpoint.losses import GRPO
from forkpoint.testing import tiny_model

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def nothing(model: nn.Module) -> None:
    pass


def same(model: Any) -> Any:
    return model


@dataclass(frozen=True)
class Split:
    """One step on ranks, and in one process with all data ranks' rollouts."""

    options: dict[str, Any] = field(default_factory=lambda: {"tp_size": 2})
    """Of transformers' DistributedConfig."""
    family: str = "qwen3"
    sizes: dict[str, Any] = field(default_factory=dict)
    build: Callable[[], Any] | None = None
    """The model itself, where it is not the family's tiny one."""
    config: Config = DEEP
    rollouts: tuple[list[Rollout], ...] = (UNEQUAL[0],)
    """By data rank."""
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    steps: int = 1
    alone: Callable[[Any], None] = nothing
    """A change of the model, here and in one process, before it is wrapped."""
    around: Callable[[Any], Any] = same
    """Something around the model, such as adapters, here and in one process."""
    step: Callable[[forkpoint.Policy, RolloutBatch, Any], float] | None = None
    """The step; by default `forward_backward`, whose loss it returns."""
    critic: bool = False

    def save(self, folder: Path) -> Path:
        """Write the model's files, before the ranks are forked."""
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        build = self.build
        if build is None:
            model = tiny_model(self.family, dtype=torch.float64, critic=self.critic, **self.sizes)
        else:
            model = build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(folder)
        return folder


def load(folder: Path, split: Split, **options: Any) -> Any:
    """The model, split over ranks as `options` of DistributedConfig say; whole without any."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Of torch, where transformers shards an embedding by itself; nothing writes into its output.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    kind = AutoModelForTokenClassification if split.critic else AutoModelForCausalLM
    given: dict[str, Any] = {"distributed_config": DistributedConfig(**options)} if options else {}
    config = json.loads((folder / "config.json").read_text())
    if "num_experts" in config or "num_local_experts" in config or "n_routed_experts" in config:
        given["experts_implementation"] = "eager"  # the default has no float64
    del config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind.from_pretrained(folder, dtype=torch.float64, **given).train()
    split.alone(model)
    return split.around(model if options else model.to(device()))


def data_rank(split: Split) -> int:
    """The place of this rank in the data dimensions: transformers has those of a copy last."""
    return dist.get_rank() // split.options.get("tp_size", 1)


def run(policy: forkpoint.Policy, batch: RolloutBatch, split: Split) -> float:
    if split.step is not None:
        return split.step(policy, batch, split.loss)
    return policy.forward_backward(batch, split.loss).loss


def compared(folder: Path, split: Split) -> dict[str, Any]:
    """Run the step on this rank; differences from one process."""
    model, other = load(folder, split, **split.options), load(folder, split)
    names = [name for name, _ in model.named_parameters()]
    with Changes() as changes:
        for each in (model, other):
            lift_upcasts(each, changes)
            run_plain_recurrences(each, changes)
        policy = forkpoint.wrap(model, split.config)
        own = RolloutBatch(split.rollouts[data_rank(split)])
        losses = [run(policy, own, split) for _ in range(split.steps)]
        found = gradients(model)
        alone = forkpoint.wrap(other, split.config)
        whole = RolloutBatch([r for part in split.rollouts for r in part])
        wanted = [run(alone, whole, split) for _ in range(split.steps)]
        scores = policy.score(own, entropy=not split.critic)
        expected = alone.score(own, entropy=not split.critic) if len(own) else scores
    apart = (scores.per_token[name] - expected.per_token[name] for name in scores.per_token)
    return {
        "error": distance(found, gradients(other), names),
        "loss": abs(losses[-1] - wanted[-1]),
        "scores": max((float(x.abs().max()) for x in apart if x.numel()), default=0.0),
        "ranks": len(policy.host.group.ranks.global_ranks),  # type: ignore[union-attr]
    }
