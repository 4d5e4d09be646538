"""Experts of one layer by implementation, the layers that fit, and the kernels of a step."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from benchmarks.kernel_kinds import by_kind
from benchmarks.rows import ResultRow, timed_row
from benchmarks.steps.cells import cell_row
from benchmarks.steps.stepper import DENSE_ROW_TOKENS, Stepper
from benchmarks.timing import time_cuda, time_host
from forkpoint.plan import Plan

Experts = Literal["grouped_mm", "batched_mm", "eager"]
LONGEST_PREFIX = 8192
ROOM = 0.85
"""The share of the device that weights, gradients and activations are to take."""
HEAD_BYTES = 12 << 30
"""Logits of a microbatch, and what its kernels allocate."""
KINDS = {
    # What grouped_mm calls its products; their plans are made by a kernel of their own.
    "grouped products": r"groupproblemshape|grouped|group_gemm",
    "attention": r"flash|fmha|attention|sum_parts|cudnn",
    "matrix products": r"gemm|nvjet|cutlass|xmma|wgmma",
    "sorts and scans": r"sort|radix|scan|histogram|cumsum",
    "gathers and scatters": r"index|gather|scatter",
    "fused elementwise": r"^triton|_kernel$",
    "copies and fills": r"memcpy|memset|copy_kernel|fill",
}
LONGEST = 12


def layer_parameters(sizes: Mapping[str, Any]) -> int:
    """Weights of one layer."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    dim, kv_heads = sizes["head_dim"], sizes["num_key_value_heads"]
    experts = sizes["num_experts"] * 3 * hidden * sizes["moe_intermediate_size"]
    return experts + 2 * hidden * dim * (heads + kv_heads) + hidden * sizes["num_experts"]


def kept_elements(sizes: Mapping[str, Any]) -> int:
    """Elements that a token's forward leaves for the backward in one layer.

    For each of its experts: its copy of the hidden state and its output, the gate and the up
    values together, the gate's activation and the product. Besides them what attention keeps.
    """
    hidden, width = sizes["hidden_size"], sizes["moe_intermediate_size"]
    each = 2 * hidden + 4 * width
    heads = sizes["num_attention_heads"] + sizes["num_key_value_heads"]
    return sizes["num_experts_per_tok"] * each + 8 * hidden + 3 * heads * sizes["head_dim"]


def layers_that_fit(
    sizes: Mapping[str, Any], device: torch.device, *, checkpointed: bool = False
) -> int:
    """How many layers fit on the device in 16 bits: weights, gradients, and the activations of a
    microbatch of 16,384 tokens below a prefix of 8,192. On a CPU all of them."""
    every: int = sizes["num_hidden_layers"]
    if device.type != "cuda":
        return every
    _, total = torch.cuda.mem_get_info(device)
    head = 4 * sizes["vocab_size"] * sizes["hidden_size"] * 2
    kept = sizes["hidden_size"] if checkpointed else kept_elements(sizes)
    tokens = DENSE_ROW_TOKENS + LONGEST_PREFIX
    each = 2 * (2 * layer_parameters(sizes) + tokens * kept)
    return max(1, min(every, int((total * ROOM - head - HEAD_BYTES) / each)))


def share_that_is_counted(stepper: Stepper) -> float:
    """The planner's count of activations over `kept_elements`: it leaves out the copies of hidden
    states that experts work on, so that it is given less memory than there is."""
    shape, config = stepper.policy.host.shape, stepper.model.config
    counted = shape.activation_bytes()
    if shape.checkpointed:
        return 0.8
    kept = shape.layers * shape.dtype_bytes * kept_elements(vars(config))  # pyright: ignore
    return min(1.0, counted / kept)


def compared_experts(
    bench: str, model: PreTrainedModel, counts: tuple[int, ...], back_to: Experts
) -> Iterator[ResultRow]:
    """Forward and backward of one layer's MLP, by implementation and count of tokens."""
    block = model.model.layers[0].mlp  # pyright: ignore
    weight = next(block.parameters())
    cuda = weight.device.type == "cuda"
    for tokens in counts:
        x = torch.randn(1, tokens, model.config.hidden_size, device=weight.device)
        x_TC = x.to(weight.dtype).requires_grad_()

        def run(x_TC: torch.Tensor = x_TC) -> None:
            block(x_TC).float().square().mean().backward()

        for name in ("grouped_mm", "batched_mm", "eager"):
            model.set_experts_implementation(name)
            figure = partial(timed_row, bench, f"experts of a layer, {tokens} tokens", name)
            try:
                timing = time_cuda(run, most=5) if cuda else time_host(run, repeats=2)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                case = f"experts of a layer, {tokens} tokens, {name}"
                yield cell_row(bench, case, "out of memory", 1.0, "1", note=str(error)[:120])
                continue
            yield figure(timing)
    model.set_experts_implementation(back_to)
    model.zero_grad()


def profile_rows(
    bench: str,
    case: str,
    side: str,
    step: Callable[[], object],
    plan: Plan,
    *,
    printed: bool,
    cuda: bool,
) -> Iterator[ResultRow]:
    """Kernels with the greatest device time of a step, and its time by kinds of kernels.

    For each kind also the time of a token in a layer, which tells a kind that runs slower shared
    than densely.
    """
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA] if cuda else [activity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        if cuda:
            torch.cuda.synchronize()
    events = profile.key_averages()
    if not cuda:
        return (yield from _host_rows(bench, case, side, events))
    figure = partial(cell_row, bench, case)
    longest = sorted(events, key=lambda e: -e.self_device_time_total)[:LONGEST]
    for number, event in enumerate(longest, 1):
        ms, what = event.self_device_time_total / 1e3, f"{event.count}x {event.key[:160]}"
        if printed:
            print(f"{side:6} {ms:10.2f} ms {what}", flush=True)
        yield figure(f"{side} kernel {number}", ms, "ms", note=what)
    assert plan.shape is not None
    runs = plan.computed_tokens * plan.shape.layers
    for kind, found in by_kind(events, KINDS).items():
        ms = found.us / 1e3
        yield figure(f"{side} device {kind}", ms, "ms", note=f"{found.launches} launches")
        yield figure(f"{side} device {kind} a token", 1e6 * ms / runs, "ns in a layer")


def _host_rows(bench: str, case: str, side: str, events: Any) -> Iterator[ResultRow]:
    """Operators with the greatest time, where there is no device."""
    longest = sorted(events, key=lambda e: -e.self_cpu_time_total)[:LONGEST]
    for number, event in enumerate(longest, 1):
        ms, what = event.self_cpu_time_total / 1e3, f"{event.count}x {event.key[:160]}"
        yield cell_row(bench, case, f"{side} operator {number}", ms, "ms", note=what)
