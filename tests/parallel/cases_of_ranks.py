"""Steps on ranks of any kinds of parallelism, beside the same steps in one process."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import device, run_ranks
from scenarios_of_ranks import BAR, DEEP, UNEQUAL, own_loss, replicated, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

import forkpoint
from benchmarks.ranks.meshes import Meshes
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.engine.changes import Changes
from forkpoint.hosts.transformers.stock import run_plain_recurrences
from forkpoint.hosts.upcasts import lift_upcasts
from forkpoint.losses import GRPO, Loss
from forkpoint.testing import tiny_model
from versions import needs_splits

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EAGER = {"experts_implementation": "eager"}
MIXTURE = {**MOE, **EAGER}
LATENT = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    **EAGER,
}
SINKS = {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 7, **EAGER}


# How ranks with other tokens hold weights: over the mesh (dp, cp), or over all ranks
# ------------------------------------------------------------


def over_all(model: Any, mesh: DeviceMesh | None) -> nn.Module:
    return sharded(model, mesh=mesh and mesh._flatten("data"))


def over_both(model: Any, mesh: DeviceMesh | None) -> nn.Module:
    return sharded(model, mesh=mesh)


def over_replicas(model: Any, mesh: DeviceMesh | None) -> nn.Module:
    if mesh is None:
        return replicated(model)
    return DistributedDataParallel(model, process_group=mesh._flatten("data").get_group())


def over_trained_replicas(model: Any, mesh: DeviceMesh) -> nn.Module:
    """DistributedDataParallel, which refuses stages that train nothing."""
    group = mesh._flatten("data").get_group()
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return DistributedDataParallel(model, process_group=group) if trains else model


def step(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> Any:
    return policy.forward_backward(batch, loss)


def through_function(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> Any:
    return policy.forward_backward(batch, own_loss)


@dataclass(frozen=True)
class Case:
    """Steps on ranks, and in one process with the rollouts of all data ranks."""

    family: str = "qwen3"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], Any] | None = None
    """The model, where it is not the family's tiny one of these sizes."""
    critic: bool = False
    dtype: torch.dtype = torch.float64
    alone: Callable[[Any], object] = lambda model: None
    """A change of the model, here and in one process, before ranks hold it."""
    around: Callable[[Any], Any] = lambda model: model
    """Something around the model, such as adapters, here and in one process."""
    config: Config = DEEP
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    rollouts: tuple[list[Rollout], ...] = (UNEQUAL[0],)
    """By data rank."""
    steps: int = 1
    step: Callable[[forkpoint.Policy, RolloutBatch, Any], Any] = step
    """The call; returns statistics of a step, or a loss."""
    hold: Callable[[Any, DeviceMesh | None], nn.Module] = over_all
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    options: Mapping[str, int] = field(default_factory=dict)
    """Of transformers' DistributedConfig, by which it makes meshes of its own and holds weights."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Besides `options`: the mesh that `wrap` is given, by dimension."""

    @property
    def size(self) -> int:
        if self.options:
            return math.prod(n for name, n in self.options.items() if name != "ep_size")
        return len(self.rollouts) * self.pp * self.cp * self.tp

    @property
    def splits(self) -> bool:
        """Whether transformers splits the model, which it does as it loads files."""
        return bool(self.options) or self.tp > 1

    @property
    def of_each_rank(self) -> bool:
        """Whether each data rank has a loss of its own, of which gradients are means."""
        return not isinstance(self.loss, Loss) or self.step is not step

    def made(self) -> Any:
        torch.manual_seed(0)
        if self.make is not None:
            return self.make()
        return tiny_model(self.family, dtype=self.dtype, critic=self.critic, **self.sizes)

    def save(self, folder: Path) -> Path:
        """Write the model's files, if it is loaded from files, before the ranks are forked."""
        if self.splits:
            quiet()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.made().save_pretrained(folder)
        return folder

    def model(self, folder: Path, meshes: Meshes | None, **options: Any) -> Any:
        """The model with its changes, split as options of DistributedConfig say."""
        model = load(folder, self, meshes, **options) if self.splits else self.made()
        model.train()
        self.alone(model)
        return self.around(model if options else model.to(device()))


def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(folder: Path, case: Case, meshes: Meshes | None, **options: Any) -> Any:
    quiet()
    # Of torch, where transformers shards an embedding by itself; nothing writes into its output.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    kind = AutoModelForTokenClassification if case.critic else AutoModelForCausalLM
    given: dict[str, Any] = {"distributed_config": DistributedConfig(**options)} if options else {}
    config = json.loads((folder / "config.json").read_text())
    if {"num_experts", "num_local_experts", "n_routed_experts"} & set(config):
        given |= EAGER  # the default has no float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if meshes is None or case.options:
            return kind.from_pretrained(folder, dtype=case.dtype, **given)
        with meshes.given_to_transformers():
            return kind.from_pretrained(folder, dtype=case.dtype, **given)


class Here(NamedTuple):
    """A case on this rank."""

    policy: forkpoint.Policy
    place: int
    """Among data ranks."""


