"""Where gradients of the gated delta rule stop being finite, or right: kernel by kernel.

    python benchmarks/delta_rule_gradients.py               on a GPU, with flash-linear-attention
    python benchmarks/delta_rule_gradients.py --device cpu  that it runs: the chunked form alone
    python benchmarks/delta_rule_gradients.py --choices 0 4  what any tuner could have chosen: every
                                                            fourth variant of each Triton kernel

The operation runs with the gates that Qwen3.5 is initialised with (rates up to 16 a token), on one
sequence and on ragged ones, in 16 bits; errors are relative to the chunked form in float64. `fla`
as called directly, with q and k repeated for every value head, and as forkpoint calls it, without,
are rows of their own, and so are batches, as transformers calls it, without cumulative lengths.
5 GiB of free memory hold NaN before each call, so that what a kernel reads before anything was
written there, or past the end of a tensor, is seen. Each line is a row of JSON. Whole models are
looked at by stock_hybrid.py.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from stock_hybrid import poison
from torch import Tensor

from forkpoint.environment import environment
from forkpoint.ops.delta_rule import chunked, fla, fla_tuning
from forkpoint.ops.delta_rule.kernel import by_value_head, decay_gate
from forkpoint.ops.recurrence import Sequences

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


def batches(device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
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
                    yield compared(case, "fla called on a batch", name, a, b)


def every_choice(device: str, dtype: torch.dtype, first: int, step: int) -> Iterator[dict]:
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
            rows = [
                compared(case, "", n, a, b) for n, a, b in zip(NAMES, found, truth, strict=True)
            ]
            yield {
                "case": f"variant {at} of {len(every)} kernels, {case}",
                "nonfinite": sum(row["nonfinite"] for row in rows),
                "error": max(row["error"] for row in rows),
                "too_large": too_large,
            }


def compared(case: str, kernel: str, name: str, found: Tensor, exact: Tensor) -> dict[str, Any]:
    return {
        "case": case,
        "kernel": kernel,
        "tensor": name,
        "nonfinite": int((~found.isfinite()).sum()),
        "error": float((found.double() - exact).norm() / exact.norm()),
    }


def operation(device: str, dtype: torch.dtype, most: int) -> Iterator[dict[str, Any]]:
    scans = {"chunked": chunked.scan}
    if device == "cuda":
        refusal = fla.KERNEL.refuses_device(torch.device("cuda"))
        if refusal is None:
            scans |= {"fla as forkpoint calls it": fla.scan, "fla called directly": direct}
        else:
            yield {"case": "fla", "refused": refusal}
    for case, lengths in CASES.items():
        lengths = [min(n, most) for n in lengths]
        given = inputs(lengths, device, dtype)
        exact = outcome(chunked.scan, [x.double() for x in given], lengths, device)
        for kernel, scan in scans.items():
            poison(device)
            found = outcome(scan, given, lengths, device)
            for name, a, b in zip(NAMES, found, exact, strict=True):
                yield compared(case, kernel, name, a, b)
    if device == "cuda":
        yield from batches(device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--most", type=int, default=1 << 20, help="cut sequences to so many tokens")
    parser.add_argument("--choices", type=int, nargs=2, metavar=("FIRST", "STEP"))
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if options.choices:
        rows = every_choice(options.device, dtype, *options.choices)
    else:
        rows = operation(options.device, dtype, options.most)
    for row in rows:
        print(json.dumps(row), flush=True)
    print(json.dumps(environment()))


if __name__ == "__main__":
    main()
