"""Weights, optimizers and options of forkpoint's engines in verl, besides gradients."""

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
    difference,
    gradients,
    loss_function,
    make_engine,
    mini_batch,
    padded_rows,
    rows_of,
    warned,
)
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from verl.workers.utils.padding import no_padding_2_padding

from forkpoint.errors import ConfigError
from forkpoint.integrations.verl.settings import load_settings
from parallel.processes import run_ranks


def mine(rows: dict[str, Any]) -> dict[str, Any]:
    """This rank's half of the rows, or all of them."""
    size = len(rows["prompts"]) // dist.get_world_size()
    begin = dist.get_rank() * size
    return rows_of(rows, list(range(begin, begin + size)))


def update(engine: Any, case: Case, rows: dict[str, Any]) -> None:
    """One step of the optimizer."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        data = mini_batch(case, mine(rows), global_batch_size=len(rows["prompts"]))
        engine.forward_backward_batch(data, loss_function(case))
        engine.optimizer_step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Weights and states of the optimizer, whole."""
    found = {f"weight {n}": whole(x).detach().clone() for n, x in engine.module.named_parameters()}
    names = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    for number, states in engine.optimizer.state_dict()["state"].items():
        for name, value in states.items():
            found[f"{name} {names[number]}"] = whole(value).clone()
    return found


def saved_and_loaded(case: Case, folder: Path, rows: dict[str, Any], place: Path) -> list[str]:
    """Names of what differs where engines of verl and of forkpoint go on from a checkpoint of
    forkpoint's."""
    engine = make_engine(case, folder, SHARED)
    before = state(engine)
    update(engine, case, rows)
    expected = state(engine)
    assert any(not torch.equal(before[name], expected[name]) for name in before)
    engine.save_checkpoint(str(place), global_step=1)
    different = []
    for vendor in (STOCK, SHARED):
        other = make_engine(case, folder, vendor)
        other.load_checkpoint(str(place), del_local_after_load=False)
        found = state(other)
        assert found.keys() == expected.keys()
        different += [
            f"{vendor}: {name}" for name in found if not torch.equal(found[name], expected[name])
        ]
        update(other, case, rows)
    return different


def test_checkpoints_are_verls(folder: Path, tmp_path: Path) -> None:
    case = Case()
    for different in run_ranks(
        2, saved_and_loaded, case, folder, padded_rows(case), tmp_path, limit_s=120.0
    ):
        assert different == []


def weights_for_rollouts(case: Case, folder: Path, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Names, shapes and dtypes of what verl sends to its inference servers after an update, of each
    vendor; forkpoint's engine sends what the optimizer has left, and not what was there before."""
    found = []
    for vendor in (STOCK, SHARED):
        engine = make_engine(case, folder, vendor)
        before = {n: whole(x).detach().clone() for n, x in engine.module.named_parameters()}
        update(engine, case, rows)
        sent = {name: whole(x).clone() for name, x in engine.get_per_tensor_param()[0]}
        found.append({name: (tuple(x.shape), str(x.dtype)) for name, x in sent.items()})
        if vendor == SHARED and not case.lora:
            assert sent.keys() == before.keys()
            for name, parameter in engine.module.named_parameters():
                assert torch.equal(sent[name], whole(parameter).detach())
                assert not torch.equal(sent[name], before[name])
    return found


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(Case(lora=True), 1), (Case(engine={"param_offload": True}), 2)],
    ids=["LoRA", "offload"],
)
def test_weights_for_rollouts_are_sent_as_by_stock(case: Case, ranks: int, folder: Path) -> None:
    rows = padded_rows(case)
    for stock, shared in run_ranks(ranks, weights_for_rollouts, case, folder, rows, limit_s=120.0):
        assert stock == shared and len(stock) > 10


def different_options(case: Case, folder: Path) -> str:
    """The error of an engine whose ranks read different files."""
    tokens = 64 if dist.get_rank() == 0 else 32
    with pytest.raises(ConfigError) as found:
        make_engine(replace(case, microbatch_tokens=tokens), folder, SHARED)
    return str(found.value)


def test_workers_with_different_options_are_refused(folder: Path) -> None:
    for message in run_ranks(2, different_options, Case(), folder):
        assert message.startswith("the workers have different options: ")
        assert "max_microbatch_tokens=32" in message and "max_microbatch_tokens=64" in message
        assert "FORKPOINT_VERL_CONFIG" in message


def coupled(*, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """The square of a micro-batch's mean."""
    values = no_padding_2_padding(model_output["log_probs"], data)
    return values[data["response_mask"].bool()].mean().square(), {}


def mistaken(case: Case, folder: Path, rows: dict[str, Any]) -> tuple[float, list[str], str]:
    """A step whose loss was wrongly taken apart: the difference of its gradients from those of a
    joint step, and its warnings. The error of such a step after another one."""
    messages = warned()
    engine = make_engine(case, folder, SHARED)
    with engine.train_mode():
        found = []
        for decomposition in ("joint", "token"):
            engine._decided = (coupled, False, decomposition)
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(mini_batch(case, rows), coupled)
            assert engine._decided[2] == "joint"
            found.append(gradients(engine))
        told = list(messages)
        engine._decided = (coupled, False, "token")
        with pytest.raises(ConfigError) as error:
            engine.forward_backward_batch(mini_batch(case, rows), coupled)
        assert all(p.grad is None for p in engine.module.parameters())
    return difference(found[1], found[0]), told, str(error.value)


def test_a_loss_that_turns_out_to_couple_is_run_again(folder: Path) -> None:
    case = Case()
    ((apart, told, message),) = run_ranks(1, mistaken, case, folder, padded_rows(case))
    assert apart == 0
    assert len(told) == 1 and "The step is repeated with dependent terms" in told[0]
    assert "also those from before the call" in message
    for text in (*told, message):
        assert "terms of the loss depend on other rollouts" in text
        assert 'decomposition = "joint"' in text


def joint_steps(case: Case, folder: Path, rows: dict[str, Any]) -> tuple[str | None, bool]:
    """The kind that a loss is taken for with `decomposition = "joint"`, and whether all parameters
    have gradients."""
    path = folder / "joint.toml"
    path.write_text('decomposition = "joint"\n[config]\nmax_microbatch_tokens = 64\n')
    engine = make_engine(case, folder, SHARED)
    engine.settings = load_settings({"FORKPOINT_VERL_CONFIG": str(path)})
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(mini_batch(case, rows), coupled)
        decided = engine._decided and engine._decided[2]
        return decided, all(p.grad is not None for p in engine.module.parameters())


def test_joint_tries_nothing_out(folder: Path) -> None:
    case = Case()
    (found,) = run_ranks(1, joint_steps, case, folder, padded_rows(case))
    assert found == (None, True)
