"""Stages of a pipeline leave the gradients of one process."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from processes import RankFailed, run_ranks
from scenarios_of_ranks import BAR, DEEP, HOSTED, group, own_loss, through_logprobs, tree
from test_ranks import checkpointed, frozen_but, pairs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch
from forkpoint.engine.changes import Changes
from forkpoint.errors import ForkpointError
from forkpoint.hosts.torch_dist.stages import StageLinks, StageRanks
from forkpoint.hosts.transformers.stock import lift_upcasts
from forkpoint.losses import DPO, GRPO, GSPO, ValueLoss
from forkpoint.parallel import watch
from forkpoint.testing import tiny_model
from lanes import slow_besides

ROLLOUTS = [*tree(3, 4), *group(0, 8, 20, 8), *group(1, 5, 14, 9)]


@dataclass(frozen=True)
class Case:
    stages: int = 2
    sizes: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 4})
    config: Config = DEEP
    rollouts: list[Rollout] = field(default_factory=lambda: ROLLOUTS)
    loss: Any = field(default_factory=lambda: GRPO(clip=0.2))
    critic: bool = False
    make: Callable[[], Any] | None = None
    """The model, where it is another than the tiny one of these sizes."""
    steps: int = 1
    step: Callable[[forkpoint.Policy, RolloutBatch, Any], float] | None = None
    alone: Callable[[Any], object] = lambda model: None


def mesh_of(stages: int) -> DeviceMesh:
    return init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))


def run(policy: forkpoint.Policy, batch: RolloutBatch, case: Case) -> float:
    if case.step is not None:
        return case.step(policy, batch, case.loss)
    return policy.forward_backward(batch, case.loss).loss


def compared(case: Case) -> dict[str, float]:
    """Run the steps on this stage and in one process; differences of its own parameters."""
    make = case.make or partial(
        tiny_model, "qwen3", dtype=torch.float64, critic=case.critic, **case.sizes
    )
    models = [make() for _ in range(2)]
    for model in models:
        case.alone(model)
    staged, other = models
    batch = RolloutBatch(case.rollouts)
    with Changes() as changes:
        for model in models:
            lift_upcasts(model, changes)
        policy, alone = (
            forkpoint.wrap(staged, case.config, mesh=mesh_of(case.stages)),
            forkpoint.wrap(other, case.config),
        )
        losses, wanted = (
            [run(each, batch, case) for _ in range(case.steps)] for each in (policy, alone)
        )
        scores = policy.score(batch, entropy=not case.critic).per_token
        expected = alone.score(batch, entropy=not case.critic).per_token
    whole = dict(other.named_parameters())
    worst, own = 0.0, 0
    for name, parameter in staged.named_parameters():
        own += 1
        found, true = parameter.grad, whole[name].grad
        assert (found is None) == (true is None), name
        if found is not None and true is not None:
            worst = max(worst, float((found - true).norm() / max(float(true.norm()), 1e-30)))
    return {
        "gradients": worst,
        "loss": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "scores": max(float((x - expected[n]).abs().max()) for n, x in scores.items()),
        "own": own / len(whole),
    }


def adapted(model: Any) -> None:
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def valued(seed: int, count: int) -> list[Rollout]:
    return [
        replace(r, returns=np.ones(len(r.token_ids)) * 0.3, old_values=np.zeros(len(r.token_ids)))
        for r in group(seed, count, 20, 8)
    ]


CASES: dict[str, Case] = {
    "two": Case(),
    "four": Case(stages=4),
    "two passes": Case(loss=GSPO()),
    "tied": Case(sizes={"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "tied, four": Case(stages=4, sizes={"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "recomputed": Case(config=replace(DEEP, activations="recompute")),
    "offloaded": Case(config=replace(DEEP, activations="offload")),
    "hosted": Case(config=HOSTED),
    "full checkpoints": Case(config=replace(DEEP, checkpointing="full")),
    "selective checkpoints": Case(config=replace(DEEP, checkpointing="selective")),
    "own checkpoints": Case(alone=checkpointed),
    "accumulated": Case(steps=3),
    "first frozen": Case(alone=frozen_but(3)),
    "last frozen": Case(alone=frozen_but(0)),
    "middle alone": Case(stages=4, alone=frozen_but(1)),
    "logprobs": Case(step=through_logprobs),
    "a function": Case(loss=own_loss),
    "pairs": Case(loss=DPO(), rollouts=pairs(0, 4)),
    "adapters": Case(alone=adapted),
    "no sharing": Case(config=Config(sharing="none")),
    "within": Case(config=Config(sharing="tree", boundary="within")),
    "mixed": Case(config=replace(DEEP, boundary="mixed")),
    "float32 sums": Case(config=replace(DEEP, grad_accumulation_dtype="float32")),
    "values": Case(loss=ValueLoss(), rollouts=valued(0, 9), critic=True),
}


KEPT = ("two passes",)


@pytest.mark.parametrize("name", slow_besides(KEPT, CASES))
def test_stages(name: str) -> None:
    case = CASES[name]
    for found in run_ranks(case.stages, compared, case):
        assert max(found["gradients"], found["loss"], found["scores"]) < BAR, found
        assert found["own"] < 0.7  # of the parameters


def events() -> tuple[str, ...]:
    model = tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=4)
    policy = forkpoint.wrap(model, DEEP, mesh=mesh_of(2))
    return policy.forward_backward(RolloutBatch(ROLLOUTS), GRPO()).events


def test_each_stage_has_an_order_of_its_own() -> None:
    first, second = run_ranks(2, events)
    assert sorted(first) == sorted(second) and first != second
    assert first[:3] == ("forward prefix 0", "forward prefix 1", "forward prefix 2")
    assert [e for e in first if "forward" in e] == [e for e in second if "forward" in e]


# Faults, each of which leaves other gradients or is refused
# ------------------------------------------------------------


@pytest.mark.slow
def test_gradients_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    send = StageLinks._send

    def nothing(self: StageLinks, tensor: torch.Tensor, *to: Any) -> None:
        send(self, tensor * (to[0] > self.stage.index), *to)

    monkeypatch.setattr(StageLinks, "_send", nothing)
    first, second = run_ranks(2, compared, CASES["two"])
    assert first["gradients"] > 0.1 and second["gradients"] < BAR


@pytest.mark.slow
def test_tied_weights_that_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRanks, "deferred_params", lambda self, parameters: [])
    assert run_ranks(2, compared, CASES["tied"])[0]["gradients"] > 0.1


@pytest.mark.slow
def test_gradients_that_are_taken_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have no tags, so each is taken for the one that is expected."""
    roots = StageLinks.roots

    def swapped(self: StageLinks, instruction: Any) -> Any:
        if len(self._expected) > 1 and not self._pending:
            self._expected[-2:] = reversed(self._expected[-2:])
        return roots(self, instruction)

    monkeypatch.setattr(StageLinks, "roots", swapped)
    with pytest.raises((AssertionError, RankFailed)):
        test_stages("two")


