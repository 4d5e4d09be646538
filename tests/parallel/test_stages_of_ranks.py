"""Stages of a pipeline, alone and of data, context, tensor and expert ranks, leave the gradients of
one process."""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_of_ranks import (
    MIXTURE,
    Case,
    check,
    named,
    on_rank,
    on_ranks_of,
    over_replicas,
    over_trained_replicas,
)
from peft import LoraConfig, get_peft_model
from processes import RankFailed, run_ranks
from scenarios_of_ranks import (
    DEEP,
    EMPTY,
    HOSTED,
    UNEQUAL,
    group,
    own_loss,
    replicated,
    said,
    sharded,
    through_logprobs,
    tree,
)
from test_context_parallel import check_compiled, check_eager_where_the_compiler_fails
from test_ranks import checkpointed, critic, frozen_but, valued
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

import forkpoint
from forkpoint import Config, RolloutBatch
from forkpoint.errors import ConfigError, ForkpointError, UnsupportedError
from forkpoint.hosts.torch_dist.stages import StageLinks
from forkpoint.losses import GRPO, GSPO, ValueLoss
from forkpoint.parallel import watch
from forkpoint.plan.pricing import meters
from forkpoint.testing import ReadOnlyHook, tiny_model
from versions import needs_splits

ROLLOUTS = [*tree(3, 4), *group(0, 8, 20, 8), *group(1, 5, 14, 9)]


def of(*, layers: int = 4, sizes: Any = None, **changes: Any) -> Case:
    """Two stages, of a model of four layers, unless others are said."""
    given: dict[str, Any] = {"pp": 2, "rollouts": (ROLLOUTS,), **changes}
    return Case(sizes={"num_hidden_layers": layers, **(sizes or {})}, **given)


def of_data(**changes: Any) -> Case:
    return of(**{"rollouts": UNEQUAL, **changes})


def of_split(**changes: Any) -> Case:
    return of(**{"rollouts": UNEQUAL[:1], **changes})


def adapted(model: Any) -> None:
    torch.manual_seed(5)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def adapted_embeddings(model: Any) -> Any:
    """LoRA on the embeddings, whose module is then one of peft."""
    torch.manual_seed(5)
    targets = ["q_proj", "embed_tokens"]
    adapters = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, where the embeddings are tied
        return get_peft_model(model, adapters).double()


def saved_embeddings(model: Any) -> Any:
    """A trained copy of the embeddings, beside the frozen ones."""
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    ).double()


def adapted_critic(model: Any) -> Any:
    """LoRA, with a trained copy of the head, as peft makes it for token classifiers."""
    adapters = LoraConfig(r=4, target_modules=["q_proj"], task_type="TOKEN_CLS")
    return get_peft_model(model, adapters).double()


