"""Pipelines of several data ranks leave the gradients of one process with all rollouts."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankFailed, run_ranks
from scenarios_of_ranks import BAR, DEEP, EMPTY, HOSTED, UNEQUAL, group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.torch_dist.replicated import Replicated
from forkpoint.hosts.transformers.stages import PassedLayer
from forkpoint.losses import GRPO, GSPO, Loss
from forkpoint.plan import stage_sizes
from forkpoint.plan.pipeline import order_stages
from forkpoint.plan.pricing import meters
from forkpoint.testing import lifted_upcasts, tiny_model


@dataclass(frozen=True)
class Case:
    wrap: str = "sharded"
    stages: int = 2
    rollouts: tuple[list[Rollout], ...] = UNEQUAL
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    config: Config = DEEP
    sizes: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 4})
    steps: int = 1
    frozen: tuple[int, ...] = ()


def model_of(case: Case) -> Any:
    model: Any = tiny_model("qwen3", dtype=torch.float64, **case.sizes)
    for layer in case.frozen:
        model.model.layers[layer].requires_grad_(False)
    return model


def held(model: Any, case: Case, mesh: Any) -> Any:
    """The model cut into stages, each of which data ranks hold."""
    forkpoint.cut(model, mesh)
    if case.wrap == "replicated":
        return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    for block in model.model.layers:
        if not isinstance(block, PassedLayer):
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def compared(case: Case) -> dict[str, Any]:
    """The steps on these ranks and in one process; differences of this rank's parameters."""
    mesh = init_device_mesh("cpu", (len(case.rollouts), case.stages), mesh_dim_names=("dp", "pp"))
    own = RolloutBatch(case.rollouts[mesh.get_local_rank("dp")])
    whole = RolloutBatch([r for part in case.rollouts for r in part])
    model, other = model_of(case), model_of(case)
    with lifted_upcasts(model), lifted_upcasts(other):
        policy = forkpoint.wrap(held(model, case, mesh), case.config, mesh=mesh)
        alone = forkpoint.wrap(other, case.config)
        for _ in range(case.steps):
            stats = policy.forward_backward(own, case.loss)
            if isinstance(case.loss, Loss):
                loss = alone.forward_backward(whole, case.loss).loss
                continue
            # A function is each data rank's own, and gradients are means over them.
            losses = [
                alone.forward_backward(RolloutBatch(part), case.loss).loss for part in case.rollouts
            ]
            loss = losses[mesh.get_local_rank("dp")]
            for parameter in other.parameters():
                parameter.grad /= len(losses)
        scores = policy.score(own).per_token["logprobs"]
        expected = alone.score(own).per_token["logprobs"] if len(own) else scores
    lanes = stats.lanes
    assert lanes is not None and len(lanes.measured) == case.stages
    # Predictions know no encoders of images.
    ran = [[e for e in x.events if not e.startswith("encode")] for x in lanes.measured]
    assert ran == [list(x.events) for x in lanes.predicted]
    assert all(0 < lane.busy <= lane.ends[-1] for lane in lanes.measured)
    true = dict(other.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        found, grad = parameter.grad, true[name].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert (found is None) == (grad is None), name
        if found is not None and grad is not None:
            worst = max(worst, float((found - grad).norm() / max(float(grad.norm()), 1e-30)))
    return {
        "gradients": worst,
        "loss": abs(stats.loss - loss),
        "scores": float((scores - expected).norm()),
        "tokens": stats.plan.max_microbatch_tokens,
    }


def own_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return -batch.trained(outputs.logprobs * batch.advantages).mean()


CASES: dict[str, Case] = {
    "sharded": Case(),
    "replicated": Case("replicated"),
    "two passes": Case(loss=GSPO()),
    "a rank without rollouts": Case(rollouts=EMPTY),
    "replicated, a rank without rollouts": Case("replicated", rollouts=EMPTY, loss=GSPO()),
    "tied": Case(sizes={"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "replicated, tied": Case(
        "replicated", sizes={"num_hidden_layers": 4, "tie_word_embeddings": True}
    ),
    "three stages": Case(stages=3),
    "recomputed": Case(config=replace(DEEP, activations="recompute")),
    "hosted": Case(config=HOSTED),
    "checkpointed": Case(config=replace(DEEP, checkpointing="full")),
    "accumulated": Case(steps=2),
    "a function": Case(loss=own_loss),
    "replicated, a function": Case("replicated", loss=own_loss),
    "first frozen": Case(frozen=(0, 1)),
}


def check(case: Case) -> list[dict[str, Any]]:
    found = run_ranks(len(case.rollouts) * case.stages, compared, case)
    for each in found:
        assert max(each["gradients"], each["loss"], each["scores"]) < BAR, each
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_data_ranks_of_stages(name: str) -> None:
    check(CASES[name])


def largest(monkeypatch: pytest.MonkeyPatch, case: Case) -> list[int]:
    """By rank, the most tokens of a microbatch, where a tiny model costs as much as its tokens."""
    for name in ("HOST_BLOCK_MS", "EFFICIENT_TOKENS", "ROW_TOKENS"):
        monkeypatch.setattr(meters, name, 0)
    return [each["tokens"] for each in check(case)]


SIZED = Config(sharing="tree")
SHORTER: dict[str, Case] = {
    "two stages": Case(config=SIZED, rollouts=UNEQUAL[:1]),
    "four stages": Case(config=SIZED, rollouts=UNEQUAL[:1], stages=4),
    "two stages, two passes": Case(config=SIZED, rollouts=UNEQUAL[:1], loss=GSPO()),
    "unequal data ranks": Case(config=SIZED),
    "replicated data ranks": Case("replicated", config=SIZED),
    "a rank without rollouts": Case(config=SIZED, rollouts=EMPTY),
    "within a budget": Case(config=replace(SIZED, memory_budget="250KB")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTER)
def test_shorter_microbatches_fill_stages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on microbatches that are shorter than those of one device."""
    case = SHORTER[name]
    found = largest(monkeypatch, case)
    for first in range(0, len(found), case.stages):
        assert len({*found[first : first + case.stages]}) == 1, "of one data rank"
    assert min(found) < 128, found


# Faults, each of which leaves other gradients or is refused
# ------------------------------------------------------------


@pytest.mark.slow
def test_orders_that_differ_between_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One data rank runs each backward as soon as it can, and the other the order of one device:
    fully_shard gathers weights of other blocks than it takes them for."""

    def own(work: Any, budget: Any) -> Any:
        return order_stages(work, [0.0] * work.stages if dist.get_rank() // 2 else None)

    monkeypatch.setattr(stage_sizes, "schedule_stages", own)
    flat = [group(seed, 9, 30, 20) for seed in (2, 3)]
    case = Case(rollouts=tuple(flat), config=replace(DEEP, max_microbatch_tokens=32))
    with pytest.raises((AssertionError, RankFailed)):
        check(case)


@pytest.mark.slow
def test_gradients_that_data_ranks_do_not_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicated, "reduce", lambda self, gradients, *_, **__: list(gradients))
    found = run_ranks(4, compared, CASES["replicated"])
    assert min(each["gradients"] for each in found) > 0.1


def refused(wrap: str) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = model_of(Case())
    if wrap == "sharded":
        fully_shard(model, mesh=data)
    else:
        model = DistributedDataParallel(model)
    said = list[str]()
    for call in (forkpoint.wrap, forkpoint.cut):
        with pytest.raises(UnsupportedError) as error:
            call(model, mesh=mesh)
        said.append(str(error.value))
    with pytest.raises(ConfigError, match="no dimension 'pp'"):
        forkpoint.cut(model, data)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["sharded", "replicated"])
def test_models_that_are_held_before_they_are_cut(wrap: str) -> None:
    for first, second in run_ranks(2, refused, wrap):
        assert "forkpoint.cut(model, mesh) first" in first
        assert "Cut the whole model first" in second
