"""Steps whose microbatches lie on several ranks leave the gradients of one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases_of_ranks import (
    LATENT,
    MIXTURE,
    SINKS,
    Case,
    check,
    compared,
    named,
    on_rank,
    on_ranks_of,
    over_all,
    over_both,
    over_replicas,
    through_function,
)
from processes import device, run_ranks
from scenarios_of_ranks import (
    BAR,
    DEEP,
    EMPTY,
    HOSTED,
    UNEQUAL,
    OfAllRanks,
    gradients,
    group,
    routed,
    said,
    sharded,
    through_logprobs,
    without_code,
)
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
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.hosts.compiled import Compiling
from forkpoint.hosts.torch_dist.context_parallel import DealtPlaces, _copied
from forkpoint.losses import DPO, GRPO, GSPO, ValueLoss
from forkpoint.testing import tiny_model
from forkpoint.units import format_bytes


def of(**changes: Any) -> Case:
    """Two ranks that have one batch in parts."""
    return Case(cp=2, **changes)


def through_routes(policy: forkpoint.Policy, batch: RolloutBatch, loss: Any) -> float:
    """The loss, and the number of choices that were forced and would have been others."""
    stats = policy.forward_backward(batch, loss)
    assert stats.routes is not None
    decisions, elsewhere = stats.routes.decisions_L, stats.routes.elsewhere_L
    assert 0 < int(elsewhere.sum()) < int(decisions.sum())
    return stats.loss + float(decisions.sum() + 1000 * elsewhere.sum())


TEMPERATURES = [*group(1, 3, 9, 7), *group(1, 2, 9, 5, temperature=0.7)]
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "sizes": MIXTURE}
CASES: dict[str, Case] = {
    "GRPO": of(),
    "GSPO, one key head": of(sizes={"num_key_value_heads": 1}, loss=GSPO()),
    "key heads that ranks do not divide": of(
        sizes={"num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "a critic": of(make=critic, loss=ValueLoss(), rollouts=(valued(UNEQUAL[0]),)),
    "log-probs": of(step=through_logprobs),
    "a function": of(step=through_function),
    "temperatures": of(rollouts=(TEMPERATURES,)),
    "accumulated": of(steps=2),
    "replicas": of(hold=over_replicas),
    "replicas, log-probs": of(hold=over_replicas, step=through_logprobs),
    "recomputed": of(config=replace(DEEP, activations="recompute")),
    "hosted, DPO": of(config=HOSTED, loss=DPO(), rollouts=(pairs(0, 3),)),
    "hosted, experts": of(config=HOSTED, **EXPERTS),
    "hosted, gated linear attention": of(config=HOSTED, make=gated_linear_attention),
    "selective checkpoints": of(config=replace(DEEP, checkpointing="selective")),
    "the model's checkpoints": of(alone=checkpointed),
    "within microbatches": of(config=Config(sharing="tree", boundary="within")),
    "dense": of(config=Config(sharing="none", boundary="within", max_microbatch_tokens=48)),
    "LoRA": of(make=lora),
    "last layer alone": of(alone=frozen_but(-1)),
    "first layer alone": of(alone=frozen_but(0)),
    "tied": of(sizes={"tie_word_embeddings": True}),
    "softcaps and windows": of(
        family="gemma2", sizes={"query_pre_attn_scalar": 8, "sliding_window": 7}
    ),
    "latent attention": of(family="deepseek_v3", sizes=LATENT),
    "sinks and windows": of(family="gpt_oss", sizes=SINKS),
    "Mamba-2": of(make=mamba),
    "a chain": of(rollouts=(group(4, 3, 150, 9),)),
    "replayed experts": of(**EXPERTS, rollouts=(routed(UNEQUAL[0]),), step=through_routes),
    "short rollouts": of(rollouts=([Rollout([1, 2], [0, 1], 1.0), *group(3, 2, 1, 4)],)),
    # Four ranks.
    "data": of(rollouts=UNEQUAL),
    "data, hybrid shards": of(rollouts=UNEQUAL, hold=over_both),
    "data, a function": of(rollouts=UNEQUAL, step=through_function),
    "data, coupled over ranks": of(rollouts=UNEQUAL, loss=OfAllRanks()),
    "data, a rank without rollouts": of(rollouts=EMPTY, loss=GSPO()),
    "data, replayed experts": of(**EXPERTS, rollouts=tuple(map(routed, UNEQUAL))),
    "four, two key heads": Case(cp=4),
    # Four query heads: each rank has two of tensor parallelism, and runs one.
    "tensor": Case(options={"tp_size": 2, "fsdp_size": 2}, mesh={"cp": 2, "tp": 2}),
    "experts of several ranks": Case(
        options={"fsdp_size": 2, "ep_size": 2}, mesh={"cp": 2}, **EXPERTS
    ),
    "experts, tensor, replayed experts": Case(
        options={"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        mesh={"cp": 2, "tp": 2},
        **EXPERTS,
        rollouts=(routed(UNEQUAL[0]),),
    ),
}


@named(CASES, "GRPO")
def test_gradients_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    for found in check(CASES[name], tmp_path):
        assert name != "a chain" or found["microbatches"] >= 3, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_strided_copies_are_exact(dtype: torch.dtype) -> None:
    whole = torch.randn(7, 6, 24).to(dtype)
    for x in (whole, whole[..., :16], whole[..., 1:17], whole[1:, :, 3:8], whole[..., ::3]):
        assert torch.equal(_copied(x.transpose(0, 1)), x.transpose(0, 1))


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


# Compiled blocks
# ------------------------------------------------------------


def compiled(folder: Path, case: Case, fails_on: int | None, after: int = 0) -> dict[str, Any]:
    """A step compiled without generating code; on one rank the compiler may fail after some
    graphs."""
    failures: list[str] = []
    give_up = Compiling.give_up

    def noted(self: Compiling, error: Exception) -> bool:
        if gave_up := give_up(self, error):
            failures.append(str(error))
        return gave_up

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", without_code(fails_on, after))
        patch.setattr(Compiling, "give_up", noted)
        config = replace(case.config, compile_blocks=True)
        found = compared(folder, replace(case, config=config))
    return {**found, "failed": failures, "graphs": counters["stats"]["unique_graphs"]}


COMPILED = {
    "one key head, recomputed": replace(
        CASES["GSPO, one key head"], config=replace(DEEP, activations="recompute")
    ),
    "accumulated, offloaded": of(steps=2, config=replace(DEEP, activations="offload")),
    "MLPs recomputed": of(config=replace(DEEP, checkpointing="selective")),
    "blocks recomputed": of(config=replace(DEEP, checkpointing="full")),
    **{
        name: CASES[name]
        for name in ("the model's checkpoints", "sinks and windows", "short rollouts", "Mamba-2")
    },
    "gated linear attention": of(make=gated_linear_attention),
}


def check_compiled(case: Case, folder: Path) -> None:
    for found in on_ranks_of(case, folder, compiled, None):
        assert found["error"] < BAR and found["scores"] < BAR, found
        # Lengths of microbatches compile nothing more.
        assert 0 < found["graphs"] < 20 and not found["failed"], found


def check_eager_where_the_compiler_fails(case: Case, folder: Path, after: int = 0) -> None:
    first, second = on_ranks_of(case, folder, compiled, 1, after)
    assert max(first["error"], second["error"]) < BAR
    assert not first["failed"] and "no such kernel" in second["failed"][0]


@named(COMPILED)
def test_compiled_blocks_leave_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    check_compiled(COMPILED[name], tmp_path)


@pytest.mark.slow
def test_blocks_run_eagerly_on_the_rank_where_the_compiler_fails(tmp_path: Path) -> None:
    check_eager_where_the_compiler_fails(of(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2])
def test_blocks_that_run_eagerly_after_a_part_exchange_nothing_twice(
    after: int, tmp_path: Path
) -> None:
    """The compiler fails after the exchange of a recurrence's inputs, or of its outputs."""
    config = replace(CASES["within microbatches"].config, self_check=False)
    case = of(make=gated_linear_attention, config=config)
    check_eager_where_the_compiler_fails(case, tmp_path, after)


