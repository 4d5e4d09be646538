"""GRPO on several ranks by torch's fully_shard (FSDP2), from a file of rollouts.

    torchrun --nproc-per-node 2 examples/fsdp2.py                           # tiny, on a CPU
    torchrun --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen3-8B --rollouts rollouts.jsonl

`forkpoint.place` puts the rollouts of a step on ranks, so that each takes about as long and groups
stay together where that pays. Means of the loss are over the rollouts of all ranks.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

import forkpoint


def load(name):
    """A model with float32 weights, which the optimizer updates."""
    if name is None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=384, **sizes, **heads))
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def made_up_rollouts(groups, responses=6):
    """Groups of random tokens, the same on every rank; small token ids are rewarded."""
    for group in range(groups):
        prompt = [random.randrange(384) for _ in range(random.randrange(20, 80))]
        for _ in range(responses):
            response = [random.randrange(384) for _ in range(random.randrange(4, 16))]
            advantage = 1 - 2 * sum(response) / (384 * len(response))
            mask = [0] * len(prompt) + [1] * len(response)
            yield forkpoint.Rollout(prompt + response, mask, advantage, group_id=str(group))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or folder; by default a tiny random model")
    parser.add_argument("--rollouts", help="a file; by default rollouts are made up")
    parser.add_argument("--groups", type=int, default=4, help="in an optimizer step")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--save", help="a folder for the trained weights")
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)  # equal weights of the random model on all ranks

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (world,))
    model = load(options.model)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32
    )
    for block in model.model.layers:  # weights move to the mesh's device, a shard on each rank
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    policy = forkpoint.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loss = forkpoint.losses.GRPO()

    # Every rank reads all rollouts, and takes those that are placed on it.
    given = forkpoint.load_rollouts(options.rollouts) if options.rollouts else made_up_rollouts(16)
    everything = forkpoint.RolloutBatch(given)
    groups = [group.tolist() for group in everything.groups()]
    for first in range(0, len(groups), options.groups):
        step = everything.select(n for g in groups[first : first + options.groups] for n in g)
        placed = forkpoint.place(step, ranks=world, model=policy.host.shape, loss=loss)
        stats = policy.forward_backward(step.select(placed[rank]), loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(
                f"{first // options.groups}: gradient norm {norm.item():.6f}, {stats}", flush=True
            )
    if options.save:
        checkpoint.save(get_model_state_dict(model), checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
