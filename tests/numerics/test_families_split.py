"""Every supported family, split over two ranks by transformers, exact in float64."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import BAR, batch, build
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

pytestmark = [pytest.mark.slow, pytest.mark.ranks, needs_splits]
TOGETHER = 6
"""Families that a pair of processes tries, one after the other."""
NAMES = [n for n, f in FAMILIES.items() if n in CONFIG_MAPPING and not f.undivided]


def load(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"experts_implementation": "eager"}
    if options:
        given["distributed_config"] = DistributedConfig(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **given).train()
    model.config._attn_implementation = PLAIN_ATTENTION
    return model


def errors(folders: dict[str, Path]) -> dict[str, float]:
    """By family: the norm of the difference from one process over the norm."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = {}
    for family, folder in folders.items():
        gradients = []
        for model in (load(folder, tp_size=2), load(folder)):
            with Changes() as changes:
                lift_upcasts(model, changes)
                run_plain_recurrences(model, changes)
                config = Config(
                    sharing="tree",
                    boundary="across",
                    max_microbatch_tokens=64,
                    self_check=False,  # which other tests have on
                )
                wrap(model, config).forward_backward(batch(), GRPO())
            every = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            whole = {
                n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in every.items()
            }
            gradients.append(whole)
        split, alone = gradients
        assert split.keys() == alone.keys()
        apart = sum(float((split[n] - g).square().sum()) for n, g in alone.items())
        found[family] = (apart / sum(float(g.square().sum()) for g in alone.values())) ** 0.5
    return found


@pytest.mark.parametrize("first", range(0, len(NAMES), TOGETHER))
def test_gradients_of_split_models_are_those_of_one_process(first: int, tmp_path: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folders = {name: tmp_path / name for name in NAMES[first : first + TOGETHER]}
    for name, folder in folders.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build(name).save_pretrained(folder)
    for found in run_ranks(2, errors, folders, limit_s=240):
        assert all(error < BAR for error in found.values()), found
