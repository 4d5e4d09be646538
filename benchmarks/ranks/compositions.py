"""Gradients and weights of models under combined parallelism, beside ordinary training.

Tiny models of transformers run on 8 and 16 processes of this machine (gloo): tensor parallelism of
4 ranks, context parallelism of 2, with and without expert parallelism of 4 and two stages of a
pipeline. Batches are flat groups, and trees of a file of agents' rollouts, thinned out.

- float64: gradients over their global norm, and weights after one step of AdamW, beside ordinary
  training in one process.
- bfloat16: the distance of the gradient to one of float32 (the same weights), over the distance of
  dense training under the same parallelism.

Mixtures of experts have router losses.

Models of torchtitan, which define no router losses, run in float32 in the place of bfloat16: the
distance of the gradient to one of float64, beside that of torchtitan's model in one process.

Models of real width and few layers run on GPUs, a process each, in bfloat16 alone: distances as
above, and times of steps beside dense training under the same parallelism, its rows as long as is
fastest of three lengths.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from itertools import product
from logging import getLogger
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

import forkpoint
from benchmarks.ranks import titan
from benchmarks.ranks.meshes import Meshes
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from benchmarks.shapes import make_model
from forkpoint import Config, Rollout, RolloutBatch, load_rollouts
from forkpoint.apps.cli.options import Count
from forkpoint.engine.changes import Changes
from forkpoint.errors import ConfigError
from forkpoint.losses import GRPO, RouterLoss
from forkpoint.policy import Policy
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
FLOAT32_BAR = 1e-5
"""Of a distance over the norm, or 1.1 times torchtitan's own if that is more."""
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
WIDE = {"llama": "llama3-8b", "qwen3_moe": "qwen3-30b-a3b"}
"""Shapes of models of real width."""
CUDA = torch.cuda.is_available()
TIMED = 2
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Layout:
    """Ranks of each kind of parallelism."""

    pp: int
    tp: int
    cp: int = 2
    ep: int = 1
    etp: int = 1
    """Ranks that have each expert in parts; torchtitan's models alone."""

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
    """Compare steps under combined parallelism with ordinary training, on CPUs or GPUs.

    Attributes:
        families: Whose models run.
        stages: Sizes of the pipeline.
        tensor: Ranks of tensor parallelism, and of expert parallelism.
        context: Ranks of context parallelism.
        width: Of the models. Those of real width run on GPUs.
        layers: Of models of real width.
        library: Whose models run. Of torchtitan's (0.2) a stage has its part of the tensor ranks,
            so that each case has 8 processes, and experts are split over tensor and context ranks.
        data: The folder of airline.jsonl; chains of turns take its place where it is missing.
        seeds: How many batches and models the distances in bfloat16 are summed over. With 8, those
            of a mixture of experts differ by a fifth from one set of seeds to the next, because a
            rounded activation can choose another expert.
    """

    NAME: ClassVar[str] = NAME

    families: tuple[Family, ...] = ("llama", "qwen3_moe")
    stages: tuple[int, ...] = (1, 2)
    tensor: Literal[2, 4] = 4
    context: Literal[1, 2] = 2
    width: Literal["tiny", "real"] = "tiny"
    layers: Count = 4
    library: Literal["transformers", "torchtitan"] = "transformers"
    data: Path = Path("../shared/data")
    seeds: Count = 24

    def check(self) -> None:
        splits = {each.name for each in fields(DistributedConfig)}
        if self.library == "transformers" and "ep_size" not in splits:
            raise ConfigError(
                f"transformers {transformers.__version__} cannot split experts by "
                "DistributedConfig(ep_size=...); install transformers 5.23."
            )

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        for stages, family in product(self.stages, self.families):
            titan = self.library == "torchtitan"
            tensor = self.tensor // stages if titan else self.tensor
            layout = Layout(stages, tensor, self.context)
            if family == "qwen3_moe" and titan:
                layout = replace(layout, ep=layout.cp, etp=layout.tp)
            elif family == "qwen3_moe":
                layout = replace(layout, ep=layout.tp)
            case = f"{family}, {layout}"
            if self.width == "real":
                case = f"{WIDE[family]}, {self.layers} layers, {layout}"
            if not deadline.over(case):
                yield from _rows(case, family, layout, self)


