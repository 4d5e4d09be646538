"""Kernels on their own: single launches, records, selection and refusals."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import numpy as np
import pytest
import torch

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import (
    KERNELS,
    AttentionTable,
    Kernel,
    Launch,
    fa4,
    registry,
    select_kernel,
    shared_attention,
)
from forkpoint.ops.attention.kernel import Asked
from forkpoint.ops.attention.table import read_launches

CPU = torch.device("cpu")
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
ON_CPU = [k.name for k in KERNELS if k.device_types is None or "cpu" in k.device_types]


def one_launch(lengths: list[tuple[int, int]], causal: bool) -> Launch:
    """Sequences of (queries, keys) from the cache, behind a first launch that a table must have."""
    q, k = (np.cumsum([0, *side]) for side in zip(*lengths, strict=True))
    count, total = len(lengths), int(q[-1])
    microbatches = [
        [0, 1, 0, total, 0, total, total, total, 0, 0, 1],
        [1, causal, 0, total, 0, k[-1], np.diff(q).max(), np.diff(k).max(), 2, 3 + count, count],
    ]
    table = AttentionTable.from_numpy(np.array(microbatches), np.array([0, total, *q, *k]))
    return read_launches(table.launches, table.cu_cpu, table.cu_device)[1]


def random_qkv(launch: Launch, heads: int = 4, groups: int = 2, dtype=torch.float64):
    torch.manual_seed(0)
    q, do = (torch.randn(launch.q_end, heads, 8, dtype=torch.float64) for _ in "qo")
    k, v = (torch.randn(launch.k_end, groups, 8, dtype=torch.float64) for _ in "kv")
    return [x.to(dtype) for x in (q, k, v, do)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[(5, 9)], [(1, 1), (1, 300)], [(4, 6), (4, 6), (260, 700)]])
def test_kernels_agree_with_the_reference(lengths: list[tuple[int, int]], causal: bool) -> None:
    launch = one_launch(lengths, causal)
    q, k, v, do = random_qkv(launch)
    options = {"scale": 0.4, "softcap": 0.0, "window": 0}
    expected = BY_NAME["reference"].forward(q, k, v, launch, **options)
    # As the composition does: a result and a log-sum-exp that more keys went into.
    merged = expected[0] * 0.5, expected[1] + 0.7
    gradients = [
        kernel.backward(do, q, k, v, *merged, launch, deterministic=True, **options)
        for kernel in (BY_NAME["reference"], BY_NAME["cpu_flash"])
    ]
    found = BY_NAME["cpu_flash"].forward(q, k, v, launch, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_queries_below_one_prefix_keep_their_digits(name: str, dtype: torch.dtype) -> None:
    """Torch's own CPU kernel sums dk and dv in the inputs' dtype, which loses them in 16 bit."""
    launch = one_launch([(20_000, 50)], causal=False)
    options = {"scale": 0.4, "softcap": 0.0, "window": 0}
    results = []
    for compute in (dtype, torch.float64):
        q, k, v, do = (x.to(compute) for x in random_qkv(launch, 2, 1, dtype))
        o, lse = BY_NAME[name].forward(q, k, v, launch, **options)
        results.append(
            BY_NAME[name].backward(do, q, k, v, o, lse, launch, deterministic=False, **options)
        )
    for found, expected in zip(*results, strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("name", ON_CPU)
def test_the_backward_repeats_bit_by_bit(name: str) -> None:
    launch = one_launch([(700, 900), (700, 900), (33, 65)], causal=True)
    q, k, v, do = random_qkv(launch, 4, 1, torch.float32)
    options = {"scale": 0.4, "softcap": 0.0, "window": 0}
    o, lse = BY_NAME[name].forward(q, k, v, launch, **options)
    runs = [
        BY_NAME[name].backward(do, q, k, v, o, lse, launch, deterministic=True, **options)
        for _ in range(4)
    ]
    for again in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(again, runs[0], strict=True))


def select(name: str = "auto", **changes) -> Kernel:
    asked = {
        "device": CPU,
        "dtype": torch.float32,
        "head_dim": 32,
        "value_dim": 32,
        "softcap": 0.0,
        "window": 0,
        "deterministic": False,
    }
    return select_kernel(name, **(asked | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "cpu_flash"),
        ({"window": 9, "deterministic": True, "dtype": torch.float64}, "cpu_flash"),
        ({"softcap": 30.0}, "reference"),
        ({"value_dim": 16}, "reference"),
        ({"device": torch.device("meta")}, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can_serve(changes: dict, expected: str) -> None:
    assert select(**changes).name == expected
    assert select(expected, **changes).name == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"softcap": 30.0}, "it has no softcap (asked for 30.0)"),
        (
            {"value_dim": 16},
            "it needs equal head dims of keys and values, not 32 and 16",
        ),
        ({"device": torch.device("cuda:0")}, "it runs on cpu, not on cuda"),
    ],
)
def test_a_named_kernel_refuses_with_reason_and_what_can_serve(changes: dict, reason: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        select("cpu_flash", **changes)
    assert str(raised.value) == (
        f"Attention kernel 'cpu_flash' cannot serve: {reason}. Able to serve here: 'reference'. "
        "Name one of these, or leave the choice to 'auto'."
    )


def test_refuses_a_dtype_that_no_kernel_takes() -> None:
    takes = "torch.float64, torch.float32, torch.bfloat16, torch.float16"
    with pytest.raises(UnsupportedError) as raised:
        select("reference", dtype=torch.int8)
    assert str(raised.value) == (
        f"Attention kernel 'reference' cannot serve: it takes {takes}, not torch.int8. "
        "Able to serve here: none. Name one of these, or leave the choice to 'auto'."
    )


def test_auto_leaves_small_launches_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataclasses.replace(BY_NAME["reference"], name="first", auto_pairs=13)
    last = dataclasses.replace(BY_NAME["reference"], name="last", ragged=False)
    monkeypatch.setattr(registry, "KERNELS", (first, last))
    asked = (CPU, torch.float32, 8, 8, 0.0, 0, False)
    registry.forget_choices()
    try:
        for lengths, expected in (
            ([(3, 4)], "last"),
            ([(3, 4), (3, 4)], "first"),
            ([(1, 4), (3, 2)], "first"),  # ragged, so that no other serves
        ):
            launch = one_launch(lengths, False)
            assert registry.launch_kernel("auto", launch, *asked).name == expected
        assert registry.launch_kernel("first", one_launch([(1, 1)], False), *asked).name == "first"
    finally:
        registry.forget_choices()


SIXTEEN = "it takes torch.bfloat16, torch.float16, not torch.float32"


@pytest.mark.parametrize(
    ("name", "capability", "changes", "reason"),
    [
        ("fa4", (9, 0), {"softcap": 30.0, "window": 9, "deterministic": True}, None),
        ("fa4", (9, 0), {"head_dim": 192, "value_dim": 128}, None),
        ("fa4", (9, 0), {"dtype": torch.float32}, SIXTEEN),
        (
            "fa4",
            (9, 0),
            {"head_dim": 264},
            "it needs head dims of 8 to 256 in steps of 8, not 264 and 64",
        ),
        ("fa4", (8, 0), {}, "it needs a GPU of compute capability 9, 10 or 11, not 8.0"),
        ("fa4", (12, 0), {}, "it needs a GPU of compute capability 9, 10 or 11, not 12.0"),
        ("fa4", (9, 0), {"head_dim": 256, "value_dim": 256, "grouped": True, "window": 9}, None),
        (
            "fa4",
            (9, 0),
            {"head_dim": 192, "value_dim": 128, "grouped": True},
            "it needs equal head dims of keys and values where query heads share them, not 192 "
            "and 128",
        ),
        ("fa4", (10, 0), {"softcap": 30.0, "window": 9, "grouped": True}, None),
        ("fa4", (10, 0), {"head_dim": 192, "value_dim": 128}, None),
        ("fa4", (10, 3), {"head_dim": 256, "value_dim": 256}, None),
        (
            "fa4",
            (10, 0),
            {"head_dim": 192, "value_dim": 192},
            "on compute capability 10 it needs head dims of at most 128, or 192 and 128, or 256 "
            "and 256, not 192 and 192",
        ),
        (
            "fa4",
            (10, 0),
            {"head_dim": 256, "value_dim": 256, "softcap": 30.0},
            "on compute capability 10 it has no softcap with head dims of 256",
        ),
        (
            "fa4",
            (11, 0),
            {"head_dim": 256, "value_dim": 256, "window": 9},
            "on compute capability 11 it has no sliding window with head dims of 256",
        ),
        ("fa2", (8, 0), {"head_dim": 256, "value_dim": 256, "deterministic": True}, None),
        ("fa2", (8, 0), {"window": 9}, None),
        ("fa2", (9, 0), {"dtype": torch.float32}, SIXTEEN),
        ("fa2", (9, 0), {"softcap": 30.0}, "it has no softcap (asked for 30.0)"),
        (
            "fa2",
            (9, 0),
            {"value_dim": 32},
            "it needs equal head dims of keys and values, not 64 and 32",
        ),
        (
            "fa2",
            (9, 0),
            {"head_dim": 20, "value_dim": 20},
            "it needs a head dim of at most 256 in steps of 8, not 20",
        ),
        (
            "fa2",
            (8, 9),
            {"head_dim": 224, "value_dim": 224},
            "on compute capability 8.9 its backward needs a head dim of at most 192, or over 224, "
            "not 224",
        ),
        ("fa2", (12, 0), {"head_dim": 256, "value_dim": 256}, None),
        ("fa2", (9, 0), {"head_dim": 224, "value_dim": 224}, None),
        ("fa2", (7, 5), {}, "it needs a GPU of compute capability 8.0 or newer, not 7.5"),
        ("cudnn", (9, 0), {"head_dim": 192, "value_dim": 128}, None),
        ("cudnn", (9, 0), {"dtype": torch.float32}, SIXTEEN),
        ("cudnn", (9, 0), {"softcap": 30.0}, "it has no softcap (asked for 30.0)"),
        ("cudnn", (9, 0), {"window": 9}, "it has no sliding window (asked for 9)"),
        ("cudnn", (9, 0), {"deterministic": True}, "its backward is not deterministic"),
        (
            "cudnn",
            (9, 0),
            {"head_dim": 20},
            "it needs head dims of at most 256 in steps of 8, not 20 and 64",
        ),
        (
            "cudnn",
            (8, 0),
            {"head_dim": 136},
            "it needs head dims of at most 128 in steps of 8, not 136 and 64",
        ),
        ("cudnn", (10, 0), {"head_dim": 192, "value_dim": 128}, None),
        (
            "cudnn",
            (10, 0),
            {"head_dim": 256, "value_dim": 256},
            "it needs head dims of at most 128 in steps of 8, not 256 and 256",
        ),
        (
            "cudnn",
            (12, 0),
            {"head_dim": 192, "value_dim": 128},
            "it needs head dims of at most 128 in steps of 8, not 192 and 128",
        ),
        ("cudnn", (7, 5), {}, "it needs a GPU of compute capability 8.0 or newer, not 7.5"),
    ],
)
def test_records_of_the_cuda_kernels(
    name: str,
    capability: tuple[int, int],
    changes: dict,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_100)
    monkeypatch.setattr(fa4, "find_spec", lambda package: package)
    monkeypatch.setattr(fa4, "_version", lambda: fa4.OLDEST)
    asked = {
        "device": torch.device("cuda:0"),
        "dtype": torch.bfloat16,
        "head_dim": 64,
        "value_dim": 64,
        "softcap": 0.0,
        "window": 0,
        "deterministic": False,
    }
    assert BY_NAME[name].refusal(**(asked | changes)) == reason


def test_old_cudnn_on_blackwell_has_no_latent_head_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    asked = Asked(torch.device("cuda:0"), torch.bfloat16, 192, 128, 0.0, 0, False)
    for version, expected in ((91_002, "at most 128"), (None, "at most 128"), (91_100, "")):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda found=version: found)
        refusal = BY_NAME["cudnn"].refuses(asked)
        assert (expected in refusal) if refusal else not expected


def test_fa4_and_cudnn_refuse_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(fa4, "find_spec", lambda package: None)
    device = torch.device("cuda:0")
    assert BY_NAME["cudnn"].refuses_device(device) == "this torch has no cuDNN"
    assert BY_NAME["fa4"].refuses_device(device) == (
        "flash-attn-4 is not installed (pip install 'forkpoint[fa4]')"
    )


@pytest.mark.parametrize(
    ("installed", "refusal"),
    [
        ({"flash-attn-4": "4.0.0b36"}, ""),
        ({"flash-attn-4": "4.0.0b100"}, ""),
        ({"flash-attn-4": "4.0.0"}, ""),
        ({"flash-attn-4": "4.0.0rc1"}, ""),
        ({"flash-attn-4": "4.1.0b2+cu130"}, ""),
        (
            {"flash-attn-4": "4.0.0b9"},
            "4.0.0b9 has not been shown exact; install 4.0.0b36 or newer",
        ),
        ({"flash-attn": "2.8.3"}, "flash-attn-4 is not installed"),
    ],
    ids=str,
)
def test_fa4_knows_its_package_by_name_and_version(
    installed: dict[str, str], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(fa4, "find_spec", lambda package: package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    found = BY_NAME["fa4"].refuses_device(torch.device("cuda:0")) or ""
    assert refusal in found if refusal else not found


def test_cudnn_takes_equal_lengths_only() -> None:
    cudnn = BY_NAME["cudnn"]
    assert "equal length" in (cudnn.launch_refusal(one_launch([(2, 3), (3, 3)], False)) or "")
    assert "more keys" in (cudnn.launch_refusal(one_launch([(2, 3)], True)) or "")
    assert "equal length" in (cudnn.launch_refusal(one_launch([(2, 3), (2, 4)], False)) or "")
    assert cudnn.launch_refusal(one_launch([(2, 3), (2, 3)], False)) is None
    for name in ("fa4", "fa2"):
        assert BY_NAME[name].launch_refusal(one_launch([(2, 3), (3, 5)], True)) is None


def limited(**claims) -> Kernel:
    """A record that claims nothing but what is named."""
    reference = BY_NAME["reference"]
    return Kernel(
        name="limited",
        forward=reference.forward,
        backward=reference.backward,
        device_types=None,
        dtypes=(torch.float32,),
        **claims,
    )


@pytest.mark.parametrize(
    ("claims", "changes", "reason"),
    [
        ({}, {"window": 4}, "it has no sliding window (asked for 4)"),
        ({"window": True}, {"window": 4}, "it has no sliding window (asked for 4)"),
        ({"causal_offset": True, "window": True}, {"window": 4}, None),
        ({}, {"deterministic": True}, "its backward is not deterministic"),
        ({"refuses_device": lambda device: f"not for {device}"}, {}, "not for cpu"),
        ({}, {}, None),
    ],
)
def test_what_a_record_does_not_claim_is_refused(
    claims: dict, changes: dict, reason: str | None
) -> None:
    asked = {"softcap": 0.0, "window": 0, "deterministic": False} | changes
    found = limited(**claims).refusal(CPU, torch.float32, 8, 8, **asked)
    assert found == reason


def test_launches_that_a_record_does_not_claim_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ragged, offset = one_launch([(2, 3), (3, 3)], False), one_launch([(2, 3)], True)
    equal, square = one_launch([(2, 3), (2, 3)], False), one_launch([(3, 3)], True)
    none = limited()
    assert "equal length" in (none.launch_refusal(ragged) or "")
    assert "more keys than queries" in (none.launch_refusal(offset) or "")
    assert none.launch_refusal(equal) is none.launch_refusal(square) is None
    able = limited(ragged=True, causal_offset=True)
    assert able.launch_refusal(ragged) is able.launch_refusal(offset) is None
    # And the operator asks.
    weak = dataclasses.replace(BY_NAME["reference"], ragged=False)
    with only(weak, monkeypatch):
        x = torch.ones(5, 1, 4)
        table = AttentionTable.from_numpy(
            np.array([[0, 1, 0, 5, 0, 5, 3, 3, 0, 0, 2]]), np.array([0, 2, 5])
        )
        with pytest.raises(UnsupportedError, match="'reference' cannot serve: it takes sequences"):
            shared_attention(x, x, x, table=table, scale=1.0, kernel="reference")


@contextmanager
def only(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other kernel, and no choices that were made before or are kept afterwards."""
    try:
        with monkeypatch.context() as patched:
            patched.setattr(registry, "KERNELS", (kernel,))
            registry.forget_choices()
            yield
    finally:
        registry.forget_choices()


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_operator_says_all_that_it_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    watched = dataclasses.replace(BY_NAME["reference"], refuses=asked.append)
    table = AttentionTable.from_numpy(
        np.array([[0, 1, 0, 5, 0, 5, 5, 5, 0, 0, 1]]), np.array([0, 5])
    )
    with only(watched, monkeypatch):
        for heads in (1, 2):
            q, k, v = torch.ones(5, 2, 4), torch.ones(5, heads, 4), torch.ones(5, heads, 3)
            options = {"scale": 1.0, "softcap": 7.0, "kernel": name, "deterministic": True}
            shared_attention(q, k, v, table=table, **options)
    expected = Asked(CPU, torch.float32, 4, 3, 7.0, 0, True, grouped=True)
    assert asked == [expected, expected._replace(grouped=False)]


