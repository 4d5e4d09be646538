"""The commands of a new user, one after the other, each with its exit code and time.

    python scripts/first_hour.py                                    # a tiny model, on any machine
    python scripts/first_hour.py --config examples/qwen3-1.7b.json --dtype bfloat16 --device cuda \\
        --groups 20 --rollouts-per-group 8 --prompt-tokens 2048 --response-tokens 1024

Runs `forkpoint` doctor, demo, plan, verify and replay as `python -m forkpoint`, then a short
training loop, in a new folder with made-up rollouts. Shows each command, its output,
its exit code and seconds; then a table of all. Exits with 1 if any command failed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import forkpoint
from forkpoint import RolloutBatch, save_rollouts
from forkpoint.rollouts.synthetic import synthetic_rollouts

TINY = Path(__file__).parents[1] / "examples" / "tiny-qwen3.json"
LOOP = """\
import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forkpoint

settings = json.loads(sys.argv[1])
config = AutoConfig.for_model(**json.load(open(settings["config"])))
with torch.device(settings["device"]):
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["dtype"]))
model.train()
policy = forkpoint.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rollouts = list(forkpoint.load_rollouts("rollouts.jsonl"))
size = settings["rollouts_per_group"]
for step in range(settings["steps"]):
    begin = step * size % len(rollouts)
    batch = forkpoint.RolloutBatch(rollouts[begin : begin + size])
    stats = policy.forward_backward(batch, forkpoint.losses.GRPO())
    optimizer.step()
    optimizer.zero_grad()
    print(step, stats)
"""


@dataclass(frozen=True)
class Ran:
    """One command."""

    command: str
    exit_code: int
    seconds: float


def run(words: list[str], folder: Path) -> Ran:
    """Run one command in a folder and show it; a program given with -c is shown by its first line.

    Its stderr is shown where it comes among its stdout.
    """
    shown = [word if "\n" not in word else "LOOP" for word in words]
    text = shlex.join(["python", *shown[1:]])
    print(f"\n$ {text}", flush=True)
    begin = time.perf_counter()
    # The package that this script imports, wherever the command runs.
    paths = [str(Path(forkpoint.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, cwd=folder, env=environment, **piped) as running:
        assert running.stdout is not None
        # Shown as they come: a command that is killed has shown how far it got.
        for line in running.stdout:
            print(line, end="", flush=True)
    seconds = time.perf_counter() - begin
    print(f"-> exit code {running.returncode}, {seconds:.1f} s", flush=True)
    return Ran(text, running.returncode, round(seconds, 2))


def commands(options: argparse.Namespace, device: str) -> list[list[str]]:
    """The commands, as lists of words, in their order."""
    cli = [sys.executable, "-m", "forkpoint"]
    file, model = "rollouts.jsonl", ["--model", str(options.config.resolve())]
    runtime = ["--dtype", options.dtype, "--device", device]
    planning = shlex.split(options.planning)
    settings = {
        "config": str(options.config.resolve()),
        "device": device,
        "dtype": options.dtype,
        "steps": options.loop_steps,
        "rollouts_per_group": options.rollouts_per_group,
    }
    loop = [sys.executable, "-c", LOOP, json.dumps(settings)]
    found = [
        [*cli],
        [*cli, "doctor"],
        [*cli, "demo", *shlex.split(options.demo)],
        [*cli, "plan", file],
        [*cli, "plan", file, *model, "--dtype", options.dtype, *planning],
        [*cli, "verify", file, *model, *runtime, "--limit-groups", "1", *planning],
        [
            *(*cli, "replay", file, *model, *runtime, "--steps", str(options.steps)),
            *("--groups-per-step", "2", "--optimizer", "sgd", "--output", "replay", *planning),
        ],
        [*cli, "report", "replay", "--output", "report.html"],
        loop,
    ]
    if not options.only:
        return found
    wanted = set(options.only)
    return [w for w in found if wanted & {*w} or (w is loop and "loop" in wanted)]


def _text_tokens(config: dict[str, Any]) -> int:
    """How many token ids stand for text, from 0 on.

    Ids of images and the like come last; families whose configuration does not name them have
    theirs by default, within the last 1% of the vocabulary.
    """
    return int(config["vocab_size"] * 0.99)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=TINY, help="a model's config.json")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rollouts-per-group", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="steps of replay")
    parser.add_argument("--loop-steps", type=int, default=5, help="steps of the training loop")
    parser.add_argument(
        "--demo", default="--steps 5 --groups 2 --prompt-tokens 128", help="its options, quoted"
    )
    parser.add_argument("--planning", default="", help="options of plan, verify and replay, quoted")
    parser.add_argument("--only", nargs="*", help="words of the commands to run, such as verify")
    parser.add_argument("--output", type=Path, help="a folder for what is written; kept")
    parser.add_argument("--json", type=Path, help="a file for the table, as JSON")
    options = parser.parse_args()

    device = options.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary = _text_tokens(json.loads(options.config.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.output or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        made = synthetic_rollouts(
            groups=options.groups,
            rollouts_per_group=options.rollouts_per_group,
            prompt_tokens=options.prompt_tokens,
            response_tokens=options.response_tokens,
            vocab_size=vocabulary,
        )
        save_rollouts(folder / "rollouts.jsonl", made)
        tokens = RolloutBatch(made).logical_tokens
        print(f"{len(made)} rollouts of {options.groups} groups, {tokens:,} tokens, on {device}")
        rows = [run(words, folder) for words in commands(options, device)]
    print("\nexit code  seconds  command")
    for row in rows:
        print(f"{row.exit_code:9d}  {row.seconds:7.1f}  {row.command[:100]}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.exit_code for row in rows))


if __name__ == "__main__":
    sys.exit(main())
