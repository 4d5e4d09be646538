"""Files of pickle.dump and torch.save are read as Python and torch read them."""

import gc
import io
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from pickle_writer import (
    INT64,
    archive,
    call,
    data,
    dumped,
    entries,
    program,
    sizes,
    storage,
    table,
    tensor,
    text,
)

from forkpoint import RolloutError
from forkpoint.formats.pickle_machine import Machine
from forkpoint.formats.pickles import load_pickle, load_torch
from forkpoint.formats.plain_values import PlainValues
from forkpoint.formats.torch_tensors import Storage, Tensor
from stand_ins import data_proto

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROTOCOLS = (2, 3, 4, 5)
NUMBERS = "?bBhHiIlLqQefd"


def equal(found: Any, wanted: Any) -> None:
    """`found` is what Python made, with lists for tuples and arrays for tensors."""
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.float() if wanted.dtype == torch.bfloat16 else wanted
        wanted = wanted.detach().numpy()
    if isinstance(wanted, np.ndarray):
        assert type(found) is np.ndarray and found.shape == wanted.shape
        assert found.dtype == wanted.dtype
        if wanted.dtype == object:
            equal(list(found.flat), list(wanted.flat))
        else:
            np.testing.assert_array_equal(found, wanted)
    elif isinstance(wanted, list | tuple):
        assert type(found) is list and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            equal(one, other)
    elif isinstance(wanted, dict):
        assert type(found) is dict and list(found) == list(wanted)
        for key in wanted:
            equal(found[key], wanted[key])
    else:
        assert type(found) is type(wanted) or isinstance(wanted, bytearray)
        assert found == wanted or found != found


def loaded(content: bytes, **options: Any) -> Any:
    """The value of a pickle or a torch file."""
    if content[:2] == b"PK" or content[2:14] == b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19":
        return load_torch(io.BytesIO(content), "x.pt", **options)

    class File(type(Path())):  # read_bytes alone is called
        def read_bytes(self) -> bytes:
            return content

    return load_pickle(File("x.pkl"), **options)


dtypes = st.one_of(
    st.sampled_from([f"{order}{np.dtype(c).str[1:]}" for c in NUMBERS for order in "<>"]),
    st.sampled_from(["S3", "<U3", ">U2", "O"]),
).map(np.dtype)
texts = st.text(max_size=5)


def _views(array: np.ndarray) -> st.SearchStrategy[np.ndarray]:
    return st.sampled_from([array, array.T, array[::2], np.asfortranarray(array), array[..., None]])


arrays = dtypes.flatmap(
    lambda dtype: st_numpy.arrays(
        dtype,
        st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.one_of(st.none(), texts, st.tuples(texts)) if dtype.kind == "O" else None,
    )
).flatmap(lambda array: _views(array) if array.ndim else st.just(array))
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**1000), 2**1000),
    st.floats(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.sampled_from([np.int64(-1), np.float32(0.5), np.True_, np.str_("aé"), np.bytes_(b"ab")]),
    st.frozensets(st.integers() | texts).map(set),
    arrays,
)
keys = st.one_of(
    texts, st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(texts, texts)
)
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        inner.map(lambda value: [value, (value, value)]),  # of which one is named again
    ),
    max_leaves=12,
)


@given(value=values, protocol=st.sampled_from(PROTOCOLS), way=st.integers(0, 3))
@settings(max_examples=400, deadline=None)
def test_plain_values(value: Any, protocol: int, way: int) -> None:
    if way == 0:
        file = io.BytesIO()
        # In protocol 5 the pickler that is written in Python fails on empty arrays.
        pickle._Pickler(file, min(4, protocol)).dump(value)  # type: ignore[attr-defined]
        content = file.getvalue()
    else:
        content = pickle.dumps(value, protocol)
        content = pickletools.optimize(content) if way == 1 else content
    equal(loaded(content), value)
    if way == 3:
        file = io.BytesIO()
        torch.save(value, file, pickle_protocol=protocol)
        equal(loaded(file.getvalue()), value)


TORCH = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("way", ["torch.save", "as before 1.6", "pickle.dumps"])
@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_tensors(dtype: torch.dtype, way: str) -> None:
    base = (torch.arange(60) % 2 if dtype == torch.bool else torch.arange(60) - 20).to(dtype)
    value = {
        "whole": base.reshape(3, 4, 5),
        "moved": base.reshape(3, 4, 5).permute(2, 0, 1)[1:, :, ::2],
        "part": base[7:19].reshape(3, 4).T,
        "expanded": base[:3, None].expand(3, 7),
        "one": base[5],
        "none": base[:0].reshape(0, 3),
        "size": base.reshape(3, 20).shape,
        "again": [base, base],
        "parameter": torch.nn.Parameter(base) if dtype.is_floating_point else base,
    }
    file = io.BytesIO()
    if way == "pickle.dumps":
        pickle.dump(value, file)
    elif way == "torch.save":
        torch.save(value, file)
    else:
        torch.save(value, file, _use_new_zipfile_serialization=False)
    found = loaded(file.getvalue())
    equal(found, value)
    assert found["again"][0] is found["again"][1]


