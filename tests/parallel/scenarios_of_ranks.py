"""Steps of several ranks beside the same step in one process."""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from processes import device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.errors import ForkpointError
from forkpoint.losses import GRPO, Loss
from forkpoint.testing import lifted_upcasts, tiny_model

BAR = 1e-10


def group(
    seed: int, count: int, prompt: int, most: int, *, vocab: int = 60, **fields: Any
) -> list[Rollout]:
    """A flat group: `count` responses of up to `most` tokens to one prompt."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, prompt)
    found = []
    for length in rng.integers(2, most, count):
        mask = np.repeat([0, 1], [prompt, length])
        ids = np.concatenate([tokens, rng.integers(0, vocab, length)])
        found.append(Rollout(ids, mask, float(rng.normal()), group_id=f"group {seed}", **fields))
    return found


def tree(seed: int, depth: int) -> list[Rollout]:
    """A chain of turns, with a rollout that ends after each: as deep as there are turns."""
    rng = np.random.default_rng(seed)
    tokens = list(rng.integers(0, 60, 9))
    found = []
    for turn in range(depth):
        ids = tokens + list(rng.integers(0, 60, 5 + turn))
        mask = [0] * 5 + [1] * (len(ids) - 5)
        found.append(Rollout(ids, mask, float(rng.normal()), group_id=f"tree {seed}"))
        tokens += list(rng.integers(0, 60, 6))
    return found


def routed(rollouts: list[Rollout], layers: int = 3) -> list[Rollout]:
    """Rollouts with other experts in each layer; some are left to routers."""
    found = []
    for rollout in rollouts:
        place = np.arange(len(rollout.token_ids))
        first = (rollout.token_ids + place)[:, None] + np.arange(layers)
        routes = np.stack([first % 4, (first + 1) % 4], -1)
        routes[3::7, 0] = -1
        found.append(replace(rollout, routed_experts=routes))
    return found


# Rank 0 has a deep tree and two groups, rank 1 one wide group: they nest differently.
UNEQUAL: tuple[list[Rollout], ...] = (
    [*tree(3, 4), *group(0, 3, 20, 8), *group(1, 2, 14, 9)],
    group(2, 5, 30, 12),
)
EMPTY: tuple[list[Rollout], ...] = ([], group(2, 5, 30, 12))
DEEP = Config(sharing="tree", boundary="across", max_microbatch_tokens=48)
HOSTED = replace(
    DEEP,
    prefix_cache="host",
    activations="offload",
    checkpointing="full",
    host_memory=1 << 16,
    offload_folder=tempfile.gettempdir(),
)
"""Prefix caches and activations in host memory, and files beyond a little of it."""


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """fully_shard of each block that this rank has, then of the model."""
    for block in model.get_decoder().layers:  # type: ignore[operator]
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def kept_gathered(model: nn.Module) -> nn.Module:
    return sharded(model, reshard_after_forward=False)


def head_alone(model: Any) -> nn.Module:
    fully_shard(model.lm_head)
    return sharded(model)


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


@dataclass(frozen=True)
class Scenario:
    """One step (or several) on ranks, and in one process with all ranks' rollouts."""

    wrap: Callable[[Any], nn.Module] = sharded
    config: Config = DEEP
    rollouts: tuple[list[Rollout], ...] = UNEQUAL
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    make: Callable[[], nn.Module] = lambda: tiny_model("qwen3", dtype=torch.float64)
    steps: int = 1
    alone: Callable[[nn.Module], object] = lambda model: None
    """A change of the model, here and in one process, before it is wrapped."""
    gather: Literal["auto", "microbatch", "step"] = "microbatch"
    """How ranks hold weights, where these are sharded."""


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name, without wrappers. Collective where they are sharded."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None and hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()  # type: ignore[attr-defined]
        found[name.replace("_checkpoint_wrapped_module.", "")] = grad
    return found


def model_of(scenario: Scenario) -> nn.Module:
    torch.manual_seed(0)
    model = scenario.make()
    scenario.alone(model)
    return model.to(device())


def on_ranks(
    model: nn.Module, config: Config, gather: Literal["auto", "microbatch", "step"] = "microbatch"
) -> forkpoint.Policy:
    """A policy of a model that ranks hold; its weights, if sharded, are gathered so."""
    if isinstance(model, FSDPModule):
        config = replace(config, gather=gather)
    return forkpoint.wrap(model, config)


