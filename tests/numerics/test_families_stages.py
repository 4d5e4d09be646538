"""Every supported family, cut into two stages of a pipeline, exact in float64."""

import pytest
from test_families import BAR, batch, build
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING

from forkpoint import Config, wrap
from forkpoint.engine.changes import Changes
from forkpoint.hosts.transformers.families import FAMILIES
from forkpoint.hosts.transformers.stock import run_plain_recurrences
from forkpoint.hosts.upcasts import lift_upcasts
from forkpoint.losses import GRPO
from parallel.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
TOGETHER = 6
"""Families that a pair of processes tries, one after the other."""
NAMES = [n for n, f in FAMILIES.items() if n in CONFIG_MAPPING and not f.undivided]
CONFIG = Config(sharing="tree", boundary="across", max_microbatch_tokens=64)


def errors(families: list[str]) -> dict[str, float]:
    """By family: the norm of the difference from one process over the norm, of this stage."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found = {}
    for family in families:
        staged, whole = build(family), build(family)
        for model, options in ((staged, {"mesh": mesh}), (whole, {})):
            with Changes() as changes:
                lift_upcasts(model, changes)
                run_plain_recurrences(model, changes)
                wrap(model, CONFIG, **options).forward_backward(batch(), GRPO())
        true = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
        apart = 0.0
        for name, parameter in staged.named_parameters():
            assert (parameter.grad is None) == (name not in true), (family, name)
            if parameter.grad is not None:
                apart += float((parameter.grad - true[name]).square().sum())
        found[family] = (apart / sum(float(g.square().sum()) for g in true.values())) ** 0.5
    return found


@pytest.mark.parametrize("first", range(0, len(NAMES), TOGETHER))
def test_families_in_stages(first: int) -> None:
    for found in run_ranks(2, errors, NAMES[first : first + TOGETHER]):
        assert max(found.values()) < BAR, found
