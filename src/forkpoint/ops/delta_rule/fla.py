"""The chunked kernels of flash-linear-attention, an optional package: variable lengths on CUDA.

Source: `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of flash-linear-attention 0.6.0. Found
there and in its issues:
- q, k, v [1, T, H, D] in 16 bits, g float32, int64 cumulative lengths, one initial state a sequence
  in float32; final states float32. Its backward has gradients of initial and from final states.
- Key dims up to 256. Some of its backends have no fewer key than value heads; here both are equal.
- On Hopper its Triton backward gives wrong gradients for Triton 3.4 to 3.7.0 (its issues 640 and
  984), so that it asks for tilelang there. On Blackwell gradients of some shapes are NaN (its
  issue 913).
- tilelang's kernel of some versions (its pull request 827) reads and writes the last chunk of a
  sequence as a whole. Where a sequence ends within a chunk, the tokens behind it are those of the
  next one: their decay enters exp with the wrong sign, infinite where tokens forget much, so that
  gradients are NaN; and gradients of the next sequence's first tokens are overwritten. So there,
  every sequence is filled up with neutral tokens (all zero: they neither decay a state nor write to
  it) to whole chunks, which is exact for parents too.
- It compiles for the lengths that it meets, for about a minute each. So there, further sequences of
  neutral tokens bring a call to one of few shapes.
- One token in all would go to kernels without a backward in some versions: another follows it.
"""

import os
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from forkpoint.ops.delta_rule.kernel import DeltaKernel, by_value_head
from forkpoint.ops.recurrence import Sequences

CHUNK = 64
OLDEST = (0, 6)
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 0))
"""The first and the last Triton whose code for Hopper computes wrong gradients."""


@cache
def _chunk_gated_delta_rule() -> Any:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    return chunk_gated_delta_rule


def scan(
    q_THD: Tensor,
    k_THD: Tensor,
    v_TGE: Tensor,
    g_TG: Tensor,
    beta_TG: Tensor,
    initial_SGDE: Tensor | None,
    sequences: Sequences,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    heads = v_TGE.shape[1]
    inputs = [by_value_head(q_THD, heads), by_value_head(k_THD, heads), v_TGE, g_TG, beta_TG]
    lengths = kernel_lengths(sequences.lengths, tilelang=_runs_tilelang(v_TGE.device))
    layout = sequences.stretched(lengths) if len(lengths) else None
    if layout is not None:
        inputs = [layout.lay_out(x) for x in inputs]
        more = len(lengths) - sequences.count
        if initial_SGDE is not None:
            initial_SGDE = F.pad(initial_SGDE, (0, 0, 0, 0, 0, 0, 0, more))
    given = sequences if layout is None else layout.sequences
    q, k, v, g, beta = (x[None] for x in inputs)
    o, state = _chunk_gated_delta_rule()(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=initial_SGDE,
        output_final_state=final,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=given.cu,
        cu_seqlens_cpu=given.cu_cpu,
    )
    o_TGE = o[0] if layout is None else layout.take_back(o[0])
    return o_TGE, state[: sequences.count] if final else None


def kernel_lengths(lengths: np.ndarray, *, tilelang: bool) -> tuple[int, ...]:
    """Lengths that a call is stretched to by neutral tokens; () if it is taken as it is.

    For tilelang each sequence ends with a chunk, and further sequences round the numbers of tokens
    and of sequences up to one of few values, which the number of chunks then follows from.
    """
    if not tilelang:
        return (1, 1) if lengths.tolist() == [1] else ()
    whole = -(-lengths // CHUNK) * CHUNK
    more = (1 << len(lengths).bit_length()) - len(lengths)
    total = _rounded_up(int(whole.sum()) + CHUNK * more)
    last = total - int(whole.sum()) - CHUNK * (more - 1)
    return (*whole.tolist(), *([CHUNK] * (more - 1)), last)


def _rounded_up(tokens: int) -> int:
    """To a multiple of a sixteenth of the power of two below it, and of chunks."""
    step = max(CHUNK, 1 << (tokens.bit_length() - 5))
    return -(-tokens // step) * step


def _refuses_head_dims(key_dim: int, value_dim: int) -> str | None:
    return None if key_dim <= 256 else f"it needs key dims of at most 256, not {key_dim}"


def _refuses_device(device: torch.device) -> str | None:
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'forkpoint[fla]')"
    if find_spec("triton") is None:
        return "it needs triton, which is not installed (pip install triton)"
    found = _version("flash-linear-attention")
    if found < OLDEST:
        return (
            f"flash-linear-attention {_text(found)} has not been shown exact; install "
            f"{_text(OLDEST)} or newer (pip install -U flash-linear-attention)"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return refuses_chip(major, minor, _version("triton"), tilelang=_has_tilelang())


def refuses_chip(major: int, minor: int, triton: tuple[int, ...], *, tilelang: bool) -> str | None:
    """Why gradients would be wrong on a chip with this Triton, or None."""
    if major not in (8, 9):
        return (
            f"on compute capability {major}.{minor} its backward has not been shown exact (NaN "
            "gradients are known of 10.0); allowed are 8.x and 9.0"
        )
    first, last = WRONG_ON_HOPPER
    if major == 9 and first <= triton[:3] <= last and not tilelang:
        return (
            f"Triton {_text(triton)} computes wrong gradients of it on Hopper; install tilelang "
            f"(and leave FLA_TILELANG unset), or a Triton newer than {_text(last)}"
        )
    return None


def _runs_tilelang(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9 and _has_tilelang()


def _has_tilelang() -> bool:
    return find_spec("tilelang") is not None and os.environ.get("FLA_TILELANG", "1") != "0"


def _version(package: str) -> tuple[int, ...]:
    """The numbers of an installed version; what follows them (rc, +cu130) is left out."""
    numbers = []
    for part in metadata.version(package).split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return (*numbers, 0, 0, 0)[: max(3, len(numbers))]


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


KERNEL = DeltaKernel(
    name="fla",
    scan=scan,
    device_types=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    refuses_head_dims=_refuses_head_dims,
    refuses_device=_refuses_device,
)
