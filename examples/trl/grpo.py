"""GRPO in TRL on a small task, by TRL's trainer and by forkpoint's side by side.

    python examples/trl/grpo.py                      # a tiny random model, on a CPU
    python examples/trl/grpo.py --model Qwen/Qwen3-0.6B --prompt-tokens 2048

Nothing is downloaded unless `--model` names a model of a hub. A prompt is a text mostly in one
dialect of a made-up language. All words of a dialect have the same vowel twice. The reward of a
completion is the share of its words that are of the most frequent dialect of its prompt. It is 0.2
on average without reading the prompt.
"""

import argparse
import copy
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from trl import GRPOConfig
from trl import GRPOTrainer as StockTrainer

from forkpoint.integrations.trl import GRPOTrainer
from forkpoint.testing import tiny_model

SPECIAL = ["<pad>", "<eos>"]
CONSONANTS = ("bl", "dr", "fn", "gm", "kt", "ld", "ms", "nk", "pr", "rv", "sb", "tl")
DIALECTS = [[f"{c[0]}{vowel}{c[1]}{vowel}" for c in CONSONANTS] for vowel in "aeiou"]
WORDS = [word for dialect in DIALECTS for word in dialect]


def own_tokenizer() -> PreTrainedTokenizerFast:
    """Each word of the language is a token, after two special ones."""
    inner = Tokenizer(
        WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="<pad>")
    )
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def own_model() -> Any:
    model = tiny_model(
        "qwen3",
        dtype=torch.float32,
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=16,
    )
    torch.manual_seed(0)
    model.apply(model._init_weights)
    return model


def share(text: str, dialect: int) -> float:
    """The share of a text's words that are of a dialect."""
    words = text.split()
    return sum(word in DIALECTS[dialect] for word in words) / max(1, len(words))


def reward(completions: list[str], dialect: list[int], **_: Any) -> list[float]:
    return [share(text, own) for text, own in zip(completions, dialect, strict=True)]


def dataset(options: argparse.Namespace) -> Dataset:
    random = np.random.default_rng(options.seed)
    texts = []
    for _ in range(options.steps * options.groups):
        own = DIALECTS[random.integers(len(DIALECTS))]
        words = [*random.choice(own, options.prompt_tokens // 2)]
        words += [*random.choice(WORDS, options.prompt_tokens - len(words))]
        random.shuffle(words)
        texts.append(" ".join(words))
    every = range(len(DIALECTS))
    most = [max(every, key=lambda d, text=text: share(text, d)) for text in texts]
    return Dataset.from_dict({"prompt": texts, "dialect": most})


class Clocked:
    """Time of losses and backwards, in the trainer that it is put before."""

    update_s = 0.0
    began = 0.0

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.began = time.perf_counter()
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.update_s += time.perf_counter() - self.began
        return found


def train(cls: type, model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.completions,
            gradient_accumulation_steps=options.groups,
            num_generations=options.completions,
            max_completion_length=options.completion_tokens,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            entropy_coef=options.entropy,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=options.model is not None,
            bf16=options.model is not None and torch.cuda.is_available(),
            dataloader_pin_memory=False,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        clocked = type(cls.__name__, (Clocked, cls), {})
        trainer = clocked(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=dataset(options),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "reward" in log]
    return {"logs": logs, "update_s": trainer.update_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model of transformers, in place of a tiny random one")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=4, help="prompts in an optimizer step")
    parser.add_argument("--completions", type=int, default=8, help="for each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=12)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--entropy", type=float, default=0.03, help="TRL's entropy_coef")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.model is None:
        model, tokenizer = own_model(), own_tokenizer()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)

    found = {}
    for name, cls in (("TRL", StockTrainer), ("forkpoint", GRPOTrainer)):
        torch.manual_seed(options.seed)
        found[name] = train(cls, copy.deepcopy(model), tokenizer, options)
        rewards = [log["reward"] for log in found[name]["logs"]]
        quarter = max(1, len(rewards) // 4)
        print(
            f"{name:10} reward {np.mean(rewards[:quarter]):.2f} in the first quarter of the steps, "
            f"{np.mean(rewards[-quarter:]):.2f} in the last (blind: {1 / len(DIALECTS):.2f}); "
            f"{found[name]['update_s']:.1f} s of losses and gradients"
        )
    logs = found["forkpoint"]["logs"]
    computed, given = (
        sum(log[f"forkpoint/{kind}_tokens"] for log in logs) for kind in ("computed", "given")
    )
    first = [found[name]["logs"][0]["grad_norm"] for name in found]
    print(f"first step's gradient norms: {first[0]:.6f} and {first[1]:.6f}")
    print(f"tokens run: {computed:,.0f} of {given:,.0f} given")
    print(f"updates: {found['TRL']['update_s'] / found['forkpoint']['update_s']:.2f}x faster")


if __name__ == "__main__":
    main()
