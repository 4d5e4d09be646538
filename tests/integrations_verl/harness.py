"""Engines of verl on CPUs: a tiny model, mini-batches, and what an engine makes of them."""

import logging
import os
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config
from verl.trainer.config import CheckpointConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import model as verl_models
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    DistillationConfig,
    DistillationLossConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding

from forkpoint.engine.changes import Changes
from forkpoint.integrations.verl.patches import keep_forwards
from multimodal_models import tiny_multimodal

STOCK, SHARED = "none", "forkpoint"
"""Values of VERL_ENGINE_VENDOR."""
VOCABULARY = 97
VISION = {"glm4v": {"patch_size": 14, "image_size": 56}, "llava": {"image_size": 8}}
"""Encoders: verl gives GLM-4V's an image of zeros with patches of 14 where there is none, and the
images of the tests have four tokens."""


def load_critic(
    local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    """verl's, without flash-attn, which it names in its code and which CPUs do not have."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


verl_models.load_valuehead_model = load_critic


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of verl, and the rows of a mini-batch."""

    loss_mode: str = "vanilla"
    loss_agg_mode: str = "token-mean"
    dynamic: bool = True
    entropy: bool = False
    entropy_coeff: float = 0.0
    kl: bool = False
    temperatures: bool = False
    checkpointing: bool = False
    lora: bool = False
    dtype: str = "fp32"
    clip: float = 0.2
    groups: int = 4
    size: int = 3
    value: bool = False
    nested: bool = False
    """Whether fields of responses are without padding too, as verl's newer trainer has them."""
    supervised: bool = False
    """Whether it is fine-tuning, with a loss mask over whole rows and no responses."""
    distillation: str | None = None
    """verl's loss_mode for log-probs of a teacher; k1 as a reward, others as losses."""
    microbatch_tokens: int | None = 64
    """Of forkpoint's microbatches, so that a step has several."""
    split: str = "auto"
    """Of forkpoint's options: what is done about prompts of several ranks."""
    sharing: str = "auto"
    """Of forkpoint's options. Without sharing a step of this small model can be faster."""
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


def save_model(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights, as verl loads it."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder


def save_multimodal(family: str, folder: Path, *, tied: bool = False) -> None:
    """A tiny multimodal model, as verl loads it.

    tied: whether the head has the weight of the embedding. If not, verl shards each embedding by
        itself. Gemma 4 reads the weight of one, and is always tied, as published models are.
    """
    tied = tied or family == "gemma4"
    text: dict[str, Any] = {"vocab_size": VOCABULARY + 3, "tie_word_embeddings": tied}
    if family == "gemma4":
        text["vocab_size_per_layer_input"] = VOCABULARY + 3
    vision = VISION.get(family, {})
    model = tiny_multimodal(family, dtype=torch.float32, vision=vision, **text)
    model.config.image_token_id, model.config.video_token_id = VOCABULARY, VOCABULARY + 1
    model.generation_config.pad_token_id = 0
    mild = 0.4 if family == "gemma4" else 0.15  # so that float32 keeps its digits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(mild if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)


def padded_rows(case: Case) -> dict[str, Any]:
    """Groups of rows that share a prompt, padded as verl's rollouts are: prompts on the left,
    responses on the right, with gaps of tools."""
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    width, most = 24, 17
    prompts, responses, prompt_masks, response_masks, attended, uids = [], [], [], [], [], []
    for group in range(case.groups):
        length = int(integers(9, width + 1, 1))
        prompt = torch.cat(
            [torch.zeros(width - length, dtype=torch.int64), integers(1, VOCABULARY, length)]
        )
        for _ in range(case.size):
            own = int(integers(1, most + 1, 1))
            responses.append(
                torch.cat(
                    [integers(1, VOCABULARY, own), torch.zeros(most - own, dtype=torch.int64)]
                )
            )
            there = (torch.arange(most) < own).long()
            gap = there.clone()
            if own > 6:
                gap[2:4] = 0
            prompts.append(prompt)
            prompt_masks.append((torch.arange(width) >= width - length).long())
            attended.append(there)
            response_masks.append(gap)
            uids.append(f"prompt-{group}")
    mask = torch.cat([torch.stack(prompt_masks), torch.stack(attended)], 1)
    noise = torch.randn(4, len(prompts), most, generator=generator)
    found = {
        "prompts": torch.stack(prompts),
        "responses": torch.stack(responses),
        "input_ids": torch.cat([torch.stack(prompts), torch.stack(responses)], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": torch.stack(response_masks),
        "old_log_probs": -4.0 + 0.5 * noise[0],
        "ref_log_prob": -4.0 + 0.5 * noise[1],
        "advantages": noise[2, :, :1].expand(-1, most).contiguous(),
        "values": noise[1],
        "returns": noise[3],
    }
    if case.temperatures:
        found["temperature"] = 0.5 + torch.rand(len(prompts), generator=generator)
    return {**found, "uid": np.array(uids, dtype=object)}


def mini_batch(case: Case, rows: dict[str, Any], **more: Any) -> Any:
    """The rows without padding, with what verl's trainer tells its engines."""
    tensors = {name: x for name, x in rows.items() if isinstance(x, Tensor)}
    data = tu.get_tensordict({**tensors, "uid": list(rows["uid"])})
    data = left_right_2_no_padding(data)
    if "multi_modal_inputs" in rows:
        data["multi_modal_inputs"] = NonTensorStack(*rows["multi_modal_inputs"])
    told: dict[str, Any] = {
        "use_dynamic_bsz": case.dynamic,
        "max_token_len_per_gpu": 90,
        "micro_batch_size_per_gpu": 2,
        "calculate_entropy": case.entropy,
        "global_batch_size": len(rows["prompts"]),
        "use_remove_padding": False,
    }
    if not case.temperatures:
        told["temperature"] = 0.8
    if case.distillation:
        generator = torch.Generator().manual_seed(5)
        tokens = data["input_ids"]
        teacher = -4.0 + 0.5 * torch.randn(len(tokens.values()), 1, generator=generator)
        data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(teacher, tokens.offsets())
    if case.nested or case.supervised:
        _without_padding(data, rows, supervised=case.supervised)
    tu.assign_non_tensor(data, **{**told, **more})
    return data


def _without_padding(data: Any, rows: dict[str, Any], *, supervised: bool) -> None:
    """Replace padded fields by nested ones."""
    width = rows["prompts"].shape[1]
    there = rows["attention_mask"].bool()
    own, prompt = there[:, width:], there[:, :width]

    def nested(values: Tensor, mask: Tensor) -> Tensor:
        parts = [x[m] for x, m in zip(values, mask, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    if supervised:
        mask = torch.cat([torch.zeros_like(rows["prompts"]), rows["response_mask"]], 1)
        for name in list(data.keys()):
            if name not in ("input_ids", "position_ids", "temperature"):
                del data[name]
        data["loss_mask"] = nested(mask, there)
        return
    data["prompts"] = nested(rows["prompts"], prompt)
    for name in ("responses", "response_mask", "old_log_probs", "ref_log_prob", "advantages"):
        data[name] = nested(rows[name], own)
    for name in ("values", "returns"):
        data[name] = nested(rows[name], own)
    data["loss_mask"] = data["response_mask"]
    for name in ("attention_mask", "max_response_len", "max_seq_len", "indices"):
        del data[name]


def rows_of(rows: dict[str, Any], chosen: list[int]) -> dict[str, Any]:
    """Some of the rows."""
    return {name: x[chosen] for name, x in rows.items()}


def configurations(case: Case, folder: Path) -> dict[str, Any]:
    """verl's configurations of an engine, by the names that its constructor takes."""
    return {
        "model_config": HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={
                "attn_implementation": "sdpa",
                **case.model.get("override_config", {}),
            },
            enable_gradient_checkpointing=case.checkpointing,
            lora_rank=4 if case.lora else 0,
            **{
                "use_remove_padding": False,
                **{name: x for name, x in case.model.items() if name != "override_config"},
            },
        ),
        "engine_config": FSDPEngineConfig(
            **{
                "strategy": "fsdp2",
                "mixed_precision": {"param_dtype": case.dtype, "reduce_dtype": "fp32"},
                "use_torch_compile": False,
                "use_dynamic_bsz": case.dynamic,
                "max_token_len_per_gpu": 90,
                "micro_batch_size_per_gpu": 2,
                "infer_max_token_len_per_gpu": 120,
                "infer_micro_batch_size_per_gpu": 2,
                **case.engine,
            }
        ),
        "optimizer_config": FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        "checkpoint_config": CheckpointConfig(),
    }


def loss_function(case: Case) -> Any:
    """verl's own loss, with its configuration."""
    common = {"strategy": "fsdp2", "use_dynamic_bsz": True, "rollout_n": case.size}
    if case.supervised:
        return partial(sft_loss, config=None)
    if case.value:
        return partial(
            value_loss, config=FSDPCriticConfig(loss_agg_mode=case.loss_agg_mode, **common)
        )
    config = FSDPActorConfig(
        loss_agg_mode=case.loss_agg_mode,
        entropy_coeff=case.entropy_coeff,
        use_kl_loss=case.kl,
        kl_loss_coef=0.1,
        clip_ratio=case.clip,
        clip_ratio_low=case.clip,
        clip_ratio_high=case.clip,
        policy_loss=PolicyLossConfig(loss_mode=case.loss_mode),
        **common,
    )
    if case.distillation:
        settings = DistillationLossConfig(
            loss_mode=case.distillation, use_policy_gradient=case.distillation == "k1"
        )
        return partial(
            distillation_ppo_loss,
            config=config,
            distillation_config=DistillationConfig(distillation_loss=settings),
        )
    return partial(ppo_loss, config=config)


def use_settings(case: Case, folder: Path) -> None:
    """Name a file of forkpoint's options, as a user does."""
    path = folder / f"forkpoint-{case.microbatch_tokens}-{os.getpid()}.toml"
    line = f"max_microbatch_tokens = {case.microbatch_tokens}\n"
    options = f'split = "{case.split}"\nsharing = "{case.sharing}"\n'
    path.write_text("[config]\n" + options + (line if case.microbatch_tokens else ""))
    os.environ["FORKPOINT_VERL_CONFIG"] = str(path)


def make_engine(case: Case, folder: Path, vendor: str, *, keeps: bool = False) -> Any:
    """An engine, as verl's workers make it.

    keeps: the model keeps the forwards of transformers, which verl replaces.
    """
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    use_settings(case, folder)
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    given = configurations(case, folder)
    given["model_config"].model_type = "value_model" if case.value else "language_model"
    engine = EngineRegistry.new(
        model_type=given["model_config"].model_type,
        backend=given["engine_config"].strategy,
        **given,
    )
    with Changes() as changes:
        if keeps:
            keep_forwards(given["model_config"].hf_config.model_type, changes)
        engine.initialize()
    return engine


def gradients(engine: Any) -> dict[str, Tensor]:
    """Whole gradients by name; zeros where there is none."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).double()
    return found


def first_step(
    case: Case, folder: Path, vendor: str, rows: list[dict[str, Any]], *, keeps: bool = False
) -> dict[str, Any]:
    """Gradients, losses and metrics of the first mini-batch; each data rank has its own
    rows."""
    engine = make_engine(case, folder, vendor, keeps=keeps)
    mine = rows[engine.get_data_parallel_rank()]
    total = sum(len(one["prompts"]) for one in rows)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(
            mini_batch(case, mine, global_batch_size=total), loss_function(case)
        )
        grads = gradients(engine)
    plan = getattr(engine, "last_plan", None)
    return {
        "gradients": grads,
        "loss": output["loss"],
        "metrics": plain(output["metrics"]),
        "decided": getattr(engine, "_decided", None) and engine._decided[2],
        "tokens": plan and (plan.computed_tokens, plan.logical_tokens),
        "microbatches": plan and len(plan.microbatches),
        "split": plan and plan.split,
    }


def both(
    case: Case, folder: Path, rows: list[dict[str, Any]], keeps: bool = False
) -> dict[str, Any]:
    """The first step of verl's own engine and of forkpoint's, in one process of each rank.

    forkpoint's comes first: verl's own engine replaces forwards of models with images.
    """
    shared = first_step(case, folder, SHARED, rows)
    stock = first_step(case, folder, STOCK, rows, keeps=keeps)
    error = difference(shared.pop("gradients"), stock.pop("gradients"))
    return {"error": error, "stock": stock, "shared": shared}


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without verl's classes."""
    return {
        name: list(value.values) if hasattr(value, "values") else value
        for name, value in metrics.items()
    }


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference over all parameters, relative to that of `expected`."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[n] - expected[n]).square().sum()) for n in expected)
    norm = sum(float(x.square().sum()) for x in expected.values())
    assert norm > 0
    return (apart / norm) ** 0.5


def make_worker(case: Case, folder: Path, vendor: str) -> Any:
    """verl's TrainingWorker, without ray."""
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    use_settings(case, folder)
    warnings.simplefilter("ignore")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.manual_seed(1)
    given = configurations(case, folder)
    kind = "value_model" if case.value else "language_model"
    worker = TrainingWorker(TrainingWorkerConfig(model_type=kind, **given))
    worker.reset()
    worker.set_loss_fn(loss_function(case))
    return worker


def warned() -> list[str]:
    """Messages of the logger `forkpoint` from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("forkpoint").addHandler(handler)
    return messages