# Prices
# ------------------------------------------------------------


def counted(folder: Path, case: Case) -> tuple[list[float], str, str, float]:
    """Bytes that a step sends and that its plan and metrics count; explain(), the printed step, and
    cache bytes by one's."""
    sent, exchange = [0], DealtPlaces._exchange

    def exchanging(self: DealtPlaces, x: Tensor) -> Tensor:
        sent[0] += x.nbytes * (self.size - 1) // self.size
        return exchange(self, x)

    DealtPlaces._exchange = exchanging  # type: ignore[method-assign]
    policy, _ = on_rank(folder, case)
    stats = policy.forward_backward(RolloutBatch(case.rollouts[0]), case.loss)
    counts = [sent[0], stats.plan.sent_bytes, stats.metrics()["sent_gib"] * 2**30]
    shape, whole = policy.host.shape, forkpoint.wrap(case.made()).host.shape
    part = shape.boundary_bytes_per_token / whole.boundary_bytes_per_token
    return counts, stats.plan.explain(), repr(stats), part


UNCHECKED = replace(DEEP, self_check=False)
PRICED = {
    "two key heads": (of(config=UNCHECKED), 0.5),
    "one key head, full checkpoints": (
        of(config=replace(UNCHECKED, checkpointing="full"), sizes={"num_key_value_heads": 1}),
        1.0,
    ),
    "Mamba-2": (of(make=mamba, config=UNCHECKED), 0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRICED)
def test_plans_count_what_is_sent_and_kept(name: str, tmp_path: Path) -> None:
    case, kept = PRICED[name]
    for (sent, *told), explained, printed, part in on_ranks_of(case, tmp_path, counted):
        assert told == [sent, sent] and sent > 0
        assert "bytes that each sends for attention" in explained
        assert f"each rank sends {format_bytes(int(sent))}" in printed
        assert part == kept


# Verification
# ------------------------------------------------------------


def found_broken(folder: Path, case: Case) -> tuple[str, str]:
    """Answers of a self-check and of verify where outputs of one rank's heads are too large."""
    to_places = DealtPlaces.to_places

    def louder(self: DealtPlaces, o_THD: Tensor, tokens: int) -> Tensor:
        return to_places(self, o_THD * (1.01 if self.rank else 1.0), tokens)

    DealtPlaces.to_places = louder  # type: ignore[method-assign]
    checked, trusting = (on_rank(folder, case, config).policy for config in (DEEP, UNCHECKED))
    batch = RolloutBatch(case.rollouts[0])
    found = said(lambda: checked.forward_backward(batch, case.loss))
    assert all(gradient is None for gradient in gradients(checked.host.model).values())
    return found, trusting.verify(batch, case.loss).verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", [of(), of(**EXPERTS)], ids=["dense", "experts"])
def test_wrong_heads_of_one_rank_are_found(case: Case, tmp_path: Path) -> None:
    for found, verdict in on_ranks_of(case, tmp_path, found_broken):
        assert found.startswith("UnsupportedError: on a sample of"), found
        assert verdict == "failed"


# Refusals
# ------------------------------------------------------------


def mesh_of(cp: int) -> DeviceMesh:
    sizes = (dist.get_world_size() // cp, cp)
    return init_device_mesh(device().type, sizes, mesh_dim_names=("dp", "cp"))


def refused() -> dict[str, str]:
    mesh, model = mesh_of(2), tiny_model("qwen3", dtype=torch.float64)
    odd = tiny_model("qwen3", num_attention_heads=3, num_key_value_heads=3)

    def wrapped(model: nn.Module, config: Config = DEEP) -> str:
        return said(lambda: forkpoint.wrap(model, config, mesh=mesh))

    found = {
        "no wrapper": wrapped(model),
        "another mesh": wrapped(sharded(model, mesh=mesh["dp"])),
        "odd heads": wrapped(over_all(odd, mesh)),
    }
    whole = over_all(tiny_model("qwen3", dtype=torch.float64), mesh)
    found["gather"] = wrapped(whole, replace(DEEP, gather="step"))
    found["exchange"] = wrapped(whole, Config(split="exchange"))
    policy = forkpoint.wrap(whole, DEEP, mesh=mesh)
    rank = dist.get_rank()
    found["batches"] = said(
        lambda: policy.forward_backward(RolloutBatch(UNEQUAL[rank]), GRPO(clip=0.2))
    )
    return found


def refused_meshes() -> dict[str, str]:
    """Weights held over two of four ranks, which have two batches in two parts each."""
    mesh = mesh_of(2)

    def wrapped(hold: Callable[[nn.Module], nn.Module], given: DeviceMesh | None) -> str:
        model = tiny_model("qwen3", dtype=torch.float64)
        return said(lambda: forkpoint.wrap(hold(model), DEEP, mesh=given))

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
        assert found["gather"].startswith("ConfigError: gather is 'step', and several ranks")
        assert found["exchange"].startswith("ConfigError: split is 'exchange'")
        assert found["batches"].startswith("RankError: ranks 0 and 1")
