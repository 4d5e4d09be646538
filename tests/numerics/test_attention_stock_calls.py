"""Calls of stock functions by the kernels of CUDA: by their signatures, computed on a CPU.

A stand-in takes the arguments under the names that the stock function gives them, and computes
what its documentation says by the reference kernel. So a wrong order, window or mask shows without
a GPU.
"""

from typing import Any, ClassVar

import pytest
import torch
from attention_cases import RECORDS
from test_attention_kernels import one_launch, random_qkv
from torch import Tensor

from forkpoint.ops.attention import AttentionTable, Launch, cudnn, fa2, fa4, padded
from forkpoint.ops.attention import table as tables
from forkpoint.ops.attention.kernel import Asked, BackwardInputs, Options
from forkpoint.tree import FROM_CACHE, FROM_OWN, LaunchLayout, Table, launches

RAGGED = [(5, 9), (1, 4), (7, 7)]
EQUAL = [(5, 5), (5, 5)]
WIDE = [(5, 9), (5, 9)]
ASKED = Asked(torch.device("cpu"), torch.bfloat16, 256, 256, heads=16, kv_heads=4)


def causal_launch(lengths: list[int]) -> Launch:
    layout = LaunchLayout(FROM_OWN, True, 0, 0, tuple(lengths), tuple(lengths))
    return AttentionTable(Table((layout,))).calls[0]


def window_of(given: dict[str, Any]) -> tuple[bool, int]:
    """Whether the mask is causal, and its window; (None or -1) leaves a side open."""
    left, right = given.get("window_size_left"), given.get("window_size_right")
    closed = [side is not None and side >= 0 for side in (left, right)]
    if not any(closed):
        return given["causal"], 0
    assert all(closed) and right == 0
    return True, left + 1


def asked(given: dict[str, Any], deterministic: bool) -> tuple[Launch, Options]:
    causal, window = window_of(given)
    assert int(given["cu_q"][-1]) == len(given["q"])
    lengths = (given[name].diff().tolist() for name in ("cu_q", "cu_k"))
    launch = one_launch(list(zip(*lengths, strict=True)), causal)
    assert (given["max_q"], given["max_k"]) == (launch.max_q, launch.max_k)
    return launch, Options(given["scale"], given.get("softcap") or 0.0, window, deterministic)


def forward(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tensors = (given[name] for name in "qkv")
    return RECORDS["reference"].forward(*tensors, *asked(given, False))


def backward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    inputs = BackwardInputs(*(given[name] for name in BackwardInputs._fields))
    return RECORDS["reference"].backward(inputs, *asked(given, True))


def packed(given: dict[str, Any], dims: str) -> dict[str, Any]:
    """A batch of equal sequences, dimensions as named, as [B * T, H, D] with its lengths."""
    order = [dims.index(x) for x in "BTHD"]
    count, queries, heads, _ = (given["q"].shape[at] for at in order)
    keys = given["k"].shape[dims.index("T")]
    flat = {
        name: x.permute(order).flatten(0, 1)
        for name, x in given.items()
        if name in ("q", "k", "v", "do", "o")
    }
    if "lse" in given:
        assert given["lse"].shape[:3] == (count, heads, queries)
        flat["lse"] = given["lse"].view(count, heads, queries).transpose(0, 1).flatten(1)
    cu = torch.arange(count + 1)
    lengths = {"cu_q": cu * queries, "cu_k": cu * keys, "max_q": queries, "max_k": keys}
    return {**given, **flat, **lengths}


class Fa4Interface:
    """`flash_attn.cute.interface`: the first arguments, and the keywords that are in use."""

    NAMES: ClassVar[dict[str, str]] = {
        "cu_seqlens_q": "cu_q",
        "cu_seqlens_k": "cu_k",
        "max_seqlen_q": "max_q",
        "max_seqlen_k": "max_k",
        "softmax_scale": "scale",
        **{name: name for name in ("causal", "softcap", "window_size_left", "window_size_right")},
    }

    def __init__(self) -> None:
        self.deterministic: list[bool] = []

    def _named(self, tensors: dict[str, Tensor], given: dict[str, Any]) -> dict[str, Any]:
        named = tensors | {self.NAMES[name]: value for name, value in given.items()}
        return named if "cu_q" in named else packed(named, "BTHD")

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
        assert given.pop("return_lse")
        assert given["softcap"] != 0.0, "None is no softcap"
        o, lse = forward(self._named({"q": q, "k": k, "v": v}, given))
        if q.ndim == 4:
            o = o.unflatten(0, q.shape[:2])
            lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
        return o, lse, None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **given: Any
    ) -> tuple[Any, ...]:
        self.deterministic.append(given.pop("deterministic"))
        tensors = {"q": q, "k": k, "v": v, "o": out, "do": dout, "lse": lse}
        found = backward(self._named(tensors, given))
        return tuple(x.unflatten(0, (len(q), -1)) for x in found) if q.ndim == 4 else found