@pytest.mark.parametrize("content", ["torch.save", "pickle.dumps"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(content: str) -> None:
    rows = [torch.arange(n * 2.0).reshape(n, 2) for n in (3, 0, 4)]
    values, offsets = torch.arange(20.0).reshape(10, 2), torch.tensor([0, 4, 7])
    value = {
        "jagged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "gaps": torch.nested.nested_tensor_from_jagged(
            values, torch.cat([offsets, torch.tensor([10])]), lengths=torch.tensor([2, 3, 1])
        ),
        "moved": torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2),
        "strided": torch.nested.as_nested_tensor(rows, layout=torch.strided),
    }
    wanted = {key: list(nested.unbind()) for key, nested in value.items()}
    if content == "torch.save":
        file = io.BytesIO()
        torch.save(value, file)
        equal(loaded(file.getvalue()), wanted)
    else:
        equal(loaded(pickle.dumps(value)), wanted)


def test_tensors_of_another_byte_order() -> None:
    numbers = np.arange(-4, 4)
    content = entries(
        table(
            a=tensor(storage(count=8), 2, (3, 2), (2, 1)),
            b=tensor(storage("torch.BFloat16Storage", "1", 2), 0, (2,), (1,)),
        ),
        **{"0": numbers.astype(">i8").tobytes(), "1": b"\x3f\x80\xc0\x00"},
    )
    found = loaded(archive(content | {"x/byteorder": b"big"}))
    assert found["a"].tolist() == numbers[2:].reshape(3, 2).tolist()
    assert found["b"].tolist() == [1.0, -2.0]


