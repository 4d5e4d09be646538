"""Tensors, masks of floats, numbers of untrained tokens: what samplers and trainers write."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forkpoint import load_rollouts, record, save_rollouts
from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.rollouts.batch_tensors.cells import LARGEST_LOGPROB
from forkpoint.rollouts.traces import open_trace

FLOATS = ("advantage", "old_logprobs", "reference_logprobs", "weights", "returns", "old_values")
TWO = ("advantage", "reference_logprobs")
"""One that may be a single number, and one that may not: stand for all in `FLOATS`."""
ONE_OR_EACH = ("advantage", "weights", "returns")
NAMES = [f.name for f in dataclasses.fields(Rollout) if f.name != "extras"]

# Exact in every format below, so that one list is what is expected of all of them.
GIVEN: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8],
    "loss_mask": [0, 0, 1, 1],
    "advantage": [0.0, 0.0, 1.0, -2.0],
    "old_logprobs": [0.0, 0.0, -1.0, -0.5],
    "reference_logprobs": [0.0, 0.0, -2.0, -0.25],
    "weights": [0.0, 1.0, 2.0, 0.5],
    "returns": [0.0, 0.0, 0.5, 1.0],
    "old_values": [0.0, 0.0, 4.0, -1.0],
    "temperature": 0.5,
    "group_id": 3,
    "rollout_id": 4,
}
EXPECTED = Rollout(**GIVEN)


def make(**changes: Any) -> Rollout:
    return Rollout(**(GIVEN | changes))


def each_field(change: Callable[[Any], Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: change(GIVEN[name]) for name in names}


# Tensors ------------------------------------------------------------------------------------------

TORCH_FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
TORCH_INTS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.uint16]


@pytest.mark.parametrize("dtype", TORCH_FLOATS, ids=str)
def test_tensors_of_any_floating_dtype(dtype: torch.dtype) -> None:
    given = each_field(lambda x: torch.tensor(x).to(dtype), (*FLOATS, "loss_mask", "temperature"))
    assert make(**given) == EXPECTED


@pytest.mark.parametrize("dtype", TORCH_INTS, ids=str)
def test_tensors_of_any_whole_dtype(dtype: torch.dtype) -> None:
    names = ("token_ids", "loss_mask", "group_id", "rollout_id")
    assert make(**each_field(lambda x: torch.tensor(x, dtype=dtype), names)) == EXPECTED
    assert make(loss_mask=torch.tensor([False, False, True, True])) == EXPECTED


def padded(x: Any) -> torch.Tensor:
    """Every second entry of a longer tensor."""
    return torch.tensor(x, dtype=torch.float32).repeat_interleave(2)[::2]


def with_graph(x: Any) -> torch.Tensor:
    return torch.tensor(x, requires_grad=True) * 1.0


def negative_view(x: Any) -> torch.Tensor:
    """A view that says its numbers are to be negated, as conjugated imaginary parts do."""
    view = torch.complex(torch.zeros(len(x)), -torch.tensor(x)).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize(
    "change",
    [
        padded,
        with_graph,
        negative_view,
        lambda x: torch.tensor(x, requires_grad=True),
        lambda x: torch.nn.Parameter(torch.tensor(x)),
        lambda x: torch.tensor(x, dtype=torch.bfloat16, requires_grad=True),
        lambda x: torch.tensor([x, x]).T[:, 1],
        lambda x: torch.tensor(x).expand(2, -1)[1],
        lambda x: list(torch.tensor(x)),
        lambda x: list(torch.tensor(x, requires_grad=True)),
        lambda x: [torch.tensor(x[0]), *x[1:3], np.array(x[3])],
    ],
)
def test_tensors_with_graphs_strides_and_lists_of_them(change: Callable[[Any], Any]) -> None:
    assert make(**each_field(change, FLOATS)) == EXPECTED


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_one_number_as_a_tensor(dtype: torch.dtype, grad: bool) -> None:
    number = torch.tensor(0.25, dtype=dtype, requires_grad=grad)
    made = make(**dict.fromkeys((*ONE_OR_EACH, "temperature"), number))
    assert made == make(**dict.fromkeys((*ONE_OR_EACH, "temperature"), 0.25))
    assert type(made.advantage) is type(made.temperature) is float


def test_what_is_stored_is_a_copy_without_a_graph() -> None:
    source = torch.tensor(GIVEN["old_logprobs"], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor(GIVEN["token_ids"])
    made = make(old_logprobs=source, token_ids=ids)
    with torch.no_grad():
        source.fill_(-9)
        ids.fill_(9)
    assert made == EXPECTED
    assert source.requires_grad and source.grad is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device() -> None:
    given = each_field(lambda x: torch.tensor(x, device="cuda"), tuple(NAMES))
    floats = each_field(
        lambda x: torch.tensor(x, dtype=torch.bfloat16, device="cuda", requires_grad=True), FLOATS
    )
    assert make(**(given | floats)) == EXPECTED


def fake(x: Any) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(len(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (
            lambda x: torch.tensor(x, device="meta"),
            "Tensor of torch.float32, torch.strided, on met",
        ),
        (
            lambda x: torch.tensor(x).to_sparse(),
            "Tensor of torch.float32, torch.sparse_coo, on cpu",
        ),
        (lambda x: torch.nested.nested_tensor([torch.tensor(x)]), "Tensor of torch.float32"),
        (
            lambda x: torch.nested.nested_tensor([torch.tensor(x)], layout=torch.jagged),
            "NestedTensor of torch.float32, torch.jagged",
        ),
        (
            lambda x: torch.quantize_per_tensor(torch.tensor(x), 0.5, 0, torch.qint8),
            "Tensor of torch.qint8",
        ),
        (lambda x: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "Tensor of torch.bits8"),
        (lambda x: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn"),
        (fake, "FakeTensor of torch.float32"),
    ],
    ids=["meta", "sparse", "nested", "jagged", "quantized", "bits", "float4", "fake"],
)
@pytest.mark.parametrize("name", TWO)
def test_tensors_without_numbers_to_read_are_refused(
    change: Callable[[Any], Any], kind: str, name: str
) -> None:
    problem = rf"Rollout '4': {name} is a .*{re.escape(kind)}.*whose numbers cannot be read.*to_den"
    with pytest.raises(RolloutError, match=problem):
        make(**{name: change(GIVEN[name])})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": torch.tensor([1.0, 2, 3, 4])}, r"token_ids\[0\] is 1\.0 \(float32\)"),
        ({"token_ids": torch.tensor([[1, 2, 3, 4]])}, r"token_ids has 2 dimensions \(1 x 4\)"),
        ({"token_ids": torch.tensor(4)}, "token_ids is array"),
        ({"loss_mask": torch.tensor([0, 0, 0.5, 1])}, r"loss_mask\[2\] is 0\.5"),
        ({"loss_mask": torch.tensor([0, math.nan, 1, 1])}, r"loss_mask\[1\] is nan"),
        ({"advantage": torch.tensor(math.nan)}, "advantage is nan"),
        ({"advantage": torch.tensor([True] * 4)}, r"advantage\[0\] is True \(bool\)"),
        ({"advantage": torch.tensor(True)}, "advantage is array"),
        ({"weights": torch.zeros(4, dtype=torch.complex64)}, r"weights\[0\] is 0j \(complex64\)"),
        ({"weights": torch.zeros(3)}, "weights has 3 entries, but token_ids has 4"),
        ({"temperature": torch.zeros(())}, "temperature is array"),
        ({"temperature": torch.ones(1)}, "temperature is array"),
        ({"group_id": torch.tensor(1.0)}, "group_id is "),
        ({"group_id": torch.tensor([1])}, "group_id is array"),
        ({"group_id": torch.tensor(True)}, "group_id is "),
    ],
)
def test_tensors_of_the_wrong_kind_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RolloutError, match=problem):
        make(**changes)


# numpy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_arrays_of_any_dtype_and_byte_order(kind: str, order: str) -> None:
    dtype = np.dtype(order + kind)
    names = FLOATS if dtype.kind == "f" else ("token_ids",)
    assert make(**each_field(lambda x: np.array(x, dtype), (*names, "loss_mask"))) == EXPECTED


def test_arrays_of_bfloat16_and_float8() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs the package ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        for change in (lambda x: np.array(x, dtype), lambda x: list(np.array(x, dtype))):  # noqa: B023
            assert make(**each_field(change, (*FLOATS, "loss_mask"))) == EXPECTED


def test_arrays_with_masked_entries_are_refused() -> None:
    masked = np.ma.masked_array([0.0, 0, 1, 1], [0, 0, 0, 1])
    with pytest.raises(RolloutError, match=r"weights is a numpy array with masked.*filled\(0\)"):
        make(weights=masked)
    assert make(weights=np.ma.masked_array(GIVEN["weights"])) == EXPECTED


@pytest.mark.parametrize(
    "mask",
    [
        [0.0, 0.0, 1.0, 1.0],
        (0, False, 1.0, True),
        [-0.0, 0, np.float32(1), np.True_],
        np.array([0.0, 0, 1, 1], np.float16),
        np.array([0.0, False, 1, np.float32(1)], object),
        [torch.tensor(0.0), 0, torch.tensor(1.0), torch.tensor(True)],
    ],
)
def test_masks_of_0_and_1_of_any_type(mask: Any) -> None:
    assert make(loss_mask=mask) == EXPECTED


# Tokens that are not trained ----------------------------------------------------------------------


@pytest.mark.parametrize("unread", [math.nan, -math.inf, None])
@pytest.mark.parametrize("name", TWO)
def test_numbers_of_untrained_tokens_are_not_read(name: str, unread: float | None) -> None:
    values = [unread, unread, *GIVEN[name][2:]]
    expected = make(**{name: [0.0, 0.0, *GIVEN[name][2:]]})
    assert make(**{name: values}) == expected
    assert make(**{name: np.array(values, object)}) == expected
    if unread is not None:
        assert make(**{name: np.array(values, np.float32)}) == expected
        assert make(**{name: torch.tensor(values, dtype=torch.bfloat16)}) == expected


@pytest.mark.parametrize("unread", [math.nan, -math.inf, None])
@pytest.mark.parametrize("name", TWO)
def test_numbers_of_trained_tokens_are_finite(name: str, unread: float | None) -> None:
    values = [*GIVEN[name][:3], unread]
    with pytest.raises(
        RolloutError, match=rf"{name}\[3\] is {unread}, and token 3 is trained.*finite"
    ):
        make(**{name: values})


def test_finite_numbers_of_untrained_tokens_are_kept() -> None:
    """So that a rollout whose mask is changed later has them."""
    made = make(old_logprobs=[9.0, -3.0, -1.0, -0.5], weights=[7.0, 1, 2, 0.5])
    assert made.old_logprobs is not None and made.old_logprobs.tolist() == [0, -3, -1, -0.5]
    assert isinstance(made.weights, np.ndarray) and made.weights[0] == 7
    wider = dataclasses.replace(made, loss_mask=[0, 1, 1, 1])
    assert wider.old_logprobs is not None and wider.old_logprobs[1] == -3


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ONE_OR_EACH)
def test_one_number_where_nothing_is_trained(name: str, number: float) -> None:
    nothing = [0, 0, 0, 0]
    assert make(loss_mask=nothing, **{name: number}) == make(loss_mask=nothing, **{name: 0.0})
    with pytest.raises(RolloutError, match=f"{name} is {number}"):
        make(**{name: number})


@pytest.mark.parametrize("value", ["x", True, [1.0], 1j])
@pytest.mark.parametrize("name", TWO)
def test_other_types_are_refused_at_any_token(name: str, value: Any) -> None:
    with pytest.raises(RolloutError, match=rf"{name}\[0\] is "):
        make(**{name: [value, *GIVEN[name][1:]]})


# Log-probs a rounding above 0 ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("above", [1e-6, LARGEST_LOGPROB])
def test_log_probs_a_rounding_above_0_are_kept_as_they_are(name: str, above: float) -> None:
    made = make(**{name: [0.0, 0.0, above, -1.0]})
    assert getattr(made, name).tolist() == [0.0, 0.0, above, -1.0]


@pytest.mark.parametrize("name", ["old_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("above", [math.nextafter(LARGEST_LOGPROB, 1), 0.7, 3.0])
def test_probabilities_and_negatives_are_refused(name: str, above: float) -> None:
    with pytest.raises(RolloutError, match=rf"{name}\[2\] is {above}; .*at most 0\.125.*negatives"):
        make(**{name: [0.0, 0.0, above, -1.0]})


def test_the_bound_is_what_rounding_logits_to_bfloat16_gives() -> None:
    """Log-probs as a logit, rounded, less the log-sum-exp, rounded, for logits up to 32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(2000, 64, generator=generator, dtype=torch.float64) * 4
    logits[:, 0] = torch.linspace(4, 31.99, 2000, dtype=torch.float64)
    rounded = logits[:, 0].bfloat16().double()
    total = logits.logsumexp(-1).bfloat16().double()
    apart = (rounded - total).max()
    assert 0 <= apart <= LARGEST_LOGPROB
    # Logits that were rounded down and then up again, as two kernels do, are a whole step apart.
    step = torch.tensor(31.0).bfloat16()
    assert float(torch.nextafter(step, torch.tensor(64.0).bfloat16()) - step) == LARGEST_LOGPROB