def by_schema(operator: Any, args: Any, options: Any) -> dict[str, Any]:
    """The arguments of a call of an operator of torch, by name."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    assert given.keys() <= set(names) and given["dropout_p"] == 0.0
    return {TORCH_NAMES.get(name, name): value for name, value in given.items()}


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
    monkeypatch.setattr(fa4, "_is_hopper", lambda device: True)
    flash, flash_backward = fa2._flash, fa2._flash_backward
    dense, dense_backward = cudnn._cudnn, cudnn._cudnn_backward

    def unpacked(x_THD: Tensor, count: int) -> Tensor:
        return x_THD.unflatten(0, (count, -1)).transpose(1, 2)

    def run_dense(*args: Any, **options: Any) -> tuple[Any, ...]:
        given = by_schema(dense, args, options)
        assert given["compute_log_sumexp"] and given["attn_bias"] is None
        again, count = packed(given, "BHTD"), len(given["q"])
        # Top-left: as bottom-right only where there are as many keys as queries.
        assert again["max_q"] == again["max_k"] or not given["causal"]
        o_THE, lse_HT = forward(again)
        lse = lse_HT.unflatten(1, (count, -1)).transpose(0, 1)[..., None].contiguous()
        return unpacked(o_THE, count), lse, None, None

    def run_dense_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        given = by_schema(dense_backward, args, options)
        assert given["attn_bias"] is given["cu_q"] is given["cu_k"] is None
        again = packed(given, "BHTD")
        assert (again["max_q"], again["max_k"]) == (given["max_q"], given["max_k"])
        return tuple(unpacked(x, len(given["q"])) for x in backward(again))

    def run_flash(*args: Any, **options: Any) -> tuple[Any, ...]:
        return (*forward(by_schema(flash, args, options)), None, None)

    def run_flash_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        interface.deterministic.append(torch.are_deterministic_algorithms_enabled())
        return backward(by_schema(flash_backward, args, options))

    monkeypatch.setattr(fa2, "_flash", run_flash)
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
        ("fa4", EQUAL, True, 0, 0.0),
        ("fa4", WIDE, False, 0, 0.0),
        ("fa4", WIDE, True, 3, 1.5),
        ("fa4", [(7, 7)], True, 0, 0.0),
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
    kernel, reference = RECORDS[name], RECORDS["reference"]
    launch = one_launch(lengths, causal)
    q, k, v, do = random_qkv(launch)
    options = Options(0.4, softcap, window, deterministic)
    expected = reference.forward(q, k, v, launch, options)
    torch.testing.assert_close(kernel.forward(q, k, v, launch, options), expected)
    # Parts of more launches went into what the backward is given.
    inputs = BackwardInputs(do, q, k, v, expected[0] * 0.5, expected[1] + 0.7)
    torch.testing.assert_close(
        kernel.backward(inputs, launch, options),
        reference.backward(inputs, launch, options),
    )
    assert stand_ins.deterministic == ([] if name == "cudnn" else [deterministic])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("lengths", "parts", "on_cudnn"),
    [
        ([3, 6, 2, 2, 9, 5, 1], [[3], [6], [2, 2], [9], [5], [1]], [8, 12, 8]),
        ([16], [[16]], [16]),
        ([5, 5], [[5], [5]], [8, 8]),
        ([2, 7], [[2], [7]], [8]),
    ],
)
def test_long_sequences_are_padded(
    lengths: list[int],
    parts: list[list[int]],
    on_cudnn: list[int],
    stand_ins: Fa4Interface,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (tables, padded):
        monkeypatch.setattr(module, "LONG_TOKENS", 5)
    monkeypatch.setattr(launches, "PADDED_STEP_TOKENS", 4)
    ran: list[int] = []
    for way in ("forward", "backward"):
        run = getattr(cudnn, way)
        monkeypatch.setattr(
            cudnn, way, lambda *given, run=run: ran.append(given[-2].max_q) or run(*given)
        )
    launch = causal_launch(lengths)
    assert [part.cu_q_cpu.diff().tolist() for part in launch.parts] == parts
    assert all(part.cu_q.equal(part.cu_k_cpu) and part.cu_q[0] == 0 for part in launch.parts)

    q, k, v, do = random_qkv(launch)
    options, reference = Options(0.4), RECORDS["reference"]
    expected = reference.forward(q, k, v, launch, options)
    torch.testing.assert_close(padded.forward(q, k, v, launch, options), expected)
    inputs = BackwardInputs(do, q, k, v, expected[0] * 0.5, expected[1] + 0.7)
    torch.testing.assert_close(
        padded.backward(inputs, launch, options),
        reference.backward(inputs, launch, options),
    )
    assert ran == 2 * on_cudnn


def test_launches_without_a_long_causal_sequence_are_not_padded() -> None:
    kernel = RECORDS["padded"]
    total = launches.LONG_TOKENS
    for last, causal, source, long in (
        (total, True, FROM_OWN, True),
        (total - 1, True, FROM_OWN, False),
        (total, False, FROM_CACHE, False),
        (total, True, FROM_CACHE, False),
    ):
        layout = LaunchLayout(source, causal, 0, 0, (last,), (last,))
        launch = AttentionTable(Table((layout,))).calls[0]
        why = kernel.launch_refusal(launch, ASKED)
        assert why is None if long else "2,048 tokens, and a launch has none" in (why or "")


def test_elements_of_padded_sequences_are_those_that_cudnn_is_given() -> None:
    most = (1 << 31) // (ASKED.heads * ASKED.head_dim)
    step = most // 32
    for lengths, refused in (
        ([most - step], False), ([most - step + 1], True), ([most // 2] * 3, False),
    ):  # fmt: skip
        why = RECORDS["padded"].launch_refusal(causal_launch(lengths), ASKED) or ""
        assert ("elements" in why) == refused


def test_padded_lengths_are_few() -> None:
    lengths = [launches.padded_length(n) for n in range(2048, 65_537)]
    assert len(set(lengths)) == 4 + 8 + 16 + 16 + 16 + 1
    for tokens, length in zip(range(2048, 65_537), lengths, strict=True):
        assert tokens <= length < tokens + max(512, tokens / 16)


@pytest.mark.parametrize(
    ("lengths", "heads", "long"),
    [
        ([(8192, 6144)], (32, 8), True),
        ([(2048, 2048)] * 8, (32, 8), True),
        ([(131 + 127 * i,) * 2 for i in range(16)], (32, 8), True),
        ([(16_384, 8192)], (28, 4), True),
        # 144 tiles of 128 queries are two rounds of 132, 96 of 192 are one.
        ([(576, 16_384)], (32, 8), True),
        # Few tiles: a longer one takes longer, and there is one round either way.
        ([(2048, 2048)], (32, 8), False),
        ([(n, 3 * n) for n in (64, 100, 200, 350, 80, 400, 33, 150)] * 2, (32, 8), False),
    ],
)
def test_long_tiles_are_taken_where_they_were_faster(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    long: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the 132 multiprocessors of an H200; how much faster is in benchmarks/history/log.md."""
    monkeypatch.setattr(fa4, "_processors", lambda device: 132)
    launch = one_launch(lengths, False)
    q = torch.empty(launch.q_end, heads[0], 128, device="meta")
    v = torch.empty(launch.k_end, heads[1], 128, device="meta")
    assert fa4._tile(q, v, launch, 0.0, 0) == (fa4.LONG_TILE_OPTIONS if long else {})
    assert fa4._tile(q, v, launch, 30.0, 0) == fa4._tile(q, v, launch, 0.0, 64) == {}
    assert fa4._tile(q[..., :64], v[..., :64], launch, 0.0, 0) == {}


def test_tiles_are_those_of_the_version_and_the_chip_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda:0")
    for version, capability, expected in (
        (fa4.TUNED, (9, 0), 132),
        (fa4.TUNED, (10, 0), 0),
        ("4.0.0b99", (9, 0), 0),
        (None, (9, 0), 0),
    ):
        fa4._processors.cache_clear()
        fa4._is_hopper.cache_clear()
        monkeypatch.setattr(fa4, "_version", lambda found=version: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert fa4._processors(device) == expected
        # Whatever the version, a batch is what was measured on compute capability 9.
        assert fa4._batched(one_launch(EQUAL, True), device) == (2 if capability[0] == 9 else 0)
        assert fa4._batched(one_launch(RAGGED, True), device) == 0
    fa4._processors.cache_clear()
    fa4._is_hopper.cache_clear()


def test_a_batch_has_no_more_sequences_than_a_grid_has_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fa4, "_is_hopper", lambda device: True)
    for count, expected in ((65_535, 65_535), (65_536, 0)):
        assert fa4._batched(one_launch([(1, 1)] * count, True), torch.device("cuda:0")) == expected
