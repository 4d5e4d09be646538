"""FlashAttention-4, from the optional package flash-attn-4: variable lengths on Hopper, Blackwell.

Source: `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd` of flash-attn-4
4.0.0b36, the functions beneath its own autograd function. Found there and by experiment:
- q [Tq, H, D], k [Tk, K, D], v [Tk, K, E] with int32 cumulative lengths; lse float32 [H, Tq].
- float16 and bfloat16; D and E from 8 to 256 in multiples of 8. On compute capability 9 its
  backward takes K < H with D equal to E alone.
- On 10 and 11, by its source: D and E up to 128, or 192 and 128, or both 256 without softcap and
  window. On 12, its backward has no softcap and is not deterministic, and head dims are not
  checked.
- Causal masks and windows align to the end (bottom-right).
- Its backward computes dO . O and P from the given o and lse, so merged ones are correct.
- An input whose address or strides are not multiples of 16 bytes is copied first.
- It compiles for a configuration at its first use, a few seconds each: dtype, head dims, query
  heads a key-value head, mask, softcap's value, tile, whether there are cumulative lengths, whether
  all queries fit in one tile, in the backward all keys as well, and, with cumulative lengths,
  whether there are more than a few hundred. It depends on nothing else of the lengths.

Choices for compute capability 9 (benchmarks/history/log.md): sequences of one length are passed as
a batch, which has a cheaper schedule. Heads of 128 use tiles of 192 queries if these need less time
in rounds of all multiprocessors.
"""

import math
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import torch
from packaging.version import Version
from torch import Tensor

from forkpoint.ops.attention.kernel import (
    Asked,
    BackwardInputs,
    Gradients,
    Kernel,
    Options,
    refuses_elements,
)
from forkpoint.ops.attention.table import Launch

CAPABILITIES = (9, 10, 11)
"""Major compute capabilities of GPUs that it runs on: Hopper and Blackwell."""
MOST_IN_A_BATCH = 65_535
"""Most sequences of a batch, which are one dimension of the grid of blocks."""

MOST_PADDING = 128
"""Most queries that its backward adds to a sequence, in the float32 sums of their gradients."""

OLDEST = "4.0.0b36"
TUNED = "4.0.0b36"
"""The version whose tiles were measured. Other versions use their default tiles."""

LONG_TILE: int = 192
SHORT_TILE: int = 128
LONG_TILE_TIME = 1.4
"""Time of a round of tiles of 192 queries, relative to a round of tiles of 128. Measured over
several whole rounds: 1.36 to 1.48 in a batch, 1.27 to 1.43 with cumulative lengths
(benchmarks/results/fa4-tiles-h200.jsonl)."""

LONG_TILE_OPTIONS: dict[str, object] = {
    "tile_mn": (LONG_TILE, 128),
    # The probabilities of so many queries do not fit in registers with the rest.
    "mma_pv_is_rs": False,
    "num_threads": 512,
}


@cache
def _interface() -> ModuleType:
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface


def forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, launch: Launch, options: Options
) -> tuple[Tensor, Tensor]:
    batch = _batched(launch, q_THD.device)
    q, k, v = (_cut(x, batch) for x in (q_THD, k_TKD, v_TKE))
    o, lse, *_ = _interface()._flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=options.scale,
        softcap=options.softcap or None,
        return_lse=True,
        **({} if batch else _lengths(launch)),
        **_mask(launch, options.window),
        **_tile(q_THD, v_TKE, launch, options.softcap, options.window),
    )
    lse_HT = lse.transpose(0, 1).reshape(q_THD.shape[1], -1) if batch else lse
    return _packed(o, batch), lse_HT


def backward(inputs: BackwardInputs, launch: Launch, options: Options) -> Gradients:
    batch = _batched(launch, inputs.q.device)
    do, q, k, v, o = (_cut(x, batch) for x in inputs[:5])
    lse = inputs.lse
    if batch:
        lse = lse.view(len(lse), batch, -1).transpose(0, 1)
    dq, dk, dv, *_ = _interface()._flash_attn_bwd(
        q,
        k,
        v,
        o,
        do,
        lse,
        softmax_scale=options.scale,
        softcap=options.softcap,
        deterministic=options.deterministic,
        **({} if batch else _lengths(launch)),
        **_mask(launch, options.window),
    )
    return _packed(dq, batch), _packed(dk, batch), _packed(dv, batch)


def _batched(launch: Launch, device: torch.device) -> int:
    """Number of sequences that are passed as a batch [B, T, H, D]; 0 if cumulative lengths are
    passed.

    Only for compute capability 9, where it was measured. Newer ones run other kernels for a batch.
    """
    if launch.ragged or launch.count > MOST_IN_A_BATCH or not _is_hopper(device):
        return 0
    return launch.count


