"""Where gradients of the gated delta rule stop being finite, or right: kernel by kernel.

The operation runs with the gates that Qwen3.5 is initialised with (rates up to 16 a token), on one
sequence and on ragged ones, in 16 bits; errors are relative to the chunked form in float64. `fla`
as called directly, with q and k repeated for every value head, and as forkpoint calls it, without,
are rows of their own, and so are batches, as transformers calls it, without cumulative lengths.
5 GiB of free memory hold NaN before each call, so that what a kernel reads before anything was
written there, or past the end of a tensor, is seen. Whole models are looked at by stock-hybrid.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from tyro.conf import DisallowNone, arg

from benchmarks.attention.cases import check_cuda
from benchmarks.delta_rule.stock_hybrid import poison
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from forkpoint.apps.cli.options import Count
from forkpoint.ops.delta_rule import chunked, fla, fla_tuning
from forkpoint.ops.delta_rule.kernel import by_value_head, decay_gate
from forkpoint.ops.recurrence import Sequences

NAME = "delta-rule-gradients"
CASES = {
    "one, whole chunks": [16_448],
    "one, not whole": [16_383],
    "ragged, whole chunks": [64, 1024, 128, 4096],
    "ragged": [65, 1000, 129, 4097, 1, 63],
}
BATCHES = [(1, 16_447), (9, 64), (9, 65), (9, 1025), (3, 63)]
"""Sequences, and tokens of each."""
NAMES = ("o", "final", "dq", "dk", "dv", "dg", "dbeta", "dinitial")


def inputs(lengths: list[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Random q, k, v, g, beta and initial states in the shapes of Qwen3.5-4B."""
    torch.manual_seed(0)
    tokens, keys, values, dim = sum(lengths), 16, 32, 128
    q, k = (torch.randn(tokens, keys, dim, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(tokens, values, dim, device=device, dtype=dtype)
    beta = torch.randn(tokens, values, device=device).sigmoid().to(dtype)
    rate = torch.empty(values, device=device).uniform_(0.01, 16).log()
    g = decay_gate(torch.randn(tokens, values, device=device), rate, torch.ones_like(rate))
    return [q, k, v, g, beta, 0.1 * torch.randn(len(lengths), values, dim, dim, device=device)]


def direct(q, k, v, g, beta, initial, sequences, final):
    """flash-linear-attention as it is called elsewhere, with ragged lengths."""
    o, state = fla._chunk_gated_delta_rule()(
        by_value_head(q, v.shape[1])[None],
        by_value_head(k, v.shape[1])[None],
        v[None],
        g=g[None],
        beta=beta[None],
        initial_state=initial,
        output_final_state=final,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.cu,
    )
    return o[0], state


def outcome(
    scan: Callable, given: list[Tensor], lengths: list[int], device: str, *, unused: bool = False
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    o, final = scan(*leaves, Sequences(np.asarray(lengths), device), True)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device=device) for x in (o, final)]
    total = (o.to(final.dtype) * weights[0]).sum() + (final * weights[1]).sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(total, leaves, allow_unused=unused)]


def on_a_batch(count: int, states: bool) -> Callable:
    """As transformers calls it: a batch of equally long sequences, q and k repeated."""
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    def scan(q, k, v, g, beta, initial, sequences, final):
        heads = v.shape[1]
        q, k = (by_value_head(x, heads) for x in (q, k))
        q, k, v, g, beta = (x.unflatten(0, (count, -1)) for x in (q, k, v, g, beta))
        o, state = chunk_gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=initial if states else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return o.flatten(0, 1), state

    return scan


def batches(device: str, dtype: torch.dtype) -> Iterator[ResultRow]:
    for count, tokens in BATCHES:
        for states in (True, False):
            given = inputs([tokens] * count, device, dtype)
            if not states:
                given[5] = torch.zeros_like(given[5])
            lengths = [tokens] * count
            exact = outcome(chunked.scan, [x.double() for x in given], lengths, device)
            poison(device)
            found = outcome(on_a_batch(count, states), given, lengths, device, unused=not states)
            case = f"{count} x {tokens}, from {'states' if states else 'nothing'}"
            for name, a, b in zip(NAMES, found, exact, strict=True):
                if a is not None:
                    yield from compared(case, "fla called on a batch", name, a, b)


