"""Gated delta rule and convolution: kernels against a loop over time, microbatches against
paths."""

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import recurrences_by_loops
import torch
from hypothesis import given, settings
from torch import Tensor

from forkpoint import Config, RolloutBatch
from forkpoint.ops.delta_rule import chunked, fla, gated_delta_rule
from forkpoint.ops.recurrence import (
    ConvolutionTable,
    Sequences,
    StateTable,
    gathered_inputs,
    short_convolution,
)
from forkpoint.plan import make_plan
from forkpoint.tree import ConvolutionLayout, Level, StateLayout, convolution_layout, state_layout
from strategies import batches

NAMES = ("q", "k", "v", "g", "beta", "initial")
RAGGED = [1, 70, 64, 3, 130, 1, 128]
HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5


@dataclass
class Inputs:
    """Random inputs; `forgets` is how much the state decays a token, as a log."""

    lengths: list[int]
    forgets: float = 0.2
    dtype: torch.dtype = torch.float64
    states: bool = True
    dims: tuple[int, int] = (KEY_DIM, VALUE_DIM)
    seed: int = 0

    def make(self) -> list[Tensor | None]:
        random = torch.Generator().manual_seed(self.seed)
        tokens, count = sum(self.lengths), len(self.lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        key_dim, value_dim = self.dims
        q, k = (normal(tokens, HEADS, key_dim).to(self.dtype) for _ in range(2))
        v = normal(tokens, VALUE_HEADS, value_dim).to(self.dtype)
        beta = normal(tokens, VALUE_HEADS).sigmoid().to(self.dtype)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        g = (-self.forgets * normal(tokens, VALUE_HEADS).abs()).to(wide)
        initial = normal(count, VALUE_HEADS, key_dim, value_dim).to(wide)
        return [q, k, v, g, beta, initial if self.states else None]

    def sequences(self) -> Sequences:
        return Sequences(np.asarray(self.lengths, np.int64), "cpu")


def outcome(
    scan, inputs: list[Tensor | None], sequences: Sequences, names=NAMES
) -> dict[str, Tensor]:
    """Output, final states and every gradient, by name, in float64."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    o, final = scan(*leaves, sequences, True)
    random = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.device) for x in (o, final)
    ]
    total = sum((x.double() * w).sum() for x, w in zip((o, final), weights, strict=True))
    named = {n: x for n, x in zip(names, leaves, strict=True) if x is not None}
    found = dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))
    return {n: x.detach().double() for n, x in ({"o": o, "final": final} | found).items()}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.isfinite(value).all(), name
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "case",
    [
        Inputs(RAGGED, forgets=0.0),
        Inputs(RAGGED, forgets=30.0),
        Inputs(RAGGED, states=False),
        Inputs([1]),
        Inputs([1, 1, 1]),
        Inputs([63, 65, 64]),
    ],
    ids=str,
)
def test_chunks_are_the_loop_over_time(case: Inputs) -> None:
    expected = outcome(recurrences_by_loops.delta_rule, case.make(), case.sequences())
    close(outcome(chunked.scan, case.make(), case.sequences()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_loop(dtype: torch.dtype) -> None:
    case = Inputs([130, 77, 200], dtype=dtype, dims=(16, 16))
    inputs = case.make()
    exact = [None if x is None else x.double() for x in inputs]
    expected = outcome(recurrences_by_loops.delta_rule, exact, case.sequences())
    loop = outcome(recurrences_by_loops.delta_rule, inputs, case.sequences())
    found = outcome(chunked.scan, inputs, case.sequences())
    for name, value in expected.items():
        bar = 2 * (loop[name] - value).norm() + 2**-22 * value.norm()
        assert (found[name] - value).norm() <= bar, name


def test_the_gradient_of_decays_is_precise_where_tokens_forget_almost_all() -> None:
    """The gradient is then far smaller than the terms that cancel within a chunk's diagonal."""
    case = Inputs([130], dtype=torch.float32, states=False)
    q, k, v, g, beta, _ = case.make()
    inputs = [q, k, v, g - 16, beta, None]
    exact = [None if x is None else x.double() for x in inputs]
    expected = outcome(recurrences_by_loops.delta_rule, exact, case.sequences())["g"]
    found = outcome(chunked.scan, inputs, case.sequences())["g"]
    assert (found - expected).norm() < 1e-3 * expected.norm()
    assert expected.norm() > 0


# Microbatches
# --------------------------------------------------------------------------------------------


@settings(max_examples=25, derandomize=True, deadline=None)
@given(batches(max_rollouts=7, max_tokens=14))
def test_a_microbatch_of_segments_is_its_paths(batch: RolloutBatch) -> None:
    plan = make_plan(
        batch, config=Config(sharing="tree", boundary="within", max_microbatch_tokens=10**6)
    )
    for microbatch in plan.microbatches:
        layout = state_layout(plan.forest, microbatch, plan.state_of)
        table = StateTable(layout)
        assert not layout.levels[-1].final, "nothing reads the last states"
        windows = ConvolutionTable(convolution_layout(plan.forest, microbatch, plan.state_of, 4))
        case = Inputs([microbatch.tokens], states=False)
        leaves = [x.detach().requires_grad_() for x in case.make() if x is not None]
        random = torch.Generator().manual_seed(2)
        weight = torch.randn(VALUE_HEADS * VALUE_DIM, 4, generator=random, dtype=torch.float64)
        bias = torch.randn(VALUE_HEADS * VALUE_DIM, generator=random, dtype=torch.float64)
        leaves.extend(x.requires_grad_() for x in (weight, bias))

        def run(paths: list[list[int]] | None, leaves=leaves, table=table, windows=windows):
            q, k, v, g, beta, weight, bias = leaves
            flat = v.flatten(1)
            if paths is None:
                flat, starts, tails = gathered_inputs(flat, windows)
                assert tails is None
                mixed = short_convolution(flat, weight, bias, starts, windows.places)
                mixed = mixed.unflatten(1, v.shape[1:])
                o, kept = gated_delta_rule(q, k, mixed, g, beta, table=table)
                assert kept is None
                return o
            outputs: dict[int, Tensor] = {}
            for path in paths:
                x = torch.nn.functional.pad(flat[path].T[None], (3, 0))
                mixed = torch.nn.functional.conv1d(x, weight[:, None], bias, groups=len(weight))
                mixed = mixed[0].T.unflatten(1, v.shape[1:])
                one = Sequences(np.asarray([len(path)]), "cpu")
                o, _ = recurrences_by_loops.delta_rule(
                    q[path], k[path], mixed, g[path], beta[path], None, one, False
                )
                outputs |= {place: o[i] for i, place in enumerate(path)}
            return torch.stack([outputs[place] for place in range(len(outputs))])

        places = {
            s: list(range(b, b + int(plan.forest.length[s])))
            for s, b in zip(microbatch.segments, microbatch.segment_begin, strict=True)
        }
        paths = [[t for s in plan.forest.path(segment) for t in places[s]] for segment in places]
        found = []
        for outputs in (run(None), run(paths)):
            weights = torch.randn(
                outputs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
            )
            found.append((outputs, *torch.autograd.grad((outputs * weights).sum(), leaves)))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_autocast_outside_changes_nothing_inside() -> None:
    """The state stays in float32, and what it is made with."""
    whole = Level(np.zeros(1, int), np.asarray([70]), np.asarray([-1]), np.zeros(1, int), True)
    table = StateTable(StateLayout((whole,), np.zeros(1, int)))
    *given, initial = Inputs([70], dtype=torch.float32).make()
    plain = gated_delta_rule(*given, table=table, initial_SGDE=initial)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gated_delta_rule(*given, table=table, initial_SGDE=initial)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)],
    ids=str,
)
def test_autocast_casts_the_convolution_as_any(dtype: torch.dtype, expected: torch.dtype) -> None:
    layout = ConvolutionLayout(np.asarray([0]), np.asarray([[-1, 0]]), np.zeros((0, 1), np.int64))
    table, x_TC = ConvolutionTable(layout), torch.randn(3, 4, dtype=dtype)
    weight_CW, bias_C = torch.randn(4, 2, dtype=dtype), torch.randn(4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        x_TC, windows_FWC, _ = gathered_inputs(x_TC, table)
        found = short_convolution(x_TC, weight_CW, bias_C, windows_FWC, table.places)
    assert found.dtype == expected


def test_first_tokens_of_a_segment_are_rounded_once() -> None:
    """Their products are of 16 bits, and summed in float32, as the library's convolution does."""
    tokens, width = 64, 4
    window = np.random.default_rng(0).integers(0, tokens, (tokens, width))
    layout = ConvolutionLayout(np.arange(tokens), window, np.zeros((0, width - 1), np.int64))
    table, random = ConvolutionTable(layout), torch.Generator().manual_seed(0)
    x_TC = torch.randn(tokens, 32, generator=random).bfloat16()
    weight_CW = torch.randn(32, width, generator=random).bfloat16()
    _, windows_FWC, _ = gathered_inputs(x_TC, table)
    found = short_convolution(x_TC, weight_CW, None, windows_FWC, table.places).double()
    expected = (x_TC.double()[torch.from_numpy(window)] * weight_CW.T.double()).sum(1)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 1e-5
    assert ((found - expected).abs() <= rounding).all()


def test_gradients_of_inputs_that_are_read_often_are_rounded_once() -> None:
    """Two children read the parent's last input, and the microbatch itself does: 256 + 1 + 1."""
    layout = ConvolutionLayout(
        np.asarray([1, 2]), np.asarray([[0, 1], [0, 2]]), np.zeros((0, 1), np.int64)
    )
    x_TC = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    again, windows, _ = gathered_inputs(x_TC, ConvolutionTable(layout))
    grads = torch.tensor([[[256.0], [0]], [[1], [0]]]).bfloat16()
    torch.autograd.backward([again, windows], [torch.ones_like(again), grads])
    assert x_TC.grad is not None
    assert x_TC.grad.flatten().tolist() == [258, 1, 1]


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize(
    ("dtype", "biased"),
    [(torch.bfloat16, True), pytest.param(torch.float64, False, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_the_compiled_convolution_is_the_eager_one(dtype: torch.dtype, biased: bool) -> None:
    """Value and gradients; in 16 bits no further from float64 than the library's convolution.

    Torch 2.11 loses gradients of a Function that casts its result to the dtype it has (torch issue
    180642), here those of float32 and float64.
    """
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(0)
    shapes = [(37, 6), (6, 4), (6,), (5, 4, 6)]
    given = [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]
    weights = torch.randn(37, 6, generator=random, dtype=torch.float64)
    places = torch.tensor([0, 1, 2, 20, 21])

    def outcome(run, dtype: torch.dtype) -> list[Tensor]:
        x, weight, bias, windows = leaves = [y.to(dtype).requires_grad_() for y in given]
        y = run(x, weight, bias if biased else None, windows, places)
        loss = (y * weights.to(dtype)).sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [y.detach(), *(g for g in found if g is not None)]

    given = [y.to(dtype).double() for y in given]
    weights = weights.to(dtype).double()
    exact = outcome(short_convolution, torch.float64)
    eager = outcome(short_convolution, dtype)
    compiled = outcome(torch.compile(short_convolution, dynamic=True, backend="aot_eager"), dtype)
    assert len(exact) == len(compiled) == 4 + biased
    for wanted, plain, found in zip(exact, eager, compiled, strict=True):
        assert found.dtype == dtype
        error, bar = ((y.double() - wanted).norm() / wanted.norm() for y in (found, plain))
        assert error <= (1e-14 if dtype == torch.float64 else max(1.1 * bar, 2e-3)), (error, bar)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_the_compiled_convolution_keeps_nothing_padded_or_wide() -> None:
    """But the inputs themselves, and outputs in their dtype."""
    torch._dynamo.reset()
    x, weight = torch.randn(37, 6).bfloat16(), torch.randn(6, 4).bfloat16().requires_grad_()
    windows, places = torch.randn(3, 4, 6).bfloat16(), torch.tensor([0, 1, 2])
    kept: list[Tensor] = []

    def pack(y: Tensor) -> Tensor:
        kept.append(y)
        return y

    def activated(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(short_convolution(x, weight, None, windows, places))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        torch.compile(activated, dynamic=True)(x.requires_grad_())
    assert kept and all(y.dtype == torch.bfloat16 for y in kept if y.numel() >= x.numel())
    assert max(len(y) for y in kept) == len(x)


# What the kernel is given -------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [63, 1, 64, 65]])
def test_what_fla_is_given(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path to the kernel and back, with the chunked form in the place of the kernel."""

    def kernel(q, k, v, g, beta, **options):
        assert options["use_qk_l2norm_in_kernel"]
        assert q.shape[:1] == (1,) and q.shape[2] == HEADS and v.shape[2] == VALUE_HEADS
        spans = np.diff(options["cu_seqlens_cpu"].numpy())
        assert spans.tolist() == ([1, 1] if lengths == [1] else lengths)
        assert options["initial_state"].shape[0] == len(spans)
        given = (x[0] for x in (q, k, v, g, beta))
        sequences = Sequences(spans, "cpu")
        final = options["output_final_state"]
        o, state = chunked.scan(*given, options["initial_state"], sequences, final)
        return o[None], state

    monkeypatch.setattr(fla, "_chunk_gated_delta_rule", lambda: kernel)
    case = Inputs(lengths)
    expected = outcome(recurrences_by_loops.delta_rule, case.make(), case.sequences())
    close(outcome(fla.scan, case.make(), case.sequences()), expected)
