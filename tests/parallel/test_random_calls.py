"""Random calls on two and three ranks, in float64, beside dense training in one process.

Wrapper, model, rollouts, options and calls are drawn from a number. More of them:

python tests/parallel/test_random_calls.py --cases 200 --seed 1
python tests/parallel/test_random_calls.py --replay 123
"""

import argparse
import random
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from mixed_calls import MixedCalls
from processes import RankFailed, run_ranks
from scenarios_of_ranks import BAR, DEEP, Scenario, group, sharded, tree
from test_mixed_calls import bucket_views, kept_gathered, replicated, static, unused
from test_ranks import checkpointed, frozen_but, lora
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from forkpoint import Config, Rollout
from forkpoint.losses import GRPO, GSPO, SFT
from forkpoint.testing import tiny_model

REPLICATED = (replicated, static, unused, bucket_views)
CONFIGS = (
    DEEP,
    Config(),
    Config(boundary="within", max_microbatch_tokens=64),
    Config(sharing="tree", boundary="mixed", max_microbatch_tokens=64),
    replace(DEEP, activations="recompute"),
    replace(DEEP, activations="offload", checkpointing="full"),
)
LOSSES = (GRPO(clip=0.2), GSPO(), SFT())


def llama() -> nn.Module:
    return tiny_model("llama")


def qwen() -> nn.Module:
    return tiny_model("qwen3")


def tied() -> nn.Module:
    return tiny_model("qwen3", tie_word_embeddings=True)


class Hybrid:
    """fully_shard over a mesh of two dimensions."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, model: Any) -> nn.Module:
        return sharded(model, mesh=init_device_mesh("cpu", self.sizes, mesh_dim_names=("r", "s")))


def drawn(seed: int) -> tuple[int, Scenario, list[str]]:
    """Ranks, their models and rollouts, and calls."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 2, 3))
    parts: list[list[Rollout]] = []
    for rank in range(ranks):
        part: list[Rollout] = []
        for number in range(rng.choice((0, 1, 1, 2, 3))):
            some = 100 * rank + number
            part += (
                tree(some, rng.randint(1, 4))
                if rng.random() < 0.3
                else group(some, rng.randint(1, 4), rng.randint(2, 24), rng.randint(3, 14))
            )
        parts.append(part)
    if not any(parts):
        parts[rng.randrange(ranks)] = group(0, 2, 9, 5)
    shards = (sharded, sharded, kept_gathered, Hybrid(ranks, 1), Hybrid(1, ranks))
    wrap = rng.choice(rng.choice((REPLICATED, shards)))
    config = rng.choice(CONFIGS)
    if wrap in REPLICATED and rng.random() < 0.2:
        config = replace(config, grad_accumulation_dtype="float32")
    model = rng.choice((qwen, qwen, llama, tied, lora))
    alone = Scenario.alone
    if config.checkpointing != "full" and model is not lora:
        alone = rng.choice((alone, alone, checkpointed, frozen_but(0), frozen_but(-1)))
    scenario = Scenario(
        wrap=wrap,
        config=config,
        rollouts=tuple(parts),
        loss=rng.choice(LOSSES),
        make=model,
        alone=alone,
        gather=rng.choice(("microbatch", "step", "auto")),
    )
    return ranks, scenario, calls_of(rng, wrap in REPLICATED, wrap is static)


def calls_of(rng: random.Random, ddp: bool, static_graph: bool) -> list[str]:
    """Calls in an order that is one of ordinary training: DDP takes one stock forward at a time,
    and reduces after no_sync in the next stock backward, with a static graph not at all."""
    calls: list[str] = []
    pending = unsynced = left = False
    for _ in range(rng.randint(2, 9)):
        names = ["function", "loss", "logprobs", "score", "logprobs_dropped", "fails"]
        if pending:
            names += ["backward", "backward"]
        else:
            names += ["stock", "sum", "sum_of_stock_first", "forward", "dropped"]
            if not (ddp and static_graph):
                names.append("synced" if unsynced else "unsynced")
            if not unsynced and not left:
                names.append("update")
        call = rng.choice(names)
        calls.append(call)
        pending = call == "forward" or (pending and call != "backward")
        unsynced = call == "unsynced" or (unsynced and call != "synced")
        if call in ("stock", "sum", "sum_of_stock_first", "backward"):
            left = unsynced
        elif call in ("function", "loss", "logprobs") and not unsynced and not ddp:
            left = False
    calls += ["backward"] * pending + ["synced"] * unsynced
    left = left or (pending and unsynced)
    return calls + [rng.choice(("stock", "sum"))] * left


def on_one_rank(scenario: Scenario, calls: list[str]) -> tuple[float, list[str]]:
    warnings.simplefilter("ignore")  # of libraries
    mixed = MixedCalls(scenario)
    return mixed.run(calls), mixed.outcomes


def fault(seed: int) -> str:
    """The fault of a case; empty where it is exact."""
    ranks, scenario, calls = drawn(seed)
    try:
        found = run_ranks(ranks, on_one_rank, scenario, calls, limit_s=120)
    except RankFailed as error:
        return str(error)
    worst = max(error for error, _ in found)
    outcomes = {outcome for _, some in found for outcome in some}
    return "" if worst < BAR and outcomes <= {"unchanged"} else f"{worst:.2e}, failed: {outcomes}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_calls_are_those_of_dense_training(seed: int) -> None:
    assert not fault(seed), drawn(seed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random calls of policies on ranks.")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1000, help="of the first; the others follow")
    parser.add_argument("--replay", type=int, metavar="SEED", help="show and check one case")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        print(*drawn(arguments.replay), sep="\n")
        print(found := fault(arguments.replay))
        return int(bool(found))
    begin, failed = time.monotonic(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        if found := fault(seed):
            failed += 1
            print(f"seed {seed}: {drawn(seed)[2]}\n{found}", flush=True)
    print(f"{arguments.cases} cases, {failed} faults, {time.monotonic() - begin:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
