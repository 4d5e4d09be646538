"""Options of the library and of the command line whose values are not allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from commands import changed, made_up_rollouts
from steps import forked_batch

import forkpoint
from bad_inputs.kind import Kind
from bad_inputs.rollouts import policy
from forkpoint import Config, Policy, losses, save_rollouts, wrap
from forkpoint.errors import ConfigError
from forkpoint.losses import Denominators
from forkpoint.testing import tiny_model

REPLAY = ("replay", "ok.jsonl", "--model", "ok.json")
GRPO = losses.GRPO()


def option_kind(
    message: str, call: Callable[[], object] | None = None, *argv: str, **others: Any
) -> Kind:
    return Kind(error=ConfigError, message=message, call=call, argv=argv, **others)


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def even_rollouts() -> None:
    save_rollouts("even.jsonl", [changed(r, advantage=0.0) for r in made_up_rollouts()])


OPTIONS = (
    option_kind(
        "ranks is 0; it takes a whole number of at least 1: how many",
        lambda: forkpoint.place(forked_batch(), ranks=0, model=None),
        *("plan", "ok.jsonl", "--ranks", "0"),
    ),
    option_kind(
        "ranks is 1000000; at most 131,072 are placed. Give a smaller number.",
        lambda: forkpoint.place(forked_batch(), ranks=10**6, model=None),
        *("plan", "ok.jsonl", "--ranks", "1000000"),
    ),
    option_kind(
        "attention_kernel is 'flashy'; allowed are auto, fa4, padded, cudnn, fa2, cpu_flash, ref",
        None,
        *("plan", "ok.jsonl", "--attention-kernel", "flashy"),
    ),
    *(
        option_kind(
            f"recurrence_kernel is '{command}'; allowed are auto, fla, chunked.",
            lambda command=command: policy().with_config(recurrence_kernel=command),
            *(command, "ok.jsonl", "--model", "ok.json", "--recurrence-kernel", command),
        )
        for command in ("plan", "verify", "replay")
    ),
    option_kind(
        f"memory_budget is {'9' * 77}...; it takes a number of bytes of at least 1, or text",
        lambda: Config(memory_budget="9" * 5000),
        *("plan", "ok.jsonl", "--memory-budget", "9" * 5000),
    ),
    option_kind(
        "model is 7 of type int",
        lambda: forkpoint.place(forked_batch(), ranks=2, model=7),  # pyright: ignore[reportArgumentType]
    ),
    option_kind(
        "sharing is 'groups'; allowed are 'auto', 'none', 'group', 'tree'.",
        lambda: Config(sharing="groups"),  # type: ignore[arg-type]
    ),
    option_kind(
        "max_microbatch_tokens is 0; it takes a whole number of at least 1.",
        lambda: Config(max_microbatch_tokens=0),
    ),
    option_kind(
        "attention_kernel is 5; it takes a kernel's name or 'auto'.",
        lambda: Config(attention_kernel=5),  # type: ignore[arg-type]
    ),
    option_kind(
        "restore_grads is 'no'; allowed are True, False.",
        lambda: Config(restore_grads="no"),  # type: ignore[arg-type]
    ),
    option_kind(
        "config is {'sharing': 'tree'} of type dict",
        lambda: wrap(tiny_model("llama"), {"sharing": "tree"}),  # type: ignore[arg-type]
    ),
    option_kind(
        "the model was wrapped with compile_blocks=None, and with_config",
        lambda: policy().with_config(compile_blocks=True),
    ),
    option_kind(
        "gather is 'step', and this rank has all of the model's weights",
        lambda: policy().with_config(gather="step"),
    ),
    option_kind(
        "split is 'exchange', and this rank trains its model alone",
        lambda: policy().with_config(split="exchange"),
    ),
    option_kind(
        "split is 'exchange' and prefix_cache is 'host'",
        lambda: Config(split="exchange", prefix_cache="host"),
    ),
    option_kind(
        "offload_folder is '/scratch' and host_memory is 'auto'; the folder is for data beyond",
        lambda: Config(offload_folder="/scratch"),
    ),
    option_kind(
        "offload_folder is 5; it takes the path of a folder, or None.",
        lambda: Config(offload_folder=5, host_memory=1),  # type: ignore[arg-type]
    ),
    *(
        option_kind(
            f"offload_folder is '{missing}', and there is no such folder. Create it, or",
            lambda missing=missing: policy().with_config(host_memory=1, offload_folder=missing),
        )
        for missing in ("", "ok.json", "missing")
    ),
    option_kind(
        "max_seconds is nan; it takes a number above 0.",
        None,
        *("calibrate", "--model", "ok.json", "--max-seconds", "nan"),
    ),
    option_kind(
        "output is the folder out. Give the path of a file to write.",
        None,
        *("calibrate", "--model", "ok.json", "--output", "out"),
        prepare=lambda _: Path("out").mkdir(),
    ),
    option_kind(
        "output is ok.json/a/x, and ",
        None,
        *("calibrate", "--model", "ok.json", "--output", "ok.json/a/x"),
    ),
    option_kind(
        "lanes is ok.json/a/x, and ",
        None,
        *("plan", "ok.jsonl", "--model", "ok.json", "--stages", "2", "--lanes", "ok.json/a/x"),
    ),
    option_kind(
        "split is 'exchange' and boundary is 'within'",
        lambda: Config(split="exchange", boundary="within"),
    ),
    option_kind(
        "denominators is {'tokens': 8.0} of type dict",
        lambda: policy().forward_backward(
            forked_batch(),
            GRPO,
            denominators={"tokens": 8.0},  # type: ignore[arg-type]
        ),
    ),
    option_kind(
        "denominators.tokens is -1; it takes a finite number of at least 0.",
        lambda: Denominators(tokens=-1, rollouts=1, groups=1),
    ),
    option_kind("loss is 'reinforce'", None, *("plan", "ok.jsonl", "--loss", "reinforce")),
    option_kind(
        "the loss dr_grpo needs max_tokens, which has no default",
        None,
        *(*REPLAY, "--loss", "dr_grpo,clip=0.1"),
    ),
    option_kind(
        "the loss dpo has no option bata; it takes beta, variant, label_smoothing, "
        "length_normalized.",
        None,
        *(*REPLAY, "--loss", "dpo,bata=0.2"),
    ),
    option_kind(
        "loss has 'kl', which is not OPTION=VALUE or repeats an option",
        None,
        *(*REPLAY, "--loss", "grpo,kl"),
    ),
    option_kind(
        "groups_per_step is 4, and the rollouts have 3 groups",
        None,
        *(*REPLAY, "--groups-per-step", "4"),
    ),
    option_kind(
        "device is 'cuda', but torch finds no CUDA device",
        None,
        *(*REPLAY, "--device", "cuda"),
        prepare=lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False),
    ),
    option_kind(
        "out of device memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "Lower --max-microbatch-tokens, or add --gradient-checkpointing.",
        None,
        *REPLAY,
        prepare=lambda patch: patch.setattr(Policy, "forward_backward", out_of_memory),
    ),
    option_kind(
        "no group of even.jsonl gives grpo a gradient, so there is nothing",
        None,
        *("verify", "even.jsonl", "--model", "ok.json"),
        prepare=lambda _: even_rollouts(),
    ),
)