def refused(work: Callable[[Any], None]) -> str:
    model = tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=4)
    policy = forkpoint.wrap(model, DEEP, mesh=mesh_of(2))
    try:
        work(policy)
    except ForkpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(policy: forkpoint.Policy) -> None:
    policy.forward_backward(RolloutBatch(ROLLOUTS), GRPO())


def freezes(policy: forkpoint.Policy) -> None:
    policy.host.model.requires_grad_(False)
    steps(policy)


def calls(policy: forkpoint.Policy) -> None:
    policy.host.model(torch.arange(9)[None])


@pytest.mark.slow
def test_the_sample_is_compared_through_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = StageLinks.receive

    def scaled(self: StageLinks, *args: Any) -> Any:
        hidden = receive(self, *args)
        return None if hidden is None else hidden * 1.01

    monkeypatch.setattr(StageLinks, "receive", scaled)
    for found in run_ranks(2, refused, steps):
        assert "forkpoint's logprobs differ from the model's" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "said"),
    [
        (freezes, "no parameter of the model requires a gradient, on any stage"),
        (calls, "the model was called by itself, and this rank holds a stage of it"),
    ],
)
def test_what_is_refused(work: Any, said: str) -> None:
    for found in run_ranks(2, refused, work):
        assert found.startswith("UnsupportedError") and said in found


def wrapped_again() -> list[str]:
    """A model that holds a stage is wrapped with the same mesh again, and with others."""
    model = tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=4)
    mesh, said = mesh_of(2), list[str]()
    for options in ({"mesh": mesh}, {"mesh": mesh}, {}):
        try:
            steps(forkpoint.wrap(model, DEEP, **options))
            said.append("")
        except ForkpointError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_models_that_hold_a_stage() -> None:
    for first, second, alone in run_ranks(2, wrapped_again):
        assert first == second == ""
        assert "holds a stage of a pipeline" in alone and "mesh" in alone


def fails(rank: int) -> str:
    model: Any = tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=4)
    policy = forkpoint.wrap(model, replace(DEEP, self_check=False), mesh=mesh_of(2))
    steps(policy)

    def hook(*_: Any) -> None:
        if dist.get_rank() == rank:
            raise MemoryError("of the test")

    model.model.layers[3 * rank].register_forward_pre_hook(forkpoint.testing.ReadOnlyHook(hook))
    try:
        steps(policy)
    except (MemoryError, ForkpointError) as error:
        time.sleep(4)  # the other rank ends meanwhile
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_ends_the_others(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("GRACE_S", 1.0), ("DEAD_S", 4.0), ("BEAT_S", 0.5), ("POLL_S", 0.1)):
        monkeypatch.setattr(watch, name, seconds)
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fails, rank)
    assert "killed after" not in str(failed.value)
    assert f"rank {1 - rank}: ended with exit status {watch.EXIT_CODE}" in str(failed.value)
    assert f"rank {rank}: MemoryError: of the test" in capfd.readouterr().err
