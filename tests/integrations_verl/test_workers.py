"""Updates through verl's TrainingWorker, as its trainers run them, and reference engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

import torch
from harness import (
    SHARED,
    STOCK,
    Case,
    make_engine,
    make_worker,
    mini_batch,
    padded_rows,
    plain,
    rows_of,
)
from torch import distributed as dist
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from parallel.processes import run_ranks


def updates(case: Case, folder: Path, vendor: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Old log-probs, four updates with them (two mini-batches, two epochs), and log-probs after.

    A critic's values in place of log-probs.
    """
    mine = dict(rows[dist.get_rank()])
    count = sum(len(one["prompts"]) for one in rows)
    worker = make_worker(case, folder, vendor)

    def scored() -> torch.Tensor:
        data = mini_batch(case, mine, compute_loss=False, calculate_entropy=not case.value)
        for key in ("max_token_len_per_gpu", "micro_batch_size_per_gpu"):
            tu.pop(data, key)
        found = worker.infer_batch(data)
        names = ("values",) if case.value else ("log_probs", "entropy")
        padded = [no_padding_2_padding(tu.get(found, name), data) for name in names]
        return torch.stack([x * mine["response_mask"] for x in padded])

    before = scored()
    if not case.value:
        mine["old_log_probs"] = before[0]
    data = mini_batch(
        case,
        mine,
        mini_batch_size=count // 2,
        epochs=2,
        seed=7,
        dataloader_kwargs={"shuffle": False},
        global_batch_size=count // 2,
    )
    output = worker.train_mini_batch(data)
    return {
        "before": before.tolist(),
        "metrics": plain(tu.get(output, "metrics")),
        "after": scored().tolist(),
    }


def both_updates(case: Case, folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {vendor: updates(case, folder, vendor, rows) for vendor in (STOCK, SHARED)}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case(engine={"param_offload": True, "optimizer_offload": True}, dynamic=False), 1),
        (Case(lora=True, checkpointing=True), 1),
        (Case(value=True), 1),
        (Case(entropy=True, kl=True), 2),
    ],
    ids=["offload", "LoRA", "critic", "two ranks"],
)
def test_four_updates_have_the_metrics_of_stock(case: Case, ranks: int, folder: Path) -> None:
    rows = padded_rows(case)
    size = len(rows["prompts"]) // ranks
    each = [rows_of(rows, list(range(r * size, r * size + size))) for r in range(ranks)]
    for found in run_ranks(ranks, both_updates, case, folder, each, limit_s=120.0):
        stock, shared = found[STOCK], found[SHARED]
        own = {name for name in shared["metrics"] if name.startswith("forkpoint/")}
        assert len(own) == 3
        compared = shared["metrics"].keys() - own
        assert compared == stock["metrics"].keys()
        assert {"loss", "grad_norm", "lr"} <= compared
        for name in compared:
            if name.startswith("perf/") or name == "mfu":
                continue  # times and memory
            assert shared["metrics"][name] == pytest.approx(
                stock["metrics"][name], rel=1e-5, abs=1e-5
            ), name
        assert len(shared["metrics"]["grad_norm"]) == 4
        for when in ("before", "after"):
            apart = torch.tensor(shared[when]) - torch.tensor(stock[when])
            assert apart.abs().max() <= 1e-5 * (1 if when == "before" else 5)
        moved = torch.tensor(stock["after"]) - torch.tensor(stock["before"])
        assert moved.abs().max() > 1e-3


def reference_scores(case: Case, folder: Path, rows: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Log-probs of an engine that only scores, and of verl's actor engine before any update."""
    found = []
    for vendor in (STOCK, SHARED):
        only = vendor == SHARED
        engine = make_engine(replace(case, engine={"forward_only": only}), folder, vendor)
        data = mini_batch(case, rows)
        with engine.eval_mode():
            output = engine.infer_batch(data)
        values = no_padding_2_padding(output["model_output"]["log_probs"], data)
        found.append((values * rows["response_mask"]).tolist())
    return found[0], found[1], engine.is_param_offload_enabled


def test_a_reference_engine_keeps_its_parameters_on_the_cpu_between_passes(folder: Path) -> None:
    case = Case(entropy=True)
    ((expected, found, offloads),) = run_ranks(1, reference_scores, case, folder, padded_rows(case))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    assert offloads


def without_adapter(case: Case, folder: Path, rows: dict[str, Any]) -> list[float]:
    """How far log-probs without the adapter are from the base model's, and from those with it."""
    base = make_engine(replace(case, lora=False), folder, STOCK)
    engine = make_engine(case, folder, SHARED)
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.05)
    scores = []
    for used, adapter in ((base, True), (engine, False), (engine, True)):
        data = mini_batch(case, rows)
        with used.eval_mode():
            if adapter:
                output = used.infer_batch(data)
            else:
                with used.disable_adapter():
                    output = used.infer_batch(data)
        values = no_padding_2_padding(output["model_output"]["log_probs"], data)
        scores.append(values * rows["response_mask"])
    return [float((x - scores[0]).abs().max()) for x in scores[1:]]


def test_a_reference_pass_without_the_adapter_is_the_base_model(folder: Path) -> None:
    case = Case(lora=True)
    (found,) = run_ranks(1, without_adapter, case, folder, padded_rows(case))
    assert found[0] <= 1e-5
    assert found[1] > 1e-2


def squares_of(case: Case, folder: Path, rows: dict[str, Any]) -> list[Any]:
    """Sums of squared probabilities of verl's engine and of forkpoint's, with log-probs."""
    found = []
    for vendor in (STOCK, SHARED):
        engine = make_engine(case, folder, vendor)
        data = mini_batch(case, rows, calculate_sum_pi_squared=True)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]
        each = [no_padding_2_padding(output[n], data) for n in ("sum_pi_squared", "log_probs")]
        found.append(torch.stack([x * rows["response_mask"] for x in each]).tolist())
    return found


def test_sums_of_squared_probabilities_are_those_of_stock(folder: Path) -> None:
    case = Case(temperatures=True, entropy=True)
    ((expected, found),) = run_ranks(1, squares_of, case, folder, padded_rows(case))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert torch.tensor(expected)[0].max() > 0
