"""An agent with a tool, trained on trees of its turns: each turn is sampled several times.

    python examples/agent_tools.py             # a tiny random model, on a CPU, in a minute
    python examples/agent_tools.py --model Qwen/Qwen3-0.6B --lr 1e-6 --turn-tokens 8 --turns 4

The agent guesses a number, and the tool says whether it is higher or lower. Tokens of the tool are
not trained. Rollouts that part at a later turn share all turns before it, which run once.
"""

import argparse
import random
import re
import statistics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Qwen3Config

import forkpoint

PROMPT = (
    "Find the secret number from 0 to 99. Write a number; you are told where the secret lies.\n"
)


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


def tool(text, secret):
    """The tool's answer to a turn, and the reward of the turn, 0 to 2."""
    digits = sum(map(str.isdigit, text)) / max(1, len(text))
    found = re.search(r"\d+", text)
    if not found:
        return " is no number\n", digits
    guess = int(found[0])
    if guess == secret:
        return " is right\n", digits + 1
    return (" is too low\n" if guess < secret else " is too high\n"), digits


def turns_of(model, tokenizer, ids, options):
    """Token ids of several turns after `ids`, each up to the EOS token."""
    given, eos = torch.tensor([ids], device=model.device), tokenizer.eos_token_id
    out = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=True,
        top_k=0,  # the log-probs of the loss are those of the whole distribution
        top_p=1.0,
        repetition_penalty=1.0,
        temperature=1.0,
        max_new_tokens=options.turn_tokens,
        num_return_sequences=options.branches,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    found = out[:, len(ids) :].tolist()
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in found]


def dialogues(model, tokenizer, secret, options):
    """Token ids, loss mask and reward of every path through a tree of turns."""
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    paths = [(prompt, [0] * len(prompt), 0.0)]
    for _ in range(options.turns):
        longer = []
        for ids, mask, earned in paths:
            for turn in turns_of(model, tokenizer, ids, options):
                text = tokenizer.decode(turn, skip_special_tokens=True)
                said, reward = tool(text, secret)
                answer = tokenizer.encode(said, add_special_tokens=False)
                marks = mask + [1] * len(turn) + [0] * len(answer)
                longer.append((ids + turn + answer, marks, earned + reward / options.turns))
        paths = longer
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or folder; by default a tiny random model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--secrets", type=int, default=2, help="trees in a step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--branches", type=int, default=2, help="samples of each turn")
    parser.add_argument("--turn-tokens", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    model, tokenizer = load(options.model)
    policy = forkpoint.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        rollouts, rewards = [], []
        for number in range(options.secrets):
            paths = dialogues(model, tokenizer, random.randrange(100), options)
            earned = [reward for _, _, reward in paths]
            mean, deviation = statistics.fmean(earned), statistics.pstdev(earned)
            rewards += earned
            for ids, mask, reward in paths:
                advantage = (reward - mean) / (deviation + 1e-4)
                rollouts.append(
                    forkpoint.Rollout(ids, mask, advantage, group_id=f"{step}-{number}")
                )
        stats = policy.forward_backward(rollouts, forkpoint.losses.GRPO())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step}: reward {statistics.fmean(rewards):.3f}, {stats}")


if __name__ == "__main__":
    main()
