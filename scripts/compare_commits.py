"""Compares steps of two commits: gradients, losses, log-probs and the order of operations.

    python scripts/compare_commits.py OLD          a commit against the working tree
    python scripts/compare_commits.py OLD NEW      two commits
    python scripts/compare_commits.py OLD --match qwen3 gspo

Each commit's `src` runs the same steps in a process of its own, in float64 on the CPU, on the same
weights and batches. An outcome is bitwise equal; within 1e-13 relative to the norm of all numbers
of its kind; or worse. Exits with 1 if an outcome is worse, or if one side alone refuses a step.
"""

import argparse
import contextlib
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BAR = 1e-13
WINDOW = 7
MOE = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 24,
    "num_local_experts": 0,
}
STATES = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE,
    "qwen3_5_text": {**DELTA, "layer_types": STATES},
    "qwen3_next": {**DELTA, **MOE, "shared_expert_intermediate_size": 12, "layer_types": STATES},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    *(
        {"sharing": sharing, "boundary": boundary}
        for sharing, boundary in product(("none", "group", "tree"), ("within", "across", "mixed"))
    ),
    {"sharing": "tree", "boundary": "within", "max_microbatch_tokens": 24},
    {"sharing": "tree", "boundary": "mixed", "max_microbatch_tokens": 24},
    *(
        {"sharing": "tree", "boundary": "across", "max_microbatch_tokens": 8, **more}
        for more in (
            {},
            {"activations": "offload"},
            {"activations": "recompute"},
            {"checkpointing": "full"},
            {"attention_kernel": "reference"},
            {"head_chunk_tokens": 3},
            {"grad_accumulation_dtype": "float32"},
        )
    ),
)
LOSSES = ("grpo", "gspo", "dpo", "entropy", "score")
Outcome = tuple[str, dict[str, np.ndarray], tuple[str, ...]]
"""The refusal, if there was one; gradients, the loss and log-probs; the events."""


def cases() -> list[tuple[str, dict[str, Any], str]]:
    """Family, options and loss of every step."""
    return list(product(FAMILIES, OPTIONS, LOSSES))


def name_of(case: tuple[str, dict[str, Any], str]) -> str:
    family, options, loss = case
    return f"{family}, {loss}, {', '.join(f'{k}={v}' for k, v in options.items()) or 'default'}"


# One side ----------------------------------------------------------------------------------------


def make_batch() -> Any:
    """Pairs of two prompts: forks, a prefix of another, equal ones, a hole in a mask."""
    from forkpoint import Rollout, RolloutBatch

    rng = np.random.default_rng(0)
    rollouts = []
    for group, length in enumerate((9, 5)):
        prompt, first, second = (rng.integers(0, 61, n).tolist() for n in (length, 4, 3))
        endings = [first + second + rng.integers(0, 61, n).tolist() for n in (5, 2, 0)]
        endings += [endings[2], first + rng.integers(0, 61, 4).tolist(), [rng.integers(0, 61)]]
        for member, ending in enumerate(endings):
            mask = [0] * len(prompt) + [1] * len(ending)
            mask[len(prompt) + 1 : len(prompt) + 2] = [0][: len(ending) - 1]
            tokens = prompt + ending
            rollouts.append(
                Rollout(
                    tokens,
                    mask,
                    float(member % 2),
                    old_logprobs=-4 + 0.1 * rng.normal(size=len(tokens)),
                    reference_logprobs=-4 + 0.1 * rng.normal(size=len(tokens)),
                    group_id=f"{group} {member // 2}",
                )
            )
    return RolloutBatch(rollouts)


def make_loss(name: str) -> Any:
    from forkpoint import losses

    class EntropyGRPO(losses.GRPO):
        needs_entropy = True

        def __call__(self, outputs: Any, batch: Any) -> Any:
            return super().__call__(outputs, batch) - 0.1 * batch.total(outputs.entropies, "token")

    made = {
        "grpo": losses.GRPO(clip=0.2, clip_high=0.28, kl=0.05),
        "gspo": losses.GSPO(clip=0.05, clip_high=0.06),
        "dpo": losses.DPO(beta=0.3),
        "entropy": EntropyGRPO(),
    }
    return made[name]