TIED = {"tie_word_embeddings": True}
RECOMPUTED = replace(DEEP, activations="recompute")
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "sizes": MIXTURE}
CASES: dict[str, Case] = {
    "two passes": of(loss=GSPO()),
    "four": of(pp=4),
    "tied, four": of(pp=4, sizes=TIED),
    "recomputed": of(config=RECOMPUTED),
    # The longer stage comes first, and repeats forwards after the next stage has.
    "recomputed, unequal": of(
        layers=3, config=RECOMPUTED, rollouts=([*group(2, 2, 90, 4), *group(9, 1, 14, 4)],)
    ),
    "hosted": of(config=HOSTED),
    "own checkpoints": of(alone=checkpointed),
    "accumulated": of(steps=3),
    "first frozen": of(alone=frozen_but(3)),
    "last frozen": of(alone=frozen_but(0)),
    "middle alone": of(pp=4, alone=frozen_but(1)),
    "logprobs": of(step=through_logprobs),
    "logprobs, last frozen": of(step=through_logprobs, alone=frozen_but(0)),
    "a function": of(loss=own_loss),
    "adapters": of(alone=adapted),
    "adapters of embeddings": of(pp=3, around=adapted_embeddings),
    "adapters of tied embeddings": of(pp=3, around=adapted_embeddings, sizes=TIED),
    "trained copies of embeddings": of(around=saved_embeddings),
    "no sharing": of(config=Config(sharing="none")),
    "within": of(config=Config(sharing="tree", boundary="within")),
    "mixed": of(config=replace(DEEP, boundary="mixed")),
    "float32 sums": of(config=replace(DEEP, grad_accumulation_dtype="float32")),
    "values": of(make=critic, loss=ValueLoss(), rollouts=(valued(group(0, 9, 20, 8)),)),
    "values, adapters": of(
        make=critic,
        around=adapted_critic,
        loss=ValueLoss(),
        rollouts=(valued(group(0, 9, 20, 8)),),
    ),
    "data": of_data(loss=GSPO()),
    # No weights of the last stage train, and those of the first are sharded.
    "data, last frozen": of_data(alone=frozen_but(0)),
    "data, replicated": of_data(hold=over_replicas),
    "data, a rank without rollouts": of_data(rollouts=EMPTY),
    "data, replicated, a rank without rollouts": of_data(
        hold=over_replicas, rollouts=EMPTY, loss=GSPO()
    ),
    "data, replicated, first frozen": of_data(hold=over_trained_replicas, alone=frozen_but(3)),
    "data, replicated, last frozen": of_data(
        hold=over_trained_replicas, alone=frozen_but(0), rollouts=EMPTY, loss=own_loss
    ),
    "context, replicated, first frozen": of_split(
        cp=2, hold=over_trained_replicas, alone=frozen_but(3)
    ),
    "data, tied, three stages": of_data(pp=3, sizes=TIED),
    "data, replicated, tied": of_data(hold=over_replicas, sizes=TIED),
    "data, hosted": of_data(config=HOSTED),
    "data, accumulated": of_data(steps=2),
    "data, a function": of_data(loss=own_loss),
    "data, replicated, a function": of_data(hold=over_replicas, loss=own_loss),
    "context": of_split(cp=2),
    "context, replicated": of_split(cp=2, hold=over_replicas),
    "context, two passes": of_split(cp=2, loss=GSPO()),
    "context, tied": of_split(cp=2, sizes=TIED),
    "context, experts": of_split(cp=2, **EXPERTS),
    "context, recomputed": of_split(cp=2, config=RECOMPUTED),
    "tensor, two passes": of_split(tp=2, loss=GSPO()),
    "tensor, tied": of_split(tp=2, sizes=TIED),
    "tensor, recomputed": of_split(tp=2, config=RECOMPUTED),
    "tensor, experts": of_split(tp=2, **EXPERTS),
    "experts": of_split(tp=2, ep=2, **EXPERTS),
    "tensor, three stages": of_split(tp=2, pp=3),
    "loaded in stages": of_split(options={"tp_size": 1, "pp_size": 3}, mesh={"pp": 3}, pp=3),
    "loaded in stages, tied": of_split(
        options={"tp_size": 1, "pp_size": 2}, mesh={"pp": 2}, sizes=TIED
    ),
    "context and tensor": of_split(cp=2, tp=2),
    "data and tensor": of_data(tp=2),
    "data and context": of_data(cp=2),
    "context and experts": of_split(cp=2, tp=2, ep=2, **EXPERTS),
}


QUICK = ("two passes", "recomputed, unequal", "data, last frozen", "logprobs, last frozen")


@named(CASES, *QUICK)
def test_stages(name: str, tmp_path: Path) -> None:
    for found in check(CASES[name], tmp_path):
        assert found["held"] < 0.7  # of the parameters


