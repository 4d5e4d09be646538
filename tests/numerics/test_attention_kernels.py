"""Kernels by themselves: single launches, records, selection and refusals."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest
import torch
from attention_cases import RECORDS

from forkpoint.errors import UnsupportedError
from forkpoint.ops.attention import (
    AttentionTable,
    Kernel,
    Launch,
    fa4,
    reference,
    registry,
    select_kernel,
    shared_attention,
)
from forkpoint.ops.attention import kernel as kernels
from forkpoint.ops.attention.kernel import Asked, BackwardInputs, Options
from forkpoint.tree import FROM_CACHE, FROM_OWN, LaunchLayout, Table

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
PLAIN = Options(0.4)


def one_launch(lengths: list[tuple[int, int]], causal: bool) -> Launch:
    """Sequences of (queries, keys) from the cache, behind a first launch that a table must have."""
    q, k = zip(*lengths, strict=True)
    first = LaunchLayout(FROM_OWN, True, 0, 0, (sum(q),), (sum(q),))
    layouts = first, LaunchLayout(FROM_CACHE, causal, 0, 0, q, k)
    return AttentionTable(Table(layouts)).calls[1]


def random_qkv(launch: Launch, heads: int = 4, groups: int = 2, dtype=torch.float64):
    torch.manual_seed(0)
    q, do = (torch.randn(launch.q_end, heads, 8, dtype=torch.float64) for _ in "qo")
    k, v = (torch.randn(launch.k_end, groups, 8, dtype=torch.float64) for _ in "kv")
    return [x.to(dtype) for x in (q, k, v, do)]


@pytest.mark.parametrize("name", ["reference", "cpu_flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_queries_below_one_prefix_keep_their_digits(name: str, dtype: torch.dtype) -> None:
    """Torch's own CPU kernel sums dk and dv in the inputs' dtype, which loses them in 16 bit."""
    launch = one_launch([(20_000, 50)], causal=False)
    results = []
    for compute in (dtype, torch.float64):
        q, k, v, do = (x.to(compute) for x in random_qkv(launch, 2, 1, dtype))
        o, lse = RECORDS[name].forward(q, k, v, launch, PLAIN)
        results.append(RECORDS[name].backward(BackwardInputs(do, q, k, v, o, lse), launch, PLAIN))
    for found, expected in zip(*results, strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < torch.finfo(dtype).eps / 2


def select(name: str = "auto", **changes: Any) -> Kernel:
    return select_kernel(name, Asked(CPU, torch.float32, 32, 32, 0.0, 0, False)._replace(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"window": 9, "deterministic": True, "dtype": torch.float64}, "cpu_flash"),
        ({"softcap": 30.0}, "reference"),
        ({"value_dim": 16}, "reference"),
        ({"device": torch.device("meta")}, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can_serve(changes: dict, expected: str) -> None:
    assert select(**changes).name == expected
    assert select(expected, **changes).name == expected
    if expected == "reference":
        with pytest.raises(UnsupportedError, match=r"'cpu_flash' cannot serve: .*'reference'"):
            select("cpu_flash", **changes)


def test_no_kernel_takes_integers() -> None:
    with pytest.raises(UnsupportedError, match=r"not torch.int8. Usable here: none"):
        select("reference", dtype=torch.int8)


def test_auto_leaves_small_launches_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dataclasses.replace(RECORDS["reference"], name="first", auto_pairs=13)
    last = dataclasses.replace(RECORDS["reference"], name="last", ragged=False)
    asked = Asked(CPU, torch.float32, 8, 8, 0.0, 0, False)
    with only(monkeypatch, first, last):
        for lengths, expected in (
            ([(3, 4)], "last"),
            ([(3, 4), (3, 4)], "first"),
            ([(1, 4), (3, 2)], "first"),  # ragged, so that no other serves
        ):
            launch = one_launch(lengths, False)
            assert registry.launch_kernel("auto", launch, asked).name == expected
        assert registry.launch_kernel("first", one_launch([(1, 1)], False), asked).name == "first"


@pytest.mark.parametrize(
    ("name", "capability", "dims", "changes", "reason"),
    [
        ("fa4", (9, 0), (64, 64), {"softcap": 30.0, "window": 9, "deterministic": True}, None),
        ("fa4", (9, 0), (64, 64), {"dtype": torch.float32}, "not torch.float32"),
        ("fa4", (9, 0), (264, 64), {}, "not 264 and 64"),
        ("fa4", (12, 0), (64, 64), {}, "not 12.0"),
        ("fa4", (9, 0), (256, 256), {"heads": 2, "window": 9}, None),
        ("fa4", (9, 0), (192, 128), {"heads": 2}, "not 192 and 128"),
        ("fa4", (10, 0), (64, 64), {"softcap": 30.0, "window": 9, "heads": 2}, None),
        ("fa4", (10, 0), (192, 192), {}, "not 192 and 192"),
        ("fa4", (10, 0), (256, 256), {"softcap": 30.0}, "no softcap"),
        ("fa4", (11, 0), (256, 256), {"window": 9}, "no sliding window"),
        ("fa2", (8, 0), (256, 256), {"deterministic": True, "window": 9}, None),
        ("fa2", (9, 0), (64, 64), {"softcap": 30.0}, "no softcap"),
        ("fa2", (9, 0), (64, 32), {}, "not 64 and 32"),
        ("fa2", (9, 0), (20, 20), {}, "not 20"),
        ("fa2", (8, 9), (224, 224), {}, "not 224"),
        ("fa2", (7, 5), (64, 64), {}, "not 7.5"),
        ("cudnn", (9, 0), (192, 128), {}, None),
        ("cudnn", (9, 0), (64, 64), {"softcap": 30.0}, "no softcap"),
        ("cudnn", (9, 0), (64, 64), {"window": 9}, "no sliding window"),
        ("cudnn", (9, 0), (64, 64), {"deterministic": True}, "not deterministic"),
        ("cudnn", (9, 0), (20, 64), {}, "not 20 and 64"),
        ("cudnn", (8, 0), (136, 64), {}, "at most 128"),
        ("cudnn", (12, 0), (192, 128), {}, "at most 128"),
        ("cudnn", (7, 5), (64, 64), {}, "not 7.5"),
    ],
)
def test_records_of_the_cuda_kernels(
    name: str,
    capability: tuple[int, int],
    dims: tuple[int, int],
    changes: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_100)
    monkeypatch.setattr(fa4, "find_spec", lambda package: package)
    monkeypatch.setattr(fa4, "_version", lambda: fa4.OLDEST)
    asked = Asked(CUDA, torch.bfloat16, *dims)._replace(**changes)
    found = RECORDS[name].refusal(asked)
    assert found is None if reason is None else reason in (found or "")


def test_old_cudnn_on_blackwell_has_no_latent_head_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_002)
    refusal = RECORDS["cudnn"].refuses(Asked(CUDA, torch.bfloat16, 192, 128, 0.0, 0, False))
    assert "at most 128" in (refusal or "")


@pytest.mark.parametrize(
    ("installed", "refusal"),
    [
        ({"flash-attn-4": "4.0.0b36"}, None),
        ({"flash-attn-4": "4.1.0b2+cu130"}, None),
        ({"flash-attn-4": "4.0.0b9"}, "4.0.0b9 has not been shown exact; install 4.0.0b36"),
        ({"flash-attn": "2.8.3"}, "flash-attn-4 is not installed"),
    ],
    ids=str,
)
def test_fa4_knows_its_package_by_name_and_version(
    installed: dict[str, str], refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(fa4, "find_spec", lambda package: package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    found = RECORDS["fa4"].refuses_device(CUDA)
    assert found is None if refusal is None else refusal in (found or "")


def limited(**claims: Any) -> Kernel:
    """A record that claims nothing but what is named."""
    reference = RECORDS["reference"]
    return Kernel(
        name="limited",
        forward=reference.forward,
        backward=reference.backward,
        device_types=None,
        dtypes=(torch.float32,),
        **claims,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [PLAIN, PLAIN._replace(softcap=2.0), PLAIN._replace(window=4)])
def test_long_sequences_are_computed_by_blocks_of_queries(
    causal: bool, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = one_launch([(9, 9), (2, 7), (5, 11)], causal)
    q, k, v, do = random_qkv(launch)
    kernel, results = RECORDS["reference"], []
    for most in (1 << 28, 3 * 4 * 11, 1):
        monkeypatch.setattr(reference, "MOST_SCORES", most)
        blocks = list(reference._blocks(launch, heads=4))
        assert all(4 * (q1 - q0) * (k1 - k0) <= max(most, 4 * 11) for q0, q1, k0, k1 in blocks)
        o, lse = kernel.forward(q, k, v, launch, options)
        inputs = BackwardInputs(do, q, k, v, o, lse)
        results.append((o, lse, *kernel.backward(inputs, launch, options)))
    for found in results[1:]:
        for x, expected in zip(found, results[0], strict=True):
            assert (x - expected).abs().max() < 1e-13


def test_what_a_record_does_not_claim_is_refused() -> None:
    for claims, changes, reason in (
        ({}, {"window": 4}, "no sliding window"),
        ({"window": True}, {"window": 4}, "no sliding window"),
        ({"causal_offset": True, "window": True}, {"window": 4}, None),
        ({}, {"deterministic": True}, "not deterministic"),
        ({"refuses_device": lambda device: f"not for {device}"}, {}, "not for cpu"),
        ({}, {}, None),
    ):
        asked = Asked(CPU, torch.float32, 8, 8)._replace(**changes)
        found = limited(**claims).refusal(asked)
        assert found is None if reason is None else reason in (found or "")


def test_launches_that_a_record_does_not_claim_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged, offset = one_launch([(2, 3), (3, 3)], False), one_launch([(2, 3)], True)
    equal, square = one_launch([(2, 3), (2, 3)], False), one_launch([(3, 3)], True)
    able, asked = limited(ragged=True, causal_offset=True), Asked(CPU, torch.float32, 8, 8)
    for none in (limited(), RECORDS["cudnn"]):
        assert "equal length" in (none.launch_refusal(ragged, asked) or "")
        assert "more keys than queries" in (none.launch_refusal(offset, asked) or "")
        assert none.launch_refusal(equal, asked) is none.launch_refusal(square, asked) is None
    assert able.launch_refusal(ragged, asked) is able.launch_refusal(offset, asked) is None
    # Elements are of queries and of keys, by their heads and the larger head dim.
    monkeypatch.setattr(kernels, "MOST_ELEMENTS", 97)
    for changes, refused in (
        ({"heads": 4}, False),
        ({"heads": 5}, True),
        ({"kv_heads": 5}, True),
        ({"heads": 4, "value_dim": 9}, True),
    ):
        for name in ("cudnn", "fa4"):
            why = RECORDS[name].launch_refusal(square, asked._replace(**changes)) or ""
            assert ("fewer than 97 elements, and a launch has" in why) == refused
    # In a backward of several sequences, flash-attn-4 adds queries to each.
    monkeypatch.setattr(kernels, "MOST_ELEMENTS", (5 + 128) * 8)
    assert "has 1,064" in (RECORDS["fa4"].launch_refusal(ragged, asked) or "")
    monkeypatch.setattr(kernels, "MOST_ELEMENTS", (5 + 128) * 8 + 1)
    assert RECORDS["fa4"].launch_refusal(ragged, asked) is None
    # And the operator asks.
    with only(monkeypatch, dataclasses.replace(RECORDS["reference"], ragged=False)):
        x = torch.ones(5, 1, 4)
        table = AttentionTable(Table((LaunchLayout(FROM_OWN, True, 0, 0, (2, 3), (2, 3)),)))
        with pytest.raises(UnsupportedError, match="'reference' cannot serve: it takes sequences"):
            shared_attention(x, x, x, table=table, scale=1.0, kernel="reference")


@contextmanager
def only(monkeypatch: pytest.MonkeyPatch, *kernels: Kernel) -> Iterator[None]:
    """No other kernels, and no choices that were made before or are kept afterwards."""
    try:
        with monkeypatch.context() as patched:
            patched.setattr(registry, "KERNELS", kernels)
            registry.forget_choices()
            yield
    finally:
        registry.forget_choices()


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_the_operator_says_all_that_it_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    table = AttentionTable(Table((LaunchLayout(FROM_OWN, True, 0, 0, (5,), (5,)),)))
    with only(monkeypatch, dataclasses.replace(RECORDS["reference"], refuses=asked.append)):
        for heads in (1, 2):
            q, k, v = torch.ones(5, 2, 4), torch.ones(5, heads, 4), torch.ones(5, heads, 3)
            options: dict[str, Any] = {"scale": 1.0, "softcap": 7.0, "kernel": name}
            shared_attention(q, k, v, table=table, deterministic=True, **options)
    expected = Asked(CPU, torch.float32, 4, 3, 7.0, 0, True, heads=2, kv_heads=1)
    assert asked == [expected, expected._replace(kv_heads=2)]


def test_lengths_of_each_launch_begin_at_16_bytes() -> None:
    lengths = [(3, 2500, 4), (2500, 1, 1, 1), (7,), (2, 2, 2, 2, 2)]
    layouts = [LaunchLayout(FROM_OWN, True, 0, 0, each, each) for each in lengths]
    table = AttentionTable(Table(tuple(layouts)))
    parts = [part for launch in table.calls for part in launch.parts]
    assert len(parts) == 5
    for launch in (*table.calls, *parts):
        for cu in (launch.cu_q, launch.cu_k, launch.cu_q_cpu, launch.cu_k_cpu):
            assert cu.storage_offset() % 4 == 0 and cu.is_contiguous()
            assert len(cu) == launch.count + 1 and cu[0] == 0
    found = [tuple(launch.cu_k.diff().tolist()) for launch in table.calls]
    assert found == lengths
    assert [launch.cu_q_cpu.diff().tolist() for launch in parts[:3]] == [[3], [2500], [4]]