def run(model: Any, options: dict[str, Any], loss: str) -> Outcome:
    import forkpoint
    from forkpoint.testing import lifted_upcasts

    model.zero_grad()
    limits = {"memory_budget": None, "checkpointing": "none", "self_check": False}
    try:
        policy = forkpoint.wrap(model, forkpoint.Config(**{**limits, **options}))
        with lifted_upcasts(model):
            if loss == "score":
                result: Any = policy.score(make_batch(), entropy=True)
            else:
                result = policy.forward_backward(make_batch(), make_loss(loss))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0], {}, ()
    numbers = {name: x.detach().numpy().copy() for name, x in result.per_token.items()}
    if loss != "score":
        numbers["loss"] = np.array(float(result.loss))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            numbers[f"gradient {name}"] = parameter.grad.numpy().copy()
    return "", numbers, tuple(result.events)


def side() -> None:
    """Positions of cases from stdin to outcomes on stdout; what else is printed goes to stderr."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch

    from forkpoint.testing import tiny_model

    torch.set_num_threads(1)
    family, model, every = "", None, cases()
    for position in pickle.load(sys.stdin.buffer):
        wanted, options, loss = every[position]
        if wanted != family:
            family, model = wanted, tiny_model(wanted, **FAMILIES[wanted]).train()
            model.set_experts_implementation("eager")  # the default's product has no float64
        pickle.dump(run(model, options, loss), output)
        output.flush()


# Both sides --------------------------------------------------------------------------------------


@contextlib.contextmanager
def source_of(commit: str | None) -> Iterator[Path]:
    """A folder with the commit's library; the working tree's own without a commit."""
    if commit is None:
        yield ROOT / "src"
        return
    archive = subprocess.check_output(["git", "archive", commit, "src"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder) / "src"


def outcomes(source: Path, chosen: list[int]) -> Iterator[Outcome]:
    """The cases at one side, as they are done."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, "--side"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        pickle.dump(chosen, process.stdin)
        process.stdin.close()
        for _ in chosen:
            yield pickle.load(process.stdout)


def difference(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> float:
    """The largest of the relative differences, 0 only if all is bitwise equal."""
    layouts = ({name: (x.shape, x.dtype) for name, x in side.items()} for side in (old, new))
    if next(layouts) != next(layouts):
        return float("inf")
    if all(x.tobytes() == new[name].tobytes() for name, x in old.items()):
        return 0.0
    worst = 0.0
    for kind in {name.split(" ")[0] for name in old}:
        names = [name for name in old if name.split(" ")[0] == kind]
        if any((np.isnan(old[n]) != np.isnan(new[n])).any() for n in names):
            return float("inf")
        # Log-probs of rollouts that did not run are NaN.
        moved = np.sqrt(sum(float(np.nansum(np.square(old[n] - new[n]))) for n in names))
        total = np.sqrt(sum(float(np.nansum(np.square(old[n]))) for n in names))
        ratio = moved / total if total else float("inf") * bool(moved)
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return max(worst, np.nextafter(0, 1))


def verdict(old: Outcome, new: Outcome) -> str:
    """How a case came out: "bitwise", "within", or what is worse."""
    if old[0] or new[0]:
        same = bool(old[0]) == bool(new[0])
        return "refused" if same else f"old: {old[0] or 'ran'}; new: {new[0] or 'ran'}"
    found = difference(old[1], new[1])
    return "bitwise" if not found else "within" if found <= BAR else f"off by {found:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--match", nargs="*", default=[], help="texts that names of cases have")
    given = parser.parse_args()
    every = cases()
    chosen = [n for n, case in enumerate(every) if all(t in name_of(case) for t in given.match)]
    counts: Counter[str] = Counter()
    with source_of(given.old) as old, source_of(given.new) as new:
        pairs = zip(outcomes(old, chosen), outcomes(new, chosen), strict=True)
        for number, (before, after) in zip(chosen, pairs, strict=True):
            found = verdict(before, after)
            known = found in ("bitwise", "within", "refused")
            counts[found if known else "worse"] += 1
            if found != "bitwise" and found != "refused":
                print(f"{name_of(every[number])}: {found}", flush=True)
            if before[2] != after[2]:
                counts["other events"] += 1
    print(f"{len(chosen)} cases: {dict(counts)}")
    return int(counts["worse"] > 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--side"]:
        side()
    else:
        sys.exit(main())
