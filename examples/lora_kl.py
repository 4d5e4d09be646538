"""GRPO of a LoRA adapter, held to the model without it by a KL divergence.

    python examples/lora_kl.py                 # a tiny random model, on a CPU, in a minute
    python examples/lora_kl.py --model Qwen/Qwen3-0.6B --lr 1e-5 --response-tokens 128

The reference policy is the same model with its adapter disabled, so no second copy is held. The
reward is the share of digits in a response.
"""

import argparse
import random
import statistics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, Qwen3Config

import forkpoint


def load(name):
    if name is None:  # a token is a byte
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen3Config(vocab_size=384, initializer_range=0.2, **sizes, **heads)
        return AutoModelForCausalLM.from_config(config), ByT5Tokenizer()
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    return model, AutoTokenizer.from_pretrained(name)


def group_of(model, tokenizer, prompt, group_id, options):
    """Rollouts of one prompt, with normalised rewards, and the mean reward."""
    ids, eos = torch.tensor([prompt], device=model.device), tokenizer.eos_token_id
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,  # the log-probs of the loss are those of the whole distribution
        top_p=1.0,
        repetition_penalty=1.0,
        temperature=1.0,
        max_new_tokens=options.response_tokens,
        num_return_sequences=options.group,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    responses = [r[: r.index(eos) + 1] if eos in r else r for r in out[:, len(prompt) :].tolist()]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    rollouts = [
        forkpoint.Rollout(
            token_ids=prompt + response,
            loss_mask=[0] * len(prompt) + [1] * len(response),
            advantage=(reward - mean) / (deviation + 1e-4),
            group_id=group_id,
        )
        for response, reward in zip(responses, rewards, strict=True)
    ]
    return rollouts, mean


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or folder; by default a tiny random model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=4, help="in a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--response-tokens", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--kl", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)

    base, tokenizer = load(options.model)
    adapter = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    model = get_peft_model(base, adapter)
    policy = forkpoint.wrap(model)
    loss = forkpoint.losses.GRPO(kl=options.kl)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    for step in range(options.steps):
        rollouts, rewards = [], []
        for number in range(options.prompts):
            digits = " ".join(str(random.randrange(1000)) for _ in range(24))
            prompt = tokenizer.encode(f"Repeat: {digits}\n", add_special_tokens=False)
            group, mean = group_of(model, tokenizer, prompt, f"{step}-{number}", options)
            rollouts += group
            rewards.append(mean)
        batch = forkpoint.RolloutBatch(rollouts)
        with model.disable_adapter():
            reference = policy.score(batch)
        # Without old_logprobs the update is on-policy: one optimizer step on a batch.
        stats = policy.forward_backward(batch.with_(reference_logprobs=reference.logprobs), loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        kl = stats.metrics()["reference_kl"]
        print(f"{step}: reward {statistics.fmean(rewards):.3f}, KL {kl:.4f}, {stats}")


if __name__ == "__main__":
    main()
