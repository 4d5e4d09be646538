"""Figure of docs/concepts/phases.md: one group as a plan runs it, beside dense. Drawn from plans.

    python scripts/plot_schedule.py [--output docs/figures/schedule.svg]

Widths are counted FLOPs of each row's forward and backward at the sizes of an 8B model, heights of
the curves the counted bytes of activations and prefix cache; nothing is measured.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from forkpoint.config import Config
from forkpoint.plan import Plan, make_plan
from forkpoint.plan.pricing.cost import ModelShape, Work, visible_pairs
from forkpoint.plan.program import FORWARD, LEAF, PREFIX_BACKWARD, PREFIX_FORWARD, phase_of
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.tree import Microbatch

PROMPT_TOKENS, RESPONSE_TOKENS, RESPONSES = 6_144, 2_048, 6
SHAPE = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, value_dim=128,
    intermediate=14336, vocab=128256,
)  # fmt: skip
COLOURS = {
    PREFIX_FORWARD: "#1f5fa8",
    LEAF: "#c98b2b",
    PREFIX_BACKWARD: "#7fb0e0",
    "dense": "#8c8c8c",
}
OUTPUT = Path(__file__).parents[1] / "docs" / "figures" / "schedule.svg"


def group() -> RolloutBatch:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1000, size=PROMPT_TOKENS)
    mask = np.repeat([0, 1], [PROMPT_TOKENS, RESPONSE_TOKENS])
    return RolloutBatch(
        [
            Rollout(
                np.concatenate([prompt, rng.integers(1000, size=RESPONSE_TOKENS)]),
                mask,
                1.0,
                group_id=0,
            )
            for _ in range(RESPONSES)
        ]
    )


Step = tuple[str, str, float, float, int]


def row_work(plan: Plan, row: Microbatch, num_loss_entries: int) -> Work:
    """Work of one row's own edges."""
    segments = list(row.segments)
    pairs = visible_pairs(plan.forest.start[segments], plan.forest.length[segments], 0)
    return Work(tokens=row.tokens, pairs={0: pairs}, num_loss_entries=num_loss_entries)


def timeline(plan: Plan) -> list[Step]:
    """(phase, row, begin, end, tokens held at the end) of every forward and backward."""
    begin, held, steps = 0.0, 0, []
    for instruction in plan.program.instructions:
        row = plan.microbatches[instruction.microbatch]
        ahead = instruction.operation == FORWARD
        # Every leaf is a response, alone or, in dense rows, behind its prompt.
        trained = 0 if row.children else RESPONSE_TOKENS * len(row.segments)
        forward = row_work(plan, row, trained).forward_flops(SHAPE)
        whole = row_work(plan, row, trained).step_flops(SHAPE)
        end = begin + (forward if ahead else whole - forward)
        held += row.tokens if ahead else -row.tokens
        name = phase_of(instruction.operation, row)
        steps.append((name, plan.microbatch_names[row.index], begin, end, held))
        begin = end
    return steps


def draw_tree(axis: Axes) -> None:
    middle = (RESPONSES - 1) / 2
    axis.barh(middle, PROMPT_TOKENS, 0.55, color=COLOURS[PREFIX_FORWARD])
    axis.text(PROMPT_TOKENS / 2, middle, f"prompt, {PROMPT_TOKENS:,} tokens", ha="center",
              va="center", color="white", fontsize=9)  # fmt: skip
    for n in range(RESPONSES):
        begin = PROMPT_TOKENS + 700
        axis.plot([PROMPT_TOKENS, begin], [middle, n], color="#555555", lw=1)
        axis.barh(n, RESPONSE_TOKENS, 0.55, left=begin, color=COLOURS[LEAF])
    axis.text(PROMPT_TOKENS + 700 + RESPONSE_TOKENS / 2, -0.62, f"{RESPONSES} responses",
              ha="center", fontsize=9)  # fmt: skip
    axis.set_title("the tokens of a group", fontsize=10, loc="left")
    axis.set_axis_off()
    axis.set_ylim(RESPONSES - 0.3, -0.9)


def draw_bars(axis: Axes, y: float, steps: list[Step], unit: float, dense: bool) -> None:
    for name, row, begin, end, _ in steps:
        colour = COLOURS["dense"] if dense else COLOURS[name]
        forward = name == PREFIX_FORWARD or (name == LEAF and (begin, row) == first_of(steps, row))
        axis.barh(y, (end - begin) / unit, 0.62, left=begin / unit, color=colour,
                  alpha=0.72 if forward else 1.0, edgecolor="white", linewidth=0.8)  # fmt: skip


def first_of(steps: list[Step], row: str) -> tuple[float, str]:
    return next((s[2], s[1]) for s in steps if s[1] == row)


def draw_memory(axis: Axes, plan: Plan, steps: list[Step], unit: float, colour: str) -> None:
    boundary = SHAPE.boundary_bytes_per_token + SHAPE.boundary_gradient_bytes_per_token
    x, y = [0.0], [0.0]
    tokens = 0
    for _, _, begin, end, held in steps:
        # A row's activations grow through its forward and go as its backward walks back.
        for at, slots in ((begin, tokens), (end, held)):
            x.append(at / unit)
            y.append((slots * SHAPE.activation_bytes() + plan.cache_tokens * boundary) / 1e9)
        tokens = held
    axis.plot(x, y, color=colour, lw=1.6)
    axis.fill_between(x, y, color=colour, alpha=0.12)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    batch = group()
    across = Config(sharing="group", boundary="across", max_microbatch_tokens=PROMPT_TOKENS)
    shared = make_plan(batch, SHAPE, across)
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    dense = make_plan(batch, SHAPE, Config(sharing="none", max_microbatch_tokens=tokens))
    draw(shared, dense, output)
    print(f"wrote {output}: bound {shared.bound:.2f}x")


def draw(shared: Plan, dense: Plan, output: Path) -> None:
    plt.switch_backend("Agg")
    plt.rcParams.update({"svg.hashsalt": "forkpoint", "svg.fonttype": "none", "font.size": 9})
    figure = plt.figure(figsize=(11, 3.4), layout="constrained")
    tree, right = figure.subfigures(1, 2, width_ratios=(1, 2.1), squeeze=False)[0]
    draw_tree(tree.subplots())
    bars, memory = right.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
    steps, dense_steps = timeline(shared), timeline(dense)
    unit = steps[-1][3]
    draw_bars(bars, 0, steps, unit, dense=False)
    draw_bars(bars, 1, dense_steps, unit, dense=True)
    for name, begin, end in spans(steps):
        bars.text((begin + end) / 2 / unit, -0.5, name, ha="center", va="bottom")
    bars.set_yticks([0, 1], ["shared", "dense"])
    bars.set_ylim(1.5, -1.0)
    bars.set_title("forwards (pale) and backwards of the rows", fontsize=10, loc="left")
    draw_memory(memory, dense, dense_steps, unit, COLOURS["dense"])
    draw_memory(memory, shared, steps, unit, COLOURS[PREFIX_FORWARD])
    memory.set_ylabel("activations, GB")
    memory.set_xlabel("counted work, in shared steps")
    memory.set_ylim(bottom=0)
    for axis in (bars, memory):
        axis.spines[["top", "right"]].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
    plt.close(figure)


def spans(steps: list[Step]) -> list[tuple[str, float, float]]:
    """Begin and end of each phase."""
    names = list(dict.fromkeys(step[0] for step in steps))
    return [
        (n, min(s[2] for s in steps if s[0] == n), max(s[3] for s in steps if s[0] == n))
        for n in names
    ]


if __name__ == "__main__":
    main()
