"""Batches from padded, split and jagged tensors, and values put back into their shapes."""

import copy
import dataclasses
import math
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_time import relative_to_additions
from forkpoint import Rollout, RolloutBatch, losses
from forkpoint.errors import ConfigError, RolloutError
from forkpoint.rollouts.formats.record import group_of

NUMBERS = {"advantages": "advantage", "weights": "weights", "returns": "returns"}
EACH = {name: name for name in ("old_logprobs", "reference_logprobs", "old_values")}
OTHERS = {name + "s": name for name in ("temperature", "group_id", "rollout_id")}
OTHERS["extras"] = "extras"

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def some(**changes: Any) -> dict[str, Any]:
    """Tensors of from_padded: rows of 5, 3 and 6 tokens, padded on the right, left, not at all."""
    fields: dict[str, Any] = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 0], [0, 0, 0, 5, 6, 7], [5, 6, 1, 2, 3, 4]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1] * 6]),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 0]]),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
    }
    return fields | changes


def split(**changes: Any) -> dict[str, Any]:
    """Tensors of from_completions: two prompts of 2 and 1 tokens, completions of 2 and 3."""
    fields: dict[str, Any] = {
        "prompt_ids": [[5, 6], [0, 7]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[1, 2, 0], [3, 4, 2]],
        "completion_mask": [[1, 1, 0], [1, 1, 1]],
        "advantages": [1.0, 2.0],
    }
    return fields | changes


def rows(**changes: Any) -> dict[str, Any]:
    """Rows of from_jagged: rollouts of 3 and 2 tokens."""
    fields = {"input_ids": [[5, 6, 7], [8, 9]], "loss_mask": [[0, 1, 1], [0, 1]]}
    return fields | changes


# Against rollouts made one by one ---------------------------------------------------------------


@dataclasses.dataclass
class Drawn:
    """Prompts and completions of N rollouts, their fields by rollout, and how to give them."""

    random: np.random.Generator
    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    """Over completions."""
    fields: dict[str, list[Any]]
    """Numbers, texts, or lists over completions, by the names of a batch."""

    def rollouts(self) -> list[Rollout]:
        own = NUMBERS | EACH | OTHERS
        made = []
        for n, prompt in enumerate(self.prompts):
            values: dict[str, Any] = {"advantage": 0}
            for name, per_rollout in self.fields.items():
                value = per_rollout[n]
                values[own[name]] = [0] * len(prompt) + value if type(value) is list else value
            values["rollout_id"] = (
                str(n) if values.get("rollout_id") is None else values["rollout_id"]
            )
            mask = [0] * len(prompt) + self.masks[n]
            made.append(Rollout(prompt + self.completions[n], mask, **values))
        return made

    def per_token(self, name: str) -> bool:
        return type(self.fields[name][0]) is list

    def begins(self, rows: Sequence[Sequence[int]]) -> tuple[list[int], int]:
        """Columns where rows begin, padded on the left, the right or both sides; the width."""
        width = max(2, *map(len, rows)) + int(self.random.integers(0, 3))  # [N, 1] is per rollout
        room = [width - len(row) for row in rows]
        side = self.random.integers(3)
        return [[0, r, int(self.random.integers(r + 1))][side] for r in room], width

    def table(self, rows: Sequence[Sequence[Any]], at: tuple[list[int], int], junk: Any) -> Any:
        """The rows, padded with `junk`, as a tensor of some dtype, as an array, or as lists."""
        made = []
        for row, begin in zip(rows, at[0], strict=True):
            cells = [junk] * at[1]
            cells[begin : begin + len(row)] = row
            made.append(cells)
        form = self.random.choice(["list", "numpy", "torch", "bfloat16", "strided"])
        if form == "list":
            return made
        tensor = torch.tensor(made)
        if form == "numpy":
            return tensor.numpy()
        if form == "bfloat16" and tensor.is_floating_point():
            return tensor.bfloat16().requires_grad_()
        return tensor.T.contiguous().T if form == "strided" else tensor


