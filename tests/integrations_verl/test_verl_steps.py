"""Steps of forkpoint's engines in verl, beside those of verl's own FSDP2 engine, on CPUs."""

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
    both,
    difference,
    first_step,
    gradients,
    loss_function,
    make_engine,
    mini_batch,
    padded_rows,
    rows_of,
    save_multimodal,
    warned,
)
from torch import distributed as dist
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size
from verl.workers.utils.padding import no_padding_2_padding

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.hosts.transformers.stock import TransformersStock
from parallel.processes import RankFailed, run_ranks

MOST = 2e-6
"""Of gradients in float32, relative to their norm."""
ROUNDS_MORE = ("qwen3_5", "qwen3_5_moe", "gemma4")
"""Families whose recurrences or norms multiply rounding."""
FAIL_IN_VERL = {
    "qwen2_vl": "'BaseModelOutputWithPooling' object has no attribute 'mean'",
    "qwen2_5_vl": "'BaseModelOutputWithPooling' object has no attribute 'mean'",
    "glm4v": r"grid_sampler_2d\.default got mixed",
}
"""Families with which verl's engine fails on rows of text, and the error: verl runs the encoder on
an image of zeros. With the forwards of transformers the same engine works."""


def split(rows: dict[str, Any], *sizes: int) -> list[dict[str, Any]]:
    """The rows of each rank."""
    found, begin = [], 0
    for size in sizes:
        found.append(rows_of(rows, list(range(begin, begin + size))))
        begin += size
    return found


