"""A replay that is killed and resumed ends bitwise where an uninterrupted one does."""

import copy
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell, changed, made_up_rollouts, write_config, write_rollouts

from forkpoint import ConfigError, RolloutBatch
from forkpoint.apps.replay.folder import CHECKPOINT, MANIFEST, ROWS
from forkpoint.apps.replay.loop import replay
from forkpoint.losses import GRPO
from forkpoint.testing import tiny_model
from lanes import slow_besides_every

# Each replay would begin with the same sample of the same model.
pytestmark = pytest.mark.usefixtures("without_sample")


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def noisy(outputs: Any, batch: Any) -> torch.Tensor:
    """A loss that draws random numbers. A resumed replay must restore the generators too."""
    weights = torch.rand(len(outputs.logprobs), dtype=outputs.logprobs.dtype)
    return -(batch.trained(outputs.logprobs) * weights * batch.advantages).sum()


def run(folder: Path, *, steps: int = 2, resume: bool = True, **changes: Any) -> None:
    """Run the replay of these tests in the calling process."""
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "optimizer": adamw,
        "groups_per_step": 2,
        "max_grad_norm": 0.5,
        "checkpoint_every": 2,
        **changes,
    }
    model = options.pop("model", None) or tiny_model("qwen3", dtype=torch.float32)
    batch = options.pop("batch", None) or RolloutBatch(made_up_rollouts())
    loss = options.pop("loss", noisy)
    replay(model, batch, loss, steps=steps, output=folder, resume=resume, **options)


