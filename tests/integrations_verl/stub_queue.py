"""Rollouts at random in the queue of verl's newer trainers, in place of inference servers."""

from typing import Any

import torch
import transfer_queue as tq
from stub_rollout import PROMPT, RESPONSE, VOCABULARY
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class QueuedRollouts:
    """In place of verl's AgentLoopManagerTQ: equal prompts for equal items, responses at random.

    count: rollouts of each prompt.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def generate_sequences(self, batch: Any) -> None:
        step = tu.get_non_tensor_data(data=batch, key="global_steps", default=0)
        generator = torch.Generator().manual_seed(step)
        keys, fields, tags = [], [], []
        for uid, item in zip(batch["uid"], batch["item"], strict=True):
            own = torch.Generator().manual_seed(int(item))
            prompt = torch.randint(1, VOCABULARY, (PROMPT - int(item) % 5,), generator=own)
            for session in range(self.count):
                length = int(torch.randint(2, RESPONSE + 1, (1,), generator=generator))
                response = torch.randint(1, VOCABULARY, (length,), generator=generator)
                scores = torch.zeros(length)
                scores[-1] = torch.rand((), generator=generator)
                tokens = torch.cat([prompt, response])
                keys.append(f"{uid}_{session}_0")
                fields.append(
                    {
                        "uid": uid,
                        "prompts": prompt,
                        "responses": response,
                        "input_ids": tokens,
                        "position_ids": torch.arange(len(tokens)),
                        "response_mask": torch.ones_like(response),
                        "loss_mask": torch.ones_like(response),
                        "rm_scores": scores,
                        "num_turns": 2,
                        "multi_modal_inputs": {},
                    }
                )
                tags.append(
                    {
                        "status": "success",
                        "prompt_len": len(prompt),
                        "response_len": length,
                        "seq_len": len(tokens),
                        "global_steps": step,
                        "min_global_steps": step,
                        "max_global_steps": step,
                    }
                )
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train"
        )
        done = [{"status": "finished"} for _ in batch["uid"]]
        tq.kv_batch_put(keys=list(batch["uid"]), tags=done, partition_id="train")