CASES = {
    "token means, dynamic": Case(),
    "sequence means, fixed": Case(dynamic=False, loss_agg_mode="seq-mean-token-mean"),
    "temperatures, KL, entropy": Case(temperatures=True, kl=True, entropy=True, entropy_coeff=0.01),
    "LoRA, checkpointing": Case(lora=True, checkpointing=True, kl=True),
    "gspo": Case(loss_mode="gspo", clip=3e-4, loss_agg_mode="seq-mean-token-mean"),
    "critic": Case(value=True),
    "offload": Case(engine={"param_offload": True, "optimizer_offload": True}),
    "without padding": Case(nested=True, kl=True, entropy=True),
    "critic without padding": Case(nested=True, value=True),
    "fine-tuning": Case(supervised=True),
    "distillation": Case(distillation="k3", kl=True),
    "one microbatch": Case(microbatch_tokens=None),
    "one row": Case(groups=1, size=1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_gradients_are_those_of_stock(name: str, folder: Path) -> None:
    case = CASES[name]
    (found,) = run_ranks(1, both, case, folder, [padded_rows(case)])
    assert found["error"] <= MOST
    same_metrics(found)
    computed, given = found["shared"]["tokens"]
    assert computed < (0.7 if case.groups > 1 else 1) * given
    several = case.microbatch_tokens is not None and case.groups > 1
    assert (found["shared"]["microbatches"] > 1) is several


def same_metrics(found: dict[str, Any]) -> None:
    """verl's metrics by micro-batch, and forkpoint's besides."""
    stock, shared = found["stock"]["metrics"], found["shared"]["metrics"]
    own = {name for name in shared if name.startswith("forkpoint/")}
    assert own == {f"forkpoint/{n}" for n in ("computed_tokens", "given_tokens", "bound")}
    assert shared.keys() - own == stock.keys()
    for name, values in stock.items():
        assert shared[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name
    assert found["shared"]["loss"] == pytest.approx(found["stock"]["loss"], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("token means, dynamic", (7, 5)),
        ("temperatures, KL, entropy", (9, 3)),
        ("LoRA, checkpointing", (6, 6)),
    ],
)
def test_two_ranks_have_the_gradients_of_stock(
    name: str, sizes: tuple[int, ...], folder: Path
) -> None:
    case = CASES[name]
    for found in run_ranks(2, both, case, folder, split(padded_rows(case), *sizes)):
        assert found["error"] <= MOST
        same_metrics(found)


def ulysses(case: Case) -> Case:
    """The case where two ranks split sequences, for which verl wants rows without padding."""
    return replace(
        case,
        engine={**case.engine, "ulysses_sequence_parallel_size": 2},
        model={**case.model, "use_remove_padding": True},
        sharing="group",
    )


ULYSSES = {
    "temperatures, KL, entropy": (9, 3),
    "LoRA, checkpointing": (12,),
    "gspo": (12,),
    "critic": (12,),
}
"""Rows of each data rank."""


@pytest.mark.parametrize("name", ULYSSES)
def test_ulysses_ranks_have_the_gradients_of_one_process(name: str, folder: Path) -> None:
    case, sizes, path = CASES[name], ULYSSES[name], folder / f"{name}.pt"
    rows = padded_rows(case)
    (loss,) = run_ranks(1, saved_step, case, folder, [rows], path)
    every = run_ranks(2 * len(sizes), ulysses_step, case, folder, split(rows, *sizes), path)
    for found in every:
        assert found["error"] <= MOST and found["scores"] <= 1e-5
        assert found["sizes"] == {1}
        assert not found["said"]
        computed, given = found["tokens"]
        assert computed < 0.8 * given
    # Each data rank has its own part of the loss, and verl's micro-batches are twice as long.
    assert sum(found["loss"] for found in every[::2]) == pytest.approx(loss, rel=1e-5)


def saved_step(case: Case, folder: Path, rows: list[dict[str, Any]], path: Path) -> float:
    """The loss of verl's own engine in its first step; a file has its gradients and scores."""
    found = first_step(case, folder, STOCK, rows)
    torch.save((found["gradients"], scores_of(case, folder, STOCK, rows)), path)
    return sum(found["loss"])


def scores_of(case: Case, folder: Path, vendor: str, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Log-probs or values of this data rank's rows before any update."""
    engine = make_engine(case, folder, vendor)
    mine = rows[engine.get_data_parallel_rank()]
    data = mini_batch(case, mine)
    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    values = no_padding_2_padding(output["values" if case.value else "log_probs"], data)
    return values * mine["response_mask"]


def ulysses_step(
    case: Case, folder: Path, rows: list[dict[str, Any]], path: Path
) -> dict[str, Any]:
    """The first step of forkpoint's engine and its scores, beside those of a file."""
    sizes: set[int] = set()
    logits = TransformersStock.logits

    def seen(self: TransformersStock, *args: Any, **kwargs: Any) -> Any:
        sizes.add(get_ulysses_sequence_parallel_world_size())
        return logits(self, *args, **kwargs)

    TransformersStock.logits = seen  # type: ignore[method-assign]
    case = ulysses(case)
    messages = warned()
    found = first_step(case, folder, SHARED, rows)
    scores = scores_of(case, folder, SHARED, rows)
    gradients, whole = torch.load(path)
    begin = sum(len(part["prompts"]) for part in rows[: dist.get_rank() // 2])
    return {
        "error": difference(found["gradients"], gradients),
        "scores": float((scores - whole[begin : begin + len(scores)]).abs().max()),
        "loss": sum(found["loss"]) / len(rows),
        "tokens": found["tokens"],
        "sizes": sizes,
        "said": messages,
    }


@pytest.mark.parametrize("name", ["gspo", "critic"])
def test_prompts_of_two_ranks_are_exchanged(name: str, folder: Path) -> None:
    case = replace(CASES[name], split="exchange")
    scattered = rows_of(padded_rows(case), [*range(0, 12, 2), *range(1, 12, 2)])
    for found in run_ranks(2, both, case, folder, split(scattered, 6, 6)):
        assert found["error"] <= MOST
        assert found["shared"]["split"] == "exchange"
        same_metrics(found)


LOSSES = {
    "vanilla": "token",
    "dppo_tv": "token",
    "gspo": "rollout",
    "kl_cov": "joint",
    "geo_mean": "rollout",
    "cispo": "token",
}
"""By verl's loss_mode: what the loss is found to be a sum over."""


@pytest.mark.parametrize("mode", LOSSES)
def test_losses_are_taken_apart_as_far_as_they_can_be(mode: str, folder: Path) -> None:
    # No clipping, which would leave few gradients to compare.
    case = Case(loss_mode=mode, clip=10.0 if mode != "gspo" else 3e-4)
    (found,) = run_ranks(1, both, case, folder, [padded_rows(case)])
    assert found["error"] <= MOST
    assert found["shared"]["decided"] == LOSSES[mode]
    same_metrics(found)


def test_a_loss_that_was_taken_apart_by_mistake_is_run_again(folder: Path) -> None:
    """The trial of kl_cov finds no dependent terms with these rows."""
    rows = padded_rows(Case())
    rows["response_mask"][:6] = 0
    case = Case(loss_mode="kl_cov", loss_agg_mode="seq-mean-token-mean")
    for found in run_ranks(2, both, case, folder, split(rows, 6, 6)):
        assert found["error"] <= MOST
        assert found["shared"]["decided"] == "joint"
        same_metrics(found)


def test_bfloat16_is_as_near_to_float32_as_stock_is(folder: Path) -> None:
    case = Case(groups=8, size=4)
    found = run_ranks(1, bfloat16_errors, case, folder, padded_rows(case))
    stock, shared = found[0]
    assert 1e-3 < stock < 0.1
    assert shared <= 1.1 * stock


def bfloat16_errors(case: Case, folder: Path, rows: dict[str, Any]) -> tuple[float, float]:
    expected = first_step(case, folder, STOCK, [rows])["gradients"]
    half = replace(case, dtype="bf16")
    stock, shared = (
        difference(first_step(half, folder, vendor, [rows])["gradients"], expected)
        for vendor in (STOCK, SHARED)
    )
    return stock, shared


def failing_on_one_rank(case: Case, folder: Path, rows: list[dict[str, Any]]) -> Any:
    """The error that a rank raises where the loss of rank 1 fails, and how far the next step is
    from one before."""
    rank = dist.get_rank()
    engine = make_engine(case, folder, SHARED)
    good = loss_function(case)

    def bad(**kwargs: Any) -> Any:
        if rank == 1:
            raise KeyError("the loss of this rank is wrong")
        return good(**kwargs)

    told = {"global_batch_size": sum(len(one["prompts"]) for one in rows)}
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(mini_batch(case, rows[rank], **told), good)
        expected = gradients(engine)
        engine.optimizer_zero_grad()
        try:
            # The loss is known, so that it fails within the step.
            engine._decided = (bad, False, "token")
            engine.forward_backward_batch(mini_batch(case, rows[rank], **told), bad)
            raised = None
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        empty = all(p.grad is None for p in engine.module.parameters())
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(mini_batch(case, rows[rank], **told), good)
        return raised, empty, difference(gradients(engine), expected)


def test_a_loss_that_fails_on_one_rank_fails_on_all(folder: Path) -> None:
    case = Case()
    rows = split(padded_rows(case), 6, 6)
    first, second = run_ranks(2, failing_on_one_rank, case, folder, rows)
    assert second[0].startswith("KeyError: 'the loss of this rank is wrong'")
    assert first[0].startswith("RankError: rank 1 failed")
    assert first[1] and second[1]
    assert max(first[2], second[2]) <= 1e-7


def said(case: Case, folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Warnings of the logger `forkpoint` in two steps of this rank."""
    messages = warned()
    engine = make_engine(case, folder, SHARED)
    mine = rows[dist.get_rank()]
    with engine.train_mode():
        for _ in range(2):
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(mini_batch(case, mine), loss_function(case))
    return messages


@pytest.mark.parametrize("together", [True, False])
def test_groups_that_are_scattered_are_told_once(together: bool, folder: Path) -> None:
    case = Case(split="replicate")
    rows = padded_rows(case)
    order = list(range(12)) if together else [*range(0, 12, 2), *range(1, 12, 2)]
    first, second = run_ranks(2, said, case, folder, split(rows_of(rows, order), 6, 6))
    assert not second
    assert len(first) == (0 if together else 1)
    for message in first:
        assert "4 of 4 prompts of a mini-batch have rollouts on several ranks" in message
        assert "trainer.v1.trainer_mode=forkpoint_sync" in message
        assert "actor_rollout_ref.actor.use_prefix_grouper=true" in message


def test_a_row_without_a_prompt_is_refused_on_all_ranks(folder: Path) -> None:
    case = Case()
    rows = split(padded_rows(case), 6, 6)
    lost = rows[1]["attention_mask"].clone()
    lost[2, :24] = 0
    rows[1]["attention_mask"] = lost
    rows[1]["position_ids"] = (lost.cumsum(1) - 1).clamp(min=0)
    with pytest.raises(RankFailed) as found:
        run_ranks(2, first_step, case, folder, SHARED, rows)
    text = str(found.value)
    assert "RolloutError: row 2 of a mini-batch has" in text
    assert "RankError: rank 1 failed" in text


def beside_verls(case: Case, folder: Path, rows: list[dict[str, Any]]) -> float:
    """As `both`. Once verl's own engine has been made, forkpoint's is refused, made before or
    after, and gradients stay as they were."""
    before = make_engine(case, folder, SHARED)
    found = both(case, folder, rows)
    says = r"has replaced Qwen3_5GatedDeltaNet\.forward .* before the first engine of the process"
    with pytest.raises(UnsupportedError, match=says):
        make_engine(case, folder, SHARED)
    with before.train_mode(), pytest.raises(UnsupportedError, match=says):
        before.forward_backward_batch(mini_batch(case, rows[0]), loss_function(case))
    assert all(parameter.grad is None for parameter in before.module.parameters())
    return found["error"]


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen3_vl", None),
        ("qwen3_vl", 4),
        *(
            pytest.param(
                family, 4 if family.startswith(("qwen", "glm")) else None, marks=pytest.mark.slow
            )
            for family in MULTIMODAL
            if family != "qwen3_vl"
        ),
    ],
)
def test_text_of_a_multimodal_model(family: str, axes: int | None, tmp_path: Path) -> None:
    """As verl loads it. Positions have axes, also of text, if verl takes them from the model's
    `get_rope_index`, as for Qwen and GLM."""
    save_multimodal(family, tmp_path)
    case = Case()
    rows = padded_rows(case)
    if axes:
        rows["position_ids"] = rows["position_ids"][:, None].expand(-1, axes, -1).contiguous()
    if family in FAIL_IN_VERL:
        with pytest.raises(RankFailed, match=FAIL_IN_VERL[family]):
            run_ranks(1, first_step, case, tmp_path, STOCK, [rows])
    (found,) = run_ranks(1, both, case, tmp_path, [rows], family in FAIL_IN_VERL)
    most = 5 * MOST if family in ROUNDS_MORE else MOST
    assert found["error"] <= most, found["error"]
    same_metrics(found)


def test_layers_that_verl_replaces(tmp_path: Path) -> None:
    save_multimodal("qwen3_5", tmp_path)
    case = Case()
    (error,) = run_ranks(1, beside_verls, case, tmp_path, [padded_rows(case)], limit_s=120.0)
    assert error <= 5 * MOST  # recurrences round more