def without_times(value: Any) -> Any:
    """Rows without what a clock says; names of times end in ms."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k.rpartition("_")[2] != "ms"}
    return value


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_times(json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]


def state_of(folder: Path) -> dict[str, Any]:
    """The checkpoint of a folder, without its rows."""
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    del state["rows"]
    return state


def assert_same_end(folder: Path, expected: Path) -> None:
    """Bitwise, except times."""
    assert rows(folder) == rows(expected)
    torch.testing.assert_close(state_of(folder), state_of(expected), rtol=0, atol=0, equal_nan=True)


def run_and_die(folder: Path, call: str, count: int) -> None:
    """The replay, whose process kills itself at the `count`-th call of a function of os."""
    real, calls = getattr(os, call), iter(range(1 << 30))

    def dying(*arguments: Any, **named: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(os, call, dying)
    run(folder, steps=2, checkpoint_every=1)


@pytest.fixture(scope="module")
def processes() -> Any:
    """Forked off this one, which has imported all there is, so that each starts at once."""
    return multiprocessing.get_context("fork")


def finish(process: Any) -> int:
    """Run a process to its end; its exit code."""
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_killed_while_it_saves(call: str, processes: Any, tmp_path: Path) -> None:
    """Before each rename and each sync, in turn; a checkpoint that was made stays."""
    expected, had = tmp_path / "expected", False
    run(expected, steps=2, checkpoint_every=1)
    for count in range(100):
        folder = tmp_path / f"{call}-{count}"
        code = finish(processes.Process(target=run_and_die, args=(folder, call, count)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        has = (folder / CHECKPOINT).exists()
        assert has or not had
        had = has
        if (folder / ROWS).exists():
            with (folder / ROWS).open("ab") as file:
                file.write(b'{"step": 2, "half": ')
        run(folder, steps=2, checkpoint_every=1)
        assert_same_end(folder, expected)
    assert had, "the last kill left no checkpoint"
    assert count >= 2, f"os.{call} was called only {count} times"


# What is resumed must be the same -----------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "begun"
    run(folder, steps=2)
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other_advantages() -> RolloutBatch:
    made = made_up_rollouts()
    return RolloutBatch([changed(made[0], advantage=0.125), *made[1:]])


CHANGES: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"batch": other_advantages()}, "batches.digest was"),
    (
        lambda: {"model": tiny_model("qwen3", seed=1, dtype=torch.float32)},
        "model.initial_parameters was",
    ),
    (
        lambda: {"model": tiny_model("qwen3", dtype=torch.float32, num_hidden_layers=2)},
        "model.config.num_hidden_layers was 3 and is now 2",
    ),
    (lambda: {"loss": GRPO(clip=0.3)}, "loss was 'noisy' and is now .GRPO.*0.3"),
    (
        lambda: {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.5)},
        "optimizer.lr was 0.01 and is now 0.5",
    ),
    (lambda: {"steps": 3}, "inputs:\n  steps was 2 and is now 3\nResume"),
]


@pytest.mark.parametrize(("make", "said"), slow_besides_every(2, CHANGES))
def test_another_replay_is_refused(
    make: Callable[[], dict[str, Any]], said: str, begun: Path
) -> None:
    before = files(begun)
    with pytest.raises(ConfigError, match=f"was started with other (?s:.)*{said}"):
        run(begun, **{"steps": 2, **make()})
    assert files(begun) == before


def test_what_must_stay_the_same(begun: Path) -> None:
    fixed = manifest_of(begun)["fixed"]
    options = ("max_grad_norm", "steps", "baseline", "config", "loss")
    assert set(fixed) == {*options, "batches", "model", "optimizer", "runs_on"}
    assert set(fixed["batches"]) == {"rollouts", "groups", "groups_per_step", "digest"}
    facts = {"device", "threads", "torch", "calibration", "memory_budget_bytes"}
    assert set(fixed["runs_on"]) == facts


def test_another_torch_is_refused(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(ConfigError, match=r"runs_on.torch was '.*' and is now '2.99.0'"):
        run(begun, steps=2)


def test_a_folder_in_use_is_refused(begun: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already has a replay"):
        run(begun, steps=2, resume=False)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="has files, but no replay"):
        run(tmp_path, steps=2)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_resuming_what_is_finished_gives_its_report(begun: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(begun, tmp_path / "finished"))
    seen: list[int] = []
    run(folder, steps=2, on_resume=seen.append)
    assert seen == [2]
    assert_same_end(folder, begun)


# What is saved ------------------------------------------------------------------------------------


class Wide(torch.optim.SGD):
    """State in float32 of parameters in 16 bits, which torch's load_state_dict would cast."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].setdefault("sums", torch.zeros(p.shape))
                    sums.add_(p.grad.float() / 3)
                    p.data.sub_((group["lr"] * sums).to(p.dtype))


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (torch.bfloat16, lambda p: Wide(p, lr=0.1)),
        pytest.param(
            torch.float32,
            lambda p: torch.optim.Adagrad([{"params": p[:3]}, {"params": p[3:], "lr": 0.1}]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["wide", "groups"],
)
def test_every_state_comes_back(dtype: torch.dtype, optimizer: Any, tmp_path: Path) -> None:
    """Two steps of four, then the rest, in one process: as all four at once."""

    class Stop(Exception):
        pass

    def stop(row: Any) -> None:
        if row.step == 2:
            raise Stop

    options = {"steps": 4, "optimizer": optimizer, "loss": GRPO(), "checkpoint_every": 1}
    run(tmp_path / "once", model=tiny_model("qwen3", dtype=dtype), **options)
    model = tiny_model("qwen3", dtype=dtype)
    with pytest.raises(Stop):
        run(tmp_path / "twice", model=model, on_step=stop, **options)
    run(tmp_path / "twice", model=tiny_model("qwen3", dtype=dtype), **options)
    assert_same_end(tmp_path / "twice", tmp_path / "once")
    assert len(rows(tmp_path / "twice")) == 4
    _, states = state_of(tmp_path / "twice")["sides"]["shared"]
    assert all(x.dtype == torch.float32 for state in states for x in state.values())


def edit(folder: Path, **changes: Any) -> None:
    (folder / MANIFEST).write_text(json.dumps({**manifest_of(folder), **changes}))


def other_shapes(folder: Path) -> None:
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    weights, _ = state["sides"]["shared"]
    weights |= {name: tensor[:1] for name, tensor in weights.items()}
    torch.save(state, folder / CHECKPOINT)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: os.truncate(f / CHECKPOINT, 9999), "not a checkpoint of this replay"),
    "dict": (lambda f: torch.save({"a": 1}, f / CHECKPOINT), "not a checkpoint of this replay"),
    "shapes": (other_shapes, "not a checkpoint of this replay"),
    "pickle": (
        lambda f: (f / CHECKPOINT).write_bytes(pickle.dumps(Path("x"), protocol=2)),
        "not a checkpoint of this replay",
    ),
    "text": (
        lambda f: (f / CHECKPOINT).write_text("junk\n"),  # a KeyError of the unpickler
        "not a checkpoint of this replay",
    ),
    "manifest": (lambda f: (f / MANIFEST).write_text("{"), "is not the manifest of a replay"),
    "version": (
        lambda f: (f / MANIFEST).write_text('{"schema": 3}'),
        "is not the manifest of a replay.*schema is 3; it takes 5",
    ),
    "fixed": (lambda f: edit(f, fixed=None), "manifest.json is not.*fixed is None; it takes an ob"),
    "runs_on": (lambda f: edit(f, fixed={}), "fixed.runs_on is None; it takes an object"),
    "budget": (
        lambda f: edit(f, fixed={"runs_on": {"memory_budget_bytes": "8GB"}}),
        "memory_budget_bytes is '8GB'; it takes a whole number",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, begun: Path, tmp_path: Path) -> None:
    """Before weights, generators or files change."""
    folder = Path(shutil.copytree(begun, tmp_path / "damaged"))
    damage, said = DAMAGE[name]
    damage(folder)
    model, before = tiny_model("qwen3", dtype=torch.float32), files(folder)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=said):
        run(folder, model=model, steps=2)
    torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
    assert files(folder) == before


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    """A replay that diverges, of a model with infinity for a limit, is recorded and reads back."""

    def nan(outputs: Any, batch: Any) -> torch.Tensor:
        return outputs.logprobs.sum() * torch.nan

    model = tiny_model("qwen3", dtype=torch.float32)
    model.config.time_step_limit = (0.0, math.inf)
    for _ in range(2):
        run(tmp_path, steps=2, loss=nan, max_grad_norm=None, model=copy.deepcopy(model))
    for line in (tmp_path / ROWS).read_text().splitlines():
        row = json.loads(line, parse_constant=pytest.fail)
        assert row["shared"]["loss"] is None and row["difference"]["max"] is None
    config = manifest_of(tmp_path)["fixed"]["model"]["config"]
    assert config["time_step_limit"] == [0.0, None]


