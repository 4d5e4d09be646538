"""Gradients and weights of models under combined parallelism, beside ordinary training.

Tiny models of transformers run on 8 and 16 processes of this machine (gloo): tensor parallelism of
4 ranks, context parallelism of 2, with and without expert parallelism of 4 and two stages of a
pipeline. Batches are flat groups, and trees of a file of agents' rollouts, thinned out.

- float64: gradients over their global norm, and weights after one step of AdamW, beside ordinary
  training in one process.
- bfloat16: the distance of the gradient to one of float32 (the same weights), over the distance of
  dense training under the same parallelism.

Mixtures of experts have router losses.
"""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

import forkpoint
from benchmarks.ranks.meshes import Meshes
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from forkpoint import Config, Rollout, RolloutBatch, load_rollouts
from forkpoint.apps.cli.options import Count
from forkpoint.engine.changes import Changes
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.step.router_steps import router_work
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model
from forkpoint.verify.dense import DenseRouters

NAME = "compositions"
VOCABULARY = 61
# All numbers are compared here.
LIMITS: dict[str, Any] = {"max_microbatch_tokens": 256, "self_check": False}
SHARED = Config(sharing="tree", boundary="across", **LIMITS)
DENSE = Config(sharing="none", boundary="within", **LIMITS)
LOSS = GRPO(clip=0.2)
ROUTER = RouterLoss(load_balancing=0.01, z=0.001)
FLOAT64_BAR, BFLOAT16_BAR = 1e-10, 1.1
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Layout:
    """Ranks of each kind of parallelism."""

    pp: int
    tp: int
    cp: int = 2
    ep: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.cp

    def __str__(self) -> str:
        return " ".join(
            f"{name.upper()}{n}" for name, n in asdict(self).items() if n > 1 or name == "pp"
        )


Family = Literal["llama", "qwen3_moe"]


@dataclass(frozen=True, kw_only=True)
class Compositions(Benchmark):
    """Compare steps under combined parallelism with ordinary training, on CPUs.

    Attributes:
        families: Whose models run.
        stages: Sizes of the pipeline.
        tensor: Ranks of tensor parallelism, and of expert parallelism.
        data: The folder of airline.jsonl; chains of turns take its place where it is missing.
        seeds: How many batches and models the distances in bfloat16 are summed over.
    """

    NAME: ClassVar[str] = NAME

    families: tuple[Family, ...] = ("llama", "qwen3_moe")
    stages: tuple[int, ...] = (1, 2)
    tensor: Literal[2, 4] = 4
    data: Path = Path("../shared/data")
    seeds: Count = 8

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for stages, family in product(self.stages, self.families):
            experts = self.tensor if family == "qwen3_moe" else 1
            layout = Layout(stages, self.tensor, ep=experts)
            case = f"{family}, {layout}"
            if not deadline.over(case):
                yield from _rows(case, family, layout, self)


def _rows(case: str, family: Family, layout: Layout, options: Compositions) -> Iterator[ResultRow]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = _Work(family, layout, folder, options.data.absolute(), options.seeds)
        _on_processes(1, work.ordinary)
        _on_processes(layout.size, work.parallel)
        parts = [torch.load(folder / f"stage-{n}.pt") for n in range(layout.pp)]
    for batch in ("groups", "trees"):
        found = {name: [part[batch, name] for part in parts] for name in FIGURES}
        norms = [sum(found[kind]) ** 0.5 for kind in ("gradient", "norm")]
        row: dict[str, Any] = {"bench": NAME, "case": f"{case}, {batch}", "unit": "1"}
        yield ResultRow(
            metric="error of gradients, float64", value=norms[0] / norms[1], bar=FLOAT64_BAR, **row
        )
        yield ResultRow(
            metric="error of weights after AdamW, float64",
            value=max(found["weight"]),
            bar=FLOAT64_BAR,
            **row,
        )
        shared, dense = (sum(found[kind]) ** 0.5 for kind in ("shared", "dense"))
        yield ResultRow(
            metric="distance from float32, bfloat16",
            value=shared / dense,
            baseline="dense",
            bar=BFLOAT16_BAR,
            **row,
        )


FIGURES = ("gradient", "norm", "weight", "shared", "dense")
"""Of one stage: squared errors and norms of gradients, the largest error of a weight, and squared
distances in bfloat16."""


