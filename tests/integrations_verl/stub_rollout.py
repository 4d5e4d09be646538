"""A source of rollouts for verl's trainer that runs no inference server: tokens at random."""

import os
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from verl import DataProto
from verl.utils import distributed
from verl.workers.rollout import base

VOCABULARY = 97
PROMPT, RESPONSE = 24, 9

base._ROLLOUT_REGISTRY[("stub", "async")] = "stub_rollout.StubRollout"


def start_group(timeout_second: float | None = None, backend: str | None = None) -> None:
    """verl's, which names the device twice where it is the CPU."""
    if not dist.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        method = os.environ.get("DIST_INIT_METHOD")
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=method)


distributed.initialize_global_process_group_ray = start_group


class StubRollout:
    """The part of a rollout that lives in verl's workers."""

    def __init__(self, **kwargs: Any) -> None:
        pass


class StubServers:
    """In place of verl's LLMServerManager."""

    @classmethod
    def create(cls, **kwargs: Any) -> "StubServers":
        return cls()

    def get_client(self) -> None:
        return None

    def get_replicas(self) -> list[Any]:
        return []


class StubRewards:
    """In place of verl's RewardLoopManager: rewards come with the rollouts."""

    def __init__(self, **kwargs: Any) -> None:
        self.reward_loop_workers: list[Any] = []
        self.reward_loop_worker_handles: list[Any] = []


class StubCheckpoints:
    """In place of verl's CheckpointEngineManager: there are no replicas to update."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        pass

    def sleep_replicas(self) -> None:
        pass


class StubAgentLoops:
    """In place of verl's AgentLoopManager: responses at random, equal prompts for equal items."""

    @classmethod
    def create(cls, **kwargs: Any) -> "StubAgentLoops":
        return cls()

    def generate_sequences(self, batch: DataProto) -> DataProto:
        generator = torch.Generator().manual_seed(0)
        count = len(batch)
        items = [int(x) for x in batch.non_tensor_batch["item"]]
        prompts = torch.zeros(count, PROMPT, dtype=torch.int64)
        responses = torch.zeros(count, RESPONSE, dtype=torch.int64)
        mask = torch.zeros(count, PROMPT + RESPONSE, dtype=torch.int64)
        for row, item in enumerate(items):
            own = torch.Generator().manual_seed(item)
            prompts[row, 4:] = torch.randint(1, VOCABULARY, (PROMPT - 4,), generator=own)
            length = int(torch.randint(2, RESPONSE + 1, (1,), generator=generator))
            responses[row, :length] = torch.randint(1, VOCABULARY, (length,), generator=generator)
            mask[row, 4 : PROMPT + length] = 1
        scores = torch.zeros(count, RESPONSE)
        scores[torch.arange(count), mask[:, PROMPT:].sum(1) - 1] = torch.rand(
            count, generator=generator
        )
        found = DataProto.from_dict(
            tensors={
                "prompts": prompts,
                "responses": responses,
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "response_mask": mask[:, PROMPT:],
                "rm_scores": scores,
            },
            meta_info={"timing": {}, "reward_extra_keys": []},
        )
        found.non_tensor_batch["multi_modal_inputs"] = np.array([{} for _ in items], dtype=object)
        return found
