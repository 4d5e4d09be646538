"""Trainers on the ranks of `accelerate launch`, stock TRL's and ours.

    accelerate launch --use_fsdp --fsdp_version 2 ... launched_trl.py fsdp FOLDER
    accelerate launch --multi_gpu ... launched_trl.py ddp FOLDER

accelerate shards models on accelerators alone: with `use_cpu` it takes MULTI_CPU, and leaves
`--use_fsdp` out without a word. For fsdp its choice of a backend is therefore replaced by that of
an accelerator, with gloo, on CPUs (ACCELERATE_TORCH_DEVICE=cpu); the launcher, its environment, the
plugin and all of the sharding are accelerate's own. For ddp nothing is replaced.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import setups_trl as setups
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from cases_trl import ACROSS, OURS, STOCK
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"max_steps": 2}),
    "grpo, coupled": ("grpo", {"importance_sampling_level": "sequence"}),
    "grpo, checkpointed": ("grpo", {"gradient_checkpointing": True}),
    "grpo, mixture": ("grpo", {"gradient_accumulation_steps": 1}),
    "dpo": ("dpo", {}),
    "dpo, bf16": ("dpo", {"bf16": True}),
}
OF_DDP = ("grpo", "grpo, mixture", "dpo")


def trained(
    name: str, cls: type, own: dict[str, Any], folder: Path, sharded: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The whole gradients of the first step, and what was logged of it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    kind, options = CASES[name]
    routed = "mixture" in name
    made = {"model": setups.mixture()} if routed else {}
    trainer = setups.trainer(kind, cls, folder, made=made, own=own, **options)
    assert trainer.aux_loss_enabled is routed
    assert trainer.accelerator.num_processes == 2
    assert bool(trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2) is sharded
    found, logs = setups.run(trainer)
    assert isinstance(trainer.model, FSDPModule) is sharded
    assert all(isinstance(g, DTensor) is sharded for g in found.values())
    return {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in found.items()}, logs[0]


def main(way: str, folder: Path) -> None:
    sharded = way == "fsdp"
    if sharded:
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
        dist.init_process_group("gloo")
    results, expected = {}, {}
    for name, (kind, _) in CASES.items():
        if not sharded and name not in OF_DDP:
            continue
        sides = [(STOCK[kind], {}), (OURS[kind], {"forkpoint": ACROSS})]
        (stock, logged), (ours, log) = [
            trained(name, cls, own, folder / f"{name} {cls.__module__}", sharded)
            for cls, own in sides
        ]
        exact = expected.setdefault(name.removesuffix(", bf16"), stock)
        names = [k for k, v in logged.items() if isinstance(v, float) and "time" not in k]
        results[name] = {
            "apart": setups.apart(ours, stock),
            "ours": setups.apart(ours, exact),
            "stock": setups.apart(stock, exact),
            "metrics": max(abs(log[k] - logged[k]) / max(1.0, abs(logged[k])) for k in names),
            "computed": log["forkpoint/computed_tokens"],
            "given": log["forkpoint/given_tokens"],
        }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]))
