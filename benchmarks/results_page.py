"""The page of results: tables that are made from rows of measurements, and from nothing else."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import make_group
from forkpoint.apps.cli.options import Flag
from forkpoint.apps.cli.output import Output
from forkpoint.config import Config
from forkpoint.plan import ModelShape, make_plan
from forkpoint.plan.models import MODELS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
Row = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
Cells = Sequence[str]

# The text of the row, a key of NAMES, and the first 71 characters (or all) of the case.
HEADLINES = (
    (
        "Qwen3-1.7B, AdamW: 8 answers to 7,800 tokens of retrieved text",
        "plain-loop",
        "qwen3-1.7b, all trained, adamw, 74.5 GiB: rag.jsonl, groups 1 to 1, 623…",
    ),
    (
        "Qwen3-1.7B, AdamW: 8 responses of 512 tokens to a prompt of 8,192 tokens",
        "plain-loop",
        "qwen3-1.7b, all trained, adamw, 74.5 GiB: P=8192 R=512 N=8",
    ),
    (
        "Qwen3-1.7B, AdamW: 4 agent conversations that branch from one another",
        "plain-loop",
        "qwen3-1.7b, all trained, adamw, 74.5 GiB: airline.jsonl, groups 2 to 2,…",
    ),
    (
        "Qwen3-8B, SGD with momentum: 16 responses of 256 tokens to a prompt of 1,024 tokens",
        "plain-loop",
        "qwen3-8b, all trained, momentum, 74.5 GiB: P=1024 R=256 N=16",
    ),
    (
        "Qwen3-1.7B, AdamW, gradient checkpointing, in TRL's GRPO trainer: 8 completions of 256 "
        "tokens to each of 4 prompts of 6,000 to 7,700 tokens",
        "trl, sharing none",
        "qwen3-1.7b, 4 prompts of 6047 to 7722, 8 of 256 each, checkpointed, rag…",
    ),
    (
        "the same",
        "trl",
        "qwen3-1.7b, 4 prompts of 6047 to 7722, 8 of 256 each, checkpointed, rag…",
    ),
    (
        "Qwen3.5-4B, gradient checkpointing, flash-linear-attention: 9 responses of 64 tokens to a "
        "prompt of 16,384 tokens",
        "hybrid",
        "P16384-R64-G9, the planner's choice, all rollouts",
    ),
)
_DENSE = "forkpoint without sharing"
# The baseline, the file, the prefixes of the baseline's and of forkpoint's metrics, the metric of
# the time, and the metric whose row has the bound.
NAMES = {
    "plain-loop": ("plain loop", "plain-loop", "plain ", "forkpoint ", "step", "faster than plain"),
    "trl, sharing none": (
        _DENSE,
        "trl",
        "forkpoint, sharing none: ",
        "forkpoint: ",
        "update",
        "update: faster",
    ),
    "trl": (
        "TRL's GRPO trainer",
        "trl",
        "TRL, sdpa: ",
        "forkpoint: ",
        "update",
        "update: faster",
    ),
    "hybrid": (_DENSE, "hybrid", "dense ", "shared ", "step", "speed-up"),
}
_UPDATE = "qwen3-8b compiled P=8192 N=32 R"
STEPS = (
    (
        "Qwen3.5-4B, gradient checkpointing: 9 responses of 64 tokens to a prompt of 16,384",
        "hybrid",
        "P16384-R64-G9",
        "",
    ),
    (
        "Qwen3.5-4B, gradient checkpointing: 9 responses of 1,024 tokens to a prompt of 16,384",
        "hybrid",
        "P16384-R1024-G9",
        "",
    ),
    (
        "Qwen3.5-4B, gradient checkpointing: 9 responses of 4,096 tokens to a prompt of 8,192",
        "hybrid",
        "P8192-R4096-G9",
        "",
    ),
    (
        "Qwen3.5-4B, gradient checkpointing: 25 trees of 4 dialogues",
        "tree",
        "qwen3.5-4b compiled airline.jsonl",
        "",
    ),
    (
        "Qwen3-8B: 32 responses of 131 to 2,048 tokens to a prompt of 8,192",
        "policy-update",
        f"{_UPDATE}~U(131,2048)",
        "",
    ),
    (
        "Qwen3-8B: the same, log-probs without gradients",
        "policy-update",
        f"{_UPDATE}~U(131,2048)",
        "log-probs ",
    ),
    (
        "Qwen3-8B: 32 responses of 2,048 tokens to a prompt of 8,192",
        "policy-update",
        f"{_UPDATE}=2048",
        "",
    ),
    (
        "Qwen3-4B: 4 responses of 1,024 tokens to a prompt of 7,168",
        "policy-update",
        "qwen3-4b compiled context 8192 n=4 R=1024",
        "",
    ),
    ("Qwen3-4B: 25 trees of 4 dialogues", "tree", "qwen3-4b compiled airline.jsonl", ""),
    *(
        (
            f"Llama3-8B: {n} responses of {r:,} tokens to a prompt of {p:,}",
            "step-grid",
            f"compiled {p}/{r} N={n}",
            "",
        )
        for p, r in ((10_240, 2048), (8192, 4096), (6144, 6144))
        for n in (4, 32)
    ),
)
_VERL = "qwen3-8b bf16, checkpointed, P=8192 N=32 R~U(131,2048), one GPU"
# Words, baseline, file, case, the metrics of both times and of the ratio, in this order.
VERL_STEPS = (
    (
        "update: 32 responses of 131 to 2,048 tokens to a prompt of 8,192; Qwen3-8B",
        "verl's FSDP2 engine",
        "verl-h200",
        _VERL,
        ("stock update", "shared update", "update faster"),
    ),
    (
        "old log-probs of the same",
        "verl's FSDP2 engine",
        "verl-h200",
        _VERL,
        ("stock log-probs", "shared log-probs", "log-probs faster"),
    ),
    (
        "update of the same",
        _DENSE,
        "verl-h200",
        _VERL,
        ("sharing none update", "shared update", "update faster"),
    ),
)
_RANKS = "qwen3-8b, 2 ranks, compiled, "
RANKS = (
    (
        "one GPU, the whole model",
        _DENSE,
        "ranks-h100x2",
        f"{_RANKS}one rank, P8192 R2048 N16 twice",
        ("dense step", "shared step", "speed-up"),
    ),
    (
        "two GPUs, `fully_shard`, weights gathered once in each step",
        _DENSE,
        "ranks-h100x2",
        f"{_RANKS}fully_shard, gather step",
        ("dense step", "shared step", "speed-up"),
    ),
)
MIXTURES = re.compile(r"compiled 16 layers P(\d+)-R(\d+)-N(\d+) (\S+)")
MIXTURE_COMMIT = "9313e24"
"""The commit of rows whose dense side has its fastest microbatches."""
ROUTER_LOSSES = {"none": "none", "rollout": "per rollout"}


def read_rows(file: Path) -> list[Row]:
    """The rows of a file, with the beginnings of long cases."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["case"] = case_key(row["case"])
    return rows


