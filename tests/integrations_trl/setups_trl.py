"""Tiny models, tokenizers, data and trainers for tests of TRL's trainers."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from heads_trl import give_trl_a_head
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import DPOConfig, GRPOConfig, RLOOConfig

from forkpoint.testing import tiny_model

give_trl_a_head()
VOCABULARY = 61


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 .. w60, and three special tokens."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def model(family: str = "qwen3", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny model that ends some of its completions."""
    return ending(tiny_model(family, seed=seed, dtype=torch.float32, **changes))


def ending(found: Any) -> Any:
    """The same model with smaller weights, which ends some of its completions."""
    with torch.no_grad():
        # Weights of forkpoint.testing lose one more digit in float32.
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
        found.get_output_embeddings().weight[2] *= 2.0
    found.generation_config.eos_token_id, found.generation_config.pad_token_id = 2, 0
    return found


def mixture(**changes: Any) -> PreTrainedModel:
    """A tiny mixture of experts, whose trainers add a load-balancing loss by default."""
    return model(
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        router_aux_loss_coef=0.5,
        **changes,
    )


def prompts(count: int = 16) -> Dataset:
    """Prompts of 5 to 14 words."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 15, (count,), generator=generator).tolist()
    texts = [
        " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (n,), generator=generator).tolist())
        for n in lengths
    ]
    return Dataset.from_dict({"prompt": texts})


def pairs(count: int = 16) -> Dataset:
    """Prompts of 8 to 15 words with a chosen and a rejected completion of 1 to 9."""
    generator = torch.Generator().manual_seed(2)

    def text(least: int, most: int) -> str:
        length = int(torch.randint(least, most, (1,), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        return " ".join(f"w{i}" for i in ids.tolist())

    return Dataset.from_list(
        [
            {"prompt": text(8, 16), "chosen": " " + text(1, 10), "rejected": " " + text(1, 10)}
            for _ in range(count)
        ]
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that depends on every token, so that the advantages of a group differ."""
    return [sum((i * 7) % 11 for i in ids) / (1 + len(ids)) for ids in completion_ids]


COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 1,
    # AdamW's first steps multiply rounding where gradients are nearly 0.
    "optim": "sgd",
    "learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "max_grad_norm": 1e9,
}
SAMPLED: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
CONFIGS = {"grpo": GRPOConfig, "rloo": RLOOConfig, "dpo": DPOConfig}


def near(policy: PreTrainedModel) -> PreTrainedModel:
    """A reference model: of one that is far off losses are exponentials of large numbers."""
    found = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    return found


def trainer(
    kind: str, cls: type, folder: Path, *, made: Any = None, own: Any = None, **options: Any
) -> Any:
    """A trainer of `kind` on the tiny task; `own` are keywords of ours, which TRL does not have."""
    sampled = {} if kind == "dpo" else SAMPLED
    args = CONFIGS[kind](output_dir=str(folder), **{**COMMON, **sampled, **options})
    peft = (made or {}).get("peft_config")
    kwargs: dict[str, Any] = {"peft_config": peft} if peft else {}
    kwargs |= {"train_dataset": pairs() if kind == "dpo" else prompts()}
    kwargs |= {k: v for k, v in (made or {}).items() if k not in ("peft_config", "model")}
    if kind != "dpo":
        kwargs |= {"reward_funcs": [reward]}
    made_model = copy.deepcopy((made or {}).get("model") or model())
    if kind == "dpo" and peft is None:
        kwargs |= {"ref_model": near(made_model)}
    elif options.get("beta", 0.0 if kind == "grpo" else 1.0) and peft is None:
        near(made_model).save_pretrained(folder / "reference")
        if dist.is_initialized():
            dist.barrier()  # of several ranks the first one saves
        made_model.config._name_or_path = str(folder / "reference")
    torch.manual_seed(0)
    return cls(model=made_model, args=args, processing_class=tokenizer(), **kwargs, **(own or {}))


def run(trainer: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train; the gradients of the first optimizer step before clipping, and what was logged."""
    gradients: dict[str, torch.Tensor] = {}
    step = trainer.create_optimizer().step if trainer.optimizer is None else trainer.optimizer.step

    def keeping(*args: Any, **kwargs: Any) -> Any:
        if not gradients:
            for name, parameter in trainer.model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad.detach().clone()
        return step(*args, **kwargs)

    torch.manual_seed(3)
    trainer.optimizer.step = keeping
    trainer.train()
    return gradients, trainer.state.log_history


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative difference of gradients over all parameters."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    squares = sum(float((found[k].double() - expected[k].double()).square().sum()) for k in found)
    size = sum(float(x.double().square().sum()) for x in expected.values())
    return (squares / size) ** 0.5
