"""DPO on pairs of a chosen and a rejected response, whose prompt runs once.

    python examples/dpo.py                     # a tiny random model and made-up pairs, on a CPU
    python examples/dpo.py --model Qwen/Qwen3-0.6B --pairs pairs.jsonl --lr 5e-7

A line of `--pairs` is {"prompt": "...", "chosen": "...", "rejected": "..."}. Made-up pairs prefer
the right sum after worked examples.
"""

import argparse
import json
import random
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


def made_up_pairs(count):
    for _ in range(count):
        sums = [(random.randrange(100), random.randrange(100)) for _ in range(17)]
        shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in sums[:-1])
        a, b = sums[-1]
        wrong = "".join(random.choices("abcxyz", k=3))
        yield {"prompt": f"{shown}{a} + {b} = ", "chosen": str(a + b), "rejected": wrong}


def rollouts_of(pair, number, tokenizer):
    """The chosen rollout, with the larger advantage, and the rejected one."""
    prompt = tokenizer.encode(pair["prompt"], add_special_tokens=False)
    for kind, advantage in (("chosen", 1.0), ("rejected", 0.0)):
        response = tokenizer.encode(pair[kind], add_special_tokens=False)
        response.append(tokenizer.eos_token_id)
        yield forkpoint.Rollout(
            token_ids=prompt + response,
            loss_mask=[0] * len(prompt) + [1] * len(response),
            advantage=advantage,
            group_id=f"pair {number}",
            rollout_id=f"pair {number}, {kind}",
        )


def accuracy(stats, batch):
    """Share of pairs whose chosen response has gained more than the rejected one."""
    gained = stats.logprobs.cpu().double() - torch.tensor(batch.reference_logprobs)
    gained = gained * torch.tensor(batch.loss_mask)
    gains = torch.stack([part.sum() for part in gained.split(batch.lengths.tolist())])
    return (gains[0::2] > gains[1::2]).double().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or folder; by default a tiny random model")
    parser.add_argument("--pairs", help="a file of JSON lines; by default pairs are made up")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="pairs in an optimizer step")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    model, tokenizer = load(options.model)
    policy = forkpoint.wrap(model)
    loss = forkpoint.losses.DPO(beta=options.beta)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if options.pairs:
        pairs = [json.loads(line) for line in Path(options.pairs).read_text().splitlines()]
    else:
        pairs = list(made_up_pairs(64))
    batches = []
    for first in range(0, len(pairs), options.batch):
        numbered = enumerate(pairs[first : first + options.batch], first)
        batch = forkpoint.RolloutBatch(
            rollout for n, pair in numbered for rollout in rollouts_of(pair, n, tokenizer)
        )
        # The reference is the model before training.
        batches.append(batch.with_(reference_logprobs=policy.score(batch).logprobs))
    for epoch in range(options.epochs):
        random.shuffle(batches)
        for batch in batches:
            stats = policy.forward_backward(batch, loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"{epoch}: accuracy {accuracy(stats, batch):.2f}, {stats}")


if __name__ == "__main__":
    main()
