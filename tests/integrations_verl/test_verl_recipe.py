"""The recipe of docs/start/verl.md, as verl reads it: keys, checks, what the engines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from forkpoint.integrations.verl.refusals import check_options, check_strategy

DOCUMENT = Path(__file__).parents[2] / "docs" / "start" / "verl.md"


def recipe() -> list[str]:
    """The arguments of the recipe."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = re.search(r"^args=\(\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [line.split("#")[0].strip() for line in block[1].splitlines()]


def several_nodes() -> list[str]:
    """The arguments that several nodes need besides."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.findall(r"^\+ray_kwargs\.\S+$", text, re.MULTILINE)


def read(folder: Path, *more: str) -> DictConfig:
    """verl's configuration of the recipe, of a model that is there."""
    model = f"actor_rollout_ref.model.path={folder}"
    lines = [
        model if line.startswith("actor_rollout_ref.model.path=") else line for line in recipe()
    ]
    assert model in lines
    lines = [line.replace("$HOME", "/home") for line in lines]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*lines, *more])


@pytest.mark.filterwarnings("ignore:Disabled critic as algorithm:UserWarning")
def test_verl_takes_the_recipe(folder: Path) -> None:
    config = read(folder)
    assert need_reference_policy(config) and not need_critic(config)
    validate_config(config, use_reference_policy=True, use_critic=False)
    assert config.trainer.use_v1  # verl's default


def test_several_nodes_are_told_the_variables(folder: Path) -> None:
    more = several_nodes()
    assert len(more) == 3
    told = read(folder, *more).ray_kwargs.ray_init.runtime_env.env_vars
    assert set(told) == {"VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_MODULES", "FORKPOINT_VERL_CONFIG"}


def test_the_engines_take_the_recipe(folder: Path) -> None:
    config = read(folder, "+actor_rollout_ref.model.load_tokenizer=false")
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    for role in ("actor", "ref"):
        given = config.actor_rollout_ref[role]
        with open_dict(given):  # as verl's worker does
            for name in [key for key in given if key.startswith("log_prob_")]:
                given.pop(name)
            given.ppo_mini_batch_size = 64
            given.ppo_micro_batch_size_per_gpu = 1
        made = omega_conf_to_dataclass(given)
        check_strategy(made.engine.strategy, "language_model")
        check_options(made.engine, model)
        assert made.engine.forward_only is (role == "ref")


def test_the_trainer_of_the_recipe_is_verls_with_other_places() -> None:
    pytest.importorskip("transfer_queue")
    (mode,) = [line.split("=")[1] for line in recipe() if "trainer_mode" in line]
    code = f"""
import verl
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
ours = get_trainer_cls({mode!r})
assert issubclass(ours, get_trainer_cls("sync")) and ours.MODE == "sync"
print(*sorted(TRAINER_REGISTRY))
"""
    modules = "cpu_platform,forkpoint.integrations.verl.trainers"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "VERL_USE_EXTERNAL_MODULES": modules,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stock = ("colocate_async", "separate_async", "sync")
    assert done.stdout.split() == [*stock[:1], *(f"forkpoint_{x}" for x in stock), *stock[1:]]
