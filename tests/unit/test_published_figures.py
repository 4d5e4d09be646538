"""The tables of figures say what the last rows say, rounded and not otherwise."""

import re
from pathlib import Path

import pytest

from benchmarks.plots import latest, read_rows
from benchmarks.shapes import make_group
from forkpoint.apps.replay.trend import LIMIT, trend
from forkpoint.config import Config
from forkpoint.plan import make_plan
from forkpoint.plan.models import MODELS
from forkpoint.plan.pricing.cost import ModelShape

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SPEED_UP, LOG_PROBS = "speed-up", "log-probs speed-up"
GRID = "compiled {}/{} N={}"
# What a row of the table begins with, its file, its cases and their metric.
STEPS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "prompt 16,384, responses of 64": ("hybrid", ("P16384-R64-G9",), SPEED_UP),
    "prompt 16,384, responses of 1,024": ("hybrid", ("P16384-R1024-G9",), SPEED_UP),
    "prompt 8,192, responses of 4,096": ("hybrid", ("P8192-R4096-G9",), SPEED_UP),
    "airline dialogues' trees, 25 groups of 4": (
        "tree",
        ("qwen3.5-4b compiled airline.jsonl",),
        SPEED_UP,
    ),
    "prompt 8,192, responses of 131 to 2,048": (
        "policy-update",
        ("qwen3-8b compiled P=8192 N=32 R~U(131,2048)",),
        SPEED_UP,
    ),
    "the same, log-probs alone": (
        "policy-update",
        ("qwen3-8b compiled P=8192 N=32 R~U(131,2048)",),
        LOG_PROBS,
    ),
    "prompt 8,192, responses of 2,048": (
        "policy-update",
        ("qwen3-8b compiled P=8192 N=32 R=2048",),
        SPEED_UP,
    ),
    "prompt 7,168, responses of 1,024": (
        "policy-update",
        ("qwen3-4b compiled context 8192 n=4 R=1024",),
        SPEED_UP,
    ),
    "agents' trees: airline dialogues, 25 groups of 4": (
        "tree",
        ("qwen3-4b compiled airline.jsonl",),
        SPEED_UP,
    ),
    **{
        f"prompt {p:,}, responses of {r:,}, N = 4 and 32": (
            "step-grid",
            (GRID.format(p, r, 4), GRID.format(p, r, 32)),
            SPEED_UP,
        )
        for p, r in ((10_240, 2048), (8192, 4096), (6144, 6144))
    },
}


# What a row of the README's table begins with, its file and its case, of which plots read 72
# characters.
HEADLINES: dict[str, tuple[str, str]] = {
    "Qwen3-1.7B, AdamW: 8 answers to 7,800 tokens of retrieved text": (
        "plain-loop",
        "qwen3-1.7b, all trained, adamw, 74.5 GiB: rag.jsonl, groups 1 to 1, 623…",
    ),
    "Qwen3-1.7B, AdamW: 8 responses of 512 tokens to 8,192": (
        "plain-loop",
        "qwen3-1.7b, all trained, adamw, 74.5 GiB: P=8192 R=512 N=8",
    ),
    "Qwen3-1.7B, AdamW: an agent's dialogues, a tree of 4": (
        "plain-loop",
        "qwen3-1.7b, all trained, adamw, 74.5 GiB: airline.jsonl, groups 2 to 2,…",
    ),
    "Qwen3-8B, SGD with momentum: 16 responses of 256 tokens to 1,024": (
        "plain-loop",
        "qwen3-8b, all trained, momentum, 74.5 GiB: P=1024 R=256 N=16",
    ),
    "Qwen3-1.7B, AdamW, TRL's GRPO trainer: 4 prompts of 6,000 to 7,700 tokens, 8 completions of "
    "256 each": ("trl", "qwen3-1.7b, 4 prompts of 6047 to 7722, 8 of 256 each, checkpointed, rag…"),
    "Qwen3.5-4B, checkpointed, fla: 9 responses of 64 tokens to 16,384": (
        "hybrid",
        "P16384-R64-G9, the planner's choice, all rollouts",
    ),
}
# Of a file: what the baseline is called, how its metrics begin and ours, and the names of the time
# and of the ratio.
NAMES = {
    "plain-loop": ("plain loop", "plain ", "forkpoint ", "step", "faster than plain"),
    "trl": ("TRL's own", "TRL, sdpa: ", "forkpoint: ", "update", "update: faster"),
    "hybrid": ("forkpoint, dense", "dense ", "shared ", "step", SPEED_UP),
}
BENCHMARKS = "benchmarks/README.md"