def draw(seed: int) -> Drawn:
    """Values are multiples of 1/8 between -4 and 0, which every floating dtype holds exactly.

    Untrained tokens have numbers that are not finite, here and there.
    """
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 7))
    prompts = [random.integers(0, 3, random.integers(1, 6)).tolist() for _ in range(count)]
    prompts[-1] = prompts[0]
    completions = [random.integers(0, 9, random.integers(0, 6)).tolist() for _ in range(count)]
    masks = [(random.random(len(c)) < 0.7).astype(int).tolist() for c in completions]

    def value(trained: int) -> float:
        odd = (math.nan, math.inf, -math.inf, 2.0)
        return float(-random.integers(0, 32) / 8 if trained else random.choice(odd))

    fields: dict[str, list[Any]] = {}
    for name in NUMBERS | EACH:
        if random.random() < 0.4:
            continue
        if name in NUMBERS and random.random() < 0.5:
            fields[name] = [value(any(mask)) for mask in masks]
        else:
            fields[name] = [[value(on) for on in mask] for mask in masks]
    others = {
        "temperatures": [0.5 + n for n in range(count)],
        "group_ids": ["a", 3, None, "b", "a", None][:count],
        "rollout_ids": [f"r{n}" for n in range(count)],
        "extras": [{"n": n} if n % 2 else None for n in range(count)],
    }
    fields |= {name: values for name, values in others.items() if random.random() < 0.5}
    return Drawn(random, prompts, completions, masks, fields)


def check_padded(drawn: Drawn) -> None:
    pairs = list(zip(drawn.prompts, drawn.completions, strict=True))
    at = drawn.begins([p + c for p, c in pairs])

    def over(values: Sequence[Sequence[Any]], junk: Any) -> Any:
        both = [[0] * len(p) + list(v) for (p, _), v in zip(pairs, values, strict=True)]
        return drawn.table(both, at, junk)

    found = RolloutBatch.from_padded(
        drawn.table([p + c for p, c in pairs], at, -100),
        drawn.table([[1] * len(p + c) for p, c in pairs], at, 0),
        over(drawn.masks, 0),
        **{n: over(v, 7.0) if drawn.per_token(n) else v for n, v in drawn.fields.items()},
    )
    assert list(found) == drawn.rollouts()
    assert found.has_advantages == ("advantages" in drawn.fields)
    back = found.to_padded(found.token_ids, fill=-1)
    assert back.shape == (len(found), at[1])
    for row, begin, (prompt, completion) in zip(back.tolist(), at[0], pairs, strict=True):
        ids = prompt + completion
        assert row == [-1] * begin + ids + [-1] * (at[1] - begin - len(ids))


def with_groups(drawn: Drawn) -> list[Rollout]:
    """Rollouts without a group_id get one that stands for the prompt."""
    return [
        dataclasses.replace(r, group_id=group_of(np.array(p))) if r.group_id is None else r
        for r, p in zip(drawn.rollouts(), drawn.prompts, strict=True)
    ]


def check_completions(drawn: Drawn) -> None:
    first, last = drawn.begins(drawn.prompts), drawn.begins(drawn.completions)
    tools = bool(drawn.random.integers(2))
    found = RolloutBatch.from_completions(
        drawn.table(drawn.prompts, first, -100),
        drawn.table([[1] * len(p) for p in drawn.prompts], first, 0),
        drawn.table(drawn.completions, last, -100),
        drawn.table([[1] * len(c) for c in drawn.completions], last, 0),
        **{"tool_mask" if tools else "loss_mask": drawn.table(drawn.masks, last, int(tools))},
        **{
            n: drawn.table(v, last, math.nan)
            if drawn.per_token(n)
            else torch.tensor(v)[:, None]
            if n in NUMBERS
            else v
            for n, v in drawn.fields.items()
        },
    )
    assert list(found) == with_groups(drawn)
    back = found.to_completions(found.token_ids, fill=-1)
    np.testing.assert_array_equal(found.to_padded(found.token_ids, fill=-1)[:, first[1] :], back)
    for row, begin, ids in zip(back.tolist(), last[0], drawn.completions, strict=True):
        assert row == [-1] * begin + ids + [-1] * (last[1] - begin - len(ids))