# The command --------------------------------------------------------------------------------------


def test_the_command(shell: Shell, tmp_path: Path) -> None:
    file, config = write_rollouts(tmp_path / "a.jsonl"), write_config(tmp_path / "config.json")
    folder = tmp_path / "out"
    arguments = (
        *("replay", file, "--model", config, "--baseline", "dense", "--steps", 4, "--json"),
        *("--output", folder, "--checkpoint-every", 2, "--max-grad-norm", 0.1, "--lr", 0.25),
    )
    first = shell(*arguments)
    assert first.code == 0 and first.result["resumed_at"] is None
    again = shell(*arguments, "--resume")
    assert again.code == 0 and again.result["resumed_at"] == 4
    assert again.result["shared_losses"] == first.result["shared_losses"]
    assert [row["lr"] for row in rows(folder)] == [0.25] * 4
    manifest = manifest_of(folder)
    assert manifest["about"]["file"] == "a.jsonl"
    assert manifest["about"]["options"]["max_grad_norm"] == 0.1
    assert manifest["fixed"]["model"]["config"]["num_hidden_layers"] == 2

    write_rollouts(file, made_up_rollouts(groups=2))
    refused = shell(*arguments, "--resume")
    assert refused.code == 2 and "batches.groups was 3 and is now 2" in refused.err
    assert shell(*arguments).code == 2
    refused = shell("replay", file, "--model", config, "--resume")
    assert refused.code == 2 and "Give output" in refused.err