def compared(scenario: Scenario, before: Sequence[list[Rollout]] = ()) -> dict[str, Any]:
    """Run the scenario on this rank, after a step of other rollouts if these are given; differences
    from one process, the same on all ranks."""
    steps = [*([before] if before else []), *[scenario.rollouts] * scenario.steps]
    rank = dist.get_rank()
    model, other = model_of(scenario), model_of(scenario)
    names = [name for name, _ in model.named_parameters()]
    # Sums in float32, such as those of norms, depend on the microbatch in their last bits.
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = on_ranks(scenario.wrap(model), scenario.config, scenario.gather)
        own = RolloutBatch(scenario.rollouts[rank])
        for parts in steps:
            stats = policy.forward_backward(RolloutBatch(parts[rank]), scenario.loss)
        found = gradients(model)
        alone = forkpoint.wrap(other, replace(scenario.config, split="auto"))
        for parts in steps:
            whole = RolloutBatch([r for part in parts for r in part])
            wanted = alone.forward_backward(whole, scenario.loss)
    expected = gradients(other)
    return {
        "error": distance(found, expected, names),
        "same have none": all((found[n] is None) == (expected[n] is None) for n in names),
        "loss": abs(stats.loss - wanted.loss),
        "tokens": (stats.logical_tokens, own.logical_tokens),
        "events": len(stats.events),
        "exchanges": sum(event.endswith(" prompts") for event in stats.events),
        "split": stats.plan.split,
        "computed": stats.computed_tokens,
        "unique": wanted.computed_tokens,
        "gather": stats.plan.gather,
        "left out": stats.plan.left_out,
        "shared": stats.computed_tokens < max(1, stats.logical_tokens),
    }


def distance(
    found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], names: Sequence[str]
) -> float:
    """The norm of the difference over the norm; infinite where gradients are missing or extra."""
    apart = total = 0.0
    assert list(wanted) == list(names)
    for one, other in zip(found.values(), wanted.values(), strict=True):
        if one is None and other is None:
            continue
        one = torch.zeros_like(other) if one is None else one  # type: ignore[arg-type]
        other = torch.zeros_like(one) if other is None else other
        apart += float((one.double() - other.double()).square().sum())
        total += float(other.double().square().sum())
    return (apart / total) ** 0.5 if total else apart**0.5


def in_hybrid_mesh(model: nn.Module, _: Any = None) -> nn.Module:
    """Two replicas of two shards."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(model, mesh=mesh)


def said(work: Callable[[], object]) -> str:
    """The error of a call, by its class and message; nothing where there is none."""
    try:
        work()
    except (ForkpointError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def own_loss(outputs: Any, batch: Any) -> Tensor:
    """A function as a loss, which couples all rollouts of a rank."""
    values = batch.trained(outputs.logprobs * batch.advantages)
    return -values.mean() + 0.1 * batch.trained(outputs.logprobs).sum() ** 2 / len(values) ** 2


def through_logprobs(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    """Loss of log-probs and entropies that replaces `loss`."""
    logprobs, entropies = policy.logprobs(batch, entropy=True)
    weights = torch.as_tensor(batch.advantages * batch.loss_mask)
    value = (weights * logprobs).sum() ** 2 - 0.01 * entropies.sum()
    value.backward()
    return float(value.detach())


@dataclass(frozen=True)
class OfAllRanks(Loss):
    """Couples rollouts of all ranks, and declares some to be zero that are not for others."""

    decomposition = "joint"
    across_ranks = True

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        sums = batch.rollout_sum(batch.trained(outputs.logprobs * batch.advantages))
        return sums.square().sum() + outputs.logprobs.sum() * sums.sum()

    def zero_rollouts(self, batch: RolloutBatch) -> Any:
        return batch.where_all_trained(batch.advantages == 0)


class Failing(Loss):
    """Fails on rank 1."""

    decomposition = "token"

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of the test")
        return -outputs.logprobs.sum()


def without_code(fails_on: int | None, after: int = 0) -> Callable[..., Any]:
    """torch.compile that generates no code; on one rank the compiler may fail after some graphs."""
    warnings.simplefilter("ignore")  # what the compiler looks at warns
    real, graphs = torch.compile, count()

    def backend(graph: Any, inputs: Any) -> Any:
        if dist.get_rank() == fails_on and next(graphs) >= after:
            raise RuntimeError("no such kernel")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return lambda function, *, dynamic, options: real(function, dynamic=dynamic, backend=backend)
