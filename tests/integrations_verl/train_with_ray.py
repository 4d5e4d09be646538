"""verl's PPO trainer on two CPU workers of ray: `python train_with_ray.py VENDOR FOLDER REFERENCE`.

The rollouts are a stub's; everything else is verl's. REFERENCE is `engine`, of its own, or
`none`: no KL term. The last line printed is the metrics, JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS, PROMPTS, ROLLOUTS = 2, 4, 4


def set_up(vendor: str, *modules: str, **more: str) -> dict[str, str]:
    """Set verl's variables for this process, and return them for its workers."""
    settings = {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": vendor,
        "VERL_USE_EXTERNAL_MODULES": ",".join(["cpu_platform", "stub_rollout", *modules]),
        "VERL_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        # By default 15, with which workers get next to no time on a busy machine.
        "RAY_worker_niceness": "0",
        **more,
    }
    os.environ.update(settings)
    sys.path.insert(0, str(HERE))
    return settings


logged: list[dict[str, Any]] = []


class Log:
    """verl's tracker, which only remembers."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def log(self, data: dict[str, Any], step: int) -> None:
        logged.append({name: float(x) for name, x in data.items()})


def main(vendor: str, folder: str, reference: str) -> None:
    settings = set_up(vendor)

    import ray
    import stub_rollout as stubs
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from torch.utils.data import Dataset
    from verl.experimental import reward_loop
    from verl.single_controller.ray import RayWorkerGroup
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role
    from verl.workers.engine_workers import ActorRolloutRefWorker

    class Items(Dataset):
        def __len__(self) -> int:
            return STEPS * PROMPTS

        def __getitem__(self, index: int) -> dict[str, Any]:
            import torch

            return {
                "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
                "item": index,
                "index": index,
            }

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides(folder, reference))
    OmegaConf.resolve(config)
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.rollout.checkpoint_manager_class = "stub_rollout.StubCheckpoints"
    config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = "stub_rollout.StubAgentLoops"
    ray_trainer.LLMServerManager = stubs.StubServers
    reward_loop.RewardLoopManager = stubs.StubRewards

    import verl.utils.tracking

    verl.utils.tracking.Tracking = Log
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, runtime_env={"env_vars": settings})
    from verl.utils.dataset.rl_dataset import collate_fn

    role = Role.ActorRolloutRef if reference == "engine" else Role.ActorRollout
    trainer = ray_trainer.RayPPOTrainer(
        config=config,
        tokenizer=None,
        role_worker_mapping={role: ray.remote(ActorRolloutRefWorker)},
        resource_pool_manager=ResourcePoolManager(
            resource_pool_spec={"pool": [2]}, mapping={role: "pool"}
        ),
        ray_worker_group_cls=RayWorkerGroup,
        train_dataset=Items(),
        val_dataset=Items(),
        collate_fn=collate_fn,
        device_name="cpu",
    )
    trainer.init_workers()
    trainer.fit()
    ray.shutdown()
    print(json.dumps(logged))


def overrides(folder: str, reference: str) -> list[str]:
    engine = [
        "model_dtype=fp32",
        "use_torch_compile=false",
        "mixed_precision={param_dtype:fp32,reduce_dtype:fp32}",
    ]
    return [
        f"actor_rollout_ref.model.path={folder}",
        "+actor_rollout_ref.model.load_tokenizer=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.ref.strategy=fsdp2",
        "actor_rollout_ref.actor.use_prefix_grouper=true",
        f"actor_rollout_ref.actor.use_kl_loss={reference == 'engine'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=90",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=120",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=120",
        *(
            f"++actor_rollout_ref.{role}.fsdp_config.{x}"
            for role in ("actor", "ref")
            for x in engine
        ),
        "actor_rollout_ref.rollout.name=stub",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"data.train_batch_size={PROMPTS}",
        "data.dataloader_num_workers=0",
        "data.shuffle=false",
        "algorithm.adv_estimator=grpo",
        "critic.enable=false",
        "trainer.use_v1=false",
        "trainer.n_gpus_per_node=2",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1",
        "trainer.logger=[console]",
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
