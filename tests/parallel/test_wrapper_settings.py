"""Settings of wrappers that change after `wrap`, and gradients that nothing reduces over ranks."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixed_calls import MixedCalls, stock
from processes import run_ranks
from scenarios_of_ranks import (
    BAR,
    UNEQUAL,
    Scenario,
    compared,
    model_of,
    replicated,
    said,
    sharded,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.losses import GRPO

FP16_COMPRESS = dist.BuiltinCommHookType.FP16_COMPRESS  # pyright: ignore[reportPrivateImportUsage]


def plain() -> Any:
    return model_of(Scenario())


def own_batch() -> RolloutBatch:
    return RolloutBatch(UNEQUAL[dist.get_rank()])


def trained(policy: forkpoint.Policy) -> None:
    policy.forward_backward(own_batch(), GRPO())


# The factor that gradients are divided by
# ------------------------------------------------------------


def with_another_factor(call: str) -> float:
    calls = MixedCalls(Scenario())
    assert calls.run([call]) < BAR
    for each in (calls.inner, calls.other):
        each.zero_grad()
    for module in calls.inner.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    if call == "loss":
        return calls.run([call])
    calls.run([call])  # reduced as the wrapper reduces any other
    for parameter in calls.other.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    calls.worst = 0.0
    return calls.run([])


@pytest.mark.slow
@pytest.mark.parametrize("call", ["loss", "sum"])
def test_a_divide_factor_is_read_at_every_step(call: str) -> None:
    assert max(run_ranks(2, with_another_factor, call)) < BAR


def not_gathered_in_backwards(model: nn.Module) -> nn.Module:
    """The root has weights that its backward needs. Ordinary training keeps them for it."""
    sharded(model).set_unshard_in_backward(False)  # type: ignore[operator]
    return model


def test_weights_are_gathered_where_a_step_needs_them() -> None:
    for found in run_ranks(2, compared, Scenario(wrap=not_gathered_in_backwards)):
        assert found["error"] < BAR


# Refusals
# ------------------------------------------------------------


def ignoring(*, trains: bool) -> nn.Module:
    model = plain()
    norm = model.model.norm.weight.requires_grad_(trains)
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model, ignored_params={norm})


def refusals_of_fully_shard() -> list[str]:
    hooked, one, frozen = (forkpoint.wrap(sharded(plain())) for _ in range(3))
    hooked.host.model.set_all_reduce_hook(lambda gradient: None)  # type: ignore[operator]
    one.host.model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    found = [said(lambda: trained(hooked)), said(lambda: trained(one))]
    hooked.score(own_batch())
    found.append(said(lambda: forkpoint.wrap(ignoring(trains=True))))
    frozen = forkpoint.wrap(ignoring(trains=False))
    trained(frozen)
    frozen.host.model.get_parameter("model.norm.weight").requires_grad_(True)
    found.append(said(lambda: trained(frozen)))
    return found


def refusals_of_ddp() -> list[str]:
    model, name = plain(), "model.norm.weight"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
    found = [said(lambda: forkpoint.wrap(replicated(model)))]
    model.get_parameter(name).requires_grad_(False)
    trained(forkpoint.wrap(replicated(model)))
    for hook in (
        lambda wrapped: wrapped.register_comm_hook(None, fp16_compress_hook),
        lambda wrapped: wrapped._register_builtin_comm_hook(FP16_COMPRESS),
    ):
        wrapped = replicated(plain())
        policy = forkpoint.wrap(wrapped)
        hook(wrapped)
        found.append(said(lambda policy=policy: trained(policy)))
    return found


@pytest.mark.slow
def test_settings_that_are_not_exact_are_refused_by_name() -> None:
    for hook, factors, *ignored in run_ranks(2, refusals_of_fully_shard):
        assert "set_all_reduce_hook" in hook
        assert "different factors ([1.0, 2.0])" in factors
        for text in ignored:
            assert "model.norm.weight trains, and fully_shard does not" in text


@pytest.mark.slow
def test_settings_of_ddp_that_are_not_exact_are_refused_by_name() -> None:
    for ignored, function, builtin in run_ranks(2, refusals_of_ddp):
        assert "model.norm.weight trains, and DistributedDataParallel does not" in ignored
        assert "fp16_compress_hook" in function and "FP16_COMPRESS" in builtin


def after_a_forward() -> str:
    model = sharded(plain())
    with torch.no_grad():
        stock(model, 0)  # which leaves the root's weights whole
    return said(lambda: trained(forkpoint.wrap(model)))


@pytest.mark.slow
def test_a_model_that_has_run_is_wrapped() -> None:
    assert run_ranks(2, after_a_forward) == ["", ""]


# Gradients that nothing reduces
# ------------------------------------------------------------


class Warnings(logging.Handler):
    """Warnings of forkpoint in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("forkpoint").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def unheld() -> tuple[list[str], list[str]]:
    """Warnings before the first gradient, and after several steps of two models."""
    warnings, batch = Warnings(), own_batch()
    policy = forkpoint.wrap(plain())
    policy.score(batch)
    policy.verify(batch, GRPO())
    trained(forkpoint.wrap(replicated(plain())))
    before = list(warnings.texts)
    for each in (policy, policy, forkpoint.wrap(plain())):
        each.logprobs(batch).sum().backward()
        trained(each)
    return before, warnings.texts


@pytest.mark.slow
def test_a_model_that_no_wrapper_holds_is_warned_of_once() -> None:
    for before, (text,) in run_ranks(2, unheld):
        assert not before
        assert "not distributed over the 2" in text and "DistributedDataParallel itself" in text


def within_ddp() -> list[str]:
    late, model = plain(), plain()
    after = forkpoint.wrap(late)
    held: list[Any] = [replicated(model), replicated(late)]
    inner = forkpoint.wrap(held[0].module)
    inner.score(own_batch())
    return [
        said(lambda: trained(inner)),
        said(lambda: trained(after)),
        said(lambda: after.logprobs(own_batch())),
    ]


@pytest.mark.slow
def test_a_model_within_ddp_is_refused_when_it_trains() -> None:
    for texts in run_ranks(2, within_ddp):
        for text in texts:
            assert "DistributedDataParallel holds this model" in text and "wrap(ddp_model)" in text


def held_over_a_part() -> list[str]:
    """Errors where all dimensions of the mesh are held, and where one is not."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shard"))

    def over(part: DeviceMesh) -> nn.Module:
        return sharded(plain(), mesh=part)

    held = (mesh, mesh["replicas", "shard"]._flatten("all"))
    found = [said(lambda part=part: trained(forkpoint.wrap(over(part)))) for part in held]
    found.append(said(lambda: forkpoint.wrap(over(mesh["shard"]))))
    return [*found, said(lambda: forkpoint.wrap(plain(), mesh=mesh))]


@pytest.mark.slow
def test_a_dimension_of_the_mesh_that_nothing_holds_is_refused() -> None:
    for *held, part, named in run_ranks(2, held_over_a_part):
        assert held == ["", ""]
        assert part.startswith("UnsupportedError: dimension 'replicas' of the model's device mesh")
        assert "the ranks [0, 1]" in part
        assert named.startswith("ConfigError: the mesh's dimension 'replicas'")