def test_archives_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of 4 GiB and more have their sizes in another place; here all have."""
    content = entries(table(a=tensor()))
    plain = archive(content)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3)
    large = archive(content)
    assert large.count(b"\xff" * 8) >= len(content) and b"PK\x06\x06" in large
    equal(loaded(large), loaded(plain))


def test_arrays_of_objects_in_the_order_of_fortran() -> None:
    array = np.asfortranarray(np.array([["a", (1, 2)], [None, "b"], [[], 0]], object))
    found = loaded(pickle.dumps(array))
    assert found.tolist() == [["a", [1, 2]], [None, "b"], [[], 0]]


def test_buffers_of_transposed_arrays() -> None:
    """numpy 2.3 and newer write the order of the axes in protocol 5."""
    buffer = "numpy._core.numeric._frombuffer"
    of = data(np.arange(24).tobytes()), INT64, sizes((3, 2, 4)), text("K"), sizes((2, 0, 1))
    wanted = np.arange(24).reshape(3, 2, 4).transpose(2, 0, 1)
    equal(loaded(program(call(buffer, *of))), wanted)
    for protocol in PROTOCOLS:
        equal(loaded(pickle.dumps(wanted, protocol)), wanted)


def test_sets() -> None:
    for protocol in PROTOCOLS:
        assert loaded(pickle.dumps([set(), {1, "a"}], protocol)) == [set(), {1, "a"}]
    assert loaded(pickle.dumps(frozenset("ab"), 4)) == {"a", "b"}


def test_batches_of_verl_in_numpy() -> None:
    """Tensors as their dtype, shape and bytes, of which nested ones are a list."""
    rows = [("bfloat16", (2,), np.array([0x3F80, 0xC000], "<u2").view(np.uint8))]
    rows.append(("bfloat16", (1,), b"\x80\x3f"))
    entries = {"a": ("jagged", rows), "b": ("int64", (1, 2), np.arange(2).view(np.uint8))}
    found = loaded(data_proto(((1,), None, entries), {}, {"c": 1}))
    equal(found["batch"]["a"], [np.array([1, -2], np.float32), np.array([1], np.float32)])
    equal(found["batch"]["b"], np.arange(2).reshape(1, 2))
    assert found["meta_info"] == {"c": 1}
    assert loaded(data_proto({"a": 1}, None, None))["batch"] == {"a": 1}


def test_a_file_that_does_not_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", full)
    with pytest.raises(RolloutError, match=r"x.pkl does not fit into memory. Write .* several"):
        load_pickle(Path("x.pkl"))


def test_dtypes_and_devices_are_text() -> None:
    value = {"a": torch.float32, "b": torch.device("cuda", 1), "c": torch.device("cpu")}
    value["d"] = np.dtype(">i4")
    file = io.BytesIO()
    torch.save(value, file)
    for content in (file.getvalue(), pickle.dumps(value)):
        found = loaded(content)
        assert found == {"a": "torch.float32", "b": "cuda:1", "c": "cpu", "d": ">i4"}


def test_a_tensordict() -> None:
    """A consolidated file of tensordict 0.11.0: tensors, a nested one, one inside, and a text."""
    found = load_torch(FIXTURES / "tensordict-consolidated.pt", "x")
    equal(
        found,
        {
            "a": np.arange(6).reshape(2, 3),
            "j": [np.arange(3), np.arange(4)],
            "t": "hello",
            "n": {"b": np.ones((2, 4), np.float32)},
        },
    )


def test_what_a_file_names_again_is_not_copied() -> None:
    row = list(range(1000))
    array = np.arange(1000)
    value = [{"row": row, "array": array, "pair": (row, array)} for _ in range(50)]
    found = loaded(pickle.dumps(value))
    equal(found, value)
    assert len({id(entry["row"]) for entry in found}) == 1
    assert len({id(entry["array"]) for entry in found}) == 1


def test_arrays_are_views_of_the_file() -> None:
    for content in (pickle.dumps({"a": np.arange(9)}), archive(entries(table(a=tensor())))):
        array = loaded(content)["a"]
        assert array.base is not None and not array.flags.writeable


@pytest.mark.parametrize("name", ["verl-batch.pkl", "trl-batch.pt"])
def test_a_file_is_let_go_with_what_was_read_of_it(name: str) -> None:
    """Its bytes may be as large as memory, so that they do not wait for a collection of cycles."""
    content = (FIXTURES / name).read_bytes()
    gc.collect()
    gc.disable()
    try:
        found = loaded(content)
        assert found
        del found
        kinds = (Machine, PlainValues, Storage, Tensor)
        assert not [kept for kept in gc.get_objects() if type(kept) in kinds]
    finally:
        gc.enable()


def test_a_limit_counts_what_copies_would_take() -> None:
    row = list(range(10_000))
    content = pickle.dumps([row] * 100)
    assert len(loaded(content, limit_bytes=100 << 20)) == 100
    with pytest.raises(RolloutError, match=r"x.pkl: it holds more than \d+ bytes, with what it re"):
        loaded(content, limit_bytes=1 << 20)
    with pytest.raises(RolloutError, match=r"as a pickle: it takes more than \d+ bytes of memory"):
        loaded(program(b"(" + b"]" * 10_000 + b"t"), limit_bytes=1 << 20)


def test_depth_has_a_bound() -> None:
    value: Any = 1
    for _ in range(65):
        value = [value]
    equal(loaded(pickle.dumps(value[0])), value[0])
    with pytest.raises(RolloutError, match="nested more than 64 deep"):
        loaded(pickle.dumps({"a": value}))


def test_keys_that_are_not_text_have_a_bound() -> None:
    assert len(loaded(pickle.dumps(dict.fromkeys(range(4096))))) == 4096
    with pytest.raises(RolloutError, match="more than 4096 entries"):
        loaded(pickle.dumps(dict.fromkeys(range(4097))))
    assert len(loaded(pickle.dumps({f"{n}": n for n in range(10_000)}))) == 10_000


def test_several_pickles_in_one_file_are_not_read_as_one() -> None:
    with pytest.raises(RolloutError, match=r"4 bytes follow .* several batches can"):
        loaded(pickle.dumps([1]) + pickle.dumps(None))


def test_empty_rows_have_a_bound() -> None:
    equal(loaded(pickle.dumps(np.zeros((512, 0)))), np.zeros((512, 0)))
    with pytest.raises(RolloutError, match="at most 65536 rows of nothing"):
        loaded(pickle.dumps(np.zeros((65537, 0))))


def test_an_empty_pickle_of_a_class_is_refused() -> None:
    with pytest.raises(RolloutError, match="an object of a trainer has no fields"):
        loaded(program(b"ctrl.experimental.async_grpo.async_rollout_worker\nRolloutSample\n)\x81"))
    with pytest.raises(RolloutError, match="a value is <opaque>"):
        loaded(program(b"ctorch._dynamo.decorators\n_DimRange\n)\x81"))
    with pytest.raises(RolloutError, match=r"a set is \{<opaque>\}"):
        loaded(program(b"\x8f(ctorch._dynamo.decorators\n_DimRange\n)\x81\x90"))
    with pytest.raises(RolloutError, match="Write one pickle"):
        loaded(program(dumped([])) + b"\n")


READ = """
import sys
sys.modules["torch"] = None
from forkpoint import load_rollouts
for path in sys.argv[1:]:
    assert load_rollouts(path)
"""


def test_neither_torch_nor_pickle_is_needed() -> None:
    """Also for what verl, TRL and OpenRLHF wrote; in a new interpreter."""
    paths = [*FIXTURES.glob("*.pkl"), *FIXTURES.glob("[!t]*.pt"), *FIXTURES.glob("trl*.pt")]
    assert len(paths) >= 6
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