def _cut(x_THD: Tensor, batch: int) -> Tensor:
    return x_THD.view(batch, -1, *x_THD.shape[1:]) if batch else x_THD


def _packed(x: Tensor, batch: int) -> Tensor:
    return x.flatten(0, 1) if batch else x


def _lengths(launch: Launch) -> dict[str, object]:
    return {
        "cu_seqlens_q": launch.cu_q,
        "cu_seqlens_k": launch.cu_k,
        "max_seqlen_q": launch.max_q,
        "max_seqlen_k": launch.max_k,
    }


def _tile(
    q_THD: Tensor, v_TKE: Tensor, launch: Launch, softcap: float, window: int
) -> dict[str, object]:
    """Options for tiles of the forward; {} for its default, which is 128 queries for heads of
    128."""
    if q_THD.shape[2] != 128 or v_TKE.shape[2] != 128 or softcap or window:
        return {}
    processors = _processors(q_THD.device)
    kv_heads = v_TKE.shape[1]
    # It packs the query heads of a key-value head into one tile.
    group = q_THD.shape[1] // kv_heads
    at_most = (len(q_THD) * group // SHORT_TILE + launch.count) * kv_heads
    if at_most <= processors or not processors:
        return {}  # one round of short tiles, as in most launches of small microbatches
    queries = [(end - begin) * group for begin, end in pairwise(launch.cu_q_cpu.tolist())]
    long, short = (
        math.ceil(sum(-(-n // tile) for n in queries) * kv_heads / processors)
        for tile in (LONG_TILE, SHORT_TILE)
    )
    return LONG_TILE_OPTIONS if long * LONG_TILE_TIME < short else {}


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def _processors(device: torch.device) -> int:
    """Number of multiprocessors of a device for which tiles were measured, otherwise 0."""
    if _version() != TUNED or not _is_hopper(device):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _mask(launch: Launch, window: int) -> dict[str, object]:
    if not window:
        return {"causal": launch.causal}
    return {"causal": False, "window_size_left": window - 1, "window_size_right": 0}


def _version() -> str | None:
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None


def is_installed() -> bool:
    # flash-attn 2 also has a flash_attn.cute, with another interface. So the package's name is
    # checked.
    return _version() is not None and find_spec("flash_attn.cute") is not None


def _refuses_device(device: torch.device) -> str | None:
    found = _version()
    if found is None or not is_installed():
        return "flash-attn-4 is not installed (pip install 'forkpoint[fa4]')"
    if Version(found) < Version(OLDEST):
        return (
            f"flash-attn-4 {found} has not been shown exact; install {OLDEST} or newer (pip "
            "install -U --pre flash-attn-4)"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        return f"it needs a GPU of compute capability 9, 10 or 11, not {major}.{minor}"
    return None


def _refuses(asked: Asked) -> str | None:
    dims = asked.head_dim, asked.value_dim
    two = f"{dims[0]} and {dims[1]}"
    if not all(8 <= dim <= 256 and dim % 8 == 0 for dim in dims):
        return f"it needs head dims of 8 to 256 in steps of 8, not {two}"
    if asked.heads != asked.kv_heads and dims[0] != dims[1]:
        return (
            f"it needs equal head dims of keys and values where query heads share them, not {two}"
        )
    major, _ = torch.cuda.get_device_capability(asked.device)
    if major == 9:
        return None
    if max(dims) > 128 and dims not in ((192, 128), (256, 256)):
        return (
            f"on compute capability {major} it needs head dims of at most 128, or 192 and 128, or "
            f"256 and 256, not {two}"
        )
    if dims == (256, 256) and asked.softcap:
        return f"on compute capability {major} it has no softcap with head dims of 256"
    if dims == (256, 256) and asked.window:
        return f"on compute capability {major} it has no sliding window with head dims of 256"
    return None


def _refuses_launch(launch: Launch, asked: Asked) -> str | None:
    # More elements than 32-bit indices allow have not been shown exact.
    queries, keys = launch.q_end - launch.q_begin, launch.k_end - launch.k_begin
    # Its backward adds up to a block of queries to each sequence.
    queries += MOST_PADDING * (launch.count - 1)
    return refuses_elements(queries, keys, asked)


KERNEL = Kernel(
    name="fa4",
    forward=forward,
    backward=backward,
    device_types=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    refuses_device=_refuses_device,
    refuses=_refuses,
    refuses_launch=_refuses_launch,
    softcap=True,
    window=True,
    causal_offset=True,
    ragged=True,
    deterministic=True,
)
