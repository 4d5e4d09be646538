"""Steps whose microbatches lie on several ranks leave the gradients of one process."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import device, run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    HOSTED,
    UNEQUAL,
    distance,
    gradients,
    group,
    replicated,
    routed,
    sharded,
    through_logprobs,
    without_code,
)
from split_models import MOE, Split, load
from test_left_out_ranks import OfAllRanks
from test_ranks import (
    checkpointed,
    critic,
    frozen_but,
    gated_linear_attention,
    lora,
    mamba,
    pairs,
    valued,
)
from test_router_ranks import Routed, apart, beside_one_process, routers
from test_split_models import LATENT, SINKS
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.engine.changes import Changes
from forkpoint.engine.compiling import Compiling
from forkpoint.errors import ForkpointError
from forkpoint.hosts import topology
from forkpoint.hosts.torch_dist import context_parallel
from forkpoint.hosts.torch_dist.context_parallel import DealtPlaces
from forkpoint.hosts.transformers.stock import run_plain_recurrences
from forkpoint.losses import DPO, GRPO, GSPO, RouterLoss, ValueLoss
from forkpoint.testing import lifted_upcasts, tiny_model
from forkpoint.units import format_bytes
from lanes import slow_besides
from versions import needs_splits


def over_all(model: Any, mesh: DeviceMesh) -> nn.Module:
    return sharded(model, mesh=mesh["dp", "cp"]._flatten("all"))


def step(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    return policy.forward_backward(batch, loss).loss


@dataclass(frozen=True)
class Context:
    """Steps on ranks with one batch each place of the data dimension, and in one process."""

    family: str = "qwen3"
    sizes: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] | None = None
    config: Config = DEEP
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    rollouts: tuple[list[Rollout], ...] = (UNEQUAL[0],)
    """By data rank."""
    cp: int = 2
    alone: Callable[[nn.Module], object] = lambda model: None
    wrap: Callable[[Any, DeviceMesh], nn.Module] = over_all
    step: Callable[[forkpoint.Policy, RolloutBatch, Any], float] = step
    steps: int = 1

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        make = self.make
        model: Any = make() if make else tiny_model(self.family, dtype=torch.float64, **self.sizes)
        self.alone(model)
        return model.to(device())


def mesh_of(cp: int) -> DeviceMesh:
    sizes = (dist.get_world_size() // cp, cp)
    return init_device_mesh(device().type, sizes, mesh_dim_names=("dp", "cp"))


def compared(context: Context) -> dict[str, Any]:
    """Differences from one process."""
    mesh = mesh_of(context.cp)
    model, other = context.model(), context.model()
    names = [name for name, _ in model.named_parameters()]
    with lifted_upcasts(model), lifted_upcasts(other), Changes() as changes:
        for each in (model, other):
            run_plain_recurrences(each, changes)
        policy = forkpoint.wrap(context.wrap(model, mesh), context.config, mesh=mesh)
        own = RolloutBatch(context.rollouts[mesh.get_local_rank("dp")])
        losses = [context.step(policy, own, context.loss) for _ in range(context.steps)]
        found = gradients(model)
        alone = forkpoint.wrap(other, replace(context.config, compile_blocks=None))
        parts = {id(part): part for part in context.rollouts}.values()  # mean of equal losses
        whole = RolloutBatch([r for part in parts for r in part])
        wanted = [context.step(alone, whole, context.loss) for _ in range(context.steps)]
        entropy = policy.host.head == "logprobs"
        scores = policy.score(own, entropy=entropy)
        expected = alone.score(own, entropy=entropy) if len(own) else scores
    apart = (scores.per_token[name] - expected.per_token[name] for name in scores.per_token)
    return {
        "error": distance(found, gradients(other), names),
        "loss": abs(losses[-1] - wanted[-1]),
        "scores": max((float(x.abs().max()) for x in apart if len(x)), default=0.0),
        "microbatches": len(scores.plan.microbatches),
    }


def over_both(model: Any, mesh: DeviceMesh) -> nn.Module:
    return sharded(model, mesh=mesh)


def over_replicas(model: Any, mesh: DeviceMesh) -> nn.Module:
    return replicated(model)


def through_function(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    def own(outputs: Any, given: Any) -> Tensor:
        return -given.trained(outputs.logprobs * given.advantages).mean()

    return policy.forward_backward(batch, own).loss


EAGER = {"experts_implementation": "eager"}
MIXTURE = {**MOE, **EAGER}


def through_routes(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    """The loss, and the number of choices that were forced and would have been others."""
    stats = policy.forward_backward(batch, loss)
    assert stats.routes is not None
    decisions, elsewhere = stats.routes.decisions_L, stats.routes.elsewhere_L
    assert 0 < int(elsewhere.sum()) < int(decisions.sum())
    return stats.loss + float(decisions.sum() + 1000 * elsewhere.sum())


TEMPERATURES = [*group(1, 3, 9, 7), *group(1, 2, 9, 5, temperature=0.7)]
CASES = {
    "GRPO": Context(),
    "GSPO, one key head": Context(sizes={"num_key_value_heads": 1}, loss=GSPO()),
    "key heads that ranks do not divide": Context(
        sizes={"num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "DPO": Context(loss=DPO(), rollouts=(pairs(0, 3),)),
    "a critic": Context(make=critic, loss=ValueLoss(), rollouts=(valued(UNEQUAL[0]),)),
    "log-probs": Context(step=through_logprobs),
    "a function": Context(step=through_function),
    "temperatures": Context(rollouts=(TEMPERATURES,)),
    "accumulated": Context(steps=2),
    "replicas": Context(wrap=over_replicas),
    "replicas, log-probs": Context(wrap=over_replicas, step=through_logprobs),
    "replicas, a function": Context(wrap=over_replicas, step=through_function),
    "recomputed": Context(config=replace(DEEP, activations="recompute")),
    "offloaded": Context(config=replace(DEEP, activations="offload")),
    "prefix caches of the host": Context(config=replace(DEEP, prefix_cache="host")),
    "hosted, DPO": Context(config=HOSTED, loss=DPO(), rollouts=(pairs(0, 3),)),
    "hosted, log-probs": Context(config=HOSTED, step=through_logprobs),
    "hosted, experts": Context(config=HOSTED, family="qwen3_moe", sizes=MIXTURE),
    "hosted, gated linear attention": Context(config=HOSTED, make=gated_linear_attention),
    "full checkpoints": Context(config=replace(DEEP, checkpointing="full")),
    "selective checkpoints": Context(config=replace(DEEP, checkpointing="selective")),
    "the model's checkpoints": Context(alone=checkpointed),
    "within microbatches": Context(config=Config(sharing="tree", boundary="within")),
    "dense": Context(config=Config(sharing="none", boundary="within", max_microbatch_tokens=48)),
    "LoRA": Context(make=lora),
    "last layer alone": Context(alone=frozen_but(-1)),
    "first layer alone": Context(alone=frozen_but(0)),
    "tied": Context(sizes={"tie_word_embeddings": True}),
    "llama": Context(family="llama"),
    "softcaps and windows": Context(
        family="gemma2", sizes={"query_pre_attn_scalar": 8, "sliding_window": 7}
    ),
    "experts": Context(family="qwen3_moe", sizes=MIXTURE),
    "latent attention": Context(family="deepseek_v3", sizes={**LATENT, **EAGER}),
    "sinks and windows": Context(family="gpt_oss", sizes={**SINKS, **EAGER}),
    "gated linear attention": Context(make=gated_linear_attention),
    "Mamba-2": Context(make=mamba),
    "a chain": Context(rollouts=(group(4, 3, 150, 9),)),
    "replayed experts": Context(
        family="qwen3_moe",
        sizes=MIXTURE,
        rollouts=(routed(UNEQUAL[0]),),
        step=through_routes,
    ),
    "short rollouts": Context(rollouts=([Rollout([1, 2], [0, 1], 1.0), *group(3, 2, 1, 4)],)),
}
FOUR = {
    "data": Context(rollouts=UNEQUAL),
    "hybrid shards": Context(rollouts=UNEQUAL, wrap=over_both),
    "data, a function": Context(rollouts=(UNEQUAL[0], UNEQUAL[0]), step=through_function),
    "data, log-probs": Context(rollouts=(UNEQUAL[0], UNEQUAL[0]), step=through_logprobs),
    "data, coupled over ranks": Context(rollouts=UNEQUAL, loss=OfAllRanks()),
    "data, a rank without rollouts": Context(rollouts=([], UNEQUAL[1]), loss=GSPO()),
    "data, replayed experts": Context(
        family="qwen3_moe",
        sizes=MIXTURE,
        rollouts=tuple(routed(part) for part in UNEQUAL),
    ),
    "four, two key heads": Context(cp=4),
}


@pytest.mark.parametrize("name", slow_besides(("GRPO",), CASES))
def test_gradients_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(2, compared, CASES[name]):
        assert found["error"] < BAR, found
        assert found["loss"] < BAR and found["scores"] < BAR, found
        assert name != "a chain" or found["microbatches"] >= 3, found


def test_every_run_of_tokens_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks then have equal parts of the labels, MLPs and routers of each segment."""
    ranks, tokens = 4, 103
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    lie_on = np.full(tokens, -1)
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        places: Any = DealtPlaces(None)  # type: ignore[arg-type]
        own = places.own(tokens)
        kept = own[: len(own) - places.padding(tokens)]
        assert (lie_on[kept] == -1).all()
        lie_on[kept] = rank
        entries, at = places.own_entries(np.arange(40, 91))
        assert (own[at] == np.arange(40, 91)[entries]).all()
    for begin, end in ((0, tokens), (40, 91), (7, 9)):
        counts = np.bincount(lie_on[begin:end], minlength=ranks)
        assert np.ptp(counts) <= 1, (begin, end, counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_leave_the_gradients_of_one_process(name: str) -> None:
    for found in run_ranks(4, compared, FOUR[name]):
        assert found["error"] < BAR, found
        assert found["loss"] < BAR and found["scores"] < BAR, found


@dataclass(frozen=True)
class Balanced:
    """A step with a router loss."""

    context: Context
    scope: Any = "batch"
    given: bool = False

    def own(self, data_rank: int) -> tuple[RouterLoss, RouterLoss]:
        return routers(Routed(rollouts=self.context.rollouts, scope=self.scope), data_rank)


def balanced(case: Balanced) -> dict[str, float]:
    context, mesh = case.context, mesh_of(case.context.cp)
    model, other = context.model(), context.model()
    place = mesh.get_local_rank("dp")
    policies = (
        forkpoint.wrap(context.wrap(model, mesh), context.config, mesh=mesh),
        forkpoint.wrap(other, context.config),
    )
    _, _, found = beside_one_process(
        policies, context.rollouts, place, case.own(place), context.loss, given=case.given
    )
    gates = [name for name, _ in other.named_parameters() if "mlp.gate." in name]
    return {**found, **apart(model, other, gates)}


EXPERTS = Context(family="qwen3_moe", sizes=MIXTURE)
ROUTERS: dict[str, tuple[int, Balanced]] = {
    "batch": (2, Balanced(EXPERTS)),
    "recomputed": (2, Balanced(replace(EXPERTS, config=replace(DEEP, activations="recompute")))),
    "rollout, checkpointed": (2, Balanced(replace(EXPERTS, alone=checkpointed), scope="rollout")),
    "counts given": (2, Balanced(EXPERTS, given=True)),
    "data": (4, Balanced(replace(EXPERTS, rollouts=UNEQUAL))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTERS)
def test_router_losses_are_those_of_one_process(name: str) -> None:
    for found in run_ranks(ROUTERS[name][0], balanced, ROUTERS[name][1]):
        assert max(found.values()) < BAR, found


# Compiled blocks
# ------------------------------------------------------------


def compiled(context: Context, fails_on: int | None) -> dict[str, Any]:
    """A step compiled without generating code; on one rank the compiler may fail."""
    failures: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", without_code(fails_on))
        patch.setattr(Compiling, "give_up", noting(failures))
        config = replace(context.config, compile_blocks=True)
        found = compared(replace(context, config=config))
    return {**found, "failed": failures, "graphs": counters["stats"]["unique_graphs"]}


def noting(failures: list[str]) -> Callable[[Compiling, Exception], bool]:
    give_up = Compiling.give_up

    def noted(self: Compiling, error: Exception) -> bool:
        failures.append(str(error))
        return give_up(self, error)

    return noted


COMPILED = {
    "GRPO": CASES["GRPO"],
    "one key head, recomputed": replace(
        CASES["GSPO, one key head"], config=replace(DEEP, activations="recompute")
    ),
    "accumulated, offloaded": Context(steps=2, config=replace(DEEP, activations="offload")),
    **{
        name: CASES[name]
        for name in (
            "first layer alone",
            "softcaps and windows",
            "sinks and windows",
            "latent attention",
            "short rollouts",
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_leave_the_gradients_of_one_process(name: str) -> None:
    for found in run_ranks(2, compiled, COMPILED[name], None, limit_s=480):
        assert found["error"] < BAR and found["scores"] < BAR, found
        assert found["graphs"] and not found["failed"], found


@pytest.mark.slow
def test_blocks_run_eagerly_on_the_rank_where_the_compiler_fails() -> None:
    first, second = run_ranks(2, compiled, CASES["GRPO"], 1, limit_s=480)
    assert max(first["error"], second["error"]) < BAR
    assert not first["failed"] and "no such kernel" in second["failed"][0]


# Prices
# ------------------------------------------------------------


def counted(context: Context) -> tuple[list[float], str, str, float]:
    """Bytes that a step sends and that its plan and metrics count; explain(), the printed step, and
    cache bytes by one's."""
    sent, exchange = [0], DealtPlaces._exchange

    def exchanging(self: DealtPlaces, x: Tensor) -> Tensor:
        sent[0] += x.nbytes * (self.size - 1) // self.size
        return exchange(self, x)

    DealtPlaces._exchange = exchanging  # type: ignore[method-assign]
    mesh, model = mesh_of(2), context.model()
    policy = forkpoint.wrap(context.wrap(model, mesh), context.config, mesh=mesh)
    stats = policy.forward_backward(RolloutBatch(context.rollouts[0]), context.loss)
    counts = [sent[0], stats.plan.sent_bytes, stats.metrics()["sent_gib"] * 2**30]
    shape, whole = policy.host.shape, forkpoint.wrap(context.model()).host.shape
    part = shape.boundary_bytes_per_token / whole.boundary_bytes_per_token
    return counts, stats.plan.explain(), repr(stats), part


PRICED = {
    "two key heads": (Context(), 0.5),
    "one key head, full checkpoints": (
        Context(config=replace(DEEP, checkpointing="full"), sizes={"num_key_value_heads": 1}),
        1.0,
    ),
    "Mamba-2": (CASES["Mamba-2"], 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRICED)
def test_plans_count_what_is_sent_and_kept(name: str) -> None:
    context, kept = PRICED[name]
    context = replace(context, config=replace(context.config, self_check=False))
    for (sent, *said), explained, printed, part in run_ranks(2, counted, context):
        assert said == [sent, sent] and sent > 0
        assert "bytes that each sends around attention" in explained
        assert f"each rank sends {format_bytes(int(sent))}" in printed
        assert part == kept


# Tensor parallelism
# ------------------------------------------------------------

TP2 = Split(options={"tp_size": 2, "fsdp_size": 2})
FSDP2_EP2 = Split(family="qwen3_moe", sizes=MOE, options={"fsdp_size": 2, "ep_size": 2})


@dataclass(frozen=True)
class Composed:
    """A step of a model that transformers splits over ranks, some of which split sequences."""

    split: Split
    sizes: dict[str, int]
    """Of the mesh, by dimension."""
    scope: Any = None
    """Of a router loss."""


COMPOSED = {
    # Four query heads: each rank has two of tensor parallelism, and runs one.
    "tensor": Composed(TP2, {"cp": 2, "tp": 2}),
    "experts": Composed(FSDP2_EP2, {"cp": 2}),
    "experts, router loss": Composed(FSDP2_EP2, {"cp": 2}, scope="rollout"),
    "experts of context ranks, data": Composed(
        replace(FSDP2_EP2, options={"fsdp_size": 4, "ep_size": 2}, rollouts=UNEQUAL),
        {"dp": 2, "cp": 2},
        scope="batch",
    ),
    "experts, tensor, replayed experts": Composed(
        replace(
            FSDP2_EP2,
            options={"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
            rollouts=(routed(UNEQUAL[0]),),
        ),
        {"cp": 2, "tp": 2},
    ),
}


def composed(folder: Path, case: Composed) -> dict[str, float]:
    split = case.split
    model, other = load(folder, split, **split.options), load(folder, split)
    names = tuple(case.sizes)
    mesh = init_device_mesh(device().type, tuple(case.sizes.values()), mesh_dim_names=names)
    place = mesh.get_local_rank("dp") if "dp" in names else 0
    batch = RolloutBatch(split.rollouts[place])
    whole = RolloutBatch([r for part in split.rollouts for r in part])
    given: dict[str, Any] = {}
    given_whole: dict[str, Any] = {}
    if case.scope:
        own, all_ranks = routers(Routed(rollouts=split.rollouts, scope=case.scope), place)
        given, given_whole = {"router": own}, {"router": all_ranks}
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = forkpoint.wrap(model, split.config, mesh=mesh)
        alone = forkpoint.wrap(other, split.config)
        stats = policy.forward_backward(batch, split.loss, **given)
        wanted = alone.forward_backward(whole, split.loss, **given_whole)
    found, expected = gradients(model), gradients(other)
    return {
        "error": distance(found, expected, list(expected)),
        "loss": abs(stats.loss - wanted.loss),
        "router loss": abs((stats.router_loss or 0.0) - (wanted.router_loss or 0.0)),
    }


@needs_splits
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_split_models_and_context_ranks(name: str, tmp_path: Path) -> None:
    case = COMPOSED[name]
    for found in run_ranks(
        math.prod(case.sizes.values()), composed, case.split.save(tmp_path), case
    ):
        assert max(found.values()) < BAR, found


# Verification
# ------------------------------------------------------------


def verified(context: Context, router: RouterLoss | None = None) -> tuple[str, float, str]:
    mesh, model = mesh_of(2), context.model()
    policy = forkpoint.wrap(context.wrap(model, mesh), context.config, mesh=mesh)
    own = RolloutBatch(context.rollouts[mesh.get_local_rank("dp")])
    report = policy.verify(own, context.loss, router=router)
    routes = report.nearest.routes
    return report.verdict, report.nearest.shared_error, (routes.reason or "held") if routes else ""


VERIFIED = {
    "two ranks": (2, Context(), None),
    "data": (4, Context(rollouts=UNEQUAL), None),
    "LoRA, two passes": (2, Context(make=lora, loss=GSPO()), None),
    "router loss": (2, EXPERTS, RouterLoss(load_balancing=0.7, z=0.05)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIED)
def test_verify_compares_with_ordinary_training(name: str) -> None:
    size, *case = VERIFIED[name]
    for verdict, error, _ in run_ranks(size, verified, *case):
        assert verdict == "passed" and error < BAR


def found_broken(context: Context) -> tuple[str, str]:
    """Answers of a self-check and of verify where outputs of one rank's heads are too large."""
    to_places = DealtPlaces.to_places

    def louder(self: DealtPlaces, o_THD: Tensor, tokens: int) -> Tensor:
        return to_places(self, o_THD * (1.01 if self.rank else 1.0), tokens)

    DealtPlaces.to_places = louder  # type: ignore[method-assign]
    mesh, model = mesh_of(2), context.model()
    checked = forkpoint.wrap(context.wrap(model, mesh), context.config, mesh=mesh)
    trusting = forkpoint.wrap(model, replace(context.config, self_check=False), mesh=mesh)
    batch = RolloutBatch(context.rollouts[0])
    said = raised(lambda: checked.forward_backward(batch, context.loss))
    assert all(gradient is None for gradient in gradients(model).values())
    return said, trusting.verify(batch, context.loss).verdict


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_wrong_heads_of_one_rank_are_found(family: str) -> None:
    context = EXPERTS if family == "qwen3_moe" else Context()
    for said, verdict in run_ranks(2, found_broken, context):
        assert said.startswith("UnsupportedError: on a sample of"), said
        assert verdict == "failed"


# Broken pieces
# ------------------------------------------------------------


def whole_gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """The gradient of all ranks' losses, which are one loss."""
    dist.all_reduce(gradient)
    return gradient[ctx.saved_tensors[0]], None, None, None


ONE_KEY_HEAD = Context(sizes={"num_key_value_heads": 1})
BROKEN: dict[str, tuple[Context, object, str, Any]] = {
    "entries of one rank counted again": (
        ONE_KEY_HEAD,
        context_parallel._Joined,
        "backward",
        staticmethod(whole_gradient),
    ),
    "a batch of each rank": (
        Context(rollouts=UNEQUAL),
        topology,
        "connected",
        lambda groups, rank: (tuple(groups), tuple(range(len(groups)))),
    ),
    **{
        f"another rank's heads, {name}": (
            CASES[name],
            DealtPlaces,
            "own_heads",
            lambda self, x_H: context_parallel.repeated(x_H, 2, 0).chunk(2)[1 - self.rank],
        )
        for name in ("sinks and windows", "Mamba-2")
    },
}


def broken(name: str) -> dict[str, Any]:
    context, owner, attribute, value = BROKEN[name]
    setattr(owner, attribute, value)
    return compared(replace(context, config=replace(context.config, self_check=False)))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_piece_is_seen(name: str) -> None:
    size = 2 * len(BROKEN[name][0].rollouts)
    for found in run_ranks(size, broken, name):
        assert found["error"] > 1e-3, found


# Refusals
# ------------------------------------------------------------


def raised(work: Callable[[], object]) -> str:
    try:
        work()
    except ForkpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused() -> dict[str, str]:
    mesh, model = mesh_of(2), tiny_model("qwen3", dtype=torch.float64)
    odd = tiny_model("qwen3", num_attention_heads=3, num_key_value_heads=3)

    def wrapped(model: nn.Module, config: Config = DEEP) -> str:
        return raised(lambda: forkpoint.wrap(model, config, mesh=mesh))

    found = {
        "no wrapper": wrapped(model),
        "another mesh": wrapped(sharded(model, mesh=mesh["dp"])),
        "odd heads": wrapped(over_all(odd, mesh)),
    }
    whole = over_all(tiny_model("qwen3", dtype=torch.float64), mesh)
    own = tiny_model("qwen3", dtype=torch.float64)
    checkpointed(own)
    found["compiled"] = wrapped(over_all(own, mesh), replace(DEEP, compile_blocks=True))
    states = gated_linear_attention()
    found["states"] = wrapped(over_all(states, mesh), replace(DEEP, compile_blocks=True))
    planned = replace(DEEP, compile_blocks=True, checkpointing="full", self_check=False)
    other = over_all(tiny_model("qwen3", dtype=torch.float64), mesh)
    policy = forkpoint.wrap(other, planned, mesh=mesh)
    batch = RolloutBatch(UNEQUAL[0])
    found["checkpoints"] = raised(lambda: policy.forward_backward(batch, GRPO(clip=0.2)))
    found["gather"] = wrapped(whole, replace(DEEP, gather="step"))
    found["exchange"] = wrapped(whole, Config(split="exchange"))
    policy = forkpoint.wrap(whole, DEEP, mesh=mesh)
    rank = dist.get_rank()
    found["batches"] = raised(
        lambda: policy.forward_backward(RolloutBatch(UNEQUAL[rank]), GRPO(clip=0.2))
    )
    return found


def refused_meshes() -> dict[str, str]:
    """Weights held over two of four ranks, which have two batches in two parts each."""
    mesh = mesh_of(2)

    def wrapped(hold: Callable[[nn.Module], nn.Module], given: DeviceMesh | None) -> str:
        model = tiny_model("qwen3", dtype=torch.float64)
        return raised(lambda: forkpoint.wrap(hold(model), DEEP, mesh=given))

    def sharded_over(name: str) -> Callable[[nn.Module], nn.Module]:
        return lambda model: sharded(model, mesh=mesh[name])

    def from_group(model: nn.Module) -> nn.Module:
        group = mesh["cp"].get_group()
        return sharded(model, mesh=DeviceMesh.from_group(group, device().type))

    return {
        "cp is missing": wrapped(sharded_over("dp"), mesh),
        "dp is missing": wrapped(sharded_over("cp"), mesh),
        "dp is missing, of a group": wrapped(from_group, mesh),
        "no mesh is given": wrapped(sharded_over("dp"), None),
    }


@pytest.mark.slow
def test_weights_held_over_a_part_of_the_mesh_are_refused() -> None:
    for found in run_ranks(4, refused_meshes):
        assert found["cp is missing"].startswith("UnsupportedError: the mesh's dimension 'cp'")
        assert found["dp is missing, of a group"].startswith("ConfigError: the mesh's dimension")
        for name, missing in (("dp is missing", "dp"), ("no mesh is given", "cp")):
            assert found[name].startswith(f"UnsupportedError: dimension {missing!r} of the model's")


@pytest.mark.slow
def test_what_is_not_exact_is_refused_by_name() -> None:
    for found in run_ranks(2, refused):
        for name in ("no wrapper", "another mesh"):
            assert found[name].startswith("UnsupportedError: the mesh's dimension 'cp'"), found
        assert found["odd heads"].startswith("UnsupportedError: the model has 3 query heads")
        for name in ("compiled", "states"):
            assert found[name].startswith("UnsupportedError: Config(compile_blocks=True)")
        assert found["checkpoints"].startswith("UnsupportedError: blocks are compiled and")
        assert found["gather"].startswith("ConfigError: gather is 'step', and several ranks")
        assert found["exchange"].startswith("ConfigError: split is 'exchange'")
        assert found["batches"].startswith("RankError: ranks 0 and 1")