def _rows(case: str, family: Family, layout: Layout, options: Compositions) -> Iterator[ResultRow]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind: Any = _TitanWork if options.library == "torchtitan" else _Work
        if options.width == "real":
            kind = partial(_WideWork, options.layers)
        work = kind(family, layout, folder, options.data.absolute(), options.seeds)
        backend = "nccl" if CUDA and not work.exact else "gloo"
        _on_processes(1, work.ordinary, backend)
        _on_processes(layout.size, work.parallel, backend)
        parts = [torch.load(folder / f"stage-{n}.pt") for n in range(layout.pp)]
    for batch in ("groups", "trees"):
        found = {name: [part[batch, name] for part in parts] for name in (*FIGURES, *TIMES)}
        norms = [sum(found[kind]) ** 0.5 for kind in ("gradient", "norm")]
        row: dict[str, Any] = {"bench": NAME, "case": f"{case}, {batch}", "unit": "1"}
        if work.exact:
            yield ResultRow(
                metric="error of gradients, float64",
                value=norms[0] / norms[1],
                bar=FLOAT64_BAR,
                **row,
            )
            yield ResultRow(
                metric="error of weights after AdamW, float64",
                value=max(found["weight"]),
                bar=FLOAT64_BAR,
                **row,
            )
        shared, dense, wide = (sum(found[kind]) ** 0.5 for kind in ("shared", "dense", "wide"))
        yield ResultRow(**work.distance(shared, dense, wide), **row)
        if not work.exact:
            times = {name: max(found[name]) for name in ("shared ms", "dense ms")}
            for name, ms in times.items():
                yield ResultRow(**row | {"metric": name[:-3] + " step", "value": ms, "unit": "ms"})
            ratio, bound = times["dense ms"] / times["shared ms"], found["bound"][0]
            figure = {"metric": "speed-up", "value": ratio, "unit": "x", "bound": bound}
            yield ResultRow(**row | figure, baseline="dense", baseline_leaves_out=True)


FIGURES = ("gradient", "norm", "weight", "shared", "dense", "wide")
"""Of one stage: squared errors and norms of gradients in float64, the largest error of a weight,
squared distances in the narrow dtype, and squared norms of what these are distances from."""
TIMES = ("shared ms", "dense ms", "bound")
"""Of models of real width: milliseconds of steps on this rank, and the counted bound."""


