"""What the kernels of CUDA give the stock functions: by their own signatures, computed on a CPU.

A stand-in takes the arguments under the names that the stock function gives them, and computes
what its documentation says by the reference kernel. So a wrong order, window or mask shows without
a GPU.
"""

from typing import Any

import pytest
import torch
from test_attention_kernels import BY_NAME, one_launch, random_qkv
from torch import Tensor

from forkpoint.ops.attention import Launch, cudnn, fa2, fa4

RAGGED = [(5, 9), (1, 4), (7, 7)]
EQUAL = [(5, 5), (5, 5)]
WIDE = [(5, 9), (5, 9)]


def packed_launch(q: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool) -> Launch:
    q_lengths, k_lengths = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert int(cu_q[-1]) == len(q)
    return one_launch(list(zip(q_lengths, k_lengths, strict=True)), causal)


def window_of(given: dict[str, Any]) -> tuple[bool, int]:
    """Whether the mask is causal, and its window; (None or -1) leaves a side open."""
    left, right = given.get("window_size_left"), given.get("window_size_right")
    closed = [side is not None and side >= 0 for side in (left, right)]
    if not any(closed):
        return given["causal"], 0
    assert all(closed) and right == 0
    return True, left + 1


def forward(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    causal, window = window_of(given)
    q, k, v = (given[name] for name in "qkv")
    launch = packed_launch(q, given["cu_q"], given["cu_k"], causal)
    assert (given["max_q"], given["max_k"]) == (launch.max_q, launch.max_k)
    softcap = given.get("softcap") or 0.0
    return BY_NAME["reference"].forward(
        q, k, v, launch, scale=given["scale"], softcap=softcap, window=window
    )


def backward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    causal, window = window_of(given)
    tensors = [given[name] for name in ("do", "q", "k", "v", "o", "lse")]
    launch = packed_launch(given["q"], given["cu_q"], given["cu_k"], causal)
    assert (given["max_q"], given["max_k"]) == (launch.max_q, launch.max_k)
    softcap = given.get("softcap") or 0.0
    options = {"scale": given["scale"], "softcap": softcap, "window": window}
    return BY_NAME["reference"].backward(*tensors, launch, deterministic=True, **options)


class Fa4Interface:
    """`flash_attn.cute.interface`: the first arguments, and the keywords that are in use."""

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    @staticmethod
    def _named(given: dict[str, Any]) -> dict[str, Any]:
        renamed = {
            "cu_seqlens_q": "cu_q",
            "cu_seqlens_k": "cu_k",
            "max_seqlen_q": "max_q",
            "max_seqlen_k": "max_k",
            "softmax_scale": "scale",
        }
        known = {*renamed, "causal", "softcap", "window_size_left", "window_size_right"}
        assert given.keys() <= known, given.keys() - known
        return {renamed.get(name, name): value for name, value in given.items()}

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
        assert given.pop("return_lse")
        assert given["softcap"] != 0.0, "None is no softcap"
        return *forward({"q": q, "k": k, "v": v, **self._named(given)}), None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **given: Any
    ) -> tuple[Any, ...]:
        self.deterministic.append(given.pop("deterministic"))
        tensors = {"q": q, "k": k, "v": v, "o": out, "do": dout, "lse": lse}
        return backward(tensors | self._named(given))


