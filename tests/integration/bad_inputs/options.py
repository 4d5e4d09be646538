"""Options of the library and of the command line whose values are not allowed."""

from collections.abc import Callable
from typing import Any

import torch
from steps import forked_batch

import forkpoint
from bad_inputs.kind import Kind
from forkpoint import Config, Policy, losses, wrap
from forkpoint.errors import ConfigError
from forkpoint.losses import Denominators
from forkpoint.testing import tiny_model

REPLAY = ("replay", "ok.jsonl", "--model", "ok.json")
GRPO = losses.GRPO()


def policy() -> Policy:
    return wrap(tiny_model("llama"))


def option_kind(
    name: str,
    call: Callable[[], object] | None = None,
    argv: tuple[str, ...] = (),
    *,
    message: str,
    means: str,
    remedy: str,
    **others: Any,
) -> Kind:
    return Kind(
        name=name,
        error=ConfigError,
        message=message,
        means=means,
        remedy=remedy,
        call=call,
        argv=argv,
        **others,
    )


OPTIONS = (
    option_kind(
        "No ranks",
        lambda: forkpoint.place(forked_batch(), ranks=0, model=None),
        argv=("plan", "ok.jsonl", "--ranks", "0"),
        message="ranks is 0; it takes a whole number of at least 1: how many data-parallel ranks "
        "take part in the step.",
        means="Rollouts are placed on at least one rank.",
        remedy="Give the number of ranks that each have rollouts of their own.",
    ),
    option_kind(
        "A model that is none",
        lambda: forkpoint.place(forked_batch(), ranks=2, model=7),  # pyright: ignore[reportArgumentType]
        message="model is 7 of type int; it takes a ModelShape such as policy.host.shape, the "
        "mapping of a config.json, a name such as 'Qwen/Qwen3-8B', a path, or None to count "
        "tokens.",
        means="Rollouts are placed by what they cost a model of some sizes.",
        remedy="Pass policy.host.shape, or the model's name.",
    ),
    option_kind(
        "Microbatches of no tokens",
        lambda: forkpoint.place(forked_batch(), ranks=2, model=None, max_microbatch_tokens=0),
        message="max_microbatch_tokens is 0; it takes a whole number of at least 1, or None.",
        means="Ranks are balanced by the microbatches that their plans will have.",
        remedy="Pass what the ranks' Config has, or leave it out.",
    ),
    option_kind(
        "A way to split groups that there is not",
        lambda: forkpoint.place(forked_batch(), ranks=2, model=None, split="exchange"),  # pyright: ignore[reportArgumentType]
        message="split is 'exchange'; it takes 'auto' or 'replicate'.",
        means="A placement may count on prompts that are exchanged, or may not.",
        remedy="Pass 'auto' where the ranks' Config(split=) is not 'replicate'.",
    ),
    option_kind(
        "sharing that there is none of",
        lambda: Config(sharing="groups"),  # type: ignore[arg-type]
        message="sharing is 'groups'; allowed are 'auto', 'none', 'group', 'tree'.",
        means="sharing says who may share tokens.",
        remedy="docs/cli.md describes the four.",
    ),
    option_kind(
        "boundary that there is none of",
        lambda: Config(boundary="rows"),  # type: ignore[arg-type]
        message="boundary is 'rows'; allowed are 'auto', 'within', 'across', 'mixed'.",
        means="boundary says where branches lie from their fork on.",
        remedy="docs/cli.md describes the four.",
    ),
    option_kind(
        "max_microbatch_tokens below 1",
        lambda: Config(max_microbatch_tokens=0),
        message="max_microbatch_tokens is 0; it takes a whole number of at least 1.",
        means="A microbatch holds at least one token.",
        remedy="Leave it out, and the planner chooses.",
    ),
    option_kind(
        "A number that no array can count to",
        lambda: Config(max_microbatch_tokens=2**63),
        message="max_microbatch_tokens is above 9223372036854775807, the most that it takes.",
        means="Tokens and bytes are counted in 64 bits.",
        remedy="Leave it out; without a limit the planner chooses.",
    ),
    option_kind(
        "memory_budget below 1",
        lambda: Config(memory_budget=-1),
        message="memory_budget is -1; it takes a number of bytes of at least 1, or text such as "
        "'8GB', '512MiB'. Leave it out for the default.",
        means="A budget is a number of bytes.",
        remedy="Leave it out for no limit.",
    ),
    option_kind(
        "head_chunk_tokens that is no whole number",
        lambda: Config(head_chunk_tokens=0.5),  # type: ignore[arg-type]
        message="head_chunk_tokens is 0.5; it takes a whole number of at least 1.",
        means="It is how many tokens' logits exist at a time.",
        remedy="Leave it out for 1024.",
    ),
    option_kind(
        "attention_kernel that is no name",
        lambda: Config(attention_kernel=5),  # type: ignore[arg-type]
        message="attention_kernel is 5; it takes a kernel's name or 'auto'.",
        means="Kernels are chosen by name.",
        remedy="forkpoint doctor lists those that serve here.",
    ),
    option_kind(
        "compile_blocks that is no truth value",
        lambda: Config(compile_blocks=1),  # type: ignore[arg-type]
        message="compile_blocks is 1; allowed are True, False, None.",
        means="Numbers are not taken for truth values.",
        remedy="Give True or False, or leave it out.",
    ),
    option_kind(
        "restore_grads that is no truth value",
        lambda: Config(restore_grads="no"),  # type: ignore[arg-type]
        message="restore_grads is 'no'; allowed are True, False.",
        means='Text is not taken for a truth value; "no" would be true.',
        remedy="Give True or False.",
    ),
    option_kind(
        "A configuration that is no Config",
        lambda: wrap(tiny_model("llama"), {"sharing": "tree"}),  # type: ignore[arg-type]
        message="config is {'sharing': 'tree'} of type dict; it takes a forkpoint.Config, such as "
        "Config(sharing='tree'), or None.",
        means="Options are checked when a Config is made.",
        remedy="wrap(model, Config(**options)).",
    ),
    option_kind(
        "compile_blocks changed after wrap",
        lambda: policy().with_config(compile_blocks=True),
        message="the model was wrapped with compile_blocks=None, and with_config asks for True; "
        "wrap it again, with Config(compile_blocks=True).",
        means="What is compiled belongs to the wrapped model, which with_config shares.",
        remedy="Call wrap again; the model itself is unchanged.",
    ),
    option_kind(
        "gather on a rank that has all weights",
        lambda: policy().with_config(gather="step"),
        message="gather is 'step', and this rank has all of the model's weights. Leave the option "
        "out, or shard the model with fully_shard.",
        means="gather says when ranks gather weights that fully_shard has sharded.",
        remedy="Config() serves any model; see docs/ranks.md.",
    ),
    option_kind(
        "Prompts exchanged on a rank that is alone",
        lambda: policy().with_config(split="exchange"),
        message="split is 'exchange', and this rank trains its model alone. Leave the option out; "
        "prompts are exchanged by ranks of fully_shard and DistributedDataParallel.",
        means="split says what ranks do about prompts of which several have rollouts.",
        remedy="Config() serves any model; see docs/ranks.md.",
    ),
    option_kind(
        "Prompts exchanged with forks within microbatches",
        lambda: Config(split="exchange", boundary="within"),
        message="split is 'exchange' and boundary is 'within'; prompts that are exchanged lie in "
        "microbatches of their own, around packed ones whose rollouts share. Leave one of the two "
        "options out.",
        means="A prompt that another rank sends is read across a boundary, by rollouts that share.",
        remedy="Leave sharing and boundary to the planner, or split.",
    ),
    option_kind(
        "A scale that is NaN",
        lambda: policy().forward_backward(forked_batch(), GRPO, scale=float("nan")),
        message="scale is nan; it takes a finite number.",
        means="scale multiplies every gradient.",
        remedy="Look at where it is computed; a GradScaler's is scaler.get_scale().",
    ),
    option_kind(
        "A scale that is no number",
        lambda: policy().forward_backward(forked_batch(), GRPO, scale=torch.ones(3)),  # type: ignore
        message="scale is tensor([1., 1., 1.]); it takes a finite number.",
        means="scale is one factor on every gradient.",
        remedy="Put factors of single tokens into the rollouts' weights.",
    ),
    option_kind(
        "Denominators that are none",
        lambda: policy().forward_backward(
            forked_batch(),
            GRPO,
            denominators={"tokens": 8.0},  # type: ignore[arg-type]
        ),
        message="denominators is {'tokens': 8.0} of type dict; it takes "
        "forkpoint.losses.Denominators(tokens=..., rollouts=..., groups=...), or None for "
        "the batch's own counts.",
        means="Losses divide by counts of the whole step, of which there are three.",
        remedy="Denominators(tokens=..., rollouts=..., groups=...).",
    ),
    option_kind(
        "A negative denominator",
        lambda: Denominators(tokens=-1, rollouts=1, groups=1),
        message="denominators.tokens is -1; it takes a finite number of at least 0.",
        means="Denominators are counts.",
        remedy="0 is allowed where there is nothing to divide by.",
    ),
    option_kind(
        "--steps below 1",
        argv=(*REPLAY, "--steps", "0"),
        message="steps is 0; it takes a whole number of at least 1.",
        means="Without a step there is nothing to measure.",
        remedy="Give 1 or more.",
    ),
    option_kind(
        "More groups a step than there are",
        argv=(*REPLAY, "--groups-per-step", "4"),
        message="groups_per_step is 4, and the rollouts have 3 groups; it takes a whole number "
        "from 1 to 3.",
        means="A step would have some group twice.",
        remedy="Give fewer, or a file with more groups.",
    ),
    option_kind(
        "A negative learning rate",
        argv=(*REPLAY, "--lr", "-1"),
        message="lr is -1.0; it takes a finite number of at least 0.",
        means="It would climb.",
        remedy="Turn the sign of the advantages where that is wanted.",
    ),
    option_kind(
        "A learning rate that is not finite",
        argv=(*REPLAY, "--lr", "nan"),
        message="lr is nan; it takes a finite number of at least 0.",
        means="Parameters would be NaN after the first step.",
        remedy="Give a number, such as 1e-5.",
    ),
    option_kind(
        "A GPU that is not there",
        argv=(*REPLAY, "--device", "cuda"),
        prepare=lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False),
        message="device is 'cuda', but torch finds no CUDA device. Use --device cpu, or install a "
        "torch built for CUDA; forkpoint doctor shows what there is.",
        means="There is none, its driver is missing, or torch was built without CUDA.",
        remedy="forkpoint doctor shows versions and devices.",
    ),
    option_kind(
        "Memory that does not suffice",
        argv=REPLAY,
        prepare=lambda patch: patch.setattr(Policy, "forward_backward", out_of_memory),
        message="out of device memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "Lower --max-microbatch-tokens, or add --gradient-checkpointing.",
        means="A microbatch's activations, or the model itself, are larger than what is free.",
        remedy="Microbatches of fewer tokens need less, and the result is the same.",
    ),
    option_kind(
        "Groups that give no gradient",
        argv=("verify", "even.jsonl", "--model", "ok.json"),
        prepare=lambda _: even_rollouts(),
        message="no group of even.jsonl gives grpo a gradient, so there is nothing to compare: no "
        "token is trained, or every advantage is 0. Give other rollouts, or --loss "
        "likelihood.",
        means="Both gradients would be 0, and 0 equals 0 whatever is computed.",
        remedy="Raise --limit where the first groups are even, or take likelihood.",
    ),
)


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def even_rollouts() -> None:
    from commands import changed, made_up_rollouts

    from forkpoint import save_rollouts

    save_rollouts("even.jsonl", [changed(r, advantage=0.0) for r in made_up_rollouts()])
