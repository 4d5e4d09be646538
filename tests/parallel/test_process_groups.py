"""Policies of the same ranks use the same process groups, also after a wrap that is refused."""

import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import join, run_ranks
from scenarios_of_ranks import DEEP, UNEQUAL, replicated, said, sharded
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import forkpoint
from forkpoint import RolloutBatch
from forkpoint.hosts.topology import read_topology
from forkpoint.hosts.torch_dist.replicated import Replicated
from forkpoint.losses import GRPO
from forkpoint.parallel import process_groups
from forkpoint.testing import tiny_model


@dataclass(frozen=True)
class Kind:
    """One way in which all ranks hold models."""

    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    groups: int = 0
    """Process groups of the policies, without the default group and those of the mesh."""

    def mesh(self) -> DeviceMesh | None:
        if not self.names:
            return None
        mesh = init_device_mesh("cpu", self.sizes, mesh_dim_names=self.names)
        if "cp" in self.names:
            mesh["dp", "cp"]._flatten("all")
        return mesh

    def wrap(self, mesh: DeviceMesh | None, *, hooked: bool = False) -> forkpoint.Policy:
        torch.manual_seed(0)
        model: Any = tiny_model("qwen3", dtype=torch.float64, num_hidden_layers=len(self.sizes) + 2)
        if hooked:
            model.model.layers[0].register_forward_hook(lambda *args: None)
        if mesh is None:
            model = replicated(model)
        elif "cp" in self.names:
            model = sharded(model, mesh=mesh["dp", "cp"]._flatten("all"))
        elif "dp" in self.names:
            forkpoint.cut(model, mesh)
            model = sharded(model, mesh=mesh["dp"])
        return forkpoint.wrap(model, DEEP, mesh=mesh)


def counts() -> tuple[int, int]:
    """Process groups and threads of this process."""
    return len(dist.distributed_c10d._world.pg_map), len([*Path("/proc/self/task").iterdir()])


def begin_again() -> None:
    """Destroy the default group and begin another of the same ranks."""
    rank, size, ports = dist.get_rank(), dist.get_world_size(), [0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1]]
        dist.broadcast_object_list(ports)
    dist.barrier()
    dist.destroy_process_group()
    join(rank, size, ports[0], timeout_s=40)


def wrapped_often(kind: Kind) -> dict[str, Any]:
    """Counts after wraps in two default groups, one after the other, and losses of the policies."""
    found: dict[str, Any] = {"groups": [], "growth": [], "refused": [], "losses": []}
    policies = []
    for life in range(2):
        if life:
            begin_again()
        mesh = kind.mesh()
        before, _ = counts()
        policies.append(kind.wrap(mesh))
        first = counts()
        found["groups"].append(first[0] - before)
        found["refused"].append(said(lambda mesh=mesh: kind.wrap(mesh, hooked=True)))
        policies.append(kind.wrap(mesh))
        found["growth"].append([b - a for a, b in zip(first, counts(), strict=True)])
        batch = RolloutBatch(UNEQUAL[0])
        found["losses"] += [p.forward_backward(batch, GRPO()).loss for p in policies[-2:]]
    return found


DATA = Kind(groups=1)
KINDS = {
    "data": (2, DATA),
    "three stages": (3, Kind((3,), ("pp",), groups=3)),
    "context": (4, Kind((2, 2), ("dp", "cp"), groups=1)),
    "data and stages": (4, Kind((2, 2), ("pp", "dp"), groups=2)),
}


@pytest.mark.parametrize(
    "name",
    [
        "three stages",
        pytest.param("data", marks=pytest.mark.slow),
        pytest.param("context", marks=pytest.mark.slow),
        pytest.param("data and stages", marks=pytest.mark.slow),
    ],
)
def test_further_wraps_make_no_groups(name: str) -> None:
    size, kind = KINDS[name]
    for rank, found in enumerate(run_ranks(size, wrapped_often, kind)):
        middle = name == "three stages" and rank == 1  # which is no end of the pipeline
        assert found["groups"] == [kind.groups - middle] * 2
        assert found["growth"] == [[0, 0]] * 2
        assert all("hook" in text for text in found["refused"])
        assert max(found["losses"]) - min(found["losses"]) < 1e-14


