"""The gated delta rule on a CUDA device: fla against float64, and models of real proportions."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from test_delta_rule import Inputs, outcome
from torch import Tensor

from benchmarks.steps.hybrid import QWEN35_4B, HybridCase, make_model
from forkpoint import Config, wrap
from forkpoint.losses import GRPO
from forkpoint.ops.delta_rule import DELTA_KERNELS, chunked, fla
from forkpoint.ops.recurrence import Sequences, StateTable, over_levels
from forkpoint.tree import Level, StateLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # What fla and tilelang say of themselves as they are imported and compile.
    pytest.mark.filterwarnings("ignore:Flash Attention is not installed:ImportWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(fla|tilelang|tvm)"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Use .T.copy:DeprecationWarning"),
]
BAR = 2e-2
"""Relative, of every output and gradient against float64, in 16 bits."""
COMPILING = 8.0
"""Seconds: less than tilelang takes to compile its kernel, which is 10 to 15."""
LENGTHS = [[1], [2], [64], [65], [4097], [65, 1000, 129, 1, 63, 640], [1] * 40]


@pytest.fixture
def with_fla() -> None:
    refusal = fla.KERNEL.refusal(torch.device("cuda"), torch.bfloat16, 128, 128, False)
    if refusal is not None:
        pytest.skip(f"fla: {refusal}")


def on_gpu(case: Inputs) -> tuple[list[Tensor | None], Sequences]:
    inputs = [None if x is None else x.cuda() for x in case.make()]
    return inputs, Sequences(np.asarray(case.lengths), "cuda")


@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("forgets", [0.05, 20.0], ids=["remembers", "forgets"])
@pytest.mark.parametrize("states", [True, False], ids=["from-states", "from-zero"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{len(n)}x{max(n)}")
def test_fla_is_the_chunked_form(lengths: list[int], states: bool, forgets: float) -> None:
    case = Inputs(lengths, forgets, torch.bfloat16, states, dims=(128, 128))
    inputs, sequences = on_gpu(case)
    exact = [None if x is None else x.double() for x in inputs]
    expected = outcome(chunked.scan, exact, sequences)
    found = outcome(fla.scan, inputs, sequences)
    for name, value in expected.items():
        assert torch.isfinite(found[name]).all(), name
        error, size = float((found[name] - value).norm()), float(value.norm())
        # What tokens forget at once leaves next to nothing of a start, and a token that starts from
        # nothing has nothing to forget: measured by the gradient of beta, of what is written.
        if name in ("initial", "g") and size < 1e-6 * value.numel() ** 0.5:
            size = float(expected["beta"].norm())
        assert error <= BAR * size, f"{name} {error} of {size}"


def tree(depth: int, random: np.random.Generator) -> tuple[StateLayout, list[int]]:
    """A microbatch of two trees in visiting order, some states of each level kept, and its
    lengths."""
    levels: list[list[tuple[int, int, int]]] = [[] for _ in range(depth)]
    lengths: list[int] = []

    def visit(level: int, parent: int) -> None:
        here = len(levels[level])
        length = int(random.choice([1, 2, 63, 64, 65, 130, 700]))
        levels[level].append((sum(lengths), length, parent))
        lengths.append(length)
        for _ in range(int(random.integers(1, 3)) if level + 1 < depth else 0):
            visit(level + 1, here)

    visit(0, -1)
    visit(0, -1)
    made, places = [], 0
    for at, segments in enumerate(levels):
        kept = np.flatnonzero(random.random(len(segments)) < 0.4)
        begin, length, parent = np.array(segments, np.int64).T
        made.append(Level(begin, length, parent, kept, at + 1 < depth or len(kept) > 0))
        places += len(kept)
    return StateLayout(tuple(made), np.arange(places)), lengths


@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("states", [True, False], ids=["from-states", "from-zero"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_levels_together_are_levels_one_by_one(depth: int, states: bool) -> None:
    layout, lengths = tree(depth, np.random.default_rng(depth))
    case = Inputs(lengths, 0.2, torch.bfloat16, states, dims=(128, 128))
    inputs = [None if x is None else x.cuda() for x in case.make()]
    if inputs[5] is not None:
        inputs[5] = inputs[5][: len(layout.levels[0].length)].contiguous()
    table = StateTable(layout, device="cuda")
    ways = {
        "exact": lambda given, initial: over_levels(chunked.scan, given, table, initial),
        "one by one": lambda given, initial: over_levels(fla.scan, given, table, initial),
        "together": lambda given, initial: fla.scan_levels(given, table, initial),
    }
    found = {}
    for name, way in ways.items():
        wide = torch.float64 if name == "exact" else None
        leaves = [None if x is None else x.to(wide or x.dtype).requires_grad_() for x in inputs]
        o_TGE, kept = way(tuple(leaves[:5]), leaves[5])
        assert (kept is None) == (len(layout.kept_index) == 0)
        outputs = [o_TGE, *([] if kept is None else [kept])]
        total = sum(
            (x.double() * torch.linspace(-1, 2, x.numel(), device="cuda").view_as(x)).sum()
            for x in outputs
        )
        assert isinstance(total, Tensor)
        wanted = [x for x in leaves if x is not None]
        found[name] = [*outputs, *torch.autograd.grad(total, wanted)]
    for at, exact in enumerate(found["exact"]):
        size = float(exact.detach().norm())
        errors = {name: float((found[name][at].double() - exact).detach().norm()) for name in found}
        assert errors["together"] <= BAR * size, f"{at}: {errors} of {size}"
        assert errors["together"] <= 1.1 * errors["one by one"] + 1e-6 * size, f"{at}: {errors}"


@pytest.mark.usefixtures("with_fla")
def test_changing_lengths_do_not_compile_again() -> None:
    random = np.random.default_rng(0)

    def step(lengths: list[int]) -> float:
        inputs, sequences = on_gpu(Inputs(lengths, dtype=torch.bfloat16, dims=(128, 128)))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outcome(fla.scan, inputs, sequences)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    step([900] * 9)
    step([905] * 9)
    # Other lengths, and other numbers of them, below a chunk and above.
    seconds = [step(random.integers(890, 910, 9).tolist()) for _ in range(10)]
    seconds += [step(random.integers(1, 3000, random.integers(2, 20)).tolist()) for _ in range(10)]
    print([round(each, 3) for each in seconds])
    assert max(seconds) < COMPILING, f"{seconds}"


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("kernel", [k.name for k in DELTA_KERNELS if k.name != "reference"])
@pytest.mark.parametrize("boundary", ["within", "across"])
def test_a_model_of_real_proportions(kernel: str, boundary: Any) -> None:
    """Four layers of Qwen3.5-4B in bfloat16: no further from float32 than dense training is."""
    record = next(k for k in DELTA_KERNELS if k.name == kernel)
    refusal = record.refusal(torch.device("cuda"), torch.bfloat16, 128, 128, False)
    if refusal is not None:
        pytest.skip(f"{kernel}: {refusal}")
    model = make_model({**QWEN35_4B, "vocab_size": 8192}, 4, torch.bfloat16, "cuda")
    batch = HybridCase(prompt=1500, response=200, size=4).batch(8192)
    tokens = 1700 if boundary == "across" else 2400
    config = Config(
        sharing="group", boundary=boundary, max_microbatch_tokens=tokens, recurrence_kernel=kernel
    )
    report = wrap(model, config).verify(batch, GRPO())
    assert report.passed, report.table()
