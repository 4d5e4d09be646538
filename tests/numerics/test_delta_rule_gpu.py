"""The gated delta rule on a CUDA device: fla against float64, and beside dense paths.

Dense is one stock call a path, as transformers makes it. Both are held against the chunked form in
float64: sharing may be off by twice what dense is.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import poisoned
from test_delta_rule import Inputs, outcome
from torch import Tensor

from benchmarks.shapes import checkpoint, make_group, make_model
from forkpoint import Config, wrap
from forkpoint.losses import GRPO
from forkpoint.ops.choice import Asked
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
LENGTHS = [[1], [2], [64], [65], [4097], [65, 1000, 129, 1, 63, 640], [1] * 40]
NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")


@pytest.fixture
def with_fla() -> None:
    refusal = fla.KERNEL.refusal(Asked(torch.device("cuda"), torch.bfloat16, 128, 128))
    if refusal is not None:
        pytest.skip(f"fla: {refusal}")


def on_gpu(lengths: list[int], forgets: float = 0.2, states: bool = True) -> list[Tensor | None]:
    case = Inputs(lengths, forgets, torch.bfloat16, states, dims=(128, 128))
    return [None if x is None else x.cuda() for x in case.make()]


@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("forgets", [0.05, 20.0], ids=["remembers", "forgets"])
@pytest.mark.parametrize("states", [True, False], ids=["from-states", "from-zero"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{len(n)}x{max(n)}")
def test_fla_is_the_chunked_form(lengths: list[int], states: bool, forgets: float) -> None:
    inputs, sequences = on_gpu(lengths, forgets, states), Sequences(np.asarray(lengths), "cuda")
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


class Tree:
    """Segments (tokens, parent) laid out one after the other, in levels and in paths."""

    def __init__(self, segments: list[tuple[int, int]], keep: float = 0.0) -> None:
        """keep: the share of states that other microbatches start from."""
        begin = np.cumsum([0, *(n for n, _ in segments)])
        self.tokens: int = int(begin[-1])
        depth: list[int] = []
        for _, parent in segments:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        levels: list[Level] = []
        above, kept_so_far = {-1: -1}, 0
        random = np.random.default_rng(len(segments))
        for at in range(max(depth) + 1):
            here = [i for i in range(len(segments)) if depth[i] == at]
            columns = [[begin[i], segments[i][0], above[segments[i][1]]] for i in here]
            first, length, parent = np.array(columns, np.int64).T
            kept = np.flatnonzero(random.random(len(here)) < keep)
            kept_so_far += len(kept)
            final = at < max(depth) or len(kept) > 0
            levels.append(Level(first, length, parent, kept, final))
            above |= {segment: place for place, segment in enumerate(here)}
        layout = StateLayout(tuple(levels), np.arange(kept_so_far))
        self.roots: int = depth.count(0)
        self.table = StateTable(layout, device="cuda")
        self.paths: list[Tensor] = []
        """Tokens of each leaf's path."""
        for leaf in set(range(len(segments))) - {parent for _, parent in segments}:
            at, runs = leaf, []
            while at >= 0:
                runs.append(np.arange(begin[at], begin[at + 1]))
                at = segments[at][1]
            self.paths.append(torch.from_numpy(np.concatenate(runs[::-1])).cuda())


TREES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(1000, -1)] + [(n, 0) for n in (65, 1, 200, 64, 63, 2)],
    "whole chunks": [(1024, -1)] + [(128, 0)] * 8,
    "turns": [(333, -1), (70, 0), (1, 0), (129, 1), (64, 1), (1, 2), (700, 2), (3, 3), (90, 3)],
    "one token levels": [(1, -1), (1, 0), (1, 1), (1, 2)],
    "two trees": [(65, -1), (300, 0), (1, 0), (130, 1), (700, -1), (64, 4), (2, 4), (63, 5)],
}


