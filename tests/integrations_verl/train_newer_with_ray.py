"""verl's newer trainer on two CPU workers: `python train_newer_with_ray.py VENDOR FOLDER MODE`.

The rollouts are a stub's; everything else is verl's. MODE is `trainer.v1.trainer_mode`. The last
line printed is the metrics, JSON.
"""

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

from train_with_ray import PROMPTS, ROLLOUTS, STEPS, Log, logged, overrides, set_up

TRAINERS = "forkpoint.integrations.verl.trainers"


def main(vendor: str, folder: str, mode: str) -> None:
    settings = set_up(vendor, TRAINERS, TRANSFER_QUEUE_ENABLE="1")

    import ray
    import stub_queue
    import stub_rollout as stubs
    import transfer_queue as tq
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from torch.utils.data import Dataset
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

    class Items(Dataset):
        def __len__(self) -> int:
            return STEPS * PROMPTS

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"raw_prompt": "", "item": index, "index": index}

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=chosen(folder, mode))
    OmegaConf.resolve(config)
    OmegaConf.set_struct(config, False)
    config.transfer_queue.enable = True

    # In place of what needs inference servers, a tokenizer and files.
    trainer_base.LLMServerManager = stubs.StubServers
    trainer_base.RewardLoopManager = stubs.StubRewards
    trainer_base.CheckpointEngineManager = stubs.StubCheckpoints
    trainer_base.Tracking = Log
    trainer_base.create_rl_dataset = lambda *args, **kwargs: Items()
    # The same names of prompts in every run, so that they come in the same order.
    names = itertools.count()
    trainer_base.uuid = SimpleNamespace(uuid4=lambda: f"{next(names):032x}")
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)

    def no_tokenizer(self: Any) -> None:
        self.tokenizer, self.processor = SimpleNamespace(eos_token_id=1, pad_token_id=0), None

    trainer._init_tokenizer = no_tokenizer
    ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, runtime_env={"env_vars": settings})
    tq.init(config.transfer_queue)
    made = trainer(config=config)
    made.init()
    made.fit(stub_queue.QueuedRollouts(ROLLOUTS))
    tq.close()
    ray.shutdown()
    print(json.dumps(logged))


def chosen(folder: str, mode: str) -> list[str]:
    others = ("trainer.use_v1", "actor_rollout_ref.actor.use_prefix_grouper")
    return [
        *(x for x in overrides(folder, "none") if not x.startswith(others)),
        "trainer.use_v1=true",
        f"trainer.v1.trainer_mode={mode}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "reward.num_workers=1",
        "actor_rollout_ref.rollout.calculate_log_probs=false",
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
