"""The chunked kernels of flash-linear-attention, an optional package: variable lengths on CUDA.

Source: `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of flash-linear-attention 0.6.0. Found
there and in its issues:
- q, k [1, T, H, D] and v [1, T, G, E] in 16 bits, G a multiple of H, g float32, int64 cumulative
  lengths, one initial state a sequence in float32; final states float32. Its backward has gradients
  of initial and from final states.
- Key dims up to 256.
- On Hopper its Triton backward gives wrong gradients for Triton from 3.4 and before 3.7.1 (its
  issue 640; only the issue says that 3.7.1 is right). With Triton 3.4 and newer, it calls tilelang
  there if it can. Before 3.7.1 it raises in the backward if it cannot, because tilelang or its nvcc
  is missing or disabled. On Blackwell, gradients of some shapes are NaN (its issue 913).
- With tilelang 0.1.15 on an H200, ragged lengths are correct, with every variant of its Triton
  kernels that a tuner may choose: all gradients are finite, and errors against float64 are as large
  as with sequences of whole chunks. New lengths cause no compilation, and almost no tuning in
  Triton (fla_tuning.py). Measurements: benchmarks/history/upstream-delta-rule.md.
- On Hopper it calls the package FlashQLA instead, if installed, which has not been shown exact.
- For a total of one token, some versions call kernels without a backward. So a second sequence of
  one zero token follows, which neither decays a state nor writes to it.
"""

import os
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor
from torch.nn import functional as F

from forkpoint.ops.choice import Asked
from forkpoint.ops.delta_rule import fla_levels
from forkpoint.ops.delta_rule.fla_tuning import share_choices
from forkpoint.ops.delta_rule.kernel import MOST_ELEMENTS, DeltaKernel
from forkpoint.ops.recurrence import Sequences, StateTable, over_levels

OLDEST = Version("0.6.0")
OLDEST_TILELANG = Version("0.1.15")
DISTRIBUTIONS = ("fla-core", "flash-linear-attention")
"""The first has the kernels in newer versions, the second in older ones."""
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton")
"""The second is part of nightly builds of torch."""
WRONG_ON_HOPPER = (Version("3.4.0"), Version("3.7.1"))
"""The first version of Triton whose code for Hopper computes wrong gradients, and the first correct
version after it."""


@cache
def _chunk_gated_delta_rule() -> Any:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    share_choices()
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
    inputs = (q_THD, k_THD, v_TGE, g_TG, beta_TG)
    count, tokens = sequences.count, sequences.tokens
    if tokens == 1:
        inputs = tuple(_one_more(x) for x in inputs)
        initial_SGDE = None if initial_SGDE is None else _one_more(initial_SGDE)
        sequences = _two_single_tokens(v_TGE.device)
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
        cu_seqlens=sequences.cu,
        cu_seqlens_cpu=sequences.cu_cpu,
    )
    return o[0, :tokens], state[:count] if final else None