@pytest.mark.parametrize(
    ("microbatch", "cu", "key_index"),
    [
        ([0, 1, 1, 5, 0, 4, 4, 4, 0, 0, 1], [0, 4], None),  # does not begin at 0
        ([0, 1, 0, 5, 0, 5, 5, 5, 0, 0, 2], [0, 5, 5], None),  # an empty sequence
        ([0, 1, 0, 5, 0, 5, 4, 5, 0, 0, 1], [0, 5], None),  # max_q is not the longest
        ([0, 1, 0, 5, 0, 5, 5, 5, 0, 0, 1], [0, 4], None),  # lengths do not fill the range
        ([0, 1, 0, 5, 0, 5, 5, 5, 0, 0, 2], [0, 5], None),  # fewer lengths than sequences
        (
            [0, 1, 0, 4, 0, 5, 4, 5, 0, 2, 1],
            [0, 4, 0, 5],
            None,
        ),  # causal in the microbatch, unequal
        ([1, 1, 0, 5, 0, 4, 5, 4, 0, 2, 1], [0, 5, 0, 4], None),  # causal, more queries than keys
        ([3, 1, 0, 5, 0, 5, 5, 5, 0, 0, 1], [0, 5], None),  # no such source
        ([2, 1, 0, 5, 0, 5, 5, 5, 0, 0, 1], [0, 5], None),  # gathers nothing
        ([0, 1, 0, 5, 0, 5, 5, 5, 0, 0, 1], [0, 5], [0, 1, 2, 3, 4]),  # does not gather
        ([2, 1, 0, 5, 0, 5, 5, 5, 0, 0, 1], [0, 5], [0, 1, 2, 3]),  # gathers too few
    ],
)
def test_a_table_that_breaks_its_rules_is_caught(
    microbatch: list[int], cu: list[int], key_index: list[int] | None
) -> None:
    with pytest.raises(AssertionError):
        AttentionTable.from_numpy(
            np.array([microbatch]), np.array(cu), None if key_index is None else np.array(key_index)
        )