def check_jagged(drawn: Drawn) -> None:
    def shaped(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> Any:
        tensors = [torch.tensor(row, dtype=dtype) for row in values]
        form = drawn.random.choice(["nested", "strided", "rows", "lists"])
        if form in ("rows", "lists"):
            return tensors if form == "rows" else [tuple(row) for row in values]
        layout = torch.jagged if form == "nested" else torch.strided
        return torch.nested.nested_tensor(tensors, layout=layout)

    responses = bool(drawn.random.integers(2))

    def over(values: Sequence[Sequence[Any]], dtype: torch.dtype = torch.float32) -> Any:
        pairs = zip(drawn.prompts, values, strict=True)
        return shaped([v if responses else [0] * len(p) + list(v) for p, v in pairs], dtype)

    lengths = torch.tensor([len(c) for c in drawn.completions])
    ids = [p + c for p, c in zip(drawn.prompts, drawn.completions, strict=True)]
    found = RolloutBatch.from_jagged(
        shaped(ids, torch.int64),
        over(drawn.masks, torch.int64),
        response_lengths=lengths if responses else None,
        **{n: over(v) if drawn.per_token(n) else v for n, v in drawn.fields.items()},
    )
    assert list(found) == (with_groups(drawn) if responses else drawn.rollouts())
    flat = found.to_padded(found.token_ids, fill=-1).tolist()
    assert flat == [row + [-1] * (max(map(len, ids)) - len(row)) for row in ids]
    if responses:
        back = found.to_completions(found.token_ids, fill=-1).tolist()
        assert back == [c + [-1] * (int(lengths.max()) - len(c)) for c in drawn.completions]


@pytest.mark.parametrize("check", [check_padded, check_completions, check_jagged])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_rollouts_made_one_by_one(check: Callable[[Drawn], None], seed: int) -> None:
    check(draw(seed))


# Groups, gaps and devices -----------------------------------------------------------------------


def test_nested_tensors_with_gaps() -> None:
    """A narrowed nested tensor has lengths of its own, and values that belong to nobody."""
    values = torch.arange(1, 11).reshape(2, 5)
    ids = torch.nested.narrow(
        values, 1, torch.tensor([1, 0]), torch.tensor([3, 2]), layout=torch.jagged
    )
    batch = RolloutBatch.from_jagged(ids, [[0, 1, 1], [0, 1]], advantages=[1, 2])
    assert batch.token_ids.tolist() == [2, 3, 4, 6, 7]
    assert batch.advantages.tolist() == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, torch.nested.nested_tensor])