# What was accepted goes on ------------------------------------------------------------------------

numbers = st.floats(-1e3, 0.0)
unread = st.sampled_from([math.nan, math.inf, -math.inf, None])


@st.composite
def noisy(draw: Any) -> dict[str, Any]:
    """Fields of a rollout with anything at untrained tokens."""
    mask = [False, *draw(st.lists(st.booleans(), min_size=1, max_size=6))]
    fields: dict[str, Any] = {"token_ids": list(range(len(mask)))}
    fields["loss_mask"] = draw(st.sampled_from([list(map(float, mask)), mask]))
    for name in FLOATS:
        fields[name] = [draw(numbers if m else st.one_of(unread, numbers)) for m in mask]
    return fields


@given(noisy())
def test_a_rollout_made_of_what_is_stored_is_equal(fields: dict[str, Any]) -> None:
    made = Rollout(**fields)
    assert dataclasses.replace(made) == made
    for name in FLOATS:
        stored = getattr(made, name)
        assert np.isfinite(stored).all()
        for given_, kept, trained in zip(fields[name], stored, made.loss_mask, strict=True):
            assert not trained or kept == given_
    assert RolloutBatch([made])[0] == dataclasses.replace(made, rollout_id="0")


def test_files_and_traces_give_back_what_is_stored(tmp_path: Path) -> None:
    nan = math.nan
    rollout = make(
        loss_mask=[0.0, 0.0, 1.0, 1.0],
        advantage=torch.tensor([nan, nan, 1, -2], dtype=torch.bfloat16),
        old_logprobs=[None, -math.inf, 0.03125, -0.5],
        reference_logprobs=torch.tensor([nan, -math.inf, -2, -0.25], requires_grad=True),
        old_values=np.array([nan, nan, 4, -1], ">f4"),
    )
    save_rollouts(tmp_path / "rollouts.jsonl", [rollout])
    assert load_rollouts(tmp_path / "rollouts.jsonl") == [rollout]
    with record(tmp_path / "trace") as trace:
        trace.add([rollout])
    read = open_trace(tmp_path / "trace")
    read.verify()
    assert [list(found.batch) for found in read] == [[rollout]]


def test_lines_of_json_with_floats_as_masks_and_infinite_numbers(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text(
        '{"token_ids": [5, 6, 7, 8], "loss_mask": [0.0, 0.0, 1.0, 1.0], '
        '"advantage": [NaN, NaN, 1, -2], "old_logprobs": [null, -Infinity, 0.0625, -0.5]}'
    )
    (found,) = load_rollouts(tmp_path / "lines.jsonl")
    assert found.loss_mask.tolist() == [False, False, True, True]
    assert found.old_logprobs is not None
    assert found.old_logprobs.tolist() == [0, 0, 0.0625, -0.5]
    assert isinstance(found.advantage, np.ndarray) and found.advantage.tolist() == [0, 0, 1, -2]
