"""Where gradients of the gated delta rule stop being finite, or right: kernel by kernel.

    python benchmarks/delta_rule_gradients.py               on a GPU, with flash-linear-attention
    python benchmarks/delta_rule_gradients.py --device cpu  that it runs: the chunked form alone
    python benchmarks/delta_rule_gradients.py --model       a stock model, dense, without forkpoint

The operation runs with the gates that Qwen3.5 is initialised with (rates up to 16 a token), on one
sequence and on ragged ones, in 16 bits; errors are relative to the chunked form in float64. `fla`
as called directly, with q and k repeated for every value head, and as forkpoint calls it, without,
are rows of their own. With --model, the stock model runs densely, and the last layers whose
output's gradient was finite, and the first whose was not, are named, together with every parameter
whose gradient is not finite. Each line is a row of JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from forkpoint.bench.hybrid import QWEN35_4B, TINY, make_model
from forkpoint.bench.rows import environment
from forkpoint.ops.delta_rule import chunked, fla
from forkpoint.ops.delta_rule.kernel import by_value_head, decay_gate
from forkpoint.ops.recurrence import Sequences

CASES = {
    "one, whole chunks": [16_448],
    "one, not whole": [16_383],
    "ragged, whole chunks": [64, 1024, 128, 4096],
    "ragged": [65, 1000, 129, 4097, 1, 63],
}
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


def outcome(scan: Callable, given: list[Tensor], lengths: list[int], device: str) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    o, final = scan(*leaves, Sequences(np.asarray(lengths), device), True)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device=device) for x in (o, final)]
    total = (o.to(final.dtype) * weights[0]).sum() + (final * weights[1]).sum()
    return [o.detach(), final.detach(), *torch.autograd.grad(total, leaves)]


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
            found = outcome(scan, given, lengths, device)
            for name, a, b in zip(NAMES, found, exact, strict=True):
                yield {
                    "case": case,
                    "kernel": kernel,
                    "tensor": name,
                    "nonfinite": int((~a.isfinite()).sum()),
                    "error": float((a.double() - b).norm() / b.norm()),
                }


def model(device: str, layers: int, tokens: int) -> Iterator[dict[str, Any]]:
    """A stock model, dense: which layer's gradient is the first, from the top, to go wrong."""
    shape, dtype = (QWEN35_4B, torch.bfloat16) if device == "cuda" else (TINY, torch.float32)
    stock = make_model(shape, layers, dtype, device)
    seen: dict[str, bool] = {}

    def watch(name: str) -> Callable:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            seen[f"{name} forward"] = bool(tensor.isfinite().all())
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda g: seen.__setitem__(f"{name} gradient", bool(g.isfinite().all()))
                )

        return hook

    for name, module in stock.named_modules():
        if name.startswith("model.layers.") and name.count(".") in (2, 3):
            module.register_forward_hook(watch(name))
    torch.manual_seed(2)
    ids = torch.randint(0, shape["vocab_size"], (1, tokens), device=device)
    hidden = stock.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -64:]
    logits = stock.lm_head(hidden).float()
    loss = F.cross_entropy(logits.flatten(0, 1), ids[0, -64:])
    loss.backward()
    finite = bool(loss.isfinite())
    yield {"case": "model", "layers": layers, "tokens": tokens, "loss_finite": finite}
    for what, fine in seen.items():
        if not fine:
            yield {"case": "model", "first_seen_nonfinite": what}
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            yield {"case": "model", "parameter": name}
    wrong = sum(not fine for fine in seen.values())
    yield {"case": "model", "looked_at": len(seen), "nonfinite": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--most", type=int, default=1 << 20, help="cut sequences to so many tokens")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_448)
    options = parser.parse_args()
    if options.model:
        rows = model(options.device, options.layers, options.tokens)
    else:
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        rows = operation(options.device, dtype, options.most)
    for row in rows:
        print(json.dumps(row), flush=True)
    print(json.dumps(environment()))


if __name__ == "__main__":
    main()