@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("states", [True, False], ids=["from-states", "from-zero"])
@pytest.mark.parametrize("name", ["turns", "two trees"])
def test_levels_together_are_levels_one_by_one(name: str, states: bool) -> None:
    tree = Tree(TREES[name], keep=0.4)
    inputs = on_gpu([n for n, _ in TREES[name]], states=states)
    if inputs[5] is not None:
        inputs[5] = inputs[5][: tree.roots].contiguous()
    runs: dict[str, Callable[..., Any]] = {
        "exact": lambda given, initial: over_levels(chunked.scan, given, tree.table, initial),
        "one by one": lambda given, initial: over_levels(fla.scan, given, tree.table, initial),
        "together": lambda given, initial: fla.scan_levels(given, tree.table, initial),
    }
    found = {}
    for run, call in runs.items():
        wide = torch.float64 if run == "exact" else None
        leaves = [None if x is None else x.to(wide or x.dtype).requires_grad_() for x in inputs]
        o_TGE, kept = call(tuple(leaves[:5]), leaves[5])
        outputs = [o_TGE, *([] if kept is None else [kept])]
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        for x in outputs:
            weights = torch.linspace(-1, 2, x.numel(), device="cuda").view_as(x)
            total = total + (x.double() * weights).sum()
        wanted = [x for x in leaves if x is not None]
        found[run] = [*outputs, *torch.autograd.grad(total, wanted)]
    for at, exact in enumerate(found["exact"]):
        size = float(exact.detach().norm())
        errors = {run: float((found[run][at].double() - exact).detach().norm()) for run in found}
        assert errors["together"] <= BAR * size, f"{at}: {errors} of {size}"
        assert errors["together"] <= 1.1 * errors["one by one"] + 1e-6 * size, f"{at}: {errors}"


def path_outcome(run: Callable[..., list[Tensor]], inputs: list[Tensor]) -> list[Tensor]:
    """All paths' outputs, and the gradients of their sum, weighted at random."""
    wide = [x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    leaves = [x.requires_grad_() for x in wide]
    outputs = run(*(x.to(y.dtype) for x, y in zip(leaves, inputs, strict=True)))
    random = torch.Generator("cuda").manual_seed(3)
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for o in outputs:
        weights = torch.randn(o.shape, generator=random, device="cuda")
        total = total + (o.double() * weights).sum()
    return [torch.cat(outputs).detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.usefixtures("with_fla")
@pytest.mark.parametrize("forgets", [0.02, 0.2, 20.0], ids=["remembers", "decays", "forgets"])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_as_exact_as_its_paths(name: str, forgets: float) -> None:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    tree = Tree(TREES[name])
    inputs = [x for x in on_gpu([tree.tokens], forgets, states=False) if x is not None]

    def dense(*given: Tensor) -> list[Tensor]:
        outputs = []
        for path in tree.paths:
            q, k, v, g, beta = (x[path][None] for x in given)
            repeats = v.shape[2] // q.shape[2]
            q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)
            o, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
            outputs.append(o[0])
        return outputs

    def exactly(*given: Tensor) -> list[Tensor]:
        whole = [Sequences(np.asarray([len(path)]), "cuda") for path in tree.paths]
        return [
            chunked.scan(*(x[path] for x in given), None, sequence, False)[0]
            for path, sequence in zip(tree.paths, whole, strict=True)
        ]

    def together(*given: Tensor) -> list[Tensor]:
        o, _ = fla.scan_levels(given, tree.table, None)
        return [o[path] for path in tree.paths]

    expected = path_outcome(exactly, [x.double() for x in inputs])
    with poisoned("cuda"):
        theirs = path_outcome(dense, inputs)
    with poisoned("cuda"):
        ours = path_outcome(together, inputs)
    for what, value, one, other in zip(NAMES, expected, theirs, ours, strict=True):
        assert torch.isfinite(other).all(), what
        size = float(value.norm())
        if what == "dg":  # tokens that forget at once have next to none
            size = max(size, 1e-6 * float(expected[-1].norm()))
        own, found = (float((x.double() - value).norm()) for x in (one, other))
        # An eighth of what rounding to bfloat16 takes at most.
        assert found <= 2 * own + 2**-11 * size, f"{what} {found} of {own}, norm {size}"


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("kernel", [k.name for k in DELTA_KERNELS])
@pytest.mark.parametrize("boundary", ["within", "across"])
def test_a_model_of_real_proportions(kernel: str, boundary: Any) -> None:
    """Four layers of Qwen3.5-4B in bfloat16: no further from float32 than dense training is."""
    record = next(k for k in DELTA_KERNELS if k.name == kernel)
    refusal = record.refusal(Asked(torch.device("cuda"), torch.bfloat16, 128, 128))
    if refusal is not None:
        pytest.skip(f"{kernel}: {refusal}")
    model = make_model("qwen3.5-4b", "cuda", layers=4, vocab_size=8192)
    checkpoint(model)
    batch = make_group(1500, [200] * 4, vocab=4096)
    tokens = 1700 if boundary == "across" else 2400
    config = Config(
        sharing="group", boundary=boundary, max_microbatch_tokens=tokens, recurrence_kernel=kernel
    )
    report = wrap(model, config).verify(batch, GRPO())
    assert report.passed, report.table()