def differing() -> dict[str, Any]:
    """One rank's wrap is refused; then ranks call policies of different models."""
    rank = dist.get_rank()
    found: dict[str, Any] = {"wrap": said(lambda: DATA.wrap(None, hooked=rank == 1))}
    policies = [DATA.wrap(None) for _ in range(2)]
    batch = RolloutBatch(UNEQUAL[rank])
    found["score"] = said(lambda: policies[rank].score(batch))
    found["losses"] = [policy.forward_backward(batch, GRPO()).loss for policy in policies]
    found["swapped"] = said(lambda: policies[1 - rank].forward_backward(batch, GRPO()))
    found["losses"].append(policies[1].forward_backward(batch, GRPO()).loss)
    return found


def test_ranks_that_differ_all_raise() -> None:
    for rank, found in enumerate(run_ranks(2, differing)):
        refused = "UnsupportedError" if rank else "RankError: rank 1 failed, so no rank goes on: "
        assert found["wrap"].startswith(refused) and "hook" in found["wrap"]
        for call in ("score", "swapped"):
            assert found[call].startswith("RankError: the ranks call policies of different models")
        assert max(found["losses"]) - min(found["losses"]) < 1e-14


def held_by(*groups: list[int]) -> DistributedDataParallel:
    """The first of this rank's models. Each group of ranks holds a model."""
    made = [dist.new_group(ranks) for ranks in groups]
    own = [group for group in made if isinstance(group, dist.ProcessGroup)]
    models = [DistributedDataParallel(tiny_model("qwen3"), process_group=group) for group in own]
    return models[0]


def two_models() -> str:
    """The error of ranks 0 and 1, which wrap a model of theirs, and of rank 2, which wraps another
    one."""
    return said(lambda: forkpoint.wrap(held_by([0, 1], [0, 2]), DEEP))


def test_ranks_that_wrap_models_of_different_ranks_all_raise() -> None:
    for text in run_ranks(3, two_models):
        assert text.startswith("RankError: rank 2 wraps a model with data parallelism over ranks [")
        assert "[0, 2], and rank 0 wraps one with data parallelism over ranks [0, 1]" in text


def group_of_pair() -> tuple[list[int], float]:
    """The group in which models on a device would exchange prompts, where the ranks of one model
    have different numbers of groups."""
    dist.new_group([0, 2])
    holder = Replicated(held_by([0, 1], [2, 3]))
    topology = read_topology([holder], torch.device("cuda"))
    before, rank = counts()[0], torch.tensor(dist.get_rank())
    group = process_groups.process_group(topology.members)
    assert group is not None and counts()[0] == before
    dist.all_reduce(rank, group=group)
    return dist.get_process_group_ranks(group), float(rank)


def test_groups_of_devices_are_made_by_all_ranks() -> None:
    assert run_ranks(4, group_of_pair) == [([0, 1], 1.0)] * 2 + [([2, 3], 5.0)] * 2


def late() -> list[str]:
    """Warnings of a rank that wraps before another one does, twice."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("forkpoint").addHandler(handler)
    for seconds, told_after in ((1.0, 0.2), (0.0, 30.0)):
        process_groups.TOLD_AFTER_S = told_after
        model = replicated(tiny_model("qwen3"))
        time.sleep(seconds * dist.get_rank())
        forkpoint.wrap(model, DEEP)
    return messages


def test_a_rank_that_does_not_wrap_is_named() -> None:
    (message,), none = run_ranks(2, late)
    assert "for 1 of 2 ranks (1), which have not called it" in message
    assert none == []
