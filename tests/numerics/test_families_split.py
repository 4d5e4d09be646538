"""Every supported family on two ranks, exact in float64: split by transformers, and in stages."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import BAR, batch, build
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from forkpoint import Config, wrap
from forkpoint.engine.changes import Changes
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.hosts.transformers.stock import run_plain_recurrences
from forkpoint.hosts.upcasts import lift_upcasts
from forkpoint.losses import GRPO
from parallel.processes import run_ranks
from plain_attention import PLAIN_ATTENTION
from versions import needs_splits

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
TOGETHER = 6
"""Families that a pair of processes tries, one after the other."""
NAMES = [n for n, f in FAMILIES.items() if n in CONFIG_MAPPING and not f.undivided]
CONFIG = Config(sharing="tree", boundary="across", max_microbatch_tokens=64)
in_pairs = pytest.mark.parametrize("first", range(0, len(NAMES), TOGETHER))


def stepped(model: Any, config: Config = CONFIG, **options: Any) -> dict[str, Any]:
    """Gradients of a step."""
    with Changes() as changes:
        lift_upcasts(model, changes)
        run_plain_recurrences(model, changes)
        wrap(model, config, **options).forward_backward(batch(), GRPO())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def load(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"experts_implementation": "eager"}
    if options:
        given["distributed_config"] = DistributedConfig(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **given).train()
    model.config._attn_implementation = PLAIN_ATTENTION
    return model


def split_errors(folders: dict[str, Path]) -> dict[str, float]:
    """By family: the norm of the difference from one process over the norm."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = {}
    config = replace(CONFIG, self_check=False)  # which other tests have on
    for family, folder in folders.items():
        split, alone = (stepped(load(folder, **size), config) for size in ({"tp_size": 2}, {}))
        assert split.keys() == alone.keys()
        whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in split.items()}
        apart = sum(float((whole[n] - g).square().sum()) for n, g in alone.items())
        found[family] = (apart / sum(float(g.square().sum()) for g in alone.values())) ** 0.5
    return found


@needs_splits
@in_pairs
def test_gradients_of_split_models_are_those_of_one_process(first: int, tmp_path: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folders = {name: tmp_path / name for name in NAMES[first : first + TOGETHER]}
    for name, folder in folders.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build(name).save_pretrained(folder)
    for found in run_ranks(2, split_errors, folders, limit_s=240):
        assert all(error < BAR for error in found.values()), found


def stage_errors(families: list[str]) -> dict[str, float]:
    """By family: as above, of this stage."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = {}
    for family in families:
        staged, whole = build(family), build(family)
        stepped(staged, mesh=mesh)
        true = stepped(whole)
        apart = 0.0
        for name, parameter in staged.named_parameters():
            assert (parameter.grad is None) == (name not in true), (family, name)
            if parameter.grad is not None:
                apart += float((parameter.grad - true[name]).square().sum())
        found[family] = (apart / sum(float(g.square().sum()) for g in true.values())) ** 0.5
    return found


@in_pairs
def test_families_in_stages(first: int) -> None:
    for found in run_ranks(2, stage_errors, NAMES[first : first + TOGETHER]):
        assert max(found.values()) < BAR, found