def every_choice(device: str, dtype: torch.dtype, first: int, step: int) -> Iterator[ResultRow]:
    """Each kernel's variants one after the other, whatever a tuner would have taken."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]
    from triton.runtime.errors import OutOfResources  # pyright: ignore[reportMissingImports]

    cases: list[tuple[str, list[int], Callable]] = [
        ("ragged", CASES["ragged"], direct),
        ("9 x 65, from states", [65] * 9, on_a_batch(9, True)),
    ]
    given = [inputs(lengths, device, dtype) for _, lengths, _ in cases]
    exact = [
        outcome(chunked.scan, [x.double() for x in inputs], lengths, device)
        for inputs, (_, lengths, _) in zip(given, cases, strict=True)
    ]
    fla._chunk_gated_delta_rule()  # imports the kernels
    at, too_large = first, 0
    every = list(fla_tuning.tuners(Autotuner))

    def forced(tuner: Any) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal too_large
            for more in range(len(tuner.configs)):
                config = tuner.configs[(at + more) % len(tuner.configs)]
                try:
                    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())
                except OutOfResources:
                    too_large += 1
            raise AssertionError("no variant fits")

        return run

    for tuner in every:
        tuner.run = forced(tuner)
    for at in range(first, max(len(tuner.configs) for tuner in every), step):
        for (case, lengths, scan), its, truth in zip(cases, given, exact, strict=True):
            poison(device)
            found = outcome(scan, its, lengths, device)
            case_of = f"variant {at} of {len(every)} kernels, {case}"
            pairs = list(zip(found, truth, strict=True))
            note = f"{too_large} variants were too large"
            yield ResultRow(
                bench=NAME,
                case=case_of,
                metric="not finite",
                unit="numbers",
                value=sum(int((~a.isfinite()).sum()) for a, _ in pairs),
                bar=0.0,
                note=note,
            )
            yield ResultRow(
                bench=NAME,
                case=case_of,
                metric="error",
                unit="relative",
                value=max(_error(a, b) for a, b in pairs),
                note=note,
            )


def compared(
    case: str, kernel: str, name: str, found: Tensor, exact: Tensor
) -> Iterator[ResultRow]:
    """How many numbers of a tensor are not finite, and its error."""
    yield ResultRow(
        bench=NAME,
        case=case,
        metric=f"{kernel}: {name} not finite",
        unit="numbers",
        value=int((~found.isfinite()).sum()),
        bar=0.0,
    )
    yield ResultRow(
        bench=NAME,
        case=case,
        metric=f"{kernel}: {name} error",
        unit="relative",
        value=_error(found, exact),
    )


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def operation(device: str, dtype: torch.dtype, most: int) -> Iterator[ResultRow]:
    scans = {"chunked": chunked.scan}
    if device == "cuda":
        refusal = fla.KERNEL.refuses_device(torch.device("cuda"))
        if refusal is None:
            scans |= {"fla as forkpoint calls it": fla.scan, "fla called directly": direct}
        else:
            yield ResultRow(
                bench=NAME, case="fla", metric="refused", unit="1 is yes", value=1.0, note=refusal
            )
    for case, lengths in CASES.items():
        lengths = [min(n, most) for n in lengths]
        given = inputs(lengths, device, dtype)
        exact = outcome(chunked.scan, [x.double() for x in given], lengths, device)
        for kernel, scan in scans.items():
            poison(device)
            found = outcome(scan, given, lengths, device)
            for name, a, b in zip(NAMES, found, exact, strict=True):
                yield from compared(case, kernel, name, a, b)
    if device == "cuda":
        yield from batches(device, dtype)


@dataclass(frozen=True, kw_only=True)
class DeltaRuleGradients(Benchmark):
    """Look for gradients of the gated delta rule that are not finite, or not right, by kernel.

    Attributes:
        device: Where it runs. On a CPU there is the chunked form alone, in float32.
        most: Cut sequences to so many tokens.
        choices: The first variant of each Triton kernel and a step: measure these variants,
            whatever a tuner would choose.
    """

    NAME: ClassVar[str] = NAME

    device: Literal["cuda", "cpu"] = "cuda"
    most: Count = 1 << 20
    choices: DisallowNone[
        Annotated[
            tuple[int, int] | None,
            arg(metavar="FIRST STEP", help_behavior_hint="(default: as the tuner chooses)"),
        ]
    ] = None

    def check(self) -> None:
        if self.device == "cuda":
            check_cuda(self.NAME)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        if self.choices:
            return every_choice(self.device, dtype, *self.choices)
        return operation(self.device, dtype, self.most)
