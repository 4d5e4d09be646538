"""The gated delta rule over trees on a CUDA device, beside the paths as transformers runs them.

Dense is one stock call a path, as a batch of one, with q and k repeated for every value head. Both
are held against the chunked form in float64: sharing may be off by twice what dense is. On both
sides gradients of a token on several paths add up in 16 bits, as autograd has it, which is part of
their errors; over a model's parameters sharing is held to 1.1 times (test_hybrid_model_gpu.py).
"""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from attention_bar import poisoned
from test_delta_rule import Inputs
from test_delta_rule_gpu import pytestmark as pytestmark
from test_delta_rule_gpu import with_fla as with_fla
from torch import Tensor

from forkpoint.ops.delta_rule import chunked, fla
from forkpoint.ops.recurrence import Sequences, StateTable, over_levels
from forkpoint.tree import Level, StateLayout

NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
SHARED = 2.0
"""Times dense's own error against float64, for outputs and every gradient."""
ROUNDING = 2**-11
"""Of the norm: an eighth of what rounding to bfloat16 takes at most."""

TREES: dict[str, list[tuple[int, int]]] = {
    "one prompt": [(1000, -1)] + [(n, 0) for n in (65, 1, 200, 64, 63, 2)],
    "whole chunks": [(1024, -1)] + [(128, 0)] * 8,
    "turns": [(333, -1), (70, 0), (1, 0), (129, 1), (64, 1), (1, 2), (700, 2), (3, 3), (90, 3)],
    "one token levels": [(1, -1), (1, 0), (1, 1), (1, 2)],
    "one token, then many": [(1, -1), (300, 0), (1, 0), (65, 2), (1, 2)],
}
"""Segments: tokens and parent, parents first."""


class Tree:
    """A forest of one tree, laid out segment after segment, in levels and in paths."""

    def __init__(self, segments: list[tuple[int, int]]) -> None:
        lengths = [n for n, _ in segments]
        begin = np.cumsum([0, *lengths])
        self.tokens: int = int(begin[-1])
        depth: list[int] = []
        for _, parent in segments:
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        levels: list[Level] = []
        above: dict[int, int] = {-1: -1}
        for at in range(max(depth) + 1):
            here = [i for i in range(len(segments)) if depth[i] == at]
            columns = [[begin[i], lengths[i], above[segments[i][1]]] for i in here]
            first, length, parent = np.array(columns, np.int64).T
            last = at == max(depth)
            levels.append(Level(first, length, parent, np.zeros(0, np.int64), not last))
            above |= {segment: place for place, segment in enumerate(here)}
        self.table = StateTable(StateLayout(tuple(levels), np.zeros(0, np.int64)), device="cuda")
        parents = {parent for _, parent in segments}
        self.paths: list[Tensor] = []
        """Tokens of each leaf's path."""
        for leaf in set(range(len(segments))) - parents:
            at, runs = leaf, []
            while at >= 0:
                runs.append(np.arange(begin[at], begin[at + 1]))
                at = segments[at][1]
            self.paths.append(torch.from_numpy(np.concatenate(runs[::-1])).cuda())


def outcome(run: Callable[..., list[Tensor]], tree: Tree, inputs: list[Tensor]) -> list[Tensor]:
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
@pytest.mark.parametrize("way", ["together", "one by one"])
@pytest.mark.parametrize("forgets", [0.02, 0.2, 20.0], ids=["remembers", "decays", "forgets"])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_as_exact_as_its_paths(name: str, forgets: float, way: str) -> None:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    tree = Tree(TREES[name])
    case = Inputs([tree.tokens], forgets, torch.bfloat16, states=False, dims=(128, 128))
    inputs = [x.cuda() for x in case.make() if x is not None]

    def dense(*given: Tensor) -> list[Tensor]:
        outputs = []
        for path in tree.paths:
            q, k, v, g, beta = (x[path][None] for x in given)
            if len(path) == 1:  # transformers would take another kernel, without a backward
                q, k, v, g, beta = (
                    torch.cat([x, torch.zeros_like(x)], 1) for x in (q, k, v, g, beta)
                )
            repeats = v.shape[2] // q.shape[2]
            o, _ = chunk_gated_delta_rule(
                q.repeat_interleave(repeats, 2),
                k.repeat_interleave(repeats, 2),
                v,
                g=g,
                beta=beta,
                use_qk_l2norm_in_kernel=True,
            )
            outputs.append(o[0, : len(path)])
        return outputs

    def shared(*given: Tensor) -> list[Tensor]:
        if way == "together":
            o, _ = fla.scan_levels(given, tree.table, None)
        else:
            o, _ = over_levels(fla.scan, given, tree.table, None)
        return [o[path] for path in tree.paths]

    def exactly(*given: Tensor) -> list[Tensor]:
        whole = [Sequences(np.asarray([len(path)]), "cuda") for path in tree.paths]
        return [
            chunked.scan(*(x[path] for x in given), None, sequence, False)[0]
            for path, sequence in zip(tree.paths, whole, strict=True)
        ]

    expected = outcome(exactly, tree, [x.double() for x in inputs])
    with poisoned("cuda"):
        theirs = outcome(dense, tree, inputs)
    with poisoned("cuda"):
        ours = outcome(shared, tree, inputs)
    for what, value, one, other in zip(NAMES, expected, theirs, ours, strict=True):
        assert torch.isfinite(other).all(), what
        size = float(value.norm())
        if (
            what == "dg"
        ):  # tokens that forget at once have next to none: see the tests of the kernel
            size = max(size, 1e-6 * float(expected[-1].norm()))
        own, found = (float((x.double() - value).norm()) for x in (one, other))
        print(f"{what} {found / size:.2e} of {own / size:.2e}")
        assert found <= SHARED * own + ROUNDING * size, f"{what} {found} of {own}, norm {size}"


@pytest.mark.usefixtures("with_fla")
def test_changing_trees_do_not_compile_again() -> None:
    random = np.random.default_rng(0)

    def step(segments: list[tuple[int, int]]) -> float:
        tree = Tree(segments)
        case = Inputs([tree.tokens], 0.2, torch.bfloat16, states=False, dims=(128, 128))
        inputs = [x.cuda() for x in case.make() if x is not None]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outcome(lambda *given: [fla.scan_levels(given, tree.table, None)[0]], tree, inputs)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def drawn() -> list[tuple[int, int]]:
        count = int(random.integers(2, 14))
        parents = [-1, *(int(random.integers(0, i)) for i in range(1, count))]
        return [(int(random.integers(1, 1500)), parent) for parent in parents]

    for name in TREES:
        step(TREES[name])
    seconds = [step(drawn()) for _ in range(20)]
    print([round(each, 3) for each in seconds])
    assert max(seconds) < 1, f"{seconds}: a kernel of Triton takes longer to compile, or to tune"