class _Work:
    """Work of the processes of one case, and the folder of its results."""

    def __init__(
        self, family: Family, layout: Layout, folder: Path, data: Path, seeds: int
    ) -> None:
        self.family, self.layout, self.folder = family, layout, folder
        self.data, self.seeds = data, seeds

    narrow: torch.dtype = torch.bfloat16
    exact: ClassVar[bool] = True
    """Whether gradients and weights in float64 are compared."""

    @property
    def router(self) -> RouterLoss | None:
        return ROUTER if self.family == "qwen3_moe" else None

    def distance(self, shared: float, dense: float, wide: float) -> dict[str, Any]:
        """The row of the distances in the narrow dtype."""
        return {
            "metric": "distance from float32, bfloat16",
            "value": shared / dense,
            "baseline": "dense",
            "bar": BFLOAT16_BAR,
        }

    def batches(self, seed: int) -> dict[str, RolloutBatch]:
        return {"groups": _groups(seed), "trees": _trees(seed, self.data)}

    # One process
    # ------------------------------------------------------------

    def ordinary(self) -> None:
        """Write models, and gradients and weights of ordinary training."""
        for seed in range(self.seeds):
            self.make(seed)
            for name, batch in self.batches(seed).items():
                kept = self.references(seed, batch)
                if seed == 0:
                    model = self.load(seed, torch.float64)
                    with lifted_upcasts(model):
                        kept["float64"] = self.gradients(model, batch)
                    for parameter_name, parameter in model.named_parameters():
                        parameter.grad = kept["float64"][parameter_name]
                    _adamw(model)
                    kept["weights"] = {n: p.detach() for n, p in model.named_parameters()}
                torch.save(kept, self.folder / f"{name}-{seed}.pt")

    def make(self, seed: int) -> None:
        """Write the model that `load` reads."""
        sizes: dict[str, Any] = {**SIZES, **(EXPERTS if self.router else {})}
        model = tiny_model(self.family, seed=seed, dtype=torch.float64, **sizes)
        model.save_pretrained(self.folder / f"model-{seed}")

    def references(self, seed: int, batch: RolloutBatch) -> dict[str, Any]:
        """Gradients that those in the narrow dtype are compared with: of float32 with the weights
        of the model in bfloat16."""
        return {"wide": self.gradients(self.load(seed, self.narrow).float(), batch)}

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

    experts: ClassVar[str] = "eager"
    """How transformers runs experts; its default has no float64."""

    def load(self, seed: int, dtype: torch.dtype, meshes: Meshes | None = None) -> Any:
        given: dict[str, Any] = {}
        if meshes is not None:
            given["distributed_config"] = DistributedConfig(
                tp_size=self.layout.tp, ep_size=self.layout.ep
            )
        if self.router is not None:
            given["experts_implementation"] = self.experts
        path = self.folder / f"model-{seed}"
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **given).train()

    # Several processes
    # ------------------------------------------------------------

    def parallel(self) -> None:
        """Run steps on this rank, and write figures of each stage."""
        self.begin()
        figures: dict[tuple[str, str], float] = {}
        for name in ("groups", "trees"):
            for kind in (*FIGURES, *TIMES):
                figures[name, kind] = 0.0
            for seed in range(self.seeds):
                batch = self.batches(seed)[name]
                wanted = self.wanted(name, seed, batch)
                if self.exact and seed == 0:
                    model, mesh = self.model(seed, torch.float64)
                    policy = forkpoint.wrap(model, SHARED, mesh=mesh)
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
                model, mesh = self.model(seed, self.narrow)
                # Each wrap makes groups of processes, whose threads wake a hundred times a second.
                policy = forkpoint.wrap(model, SHARED, mesh=mesh)
                for kind, config in self.configs.items():
                    step = policy.with_config(sharing=config.sharing, boundary=config.boundary)
                    step.forward_backward(batch, LOSS, router=self.router)
                    apart, norm = _apart(model, wanted["wide"])
                    figures[name, kind] += apart
                    figures[name, "wide"] += norm / len(self.configs)
                    model.zero_grad()
                figures[name, "dense"] += wanted.get("own", 0.0) / self.layout.pp
                del wanted
                for kind, value in self.times(policy, batch).items():
                    figures[name, kind] += value / self.seeds
        stage, place = divmod(dist.get_rank(), self.layout.size // self.layout.pp)
        if place == 0:
            torch.save(figures, self.folder / f"stage-{stage}.pt")

    configs: ClassVar[dict[str, Config]] = {"shared": SHARED, "dense": DENSE}
    """Plans that run in the narrow dtype."""

    def wanted(self, name: str, seed: int, batch: RolloutBatch) -> dict[str, Any]:
        """Read what one process wrote of a batch."""
        return torch.load(self.folder / f"{name}-{seed}.pt")

    def times(self, policy: Policy, batch: RolloutBatch) -> dict[str, float]:
        """Values of TIMES. Collective. None are taken of tiny models."""
        return {}

    def begin(self) -> None:
        """Make what all models of this process need. Collective."""
        degrees = asdict(self.layout)
        del degrees["etp"]
        self.meshes = Meshes(**degrees)

    def model(self, seed: int, dtype: torch.dtype) -> tuple[nn.Module, DeviceMesh]:
        """This rank's part of a model, and the mesh of `forkpoint.wrap`."""
        with self.meshes.given_to_transformers():
            model = self.load(seed, dtype, self.meshes)
        return self.meshes.sharded(model), self.meshes.dense


class _TitanWork(_Work):
    """The work with models of torchtitan."""

    narrow = torch.float32
    configs: ClassVar[dict[str, Config]] = {"shared": SHARED}

    def distance(self, shared: float, dense: float, wide: float) -> dict[str, Any]:
        return {
            "metric": "distance from float64 over the norm, float32",
            "value": shared / wide,
            "bar": max(FLOAT32_BAR, BFLOAT16_BAR * dense / wide),
            "note": f"torchtitan's own, in one process: {dense / wide:.2g}",
        }

    @property
    def router(self) -> RouterLoss | None:
        return None

    def make(self, seed: int) -> None:
        """Nothing: models are drawn wherever they are used."""

    def load(self, seed: int, dtype: torch.dtype, meshes: Meshes | None = None) -> Any:
        layers = SIZES["num_hidden_layers"]
        return titan.make_tiny(self.family, seed, dtype, layers=layers, vocabulary=VOCABULARY)

    def references(self, seed: int, batch: RolloutBatch) -> dict[str, Any]:
        model = self.load(seed, torch.float64)
        with lifted_upcasts(model):
            exact = self.gradients(model, batch)
        own = self.load(seed, self.narrow)
        for name, gradient in self.gradients(own, batch).items():
            own.get_parameter(name).grad = gradient
        return {"wide": exact, "own": _apart(own, exact)[0]}

    def ordinary(self) -> None:
        titan.models_on_cpus()
        super().ordinary()

    def begin(self) -> None:
        titan.models_on_cpus()

    def model(self, seed: int, dtype: torch.dtype) -> tuple[nn.Module, DeviceMesh]:
        model, layout = self.load(seed, dtype), self.layout
        dims = titan.parallelize(
            model, pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp
        )
        return model, dims.get_mesh(["pp", "cp"] if layout.pp > 1 else ["cp"])


class _WideWork(_Work):
    """The work with models of real width and few layers, in bfloat16, on a GPU each.

    Every process computes the gradients to compare with by itself.
    """

    exact = False
    experts = "grouped_mm"
    configs: ClassVar[dict[str, Config]] = {
        "shared": Config(sharing="tree", boundary="across", self_check=False),
        "dense": Config(sharing="none", boundary="within", self_check=False),
    }

    def __init__(self, layers: int, *rest: Any) -> None:
        super().__init__(*rest)
        self.layers = layers

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", dist.get_rank()) if CUDA else torch.device("cpu")

    def batches(self, seed: int) -> dict[str, RolloutBatch]:
        if not CUDA:
            return super().batches(seed)
        return {
            "groups": _groups(seed, prompt=4096, lengths=(256, 769), count=8, vocabulary=8192),
            "trees": _trees(seed, self.data, every=2, vocabulary=8192),
        }

    def ordinary(self) -> None:
        for seed in range(self.seeds):
            model = make_model(
                WIDE[self.family], self.device, dtype=self.narrow, layers=self.layers, tiny=not CUDA
            )
            model.save_pretrained(self.folder / f"model-{seed}")

    def wanted(self, name: str, seed: int, batch: RolloutBatch) -> dict[str, Any]:
        model = self.load(seed, self.narrow).float().to(self.device)
        return {"wide": self.gradients(model, batch)}

    def begin(self) -> None:
        degrees = asdict(self.layout)
        del degrees["etp"]
        self.meshes = Meshes(self.device, **degrees)

    def times(self, policy: Policy, batch: RolloutBatch) -> dict[str, float]:
        shared = policy.with_config(max_microbatch_tokens=None)
        dense: dict[str, Any] = {"sharing": "none", "boundary": "within"}
        rows = [
            policy.with_config(max_microbatch_tokens=limit, **dense)
            for limit in (None, 8192, 16_384)
        ]
        took = [self._ms(policy, batch) for policy in (shared, *rows)]
        return {"shared ms": took[0], "dense ms": min(took[1:]), "bound": shared.plan(batch).bound}

    def _ms(self, policy: Policy, batch: RolloutBatch) -> float:
        found: list[float] = []
        for _ in range(1 + TIMED):
            policy.host.model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            policy.forward_backward(batch, LOSS, router=self.router)
            if CUDA:
                torch.cuda.synchronize()
            dist.barrier()
            found.append((time.perf_counter() - begin) * 1e3)
        return median(found[1:])


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


def _groups(
    seed: int,
    *,
    prompt: int = 40,
    lengths: tuple[int, int] = (5, 30),
    count: int = 4,
    vocabulary: int = VOCABULARY,
) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(3):
        shared = rng.integers(0, vocabulary, prompt)
        for length in rng.integers(*lengths, count):
            ids = np.concatenate([shared, rng.integers(0, vocabulary, length)])
            mask = np.repeat([0, 1], [prompt, length])
            found.append(Rollout(ids, mask, float(rng.normal()), group_id=f"group {number}"))
    return RolloutBatch(found)


def _trees(seed: int, data: Path, *, every: int = 32, vocabulary: int = VOCABULARY) -> RolloutBatch:
    """The first two tasks of a file, one token of `every`; chains of turns where there is none."""
    rng, path = np.random.default_rng(seed), data / "airline.jsonl"
    if not path.exists():
        return _chains(rng)
    return RolloutBatch(
        Rollout(
            np.asarray(rollout.token_ids)[::every] % vocabulary,
            np.asarray(rollout.loss_mask)[::every],
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


def _on_processes(count: int, work: Any, backend: str = "gloo") -> None:
    """Call `work` in processes of one group, with gloo forked from one that has all imports.

    A forked process cannot use CUDA where the first one has asked whether there is any.
    """
    method = "spawn" if backend == "nccl" else "forkserver"
    if method == "forkserver":
        # Modules that are not installed are left out.
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload([__name__, *titan.MODULES])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_processes(_run_here, (count, port, work, backend), count, start_method=method)


def _run_here(rank: int, count: int, port: int, work: Any, backend: str) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Gradients are gathered over two dimensions, one after the other.
    getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", port, count, rank == 0, timedelta(seconds=300)
    )
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=300)
    )
    work()
    dist.barrier()
    dist.destroy_process_group()