SIZED = Config(sharing="tree")
SHORTER: dict[str, Case] = {
    "four stages": of_split(config=SIZED, pp=4),
    "two passes": of_split(config=SIZED, loss=GSPO()),
    "unequal data ranks": of_data(config=SIZED),
    "a rank without rollouts": of_data(config=SIZED, rollouts=EMPTY),
    "within a budget": of_data(config=replace(SIZED, memory_budget="250KB")),
}


@named(SHORTER)
def test_shorter_microbatches_fill_stages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agree on microbatches that are shorter than those of one device, where a tiny model
    costs as much as its tokens."""
    for nothing in ("HOST_BLOCK_MS", "EFFICIENT_TOKENS", "ROW_TOKENS"):
        monkeypatch.setattr(meters, nothing, 0)
    case = SHORTER[name]
    found = [each["tokens"] for each in check(case, tmp_path)]
    data = len(case.rollouts)
    assert all(len({*found[n::data]}) == 1 for n in range(data)), "of one data rank"
    assert min(found) < 128, found


def mesh_of(stages: int) -> DeviceMesh:
    return init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))


def made() -> Any:
    return tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=4)


def stepped(policy: forkpoint.Policy) -> Any:
    return policy.forward_backward(RolloutBatch(ROLLOUTS), GRPO())


def events() -> tuple[str, ...]:
    return stepped(forkpoint.wrap(made(), DEEP, mesh=mesh_of(2))).events


COMPILED = {
    "checkpointed": of(config=replace(DEEP, checkpointing="full"), loss=GSPO()),
    "context, offloaded": of_split(
        cp=2, config=replace(DEEP, checkpointing="selective", activations="offload")
    ),
    **{name: CASES[name] for name in ("tied, four", "own checkpoints", "data, accumulated")},
}


@named(COMPILED)
def test_compiled_stages(name: str, tmp_path: Path) -> None:
    check_compiled(COMPILED[name], tmp_path)


@pytest.mark.slow
def test_a_stage_runs_eagerly_where_the_compiler_fails(tmp_path: Path) -> None:
    check_eager_where_the_compiler_fails(of(steps=2), tmp_path)


def test_each_stage_has_an_order_of_its_own() -> None:
    first, second = run_ranks(2, events)
    assert sorted(first) == sorted(second) and first != second
    assert first[:3] == ("forward prefix 0", "forward prefix 1", "forward prefix 2")
    assert [e for e in first if "forward" in e] == [e for e in second if "forward" in e]


# What is refused
# ------------------------------------------------------------


def divided_otherwise(folder: Path, case: Case) -> str:
    policy, place = on_rank(folder, case)
    model = policy.host.model
    for module in model.modules() if policy.host.links.ends_here else ():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return said(lambda: policy.forward_backward(RolloutBatch(case.rollouts[place]), GRPO()))


@pytest.mark.slow
def test_factors_that_differ_between_stages_are_refused(tmp_path: Path) -> None:
    for found in on_ranks_of(of_data(), tmp_path, divided_otherwise):
        assert found.startswith("RankError: the ranks make different calls")
        assert "gradients divided by 2" in found and "gradients divided by 1" in found


def refused(work: Callable[[Any], None]) -> str:
    policy = forkpoint.wrap(made(), DEEP, mesh=mesh_of(2))
    return said(lambda: work(policy))


def freezes(policy: forkpoint.Policy) -> None:
    policy.host.model.requires_grad_(False)
    stepped(policy)


def infers(policy: forkpoint.Policy) -> None:
    with torch.inference_mode():
        stepped(policy)


def calls(policy: forkpoint.Policy) -> None:
    policy.host.model(torch.arange(9)[None])


@pytest.mark.slow
def test_the_sample_is_compared_through_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = StageLinks.receive

    def scaled(self: StageLinks, *args: Any) -> Any:
        hidden = receive(self, *args)
        return None if hidden is None else hidden * 1.01

    monkeypatch.setattr(StageLinks, "receive", scaled)
    for found in run_ranks(2, refused, stepped):
        assert "forkpoint's logprobs differ from the model's" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "text"),
    [
        (freezes, "no parameter that these rollouts run requires a gradient, on any rank"),
        (infers, "forward_backward was called under torch.inference_mode"),
        (calls, "the model was called by itself, and this rank holds a stage of it"),
    ],
)
def test_what_is_refused(work: Any, text: str) -> None:
    for found in run_ranks(2, refused, work):
        assert found.startswith("UnsupportedError") and text in found


def unfrozen(folder: Path, case: Case) -> str:
    policy, place = on_rank(folder, case)
    policy.host.model.requires_grad_(True)
    return said(lambda: policy.forward_backward(RolloutBatch(case.rollouts[place]), case.loss))


@pytest.mark.slow
def test_frozen_stages_of_data_ranks_stay_frozen(tmp_path: Path) -> None:
    for found in on_ranks_of(CASES["data, replicated, first frozen"], tmp_path, unfrozen):
        assert "embed_tokens.weight trains, and no parameter of this rank's stage" in found


def wrapped_again() -> list[str]:
    """A model that holds a stage is wrapped with the same mesh again, and with others."""
    model, mesh = made(), mesh_of(2)
    return [
        said(lambda options=options: stepped(forkpoint.wrap(model, DEEP, **options)))
        for options in ({"mesh": mesh}, {"mesh": mesh}, {})
    ]


@pytest.mark.slow
def test_models_that_hold_a_stage() -> None:
    for first, second, alone in run_ranks(2, wrapped_again):
        assert first == second == ""
        assert "holds a stage of a pipeline" in alone and "mesh" in alone


def held_before(hold: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = hold(made())
    with pytest.raises(ConfigError, match="no dimension 'pp'"):
        forkpoint.cut(model, data)
    return [
        said(lambda: forkpoint.wrap(model, mesh=mesh)),
        said(lambda: forkpoint.cut(model, mesh)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("hold", [sharded, replicated])
def test_models_that_are_held_before_they_are_cut(hold: Any) -> None:
    for first, second in run_ranks(2, held_before, hold):
        assert "forkpoint.cut(model, mesh) first" in first
        assert "Cut the whole model first" in second


def loaded_otherwise(folder: Path, case: Case) -> list[str]:
    """Messages for a model that transformers has cut, with a mesh of other stages or none."""
    found = list[str]()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    for mesh in (None, pairs):
        model = case.model(folder, None, **case.options)
        with pytest.raises(UnsupportedError) as error:
            forkpoint.wrap(model, mesh=mesh)
        found.append(str(error.value))
    return found


@needs_splits
@pytest.mark.slow
def test_layouts_that_are_not_those_of_the_mesh(tmp_path: Path) -> None:
    case = of(options={"tp_size": 1, "pp_size": 4})
    for rank, found in enumerate(run_ranks(4, loaded_otherwise, case.save(tmp_path), case)):
        assert "wrap was given no mesh with the dimension 'pp'" in found[0]
        assert f"and transformers has loaded stage {rank} of 4" in found[1]


def fails(rank: int) -> str:
    model = made()
    policy = forkpoint.wrap(model, replace(DEEP, self_check=False), mesh=mesh_of(2))
    stepped(policy)

    def hook(*_: Any) -> None:
        if dist.get_rank() == rank:
            raise MemoryError("of the test")

    model.model.layers[3 * rank].register_forward_pre_hook(ReadOnlyHook(hook))
    try:
        stepped(policy)
    except (MemoryError, ForkpointError) as error:
        time.sleep(4)  # the other rank ends meanwhile
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_fails_ends_the_others(
    quick: None, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fails, rank)
    assert "killed after" not in str(failed.value)
    assert f"rank {1 - rank}: ended with exit status {watch.EXIT_CODE}" in str(failed.value)
    assert f"rank {rank}: MemoryError: of the test" in capfd.readouterr().err