def table(header: str, file: str = "README.md") -> list[list[str]]:
    """Cells of a file's table whose header begins so."""
    text = (ROOT / file).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n| {header}")
    assert found, header
    lines = rest.split("\n")[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def numbers(cell: str) -> list[float]:
    return [float(x.replace(",", "")) for x in re.findall(r"[\d,]*\d(?:\.\d+)?", cell)]


def test_headlines() -> None:
    rows = table("set-up")
    assert [row[0] for row in rows] == list(HEADLINES)
    for what, baseline, theirs, ours, ratio, bound, peaks in rows:
        name, case = HEADLINES[what]
        found = {
            row["metric"]: row
            for row in latest(read_rows([RESULTS / f"{name}-h200.jsonl"]))
            if row["case"] == case
        }
        called, dense, shared, time, faster = NAMES[name]
        assert baseline == called
        seconds = [round(found[f"{side}{time}"]["value"] / 1e3, 2) for side in (dense, shared)]
        assert [*numbers(theirs), *numbers(ours)] == seconds, what
        assert numbers(ratio) == [round(found[faster]["value"], 2)], what
        assert numbers(bound) == [round(found[faster]["bound"], 2)], what
        gib = [round(found[f"{side}peak"]["value"] / 2**30, 1) for side in (dense, shared)]
        assert numbers(peaks) == gib, what


def test_bounds_of_groups() -> None:
    shape = ModelShape.from_config(MODELS["qwen3-8b"])
    rows = table("prompt to response")
    for ratio, *cells in rows:
        prompt, response = (int(x) for x in numbers(ratio))
        found = []
        for size in (2, 4, 8, 16, 32):
            batch = make_group(1024 * prompt // response, [1024] * size, vocab=1000)
            config = Config(sharing="group", boundary="across")
            found.append(round(make_plan(batch, shape, config).bound, 2))
        assert [numbers(cell)[0] for cell in cells] == found, ratio


def test_speed_ups_of_steps() -> None:
    rows = table("model, random weights", BENCHMARKS)
    assert [row[1] for row in rows] == list(STEPS)
    for _, what, speed_ups, bounds in rows:
        name, cases, metric = STEPS[what]
        found = {
            (row["case"], row["metric"]): row
            for row in latest(read_rows([RESULTS / f"{name}-h200.jsonl"]))
        }
        picked = [found[case, metric] for case in cases]
        assert numbers(speed_ups) == [round(row["value"], 2) for row in picked], what
        assert numbers(bounds) == [round(row["bound"], 2) for row in picked], what


def test_attention() -> None:
    rows = table("P | N |", BENCHMARKS)
    assert len(rows) == 4
    last = {}
    for row in read_rows([RESULTS / "attention-h200.jsonl"]):
        last[row["case"], row["metric"], row["baseline"]] = row
    for prompt, count, rates, speed_up, bound in rows:
        p, n = int(numbers(prompt)[0]), int(numbers(count)[0])
        case = f"dualkv/P{p}-N{n}-R2048-H32K8D128-bfloat16"
        measured = [last[case, f"fa4/{way}_rate", None] for way in ("forward", "backward")]
        assert numbers(rates) == [round(row["value"]) for row in measured]
        ratio = last[case, "speedup", "dense_fa4"]
        assert numbers(speed_up) == [round(ratio["value"], 2)]
        assert numbers(bound) == [round(ratio["bound"], 2)]
        # FlashAttention-4 is the fastest of the dense kernels, or dense is not at its best.
        others = [last[case, "speedup", f"dense_{k}"]["value"] for k in ("cudnn", "fa2")]
        assert ratio["value"] <= min(others)


def test_optimizer_steps_on_a_cpu() -> None:
    text = " ".join((ROOT / BENCHMARKS).read_text(encoding="utf-8").split())
    (row,) = read_rows([RESULTS / "replay-cpu.jsonl"])
    result = row["result"]
    assert f"ran {row['value']:.2f} times faster shared than dense" in text
    assert f"the counted bound is {row['bound']:.2f};" in text
    moved, apart = result["rms_parameter_change"], result["max_parameter_difference"]
    assert f"parameters, moved by {moved:.1e} (RMS), differ by at most {apart:.1e}" in text


@pytest.mark.parametrize("name", sorted(p.name for p in RESULTS.glob("*.jsonl")))
def test_every_file_of_rows_is_in_the_table(name: str) -> None:
    assert f"`results/{name}`" in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["rag.jsonl", "airline.jsonl"])
def test_replays_of_100_steps_do_not_drift(file: str) -> None:
    """Of parameters shared less dense, in the rows of each step."""
    rows = read_rows([RESULTS / "replay-h200.jsonl"])
    steps = [r["step"] for r in rows if r["metric"] == "step" and r["case"].startswith(file)]
    assert [step["step"] for step in steps] == list(range(1, 101))
    found = trend([step["difference"]["mean"] for step in steps])
    assert abs(found.errors) <= LIMIT, found