def test_one_number_in_each_row(kind: Callable[[list[list[float]]], object]) -> None:
    """Shape [N, 1] of any type is one number per rollout, unless rows have one token."""
    batch = RolloutBatch.from_jagged([[2, 3, 4], [6]], [[0, 0, 1], [0]], weights=kind([[1], [2]]))
    assert batch.weights is not None and batch.weights.tolist() == [1, 1, 1, 2]
    one = RolloutBatch.from_jagged([[2], [6]], [[0], [0]], weights=kind([[1.0], [math.nan]]))
    assert one.weights is not None and one.weights.tolist() == [1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device() -> None:
    on_device = {name: x.to("cuda") for name, x in some().items()}
    logprobs = -torch.rand(3, 6, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    batch = RolloutBatch.from_padded(**on_device, old_logprobs=logprobs)
    assert list(batch) == list(RolloutBatch.from_padded(**some(), old_logprobs=logprobs.cpu()))
    values = torch.randn(14, device="cuda", requires_grad=True)
    back = batch.to_padded(values)
    back.square().sum().backward()
    assert back.device == values.device and values.grad is not None
    assert torch.equal(values.grad, 2 * values)
    mask = torch.from_numpy(batch.layout.mask()).to("cuda")
    assert torch.equal(back[mask], values) and not back[~mask].any()
    nested = torch.nested.as_nested_tensor(
        [torch.arange(3, device="cuda"), torch.arange(2, device="cuda")], layout=torch.jagged
    )
    jagged = RolloutBatch.from_jagged(nested, [[0, 1, 1], [0, 1]], advantages=1.0)
    assert jagged.token_ids.tolist() == [0, 1, 2, 0, 1]


# Values of tokens in the shapes that were given ---------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_values_keep_dtype_and_order(dtype: torch.dtype) -> None:
    batch = RolloutBatch.from_padded(**some())
    values = (torch.arange(14) % 2).to(dtype)
    back = batch.to_padded(values, fill=1)
    mask = torch.from_numpy(batch.layout.mask())
    assert back.dtype == dtype and back.shape == (3, 6)
    assert torch.equal(back[mask], values) and bool((back[~mask] == 1).all())


def test_values_of_more_dimensions_arrays_and_lists() -> None:
    batch = RolloutBatch.from_completions(**split())
    mask = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(batch.layout.mask(), mask)
    values = np.arange(16, dtype=np.float32).reshape(8, 2)
    for each in (values, torch.from_numpy(values)):
        back = batch.to_padded(each)
        assert back.shape == (2, 5, 2)
        np.testing.assert_array_equal(np.asarray(back)[mask], values)
        of_completions = batch.to_completions(each)
        np.testing.assert_array_equal(np.asarray(of_completions), np.asarray(back)[:, 2:])
    assert batch.to_padded(list(range(8))).tolist() == [[0, 1, 2, 3, 0], [0, 4, 5, 6, 7]]
    assert batch.to_padded(np.ones(8, bool), fill=True).all()


@pytest.mark.parametrize("method", ["to_padded", "to_completions"])
def test_gradients_of_padded_values(method: str) -> None:
    pad = getattr(RolloutBatch.from_completions(**split()), method)
    values = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pad(x * x, fill=3), [values])
    assert not pad(values.detach()).requires_grad


def test_rollouts_alone_have_no_completions() -> None:
    batch = RolloutBatch([Rollout([1, 2, 3], [0, 1, 1], 1.0), Rollout([4], [0], 1.0)])
    with pytest.raises(RolloutError, match="Use to_padded"):
        batch.to_completions([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("values", "fill", "error", "problem"),
    [
        (torch.zeros(13), 0, RolloutError, r"the shape \(13,\), and the batch has 14 tokens"),
        (np.array(1.0), 0, RolloutError, r"the shape \(\), and the batch has 14 tokens"),
        (torch.zeros(14).to_sparse(), 0, RolloutError, "sparse_coo"),
        (["a"] * 14, 0, RolloutError, "values is "),
        ([[1], [2, 3]], 0, RolloutError, "values is "),
        (torch.zeros(14, dtype=torch.int64), 0.5, ConfigError, r"fill is 0\.5; .*int64"),
        (torch.zeros(14, dtype=torch.int8), 200, ConfigError, "fill is 200; .*int8"),
        (torch.zeros(14, dtype=torch.int8), math.nan, ConfigError, "fill is nan; .*int8"),
        (torch.zeros(14, dtype=torch.bool), 2, ConfigError, "fill is 2; .*bool"),
        (np.zeros(14, np.uint8), -1, ConfigError, "fill is -1; .*uint8"),
        (np.zeros(14), "0", ConfigError, "fill is '0'"),
        (torch.zeros(14, dtype=torch.float16), 1e9, ConfigError, "fill is .*float16"),
        (np.zeros(14, np.float16), -1e9, ConfigError, "fill is .*float16"),
    ],
)
def test_values_that_do_not_fit(values: Any, fill: Any, error: type, problem: str) -> None:
    with pytest.raises(error, match=problem):
        RolloutBatch.from_padded(**some()).to_padded(values, fill=fill)


# The batch as any other -------------------------------------------------------------------------


def test_nothing_is_shared_with_what_was_given() -> None:
    logprobs = -torch.rand(3, 6, dtype=torch.float64)
    fields = some(old_logprobs=logprobs, advantages=logprobs, temperatures=np.ones(3))
    batch = RolloutBatch.from_padded(**fields)
    wanted = copy.deepcopy(list(batch))
    for values in fields.values():
        values[:] = 0
    assert list(batch) == wanted
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids[0] = 1


@pytest.mark.parametrize("through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles(through: Callable[[Any], Any]) -> None:
    batch = RolloutBatch.from_completions(**split(old_logprobs=-np.ones((2, 3))))
    same = through(batch)
    assert list(same) == list(batch) and same.rollout_ids == batch.rollout_ids
    values = np.arange(8)
    np.testing.assert_array_equal(same.to_completions(values), batch.to_completions(values))


def test_select_keeps_cells_and_advantages() -> None:
    batch = RolloutBatch.from_completions(**split(advantages=None))
    chosen = batch.select(np.array([1, -2]))
    assert not chosen.has_advantages and chosen.rollout_ids == ("1", "0")
    assert chosen.to_padded([4, 5, 6, 7, 0, 1, 2, 3]).tolist() == [[0, 4, 5, 6, 7], [0, 1, 2, 3, 0]]
    assert chosen.to_completions(range(1, 9)).tolist() == [[2, 3, 4], [7, 8, 0]]


@pytest.mark.parametrize("loss", [losses.GRPO(), losses.GSPO(), losses.DPO(beta=0.1)])
def test_losses_of_advantages_refuse_a_batch_without(loss: losses.Loss) -> None:
    fields = split(advantages=None, reference_logprobs=-np.ones((2, 3)), group_ids=[0, 0])
    with pytest.raises(RolloutError, match="needs advantages"):
        loss.check(RolloutBatch.from_completions(**fields))
    losses.SFT().check(RolloutBatch.from_completions(**fields))
    loss.check(RolloutBatch.from_completions(**(fields | {"advantages": [1, 2]})))


@pytest.mark.slow
def test_a_large_batch_takes_little_time() -> None:
    """512 rollouts of 8,192 tokens: 0.2 s where nothing else runs; a loop over tokens takes
    minutes. The bar is the time of 40 million additions, 1 to 2.5 s by machine."""
    shape = 512, 8192
    attention, mask = torch.ones(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    mask[:, :2048] = False
    ids, logprobs = torch.arange(8192).expand(shape).clone(), torch.full(shape, -1.0)
    made: list[RolloutBatch] = []

    def make() -> None:
        made[:] = [
            RolloutBatch.from_padded(ids, attention, mask, old_logprobs=logprobs, advantages=1.0)
        ]

    assert relative_to_additions(make) < 4
    (batch,) = made
    assert batch.logical_tokens == 512 * 8192 and batch.group_index.max() == 0


# What is refused --------------------------------------------------------------------------------


def at(values: Any, n: int, column: int, value: Any) -> Any:
    """A copy with one entry changed."""
    copied = torch.as_tensor(values).clone()
    if isinstance(value, float):
        copied = copied.to(torch.float64)
    copied[n, column] = value
    return copied


IDS, ATTENTION, MASK = (some()[name] for name in ("input_ids", "attention_mask", "loss_mask"))
LOGPROBS, ROWS = -torch.ones(3, 6), torch.tensor([[1], [0], [1]])
PADDED = [
    ({"input_ids": IDS.float()}, "input_ids[0][0] is 5.0 (float32)"),
    ({"input_ids": [[1, 2], [3]]}, "input_ids has 2 entries in row 0 and 1 in row 1"),
    ({"input_ids": np.zeros((0, 5), int)}, "There are no rollouts"),
    ({"attention_mask": ATTENTION[:2]}, "attention_mask has 2 rows"),
    ({"attention_mask": at(ATTENTION, 1, 5, 0.5)}, "attention_mask[1][5] is 0.5"),
    ({"attention_mask": ATTENTION * ROWS, "loss_mask": MASK * ROWS}, "Rollout '1': token_ids is"),
    ({"loss_mask": at(MASK, 0, 5, 1)}, "loss_mask[0, 5] is 1, where there is padding"),
    ({"advantages": torch.ones(2)}, "advantages is [1.0, 1.0]"),
    ({"advantages": [1.0, math.nan, 1.0]}, "Rollout '1': advantage is nan"),
    ({"weights": at(LOGPROBS, 1, 5, math.nan)}, "is entry [1, 3]"),
    ({"old_logprobs": LOGPROBS.to_sparse()}, "old_logprobs is a Tensor"),
    ({"group_ids": "abc"}, "group_ids is 'abc'"),
    ({"rollout_ids": [1, "1", 2]}, "rollout_id '1' is given twice, at positions 0 and 1"),
]
COMPLETIONS = [
    ({"loss_mask": [[1, 1, 0]] * 2, "tool_mask": [[1, 1, 1]] * 2}, "both loss_mask and tool_mask"),
    ({"advantages": [[1.0] * 5] * 2}, "advantages has 5 entries in row 0, but completion_ids"),
]
JAGGED = [
    ({"input_ids": torch.arange(5)}, "input_ids is "),
    ({"loss_mask": [0, 1, 1, 0, 1]}, "loss_mask[0] is 0"),
    ({"response_lengths": [2, 3]}, "response_lengths[1] is 3"),
    ({"response_lengths": [2]}, "response_lengths is [2]"),
    ({"response_lengths": [2, 1]}, "loss_mask has 3 entries in row 0"),
]
REFUSED = [
    *((RolloutBatch.from_padded, some(**changes), said) for changes, said in PADDED),
    *((RolloutBatch.from_completions, split(**changes), said) for changes, said in COMPLETIONS),
    *((RolloutBatch.from_jagged, rows(**changes), said) for changes, said in JAGGED),
]


@pytest.mark.parametrize(("make", "fields", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_refuses(make: Callable[..., RolloutBatch], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RolloutError, match=re.escape(said)) as caught:
        make(**fields)
    assert len(str(caught.value)) < 420


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="advantage"):
        RolloutBatch.from_padded(**some(), advantage=1.0)  # type: ignore[call-arg]
