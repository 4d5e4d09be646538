"""Random steps to interrupt: recompute, host memory, files and frozen layers in any combination."""

import atexit
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from fuzz_cases import stream
from fuzz_models import between, chance, one_of
from interrupt_cases import (
    Case,
    FailingLoss,
    Failure,
    checkpointed_model,
    deeper_model,
    make_case,
    small_hybrid,
    small_lora,
    small_model,
    squared,
)
from torch import nn

from forkpoint import losses

MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": small_model,
    "two layers": deeper_model,
    "checkpointed": checkpointed_model,
    "lora": small_lora,
    "experts": lambda: small_model(
        "qwen3_moe",
        num_hidden_layers=2,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        experts_implementation="eager",
    ),
    "delta rule": lambda: small_hybrid("qwen3_next"),
    "mamba": lambda: small_hybrid("granitemoehybrid"),
}
LOSSES: dict[str, Callable[[], losses.Loss]] = {
    "grpo": lambda: losses.GRPO(kl=0.1),
    "gspo": losses.GSPO,
    "two passes": lambda: losses.base.as_loss(squared),
    "fails": lambda: FailingLoss(Failure),
    "out of memory": lambda: FailingLoss(torch.OutOfMemoryError),
}
CHUNK_BYTES = 1024
"""Bytes of host memory taken at a time: tensors of these models take several chunks."""
HOST_BYTES = {"memory": None, "limited": 3 * CHUNK_BYTES, "both": 3 * CHUNK_BYTES, "files": 1}
"""Limit of host memory by where offloaded data goes; "both" and "files" have a folder beyond it."""
FOLDER = Path(tempfile.mkdtemp(prefix="interrupts-"))
atexit.register(FOLDER.rmdir)


Drawn = dict[str, str]


def draw(seed: int) -> Drawn:
    """Options of the step of a seed."""
    random = stream(seed, "interrupts")
    drawn = {
        "model": one_of(random, list(MODELS)),
        "frozen": one_of(random, ("none", "none", "lower", "some")),
        "activations": one_of(random, ("keep", "offload", "offload", "recompute")),
        "checkpointing": one_of(random, ("none", "selective", "full")),
        "prefix_cache": one_of(random, ("device", "host", "host")),
        "host": one_of(random, list(HOST_BYTES)),
        "boundary": one_of(random, ("across", "across", "mixed")),
        "loss": one_of(random, list(LOSSES)),
        "call": one_of(random, ("step", "step", "step", "score")),
        "gradients": one_of(random, ("none", "earlier", "restored")),
        "sums": one_of(random, ("parameter", "float32")),
    }
    if drawn["model"] == "checkpointed":
        drawn["checkpointing"] = "none"
    if drawn["model"] == "lora":
        drawn["frozen"] = "none"
    fails = drawn["loss"] in ("fails", "out of memory")
    # Failing losses watch the backward of the first layer.
    lower = drawn["frozen"] == "lower" or drawn["model"] == "lora"
    if drawn["call"] == "score" or (fails and lower):
        drawn["loss"] = "grpo"
    return drawn


def case_of(seed: int, drawn: Drawn) -> Case:
    """The model and the step of a seed."""
    random = stream(seed, "interrupted steps")
    model = MODELS[drawn["model"]]()
    for name, parameter in model.named_parameters():
        if drawn["frozen"] == "lower":
            parameter.requires_grad_("layers.0" not in name and "embed" not in name)
        elif drawn["frozen"] == "some":
            parameter.requires_grad_("lm_head" in name or chance(random, 0.5))
    calls = {"step": "forward_backward", "score": "score"}[drawn["call"]]
    return make_case(
        "random",
        model,
        LOSSES[drawn["loss"]](),
        case={"accumulated": drawn["gradients"] != "none", "calls": calls},
        chunk_bytes=CHUNK_BYTES,
        activations=drawn["activations"],
        checkpointing=drawn["checkpointing"],
        prefix_cache=drawn["prefix_cache"],
        host_memory=HOST_BYTES[drawn["host"]],
        offload_folder=FOLDER if drawn["host"] in ("both", "files") else None,
        boundary=drawn["boundary"],
        max_microbatch_tokens=between(random, 4, 9),
        grad_accumulation_dtype=drawn["sums"],
        restore_grads=drawn["gradients"] == "restored",
    )