class _Work:
    """Work of the processes of one case, and the folder of its results."""

    def __init__(
        self, family: Family, layout: Layout, folder: Path, data: Path, seeds: int
    ) -> None:
        self.family, self.layout, self.folder = family, layout, folder
        self.data, self.seeds = data, seeds

    @property
    def router(self) -> RouterLoss | None:
        return ROUTER if self.family == "qwen3_moe" else None

    def batches(self, seed: int) -> dict[str, RolloutBatch]:
        return {"groups": _groups(seed), "trees": _trees(seed, self.data)}

    # One process
    # ------------------------------------------------------------

    def ordinary(self) -> None:
        """Write models, and gradients and weights of ordinary training."""
        for seed in range(self.seeds):
            sizes: dict[str, Any] = {**SIZES, **(EXPERTS if self.router else {})}
            model = tiny_model(self.family, seed=seed, dtype=torch.float64, **sizes)
            model.save_pretrained(self.folder / f"model-{seed}")
            for name, batch in self.batches(seed).items():
                # In float32 with the weights of the model in bfloat16.
                narrow = self.load(seed, torch.bfloat16).float()
                kept: dict[str, Any] = {"float32": self.gradients(narrow, batch)}
                if seed == 0:
                    model = self.load(seed, torch.float64)
                    with lifted_upcasts(model):
                        kept["float64"] = self.gradients(model, batch)
                    for parameter_name, parameter in model.named_parameters():
                        parameter.grad = kept["float64"][parameter_name]
                    _adamw(model)
                    kept["weights"] = {n: p.detach() for n, p in model.named_parameters()}
                torch.save(kept, self.folder / f"{name}-{seed}.pt")

    def gradients(self, model: nn.Module, batch: RolloutBatch) -> dict[str, Tensor | None]:
        host = forkpoint.wrap(model).host
        with Changes() as changes:
            routers = None
            if self.router is not None:
                work = router_work(host, batch, self.router)
                assert work is not None
                routers = DenseRouters(
                    host.routers.found,
                    work.terms,
                    changes,
                    last_token=self.router.last_token,
                )
            return dense_run(model, batch, LOSS, routers=routers).gradients

    def load(self, seed: int, dtype: torch.dtype, meshes: Meshes | None = None) -> Any:
        given: dict[str, Any] = {}
        if meshes is not None:
            given["distributed_config"] = DistributedConfig(
                tp_size=self.layout.tp, ep_size=self.layout.ep
            )
        if self.router is not None:
            given["experts_implementation"] = "eager"  # the default has no float64
        path = self.folder / f"model-{seed}"
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **given).train()

    # Several processes
    # ------------------------------------------------------------

    def parallel(self) -> None:
        """Run steps on this rank, and write figures of each stage."""
        meshes = Meshes(**asdict(self.layout))
        figures: dict[tuple[str, str], float] = {}
        for name in ("groups", "trees"):
            for kind in FIGURES:
                figures[name, kind] = 0.0
            for seed in range(self.seeds):
                batch = self.batches(seed)[name]
                wanted = torch.load(self.folder / f"{name}-{seed}.pt")
                if seed == 0:
                    model = self.model(seed, torch.float64, meshes)
                    policy = forkpoint.wrap(model, SHARED, mesh=meshes.dense)
                    with lifted_upcasts(model):
                        policy.forward_backward(batch, LOSS, router=self.router)
                    apart, norm = _apart(model, wanted["float64"])
                    figures[name, "gradient"], figures[name, "norm"] = apart, norm
                    _adamw(model)
                    weights = wanted["weights"]
                    figures[name, "weight"] = max(
                        float((_whole(p.detach()) - weights[n]).abs().max())
                        for n, p in model.named_parameters()
                    )
                model = self.model(seed, torch.bfloat16, meshes)
                for kind, config in (("shared", SHARED), ("dense", DENSE)):
                    policy = forkpoint.wrap(model, config, mesh=meshes.dense)
                    policy.forward_backward(batch, LOSS, router=self.router)
                    figures[name, kind] += _apart(model, wanted["float32"])[0]
                    model.zero_grad()
        place = meshes.dense.get_coordinate()
        assert place is not None
        if not any(place[1:]):
            torch.save(figures, self.folder / f"stage-{place[0]}.pt")

    def model(self, seed: int, dtype: torch.dtype, meshes: Meshes) -> nn.Module:
        with meshes.given_to_transformers():
            model = self.load(seed, dtype, meshes)
        return meshes.sharded(model)


def _adamw(model: nn.Module) -> None:
    # Parameters of several meshes.
    torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-8, foreach=False).step()


def _whole(tensor: Tensor) -> Tensor:
    """Collective where ranks hold parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _apart(model: nn.Module, wanted: dict[str, Tensor | None]) -> tuple[float, float]:
    """The squared distance of a model's gradients, and the squared norm of those wanted."""
    apart = norm = 0.0
    for name, parameter in model.named_parameters():
        found, true = parameter.grad, wanted[name]
        assert found is not None and true is not None, name
        apart += float((_whole(found).double() - true.double()).square().sum())
        norm += float(true.double().square().sum())
    return apart, norm


# Batches
# ------------------------------------------------------------


def _groups(seed: int) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(3):
        prompt = rng.integers(0, VOCABULARY, 40)
        for length in rng.integers(5, 30, 4):
            ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, length)])
            mask = np.repeat([0, 1], [len(prompt), length])
            found.append(Rollout(ids, mask, float(rng.normal()), group_id=f"group {number}"))
    return RolloutBatch(found)


def _trees(seed: int, data: Path) -> RolloutBatch:
    """The first two tasks of a file, every 32nd token; chains of turns where there is none."""
    rng, path = np.random.default_rng(seed), data / "airline.jsonl"
    if not path.exists():
        return _chains(rng)
    return RolloutBatch(
        Rollout(
            np.asarray(rollout.token_ids)[::32] % VOCABULARY,
            np.asarray(rollout.loss_mask)[::32],
            float(rng.normal()),
            group_id=rollout.group_id,
        )
        for rollout in load_rollouts(path)[:8]
    )


def _chains(rng: np.random.Generator) -> RolloutBatch:
    found = []
    for number in range(2):
        tokens = rng.integers(0, VOCABULARY, 30)
        for _ in range(4):
            answer = rng.integers(0, VOCABULARY, 20)
            mask = np.repeat([0, 1], [len(tokens), len(answer)])
            ids = np.concatenate([tokens, answer])
            found.append(Rollout(ids, mask, float(rng.normal()), group_id=f"task {number}"))
            tokens = np.concatenate([tokens, rng.integers(0, VOCABULARY, 15)])
    return RolloutBatch(found)


# Processes
# ------------------------------------------------------------


def _on_processes(count: int, work: Any) -> None:
    """Call `work` in processes of one group, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_processes(_run_here, (count, port, work), count, start_method="forkserver")


def _run_here(rank: int, count: int, port: int, work: Any) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Gradients are gathered over two dimensions, one after the other.
    getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", port, count, rank == 0, timedelta(seconds=300)
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=300)
    )
    work()
    dist.barrier()
    dist.destroy_process_group()