def by_schema(operator: Any, renamed: dict[str, str], args: Any, options: Any) -> dict[str, Any]:
    """The arguments of a call of an operator of torch, by name."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    assert given.keys() <= set(names) and given["dropout_p"] == 0.0
    return {renamed.get(name, name): value for name, value in given.items()}


TORCH_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "grad_out": "do",
    "out": "o",
    "logsumexp": "lse",
    "cum_seq_q": "cu_q",
    "cum_seq_k": "cu_k",
    "is_causal": "causal",
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Fa4Interface:
    interface = Fa4Interface()
    monkeypatch.setattr(fa4, "_interface", lambda: interface)
    aten = torch.ops.aten
    flash, flash_backward = fa2._flash, fa2._flash_backward
    dense, dense_backward = cudnn._cudnn, cudnn._cudnn_backward
    assert flash is aten._flash_attention_forward.default
    assert dense is aten._scaled_dot_product_cudnn_attention.default

    def packed(given: dict[str, Any]) -> dict[str, Any]:
        """[B, H, T, D] -> [B * T, H, D], as the reference takes it."""
        (count, _, queries, _), keys = given["q"].shape, given["k"].shape[2]
        flat = {
            name: x.transpose(1, 2).flatten(0, 1)
            for name, x in given.items()
            if name in ("q", "k", "v", "do", "o")
        }
        if "lse" in given:
            assert given["lse"].shape == (*given["q"].shape[:3], 1)
            flat["lse"] = given["lse"][..., 0].transpose(0, 1).flatten(1)
        cu = torch.arange(count + 1)
        lengths = {"cu_q": cu * queries, "cu_k": cu * keys, "max_q": queries, "max_k": keys}
        # Top-left: as bottom-right only where there are as many keys as queries.
        assert queries == keys or not given["causal"]
        return {**given, **flat, **lengths}

    def unpacked(x_THD: Tensor, count: int) -> Tensor:
        return x_THD.unflatten(0, (count, -1)).transpose(1, 2)

    def run_dense(*args: Any, **options: Any) -> tuple[Any, ...]:
        given = by_schema(dense, TORCH_NAMES, args, options)
        assert given["compute_log_sumexp"] and given["attn_bias"] is None
        count = len(given["q"])
        o_THE, lse_HT = forward(packed(given))
        lse = lse_HT.unflatten(1, (count, -1)).transpose(0, 1)[..., None].contiguous()
        return unpacked(o_THE, count), lse, None, None

    def run_dense_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = by_schema(dense_backward, TORCH_NAMES, args, options)
        assert given["attn_bias"] is given["cu_q"] is given["cu_k"] is None
        again = packed(given)
        assert (again["max_q"], again["max_k"]) == (given["max_q"], given["max_k"])
        return tuple(unpacked(x, len(given["q"])) for x in backward(again))

    monkeypatch.setattr(
        fa2, "_flash", lambda *a, **o: (*forward(by_schema(flash, TORCH_NAMES, a, o)), None, None)
    )

    def run_flash_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        interface.deterministic.append(torch.are_deterministic_algorithms_enabled())
        return backward(by_schema(flash_backward, TORCH_NAMES, args, options))

    monkeypatch.setattr(fa2, "_flash_backward", run_flash_backward)
    monkeypatch.setattr(cudnn, "_cudnn", run_dense)
    monkeypatch.setattr(cudnn, "_cudnn_backward", run_dense_backward)
    return interface


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("name", "lengths", "causal", "window", "softcap"),
    [
        *((n, RAGGED, causal, 0, 0.0) for n in ("fa4", "fa2") for causal in (False, True)),
        *((n, RAGGED, True, window, 0.0) for n in ("fa4", "fa2") for window in (1, 4)),
        ("fa4", RAGGED, False, 0, 1.5),
        ("fa4", RAGGED, True, 3, 1.5),
        ("cudnn", EQUAL, True, 0, 0.0),
        ("cudnn", WIDE, False, 0, 0.0),
    ],
)
def test_what_stock_functions_are_given(
    name: str,
    lengths: list[tuple[int, int]],
    causal: bool,
    window: int,
    softcap: float,
    deterministic: bool,
    stand_ins: Fa4Interface,
) -> None:
    kernel, reference = BY_NAME[name], BY_NAME["reference"]
    launch = one_launch(lengths, causal)
    q, k, v, do = random_qkv(launch)
    options: dict[str, Any] = {"scale": 0.4, "softcap": softcap, "window": window}
    expected = reference.forward(q, k, v, launch, **options)
    torch.testing.assert_close(kernel.forward(q, k, v, launch, **options), expected)
    # Parts of more launches went into what the backward is given.
    merged = expected[0] * 0.5, expected[1] + 0.7
    options["deterministic"] = deterministic
    torch.testing.assert_close(
        kernel.backward(do, q, k, v, *merged, launch, **options),
        reference.backward(do, q, k, v, *merged, launch, **options),
    )
    assert stand_ins.deterministic == ([] if name == "cudnn" else [deterministic])
    assert not torch.are_deterministic_algorithms_enabled()