def case_key(case: str) -> str:
    return case if len(case) <= 72 else f"{case[:71]}…"


def latest(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """The last row of each case and metric.

    A row whose note begins with "void" does not count. A case that ran out of memory has no other
    figures than those that were measured after that.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        case, metric = row["case"], row["metric"]
        if (row.get("note") or "").startswith("void"):
            continue
        if metric == OUT_OF_MEMORY:
            found = {key: r for key, r in found.items() if key[0] != case}
        else:
            found.pop((case, OUT_OF_MEMORY), None)
        found[case, metric] = row
    return found


def measured(name: str) -> dict[tuple[str, str], Row]:
    """The last row of each case and metric of a file."""
    return latest(read_rows(RESULTS / f"{name}.jsonl"))


def source(row: Row) -> str:
    """Device, versions and commit of a row."""
    device = re.sub("NVIDIA (\\w+).*", "\\1", row["device"])
    torch = row["versions"]["torch"].partition("+")[0]
    optional = ", FlashAttention-4" if "flash-attn-4" in row["versions"] else ""
    return f"{device}, torch {torch}{optional}, `{row['commit']}`"


def markdown(header: Cells, rows: Iterable[Cells]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---")


def times(row: Row) -> str:
    return f"{row['value']:.2f}x"


def bound(row: Row) -> str:
    return f"{row['bound']:.2f}x"


def headlines(*, sources: bool = True) -> str:
    """Steps compared with a plain loop, TRL, and forkpoint without sharing."""
    lines = []
    for words, key, case in HEADLINES:
        called, name, theirs, ours, step, ratio = NAMES[key]
        found = measured(f"{name}-h200")
        before, after = (found[case, f"{side}{step}"]["value"] / 1e3 for side in (theirs, ours))
        seconds = [f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x"]
        peaks = [found[case, f"{side}peak"]["value"] / 2**30 for side in (theirs, ours)]
        row = found[case, ratio]
        gib = [f"{peak:.1f}" for peak in peaks]
        lines.append([words, called, *seconds, bound(row), *gib])
        lines[-1] += [source(row)] * sources
    seconds, gib = ("baseline, s", "forkpoint, s"), ("baseline, GiB", "forkpoint, GiB")
    header = ["step", "baseline", *seconds, "ratio", "bound", *gib]
    return markdown(header + ["measured on"] * sources, lines)


def timed(table: Sequence[tuple[str, str, str, str, tuple[str, str, str]]]) -> str:
    """Rows with the times of a baseline and of forkpoint."""
    lines = []
    for words, called, name, case, (theirs, ours, ratio) in table:
        found = measured(name)
        before, after = (found[case, metric]["value"] / 1e3 for metric in (theirs, ours))
        row = found[case, ratio]
        seconds = [f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x"]
        lines.append([words, called, *seconds, bound(row), source(row)])
    header = ("step", "baseline", "baseline, s", "forkpoint, s", "ratio", "bound", "measured on")
    return markdown(header, lines)


def verl() -> str:
    """Updates and log-probs in verl."""
    return timed(VERL_STEPS)


def ranks() -> str:
    """Steps of two ranks beside one."""
    return timed(RANKS)


def peers() -> str:
    """An update by other methods that share prompts."""
    found = {metric: row for (_, metric), row in measured("peers-h200").items()}
    loop, lines = found["plain loop: update"]["value"], []
    for metric, row in found.items():
        side, _, figure = metric.rpartition(": ")
        if figure == "update":
            peak = found[f"{side}: peak"]["value"] / 2**30
            seconds = f"{row['value'] / 1e3:.2f}"
            side = side.replace(", sharing none", " without sharing")
            lines.append([side, seconds, f"{loop / row['value']:.2f}x", f"{peak:.1f}", source(row)])
    return markdown(("method", "update, s", "ratio to the loop", "peak, GiB", "measured on"), lines)


def context() -> str:
    """Steps of long prompts on two ranks of context parallelism beside one GPU."""
    found, lines = measured("context-h200x2"), []
    for layers, prompt in ((12, 32_768), (12, 65_536), (36, 32_768)):
        some = "" if layers == 36 else f", {layers} layers"
        case = f"qwen3-8b{some}, 2 ranks, compiled, P{prompt}"
        one, dense = found[f"{case}, one rank", "shared step"], found[case, "dense step"]
        ways = {
            "by heads": "by heads",
            "by responses": "leaves dealt out",
            "by layer": "gathered by layer",
        }
        for words, way in ways.items():
            row = found.get((f"{case}, {way}", "shared step"))
            if row is None:  # the planner found no such plan
                continue
            sent = found[f"{case}, {way}", "sent by each rank"]["value"] / 2**30
            seconds = [f"{each['value'] / 1e3:.2f}" for each in (dense, one, row)]
            part = f"{row['value'] / one['value']:.2f}"
            peaks = [
                f"{found[f'{case}, {which}', 'shared peak']['value'] / 2**30:.0f}"
                for which in ("one rank", way)
            ]
            sizes = [f"{layers}", f"{prompt:,}"]
            lines.append([*sizes, words, *seconds, part, *peaks, f"{sent:.1f}", source(row)])
    seconds = ("no sharing, s", "one GPU, s", "two GPUs, s", "two over one")
    sizes = ("peak of one, GiB", "peak of two, GiB", "sent by a GPU, GiB")
    header = ("layers", "prompt", "split", *seconds, *sizes, "measured on")
    return markdown(header, lines)


def longest() -> str:
    """The longest prompts of one and of two GPUs."""
    found, parts = measured("context-h200x2"), []
    for words, ranks in (("one GPU", "one rank"), ("two GPUs", "all ranks")):
        case = f"qwen3-8b, 2 ranks, compiled, longest prompt, {ranks}"
        tokens, peak = (found[case, f]["value"] for f in ("predicted to fit", "peak of it"))
        parts.append(f"{tokens:,} tokens on {words} ({peak / 2**30:.1f} GiB measured)")
    lines = " and\n".join(parts)
    return f"Longest prompt of 36 layers within 80 GiB of a GPU, in steps of 16,384: {lines}."


def pipeline() -> str:
    """Steps on two stages beside one GPU."""
    lines = []
    found = measured("pipeline-h200x2")
    for size in (4, 16):
        case = f"qwen3-8b, 2 stages, 2 groups of {size}"
        row = found[case, "measured speed-up"]
        bubbles = (
            "measured bubble",
            "measured waits",
            "predicted bubble",
            "predicted bubble of three barriers",
        )
        figures = [f"{found[case, metric]['value']:.3f}" for metric in bubbles]
        predicted = times(found[case, "predicted speed-up"])
        lines.append([f"2 groups of {size}", times(row), predicted, *figures, source(row)])
    ratios = ("ratio to one GPU", "predicted")
    bubbles = ("bubble", "waits", "predicted bubble", "with three barriers")
    return markdown(("step", *ratios, *bubbles, "measured on"), lines)


def images() -> str:
    """Steps of a prompt of images, over forkpoint's dense training and over TRL's."""
    lines = []
    for name in ("images-fa4-h200", "images-h200"):
        found = measured(name)
        for (case, metric), row in found.items():
            if metric == "faster than without sharing":
                share = f"{row['value'] / row['bound']:.2f}"
                encoder = case.split(", ")[1].removeprefix("encoder ")
                stock = found.get((case, "faster than TRL"))
                stock = times(stock) if stock else "not run"
                lines.append([encoder, times(row), bound(row), share, stock, source(row)])
    header = ("encoder", "ratio", "bound", "share", "ratio to TRL", "measured on")
    return markdown(header, lines)


def defaults() -> str:
    """Default plans over dense training, with FlashAttention-4 and without."""
    lines = []
    for name in ("defaults-fa4-h200", "defaults-h200"):
        found = measured(name)
        for (case, metric), row in found.items():
            if metric != "default over dense":
                continue
            ratio = 1 / row["value"]
            share = f"{ratio / row['bound']:.2f}"
            best = f"{found[case, 'default over the best']['value']:.2f}"
            model, _, load = case.partition(" ")
            lines.append(
                [model.title(), load, f"{ratio:.2f}x", bound(row), share, best, source(row)]
            )
    header = ("model", "rollouts", "ratio", "bound", "share", "over the best plan", "measured on")
    return markdown(header, lines)


def bounds() -> str:
    """Counted bounds of groups by their prompt and size."""
    shape = ModelShape.from_config(MODELS["qwen3-8b"])
    config = Config(sharing="group", boundary="across")
    sizes, lines = (2, 4, 8, 16, 32), []
    for prompt, response in ((1, 4), (1, 1), (4, 1), (16, 1)):
        groups = (make_group(1024 * prompt // response, [1024] * n, vocab=1000) for n in sizes)
        found = [f"{make_plan(batch, shape, config).bound:.2f}x" for batch in groups]
        lines.append([f"{prompt} : {response}", *found])
    return markdown(["prompt to response", *(f"N = {n}" for n in sizes)], lines)


def steps() -> str:
    """Steps over forkpoint's dense training."""
    lines = []
    for words, name, case, kind in STEPS:
        row = measured(f"{name}-h200")[case, f"{kind}speed-up"]
        share = f"{row['value'] / row['bound']:.2f}"
        lines.append([words, times(row), bound(row), share, source(row)])
    return markdown(("model and step", "ratio", "bound", "share", "measured on"), lines)


def mixtures() -> str:
    """Steps of a mixture of experts over forkpoint's dense training."""
    lines = []
    for (case, metric), row in measured("moe-h200").items():
        found = MIXTURES.fullmatch(case)
        if metric != "speed-up" or found is None or row.get("commit") != MIXTURE_COMMIT:
            continue
        prompt, response, count, router = found.groups()
        words = f"{count} responses of {int(response):,} tokens to a prompt of {int(prompt):,}"
        share = f"{row['value'] / row['bound']:.2f}"
        lines.append([words, ROUTER_LOSSES[router], times(row), bound(row), share, source(row)])
    header = ("step", "router loss", "ratio", "bound", "share", "measured on")
    return markdown(header, lines)


def attention() -> str:
    """Attention alone, forward and backward."""
    last: dict[tuple[str, str, str | None], Row] = {}
    for row in read_rows(RESULTS / "attention-h200.jsonl"):
        last[row["case"], row["metric"], row["baseline"]] = row
    lines = []
    for prompt, count in ((4096, 28), (16_384, 28), (32_768, 28), (65_536, 16)):
        case = f"dualkv/P{prompt}-N{count}-R2048-H32K8D128-bfloat16"
        rates = [last[case, f"fa4/{way}_rate", None]["value"] for way in ("forward", "backward")]
        # The fastest of the dense kernels, or dense is not at its best.
        kernels = ("dense_fa4", "dense_cudnn", "dense_fa2")
        row = min((last[case, "speedup", k] for k in kernels), key=lambda row: row["value"])
        rate = f"{rates[0]:.0f}, {rates[1]:.0f}"
        lines.append([f"{prompt:,}", str(count), rate, times(row), bound(row), source(row)])
    header = ("P", "N", "TFLOP/s, forward and backward", "ratio", "bound", "measured on")
    return markdown(header, lines)


TEXT = """# Benchmarks

`python -m benchmarks results` writes this page from the rows in `benchmarks/results/`. Each row
names its device, versions, commit and command. The models have random weights in bfloat16.

!!! note "Method"

    - The *bound* is the counted FLOPs of training without sharing, divided by the counted FLOPs
      with sharing ([definition](concepts/bound.md)). All FLOPs count equally in it, although
      attention runs at a lower rate than matrix products.
    - The *ratio* is the time of the baseline divided by the time of forkpoint. The *share* is the
      ratio divided by the bound.
    - The time of a step excludes planning. It ends when the device is idle.
    - Each benchmark compares gradients before it measures times.
    - If a figure was measured several times, this page shows the last measurement.
    - Peak memory includes weights, gradients and optimizer states.

## Compared with other training

The baseline runs the whole batch. A *plain loop* runs one rollout at a time through the
transformers model, with sdpa and without compilation. It is slower than forkpoint without sharing,
because it compiles nothing and computes the head on all tokens. Ratios to it can therefore exceed
the bound. TRL's trainer runs 8 rows at a time with gradient checkpointing and sdpa. It is also
slower than forkpoint without sharing in the same trainer. The two rows of TRL's trainer time the
update only, without generation. They have no memory limit. The other rows stay below 80 GB. The
last two columns give peak memory. forkpoint can need more memory than the loop, mainly for
rollouts of up to 2,048 tokens, because it packs several rollouts into one forward: up to 38% more
in full training, and 61% more with LoRA (`benchmarks/results/plain-loop-h200.jsonl`).

{headlines}

## In verl

verl's engine was measured on 4 of the 32 rollouts, in the fastest of five settings. The time is
scaled to 32 rollouts by counted FLOPs. *forkpoint without sharing* also runs in verl.

{verl}

## On two GPUs

Data parallelism: 12 layers of Qwen3-8B. Each rank has two prompts of 8,192 tokens, with 16
responses of 2,048 tokens each.

{ranks}

Context parallelism: layers of Qwen3-8B, one prompt with 8 responses of 2,048 tokens. *By heads*
splits each sequence over the GPUs by attention heads. *By responses* assigns whole responses to
GPUs, which gather the prefix cache of all layers once. *By layer* assigns them too, but gathers
the cache of one layer before its attention, in each forward and backward of responses
(schedule-level reuse, section 4.4). Only the benchmark has it. *No sharing* is training without
sharing on both GPUs with one rollout in each microbatch. Its time is extrapolated from two
rollouts, and of earlier runs: `fcb1fd49` with 12 layers and `c07dfe52` with 36.

{context}

{longest}

Pipeline parallelism: Qwen3-8B in two stages, microbatches of at most 4,096 tokens. The *bubble* is
the share of the GPUs' time that is idle or spent on communication: 1 minus half the ratio to one
GPU. *Waits* is the share of one step's time in which a stage waits for another. *With three
barriers* is the predicted bubble of the usual order, in which all stages finish a phase before any
stage begins the next.

{pipeline}

## Other methods that share prompts

Forward and backward of Qwen3-1.7B on two prompts of 8,192 tokens, with 8 responses of 512 tokens
each. PrefixGrouper and TRL use sdpa, and TRL runs 4 rows at a time. Tree packing uses
FlexAttention. Optimizer states are not included.

{peers}

## Images

Qwen3-VL-4B on a prompt of 8,000 visual and 200 other tokens, with 8 responses of 300 tokens. The
baseline is forkpoint without sharing, a step for each rollout, measured on two rollouts and scaled
to 8. It plans and adds to gradients once for each rollout, so the ratio can exceed the bound.
forkpoint runs the encoder once. Both compile their blocks. TRL's trainer runs all 8 rollouts, one
row at a time, with sdpa. Rows without FlashAttention-4 use torch's FlashAttention-2. During these
measurements, others ran on the other GPUs of the machine.

{images}

## The default plan

Forward and backward with the default plan. The baseline is forkpoint without sharing. While rows of
commits other than `32531497`, `5bb702c4`, `9aded41d`, `c42e9008` and `89ca7398` were measured, the
other GPU of the host ran another job, on other cores. The default plan of Qwen3-4B *long* without
FlashAttention-4 was not the fastest at `32531497`. Later commits take the fastest plan, which
recomputes the prompt's activations. A fixed seed selected groups of airline.jsonl (agent
conversations) and rag.jsonl (retrieved text). *gsm8k-8* and *gsm8k-64* have 32 prompts of 200
tokens with 8 or 64 responses of 300 tokens each. *long* has one prompt of 8,192 tokens with 32
responses of 2,048 tokens. The column *over the best plan* compares the time of the default plan
with that of the fastest plan. It is 1.00 if the default plan is the fastest. Times of short steps
vary by up to 1.6 times between runs, because the host decides them and its virtual cores run at two
speeds: a fixed loop of Python takes 3.6 or 7.5 ms, and this changes within a second. A plan that
shares must also be predicted to be faster than the plan without sharing on a slower host.

{defaults}

## Compared with forkpoint without sharing

Forward and backward of one group or of several trees. Both sides compile their blocks and use the
same kernels. The baseline uses its fastest microbatch size. For groups of more than four responses,
it is measured on two to eight rollouts and scaled by counted FLOPs. For trees, the ratio is the
median of three measurements. Rows of groups of Qwen3.5-4B use the fastest of three plans. The other
rows use the plan that the planner chose with a calibration.

{steps}

## Mixtures of experts

16 layers of Qwen3-30B-A3B, compiled. The baseline is forkpoint without sharing, with microbatches
of up to 65,536 tokens.

{mixtures}

## Attention

Shared-prefix attention with FlashAttention-4 in bfloat16, for N responses of 2,048 tokens to a
prompt of P tokens. There are 32 query heads and 8 key-value heads of dimension 128. Rates count the
pairs of queries and keys that the mask allows. The baseline is attention without sharing with the
fastest kernel, measured on two responses and scaled to N. It was timed after forkpoint, not in
turn, so the ratios are accurate to a few percent.

{attention}

## Counted bounds

The table lists the bound for groups of N responses of 1,024 tokens to one prompt, for Qwen3-8B. The
first column is the ratio of prompt length to response length.

{bounds}
"""


def page() -> str:
    """The text of docs/results.md."""
    made = (headlines, verl, ranks, context, longest, pipeline, peers, images, defaults)
    made += (steps, mixtures, attention, bounds)
    return TEXT.format(**{make.__name__: make() for make in made})


def with_table(text: str) -> str:
    """The README's text with its table of results."""
    table = headlines(sources=False)
    header = re.escape(table.partition("\n")[0])
    text, count = re.subn(rf"^{header}\n(\|.*\n)+", lambda _: f"{table}\n", text, flags=re.M)
    assert count == 1, header
    return text


@dataclass(frozen=True, kw_only=True)
class Results:
    """Write docs/results.md and the README's table from the rows.

    Attributes:
        json: Print one line of JSON and nothing else.
    """

    json: Flag = False

    def run(self) -> int:
        PAGE.write_text(page(), encoding="utf-8")
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
        out = Output(json_only=self.json)
        out.show(f"written: {PAGE}")
        out.result({"benchmark": "results", "written": [str(PAGE), str(README)]})
        return 0
