"""Models that are not wrapped: each is a tiny Llama with one thing changed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from host_models import lora
from peft import PromptTuningConfig, TaskType, get_peft_model
from steps import model_state
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, distribute_tensor
from transformers import LlamaForCausalLM

from bad_inputs.kind import Kind
from forkpoint import wrap
from forkpoint.errors import RankError
from forkpoint.parallel.agreement import Proposal, agreed
from forkpoint.testing import ReadOnlyHook, tiny_model

Change = Callable[[Any], Any]


def model_kind(change: Change, *, message: str) -> Kind:
    def call() -> None:
        changed = change(tiny_model("llama"))
        state = model_state(changed) if isinstance(changed, nn.Module) else None
        try:
            wrap(changed)
        finally:
            assert state is None or model_state(changed) == state, "a refusal changed the model"

    return Kind(message=message, call=call)


class MyLlama(LlamaForCausalLM):
    """Of the same code today; what a subclass adds is not looked for."""


class MyMLP(nn.Module):
    """Not the family's: it could do anything, such as normalise over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def replaced(path: str, module: nn.Module) -> Change:
    def change(model: nn.Module) -> nn.Module:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)
        return model

    return change


def hooked_compiled(model: Any) -> nn.Module:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    model.model.layers[1].register_forward_hook(ReadOnlyHook(lambda *_: None))
    return model


class Params4bit(nn.Parameter):
    """As quantization libraries do: a parameter whose values mean something else."""


def weight(parameter: nn.Parameter) -> Change:
    def change(model: nn.Module) -> nn.Module:
        model.get_submodule("model.layers.1.mlp.up_proj").weight = parameter
        return model

    return change


def adapter(config: Any) -> Change:
    return lambda model: get_peft_model(model, config)


def partly_on_meta(model: nn.Module) -> nn.Module:
    model.get_submodule("lm_head").to("meta")
    return model


def checkpointed_block(model: Any) -> nn.Module:
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    return model


def in_process_group(change: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Callable[[], None]:
    """Wraps what `change` makes of a model in a group of one process."""

    def call() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            wrap(change(tiny_model("llama"), DeviceMesh("cpu", [0])))
        finally:
            dist.destroy_process_group()

    return call


def one_sharded_weight(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh))  # type: ignore
    return model


def first_block_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.get_submodule("model.layers.0"), mesh=mesh)
    return model


CAUSAL: Any = {"task_type": TaskType.CAUSAL_LM}

MODELS: tuple[Kind, ...] = (
    model_kind(
        lambda _: "Qwen/Qwen3-8B",
        message="'Qwen/Qwen3-8B' of type str is no model; wrap takes one in memory, as",
    ),
    model_kind(
        lambda _: tiny_model("gemma3_text", use_bidirectional_attention=True),
        message="the configuration has use_bidirectional_attention=True: tokens attend to",
    ),
    model_kind(
        lambda _: nn.Linear(2, 2),
        message="torch.nn.modules.linear.Linear is not a transformers model;",
    ),
    model_kind(
        lambda m: lora(m).base_model,
        message="peft.tuners.lora.model.LoraModel is not a transformers model; wrap the model",
    ),
    Kind(
        message="parameter model.layers.1.mlp.up_proj.weight is a DTensor;",
        call=in_process_group(one_sharded_weight),
    ),
    Kind(
        message="model.layers.0 is sharded by fully_shard and the model around it is not, so "
        "gradients of its other parameters would not be reduced over ranks. Call "
        "fully_shard(model) as well, after its blocks.",
        call=in_process_group(first_block_sharded),
    ),
    Kind(
        error=RankError,
        message="the ranks make different calls: rank 1: score; rank 0: forward_backward of SFT(). "
        "Every rank must make the same calls of its policy in the same order, with the same "
        "options; a rank without rollouts passes RolloutBatch([]).",
        call=lambda: agreed(
            [Proposal("forward_backward of SFT()"), Proposal("score")], 0, [0, 1], gather="auto"
        ),
    ),
    Kind(
        error=RankError,
        message="rank 1 cannot run this step, so no rank does, and gradients are unchanged: of the",
        call=lambda: agreed(
            [Proposal("score"), Proposal("score", "of the test.")], 0, [0, 1], gather="auto"
        ),
    ),
    model_kind(
        lambda m: MyLlama(m.config),
        message="bad_inputs.models.MyLlama (model_type 'llama') has not been shown exact;",
    ),
    model_kind(
        replaced("model.layers.1.mlp", MyMLP()),
        message="model.layers.1.mlp is a bad_inputs.models.MyMLP, which has not been shown exact.",
    ),
    model_kind(
        hooked_compiled, message="model.layers.1 is the result of torch.compile, and has a hook."
    ),
    model_kind(
        weight(Params4bit(torch.zeros(48, 32), requires_grad=False)),
        message="parameter model.layers.1.mlp.up_proj.weight is a Params4bit;",
    ),
    model_kind(
        adapter(PromptTuningConfig(**CAUSAL, num_virtual_tokens=2)),
        message="prompt_encoder.default is a peft.tuners.prompt_tuning.model.PromptEmbedding, "
        "which has not been shown exact. Of peft's adapters, LoRA, DoRA and trainable tokens have "
        "been shown exact. Use one of these, or merge the adapter",
    ),
    model_kind(
        lambda m: lora(m, alora_invocation_tokens=[1, 2], target_modules=["q_proj"]),
        message="adapter 'default' of base_model.model.model.layers.0.self_attn.q_proj is the",
    ),
    model_kind(
        lambda m: lora(m, target_modules=["lm_head"]),
        message="the output head is a peft.tuners.lora.layer.Linear; forkpoint computes log-probs "
        "from a plain torch.nn.Linear. Leave lm_head out of adapters and quantization. peft also "
        "wraps it for embeddings that are tied to it (tie_word_embeddings): leave out "
        "trainable_token_indices and ensure_weight_tying.",
    ),
    model_kind(
        checkpointed_block,
        message="model.layers.0 is a torch.distributed.algorithms._checkpoint.checkpoint_wrapper."
        "CheckpointWrapper, which has not been shown exact. Leave it out. To recompute "
        'activations, use Config(checkpointing="full") or model.gradient_checkpointing_enable().',
    ),
    model_kind(
        partly_on_meta,
        message="the model's parameters are on several devices, or on the meta device "
        "(model.embed_tokens.weight on cpu, lm_head.weight on meta). Load them, all on one device, "
        "before wrapping the model.",
    ),
)
