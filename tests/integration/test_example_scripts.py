"""The scripts of examples/ run on a CPU, and do what they say."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forkpoint.engine.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"
REWARD = re.compile(r"^\d+: reward ([\d.]+),", re.MULTILINE)
NORM = re.compile(r"gradient norm ([\d.]+), StepStats\(loss=(\S+),")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def rises(output: str) -> bool:
    rewards = [float(x) for x in REWARD.findall(output)]
    quarter = len(rewards) // 4
    return sum(rewards[-quarter:]) > 1.5 * sum(rewards[:quarter])


def test_grpo_logs_metrics(run: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run("grpo.py", "--steps", 2, "--prompts", 2, "--group", 4, "--log", log)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["computed_tokens"] < row["given_tokens"] / 2
        assert row["ratio_mean"] != 1 and row["approx_kl"] > 0  # the second update of the batch
        assert 0 <= row["clip_fraction"] < 1


@pytest.mark.parametrize("factor", [1.0, 1.001], ids=["right", "wrong"])
def test_grpo_compares_gradients(
    factor: float, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `make demo` does; wrong gradients with sharing give exit status 1."""
    right = Engine.forward_backward

    def scaled(self: Engine, *args: Any) -> Any:
        shared = self.config.sharing != "none" and self.host.shape.dtype_bytes == 4
        return right(self, *args[:-1], args[-1] * (factor if shared else 1.0))

    monkeypatch.setattr(Engine, "forward_backward", scaled)
    with pytest.raises(SystemExit) as ended:
        run("grpo.py", "--compare", "--steps", 2, "--prompts", 2, "--group", 4, "--log", "")
    shown = capsys.readouterr().out
    assert bool(ended.value.code) == (factor > 1)
    assert "passed: 2 of 2 plans" in shown
    (apart,) = re.findall(r"differ by at most (\S+) of their norm", shown)
    assert 0 < float(apart) < 1e-5 or factor > 1


@pytest.mark.slow
def test_grpo_learns(run: Any, tmp_path: Path) -> None:
    assert rises(run("grpo.py", "--log", tmp_path / "log.jsonl"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_lora_learns_and_leaves_the_reference(run: Any) -> None:
    output = run("lora_kl.py")
    assert rises(output)
    kl = [float(x) for x in re.findall(r"KL ([\d.]+),", output)]
    assert kl[0] == 0 and kl[-1] > 0.01


@pytest.mark.slow
def test_agent_learns_from_its_tool(run: Any) -> None:
    assert rises(run("agent_tools.py"))


@pytest.mark.slow
def test_dpo_tells_pairs_apart(run: Any, tmp_path: Path) -> None:
    output = run("dpo.py")
    accuracy = [float(x) for x in re.findall(r"accuracy ([\d.]+)", output)]
    assert accuracy[0] == 0 and accuracy[-1] > 0.9
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "one two", "chosen": " three", "rejected": " two"}\n' * 3)
    assert "0: accuracy" in run("dpo.py", "--pairs", pairs, "--epochs", 1, "--batch", 2)


@pytest.mark.slow
def test_ranks_train_as_one_does(tmp_path: Path) -> None:
    """Losses and gradient norms of every step; the weights move between them."""
    found = []
    for ranks in (1, 2):
        saved = tmp_path / f"saved-{ranks}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(EXAMPLES / "fsdp2.py")]
        command += ["--lr", "1e-3", "--save", str(saved)]
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            # A thread of gloo that frees a tensor while the interpreter ends aborts the process.
            if "terminate called without an active exception" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr[-3000:]
        assert (saved / ".metadata").is_file()
        found.append([float(x) for pair in NORM.findall(done.stdout) for x in pair])
    one, two = found
    assert len(one) == 8 and one[0] != one[2]
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom() -> None:
    """Its cells in one namespace; what they print would be its outputs, which it has none of."""
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]), namespace)
    assert namespace["plan"].bound > 4 and namespace["report"].passed
    history = namespace["history"]
    assert sum(history[-3:]) > 1.5 * sum(history[:3])
