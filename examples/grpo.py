"""GRPO in a loop of your own: sample, reward, score, update with clipping, log.

    python examples/grpo.py                    # a tiny random model, on a CPU, in a minute
    python examples/grpo.py --model Qwen/Qwen3-0.6B --lr 1e-6 --response-tokens 128 --steps 200
    python examples/grpo.py --compare          # each gradient without sharing too

The task is a sum after worked examples. The reward is 1 for the right answer, and up to 1 for
digits in place of other characters, which a random model can learn as well.
"""

import argparse
import copy
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Qwen3Config

import forkpoint


def load(name):
    if name is None:  # a token is a byte
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen3Config(vocab_size=384, **sizes, **heads)
        return AutoModelForCausalLM.from_config(config), ByT5Tokenizer()
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    return model, AutoTokenizer.from_pretrained(name)


def question(examples):
    """A prompt and the right answer to it."""
    pairs = [(random.randrange(100), random.randrange(100)) for _ in range(examples + 1)]
    shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:-1])
    a, b = pairs[-1]
    return f"{shown}{a} + {b} =", str(a + b)


def reward(text, answer):
    digits = sum(character.isdigit() for character in text) / max(1, len(text))
    return digits + (text.split("\n")[0].strip() == answer)


def sample(model, tokenizer, prompt, options):
    """Token ids of a group's responses, each up to its EOS token, which belongs to it."""
    ids = torch.tensor([prompt], device=model.device)
    eos = tokenizer.eos_token_id
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=options.temperature,
        top_k=0,  # the log-probs of the loss are those of the whole distribution
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=options.response_tokens,
        num_return_sequences=options.group,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    responses = out[:, len(prompt) :].tolist()
    return [r[: r.index(eos) + 1] if eos in r else r for r in responses]


def step_ms(policy, batch, loss):
    began = time.perf_counter()
    stats = policy.forward_backward(batch, loss)
    return stats, (time.perf_counter() - began) * 1e3


def distance(gradients, others):
    """The norm of the differences, relative to the norm of the others."""
    pairs = [(a.double(), b.double()) for a, b in zip(gradients, others, strict=True)]
    norm = sum(b.square().sum() for _, b in pairs).sqrt()
    return float(sum((a - b).square().sum() for a, b in pairs).sqrt() / norm)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or folder; by default a tiny random model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4, help="in a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps on a batch")
    parser.add_argument("--examples", type=int, default=16, help="in a prompt")
    parser.add_argument("--response-tokens", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--compare", action="store_true", help="with gradients without sharing")
    parser.add_argument("--log", default="grpo.jsonl", help="a line of JSON for each step")
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    model, tokenizer = load(options.model)
    policy = forkpoint.wrap(model)
    dense = forkpoint.wrap(model, forkpoint.Config(sharing="none"))
    loss = forkpoint.losses.GRPO(clip=0.2, clip_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    differences, speed_ups = [], []
    for step in range(options.steps):
        rollouts, rewards = [], []
        for number in range(options.prompts):
            text, answer = question(options.examples)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            responses = sample(model, tokenizer, prompt, options)
            texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
            group = [reward(text, answer) for text in texts]
            mean, deviation = statistics.fmean(group), statistics.pstdev(group)
            rewards += group
            rollouts += [
                forkpoint.Rollout(
                    token_ids=prompt + response,
                    loss_mask=[0] * len(prompt) + [1] * len(response),
                    advantage=(found - mean) / (deviation + 1e-4),
                    temperature=options.temperature,
                    group_id=f"{step}-{number}",
                )
                for response, found in zip(responses, group, strict=True)
            ]
        batch = forkpoint.RolloutBatch(rollouts)
        batch = batch.with_(old_logprobs=policy.score(batch).logprobs)
        if options.compare and step == 0:
            first = batch.select(batch.groups()[0])
            exact = forkpoint.wrap(copy.deepcopy(model).double()).verify(first, loss)
            print(exact.table(most=3))
        for _ in range(options.updates):
            if options.compare:
                _, dense_ms = step_ms(dense, batch, loss)
                expected = [p.grad for p in model.parameters()]
                optimizer.zero_grad()
            stats, ms = step_ms(policy, batch, loss)
            if options.compare:
                speed_ups.append(dense_ms / ms)
                differences.append(distance([p.grad for p in model.parameters()], expected))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        row = {"step": step, "reward": statistics.fmean(rewards), "grad_norm": float(norm)}
        row |= stats.metrics()  # wandb.log(row) takes it as it is
        if options.log:
            with Path(options.log).open("a") as log:
                log.write(json.dumps(row) + "\n")
        print(f"{step}: reward {row['reward']:.3f}, {stats}")
    if options.compare:
        print(
            f"gradients with and without sharing differ by at most {max(differences):.1e} of their "
            f"norm; sharing is {statistics.median(speed_ups):.1f}x as fast, and the counted bound "
            f"{stats.plan.bound:.1f}x"
        )
        sys.exit(not exact.passed or max(differences) > 1e-4)


if __name__ == "__main__":
    main()