def scan_levels(
    inputs: tuple[Tensor, ...], table: StateTable, initial_SGDE: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Results of `over_levels`, by internal functions of flash-linear-attention in known
    versions."""
    _chunk_gated_delta_rule()
    if _knows_inside():
        return fla_levels.scan_levels(inputs, table, initial_SGDE)
    return over_levels(scan, inputs, table, initial_SGDE)


@cache
def _knows_inside() -> bool:
    found = _version(*DISTRIBUTIONS)
    return found is not None and found.release == fla_levels.SHOWN and found >= OLDEST


def _one_more(x: Tensor) -> Tensor:
    """Append zeros as one more entry."""
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, 1))


@cache
def _two_single_tokens(device: torch.device) -> Sequences:
    """Cached, because kernels compare cumulative lengths by identity."""
    return Sequences(np.asarray([1, 1]), device)


def _refuses(asked: Asked) -> str | None:
    if asked.head_dim > 256:
        return f"it needs key dims of at most 256, not {asked.head_dim}"
    if asked.is_large:
        # Not all of its kernels have 64-bit indices.
        return (
            f"it needs tensors of fewer than {MOST_ELEMENTS:,} elements, and this microbatch has "
            "too many tokens or sequences for that; lower max_microbatch_tokens"
        )
    return None


def _refuses_device(device: torch.device) -> str | None:
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'forkpoint[fla]')"
    if find_spec("triton") is None:
        return "it needs triton, which is not installed (pip install triton)"
    found, triton = _version(*DISTRIBUTIONS), _version(*TRITON_DISTRIBUTIONS)
    if found is None or triton is None:
        unknown = "flash-linear-attention" if found is None else "triton"
        return (
            f"{unknown} can be imported but is no installed package, so its version is not known; "
            f"install it with pip (pip install -U {unknown})"
        )
    if found < OLDEST:
        return (
            f"flash-linear-attention {found} has not been shown exact; install {OLDEST} or newer "
            "(pip install -U flash-linear-attention)"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9 and _installed("flash_qla", "FLA_FLASH_QLA"):
        return (
            "it would call FlashQLA, which is installed and has not been shown exact; set "
            "FLA_FLASH_QLA=0"
        )
    if major not in (8, 9):
        return (
            f"on compute capability {major}.{minor} its backward has not been shown exact (10.0 "
            "has NaN gradients); supported are 8.x and 9.0"
        )
    first, right = WRONG_ON_HOPPER
    missing = _wants_for_tilelang()
    if major == 9 and first <= triton < right and missing:
        return (
            f"Triton {triton} computes wrong gradients for it on Hopper; {missing}, or install "
            f"Triton {right} or newer"
        )
    asked = os.environ.get("FLA_TILELANG", "0") != "0"
    called = missing is None and (asked or (major == 9 and triton >= first))
    return _refuses_tilelang(major) if called else None


def _wants_for_tilelang() -> str | None:
    """Advice how to make flash-linear-attention call tilelang on Hopper; None if it does."""
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return "unset FLA_DISABLE_BACKEND_DISPATCH, so that it calls tilelang there"
    if find_spec("tilelang") is None:
        return "install tilelang, which it calls there (pip install tilelang)"
    if not _installed("tilelang", "FLA_TILELANG"):
        return "unset FLA_TILELANG, so that it calls tilelang there"
    if not _has_nvcc():
        return (
            "install the CUDA toolkit or 'nvidia-cuda-nvcc>=13', or set CUDA_HOME to where it is: "
            "tilelang, which it calls there, is installed, but not the nvcc that it compiles with"
        )
    return None


def _refuses_tilelang(major: int) -> str | None:
    """Why tilelang, which it would call, has not been shown exact; None if it has."""
    if major != 9:
        return (
            "with FLA_TILELANG it calls tilelang, shown exact on Hopper alone; unset FLA_TILELANG"
        )
    found = _version("tilelang")
    if found is None or found < OLDEST_TILELANG:
        return (
            f"it would call tilelang {found or 'of no known version'}, which has not been shown "
            f"exact; install {OLDEST_TILELANG} or newer (pip install -U tilelang)"
        )
    return None


def _has_nvcc() -> bool:
    """Whether flash-linear-attention finds a usable nvcc, which decides what it calls. Versions
    without this function are assumed to need none."""
    try:
        from fla.utils import has_usable_nvcc  # pyright: ignore[reportMissingImports]
    except ImportError:
        return True
    return has_usable_nvcc()


def _installed(package: str, switch: str) -> bool:
    """Whether a package is installed and the variable `switch` does not disable it."""
    return find_spec(package) is not None and os.environ.get(switch, "1") != "0"


def _version(*distributions: str) -> Version | None:
    """The version of the first installed distribution."""
    for name in distributions:
        try:
            return Version(metadata.version(name))
        except (metadata.PackageNotFoundError, InvalidVersion):
            continue
    return None


KERNEL = DeltaKernel(
    name="fla",
    scan=scan,
    scan_levels=scan_levels,
    device_types=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    refuses_device=_refuses_device,
    refuses=_refuses,
)