def on_rank(folder: Path, case: Case, config: Config | None = None) -> Here:
    """The policy of this rank."""
    config = config or case.config
    if case.options:
        model, mesh = case.model(folder, None, **case.options), None
        place = dist.get_rank() // case.options.get("tp_size", 1)
        if case.mesh:
            names = tuple(case.mesh)
            mesh = init_device_mesh(device().type, tuple(case.mesh.values()), mesh_dim_names=names)
            place = mesh.get_local_rank("dp") if "dp" in names else 0
        return Here(forkpoint.wrap(model, config, mesh=mesh), place)
    if case.pp * case.cp * case.tp == 1:
        model = case.hold(case.model(folder, None), None)
        return Here(forkpoint.wrap(model, config), dist.get_rank())
    data = len(case.rollouts)
    meshes = Meshes(device(), pp=case.pp, dp=data, cp=case.cp, tp=case.tp, ep=case.ep)
    options = {"tp_size": case.tp, "ep_size": case.ep} if case.tp > 1 else {}
    model = case.model(folder, meshes, **options)
    if case.ep > 1 and data * case.cp > 1:
        model = meshes.sharded(model)
    elif data * case.cp > 1:
        if case.pp > 1:
            forkpoint.cut(model, meshes.dense)
        model = case.hold(model, meshes.dense["dp", "cp"])
    policy = forkpoint.wrap(model, config, mesh=meshes.dense)
    return Here(policy, meshes.dense.get_local_rank("dp"))


@contextmanager
def both(folder: Path, case: Case) -> Iterator[tuple[forkpoint.Policy, forkpoint.Policy, int]]:
    """The policies of this rank and of one process, which compute in float64 throughout, and the
    place among data ranks."""
    policy, place = on_rank(folder, case)
    alone = forkpoint.wrap(
        case.model(folder, None), replace(case.config, compile_blocks=None, gather="auto")
    )
    with Changes() as changes:
        for each in (policy, alone):
            lift_upcasts(each.host.model, changes)
            run_plain_recurrences(each.host.model, changes)
        yield policy, alone, place


def loss_of(result: Any) -> float:
    return result if isinstance(result, float) else result.loss


def compared(folder: Path, case: Case) -> dict[str, Any]:
    """Take the steps on this rank; differences from one process."""
    with both(folder, case) as (policy, alone, place):
        own = RolloutBatch(case.rollouts[place])
        for _ in range(case.steps):
            result = case.step(policy, own, case.loss)
        parts = [RolloutBatch(part) for part in case.rollouts]
        if not case.of_each_rank:
            parts, place = [RolloutBatch([r for part in case.rollouts for r in part])], 0
        for _ in range(case.steps):
            wanted = [
                loss_of(case.step(alone, part, case.loss)) if len(part) else 0.0 for part in parts
            ]
        for parameter in alone.host.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        entropy = policy.host.head == "logprobs"
        scores = policy.score(own, entropy=entropy)
        expected = alone.score(own, entropy=entropy) if len(own) else scores
    if case.pp > 1:
        check_lanes(result, case.pp)
    apart = (scores.per_token[name] - expected.per_token[name] for name in scores.per_token)
    names = [len(list(each.host.model.parameters())) for each in (policy, alone)]
    return {
        "error": error_of(policy.host.model, alone.host.model),
        "loss": abs(loss_of(result) - wanted[place]),
        "scores": max((float(x.abs().max()) for x in apart if x.numel()), default=0.0),
        "microbatches": len(scores.plan.microbatches),
        "tokens": 0 if isinstance(result, float) else result.plan.max_microbatch_tokens,
        "held": names[0] / names[1],
    }


def check_lanes(result: Any, stages: int) -> None:
    """The stages ran what was predicted."""
    if isinstance(result, float):
        return
    assert len(result.lanes.measured) == stages
    # Predictions know no encoders of images and videos.
    ran = [
        [e for e in x.events if "image" not in e and "video" not in e]
        for x in result.lanes.measured
    ]
    assert ran == [list(x.events) for x in result.lanes.predicted]
    assert all(0 < lane.busy <= lane.ends[-1] for lane in result.lanes.measured)


def error_of(model: nn.Module, other: nn.Module, part: str = "") -> float:
    """Of the gradients that this rank's stage has, of names with `part`, over the norm of all of
    these. Collective where they are sharded."""
    true = {name: p for name, p in other.named_parameters() if part in name}
    apart = 0.0
    for name, parameter in model.named_parameters():
        if part not in name:
            continue
        found, wanted = parameter.grad, true[name].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            apart += float((found - wanted).square().sum())
    norm = sum(float(p.grad.square().sum()) for p in true.values() if p.grad is not None)
    return (apart / norm) ** 0.5


# What tests do with cases
# ------------------------------------------------------------


def named(cases: Mapping[str, Any], *quick: str, case: Callable[[Any], Case] = lambda x: x) -> Any:
    """`parametrize` over names of cases; all but the quick ones are slow."""
    params = []
    for name, value in cases.items():
        marks = [] if name in quick else [pytest.mark.slow]
        params.append(
            pytest.param(name, marks=[*marks, needs_splits] if case(value).splits else marks)
        )
    return pytest.mark.parametrize("name", params)


def on_ranks_of(case: Case, folder: Path, work: Callable[..., Any] = compared, *more: Any) -> Any:
    """`work(folder, case, *more)` on each rank of a case."""
    return run_ranks(case.size, work, case.save(folder), case, *more, limit_s=240)


def check(case: Case, folder: Path, work: Callable[..., Any] = compared) -> list[dict[str, Any]]:
    found = on_ranks_of(case, folder, work)
    for each in found:
        assert max(each["error"], each["loss"], each["scores"]) < BAR, each
    return found
