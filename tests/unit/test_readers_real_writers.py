"""Files that trainers' own code wrote, where that code is installed.

verl 0.9.1 and OpenRLHF 0.11.2 can be installed without what they run on GPUs (`pip install
--no-deps`, and then what their import asks for: for verl tensordict, ray and codetiming, for
OpenRLHF pylatexenc).
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import dumps
from dumps import same, tensors, truth
from forkpoint import load_rollouts
from forkpoint.traces import open_rollouts


def test_what_verl_saves_of_a_batch(tmp_path: Path) -> None:
    """DataProto.save_to_disk: left-padded prompts, shuffled rows, tool tokens out of the mask."""
    verl = pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
    rollouts = [truth()[n] for n in np.random.default_rng(1).permutation(len(truth()))]
    table = tensors(dumps.verl(rollouts))
    own = {name: x for name, x in table.items() if isinstance(x, torch.Tensor)}
    other = {name: np.array(x, object) for name, x in table.items() if name not in own}
    data = verl.DataProto.from_dict(tensors=own, non_tensors=other, meta_info={"temperature": 0.7})
    path = tmp_path / "batch.pkl"
    data.save_to_disk(path)
    file = open_rollouts(path)
    found = file.read()
    assert file.format == "verl"
    same(found, rollouts)
    assert [r.group_id for r in found] == [r.group_id for r in rollouts]
    assert {r.temperature for r in found} == {0.7}


def test_what_openrlhf_has_of_a_batch(tmp_path: Path) -> None:
    written = pytest.importorskip(
        "openrlhf.trainer.ppo_utils.experience",
        reason="OpenRLHF is not installed",
        exc_type=ImportError,
    )
    experience = written.Experience(**tensors(dumps.openrlhf(truth())))
    path = tmp_path / "experience.pt"
    torch.save(experience, path)
    same(load_rollouts(path), truth())
