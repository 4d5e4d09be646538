"""Batches from padded, split and jagged tensors, held against rollouts made in a loop."""

import copy
import dataclasses
import math
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dumps
from batch_fields import some, split
from forkpoint import Rollout, RolloutBatch, load_rollouts, losses, record, save_rollouts
from forkpoint.errors import RolloutError
from forkpoint.plan import make_plan
from forkpoint.rollouts.formats.record import group_of
from forkpoint.rollouts.traces import open_trace

FIXTURES = Path(__file__).parents[1] / "fixtures"
EITHER = {"advantages": "advantage", "weights": "weights", "returns": "returns"}
EACH = {name: name for name in ("old_logprobs", "reference_logprobs", "old_values")}
OTHERS = {
    "temperatures": "temperature",
    "group_ids": "group_id",
    "rollout_ids": "rollout_id",
    "extras": "extras",
}
ATTRIBUTES = [f.name for f in dataclasses.fields(RolloutBatch) if not f.name.startswith("_")]
JUNK_IDS = (-100, 0, 3, 2**40)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def equal(found: RolloutBatch, wanted: RolloutBatch, *without: str) -> None:
    """Every attribute is equal in value and type, and so are the rollouts."""
    for name in ATTRIBUTES:
        if name in ("layout", "completion_layout", *without):
            continue
        one, other = getattr(found, name), getattr(wanted, name)
        assert type(one) is type(other), name
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and not one.flags.writeable, name
            np.testing.assert_array_equal(one, other, err_msg=name)
        else:
            assert one == other, name
    if not without:
        assert list(found) == list(wanted) and len(found) == len(wanted)
    assert found.logical_tokens == found.layout.lengths.sum()


# Drawn batches --------------------------------------------------------------------------------


@dataclasses.dataclass
class Drawn:
    """Rollouts as prompts and completions, with the values of each field by rollout."""

    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    """Over completions."""
    numbers: dict[str, list[float]]
    each: dict[str, list[list[float]]]
    """Over prompts and completions."""
    others: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return [len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)]

    def batch(self, over_completions: bool) -> RolloutBatch:
        """The batch of rollouts made one by one.

        over_completions: fields have no entries for prompts, which are then 0, and prompts are
            known. Where groups by prompts are others than those of the rollouts, rollouts have ids.
        """
        made = RolloutBatch(self.rollouts(over_completions))
        ids = self.others["group_ids"] or [None] * len(made)
        keys = [tuple(p) if g is None else str(g) for p, g in zip(self.prompts, ids, strict=True)]
        groups = [list(dict.fromkeys(keys)).index(key) for key in keys]
        if not over_completions or made.group_index.tolist() == groups:
            return made
        of_prompts = [group_of(np.array(prompt)) for prompt in self.prompts]
        self.others["group_ids"] = [g or p for g, p in zip(ids, of_prompts, strict=True)]
        made = RolloutBatch(self.rollouts(over_completions))
        assert made.group_index.tolist() == groups
        return made

    def rollouts(self, over_completions: bool) -> list[Rollout]:
        rollouts = []
        for n, (prompt, completion) in enumerate(zip(self.prompts, self.completions, strict=True)):
            fields: dict[str, Any] = {}
            for name, own in (EITHER | EACH).items():
                if name in self.numbers:
                    fields[own] = self.numbers[name][n]
                if name in self.each:
                    values = self.each[name][n]
                    lead = [0.0] * len(prompt) if over_completions else values[: len(prompt)]
                    fields[own] = lead + values[len(prompt) :]
            for name, own in OTHERS.items():
                if self.others[name] is not None:
                    fields[own] = self.others[name][n]
            mask = [0] * len(prompt) + self.masks[n]
            rollouts.append(Rollout(prompt + completion, mask, **({"advantage": 0} | fields)))
        return rollouts


def draw(seed: int) -> Drawn:
    """Values are multiples of 1/8 between -4 and 0, which every floating dtype holds exactly.

    Untrained tokens have numbers that are not finite, here and there.
    """
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 7))
    prompts = [random.integers(0, 3, random.integers(1, 6)).tolist() for _ in range(count)]
    if count > 1 and random.random() < 0.7:
        prompts[1] = prompts[0]
    completions = [random.integers(0, 9, random.integers(0, 6)).tolist() for _ in range(count)]
    masks = [(random.random(len(c)) < 0.7).astype(int).tolist() for c in completions]
    drawn = Drawn(prompts, completions, masks, {}, {}, {})
    trained = [[0] * len(p) + m for p, m in zip(prompts, masks, strict=True)]

    def values(mask: Sequence[int]) -> list[float]:
        odd = (math.nan, math.inf, -math.inf, 2.0, -0.5)
        return [
            float(-random.integers(0, 32) / 8)
            if on or random.random() < 0.6
            else random.choice(odd)
            for on in mask
        ]

    for name in EITHER | EACH:
        if random.random() < 0.4:
            continue
        if name in EITHER and random.random() < 0.5:
            drawn.numbers[name] = [
                values([1])[0] if any(t) else float(random.choice([math.nan, 0.5])) for t in trained
            ]
        else:
            drawn.each[name] = [values(t) for t in trained]
    ids = [f"r{n}" if random.random() < 0.7 else None for n in range(count)]
    drawn.others = {
        "temperatures": random.choice([[0.5, 1.0][n % 2] for n in range(count)], count).tolist()
        if random.random() < 0.5
        else None,
        "group_ids": [random.choice(["a", "b", 3, None]) for _ in range(count)]
        if random.random() < 0.5
        else None,
        "rollout_ids": ids if random.random() < 0.5 else None,
        "extras": [{"n": n} if n % 2 else None for n in range(count)]
        if random.random() < 0.5
        else None,
    }
    return drawn


def padded(rows: Sequence[Sequence[Any]], begins: Sequence[int], width: int, junk: Any) -> list:
    """Rows of a matrix, padded on both sides with entries of `junk` in turn."""
    made = []
    for n, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        cells = [junk[(n + c) % len(junk)] for c in range(width)]
        cells[begin : begin + len(row)] = row
        made.append(cells)
    return made


FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MASK_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.uint8)


def ragged_begins(random: np.random.Generator, lengths: Sequence[int], width: int) -> list[int]:
    side = random.choice(["left", "right", "both"])
    room = [width - length for length in lengths]
    if side == "both":
        return [int(random.integers(0, r + 1)) for r in room]
    return room if side == "left" else [0] * len(room)


def as_given(random: np.random.Generator, rows: list, kind: str, container: str) -> Any:
    """The rows as a tensor of some dtype and strides, as an array, or as lists."""
    if container == "list":
        return rows
    dtypes = {
        "ids": (torch.int64,),
        "mask": MASK_DTYPES,
        "floats": FLOAT_DTYPES,
    }[kind]
    tensor = torch.tensor(rows, dtype=torch.float64 if kind == "floats" else torch.int64)
    tensor = tensor.to(dtypes[int(random.integers(len(dtypes)))])
    if random.random() < 0.3:
        tensor = tensor.repeat_interleave(2, dim=1)[:, ::2]
    if random.random() < 0.3:
        tensor = tensor.T.contiguous().T
    if tensor.is_floating_point() and random.random() < 0.5:
        tensor = tensor.requires_grad_()
    if container == "numpy":
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.to(torch.float32)
        return tensor.detach().numpy()
    return tensor


def containers(random: np.random.Generator) -> str:
    return str(random.choice(["torch", "torch", "numpy", "list"]))


def number_fields(random: np.random.Generator, drawn: Drawn) -> dict[str, Any]:
    def shaped(values: list[float]) -> Any:
        if random.random() < 0.3:
            return values
        tensor = torch.tensor(values, dtype=torch.float32)
        return tensor[:, None] if random.random() < 0.5 else tensor

    return {name: shaped(values) for name, values in drawn.numbers.items()}


# Against rollouts made one by one ---------------------------------------------------------------


def check_padded(seed: int) -> None:
    drawn, random = draw(seed), np.random.default_rng(seed)
    lengths = drawn.lengths
    width = max(2, *lengths) + int(random.integers(0, 3))  # [N, 1] is one number per rollout
    begins = ragged_begins(random, lengths, width)

    def table(rows: Sequence[Sequence[Any]], kind: str, *junk: Any) -> Any:
        return as_given(random, padded(rows, begins, width, junk), kind, containers(random))

    ids = [p + c for p, c in zip(drawn.prompts, drawn.completions, strict=True)]
    masks = [[0] * len(p) + m for p, m in zip(drawn.prompts, drawn.masks, strict=True)]
    found = RolloutBatch.from_padded(
        table(ids, "ids", *JUNK_IDS),
        table([[1] * length for length in lengths], "mask", 0),
        table(masks, "mask", 0),
        **number_fields(random, drawn),
        **{name: table(rows, "floats", math.nan, 7.0) for name, rows in drawn.each.items()},
        **drawn.others,
    )
    wanted = drawn.batch(over_completions=False)
    without = () if "advantages" in drawn.numbers | drawn.each else ("has_advantages",)
    equal(found, wanted, *without)
    assert found.has_advantages == (not without)
    cells = np.zeros((len(found), width), bool)
    for row, begin, length in zip(cells, begins, lengths, strict=True):
        row[begin : begin + length] = True
    np.testing.assert_array_equal(found.layout.mask(), cells)
    np.testing.assert_array_equal(found.to_padded(found.token_ids)[cells], found.token_ids)
    assert not found.to_padded(np.ones(found.logical_tokens))[~cells].any()


def check_completions(seed: int) -> None:
    drawn, random = draw(seed), np.random.default_rng(seed)
    prompts, completions = ([len(x) for x in xs] for xs in (drawn.prompts, drawn.completions))
    widths = [max(2, *x) + int(random.integers(0, 3)) for x in (prompts, completions)]
    begins = [
        ragged_begins(random, x, w) for x, w in zip((prompts, completions), widths, strict=True)
    ]

    def table(part: int, rows: Sequence[Sequence[Any]], kind: str, *junk: Any) -> Any:
        made = padded(rows, begins[part], widths[part], junk)
        return as_given(random, made, kind, containers(random))

    over = {
        name: table(1, [row[p:] for row, p in zip(rows, prompts, strict=True)], "floats", math.nan)
        for name, rows in drawn.each.items()
    }
    trained = table(1, drawn.masks, "mask", 0)
    kwargs = {"loss_mask": trained}
    if seed % 2:
        kwargs = {"tool_mask": table(1, drawn.masks, "mask", 1)}
    found = RolloutBatch.from_completions(
        table(0, drawn.prompts, "ids", *JUNK_IDS),
        table(0, [[1] * p for p in prompts], "mask", 0),
        table(1, drawn.completions, "ids", *JUNK_IDS),
        table(1, [[1] * c for c in completions], "mask", 0),
        **kwargs,
        **number_fields(random, drawn),
        **over,
        **drawn.others,
    )
    without = () if "advantages" in drawn.numbers | drawn.each else ("has_advantages",)
    equal(found, drawn.batch(over_completions=True), *without)

    assert found.completion_layout is not None
    attended = np.array(padded([[1] * c for c in completions], begins[1], widths[1], [0]), bool)
    attended = attended.reshape(len(found), widths[1])
    np.testing.assert_array_equal(found.completion_layout.mask(), attended)
    both = np.concatenate(
        [np.array(padded([[1] * p for p in prompts], begins[0], widths[0], [0]), bool), attended], 1
    )
    np.testing.assert_array_equal(found.layout.mask(), both)
    np.testing.assert_array_equal(found.to_padded(found.token_ids)[both], found.token_ids)
    flat_completions = np.array([t for c in drawn.completions for t in c], np.int64)
    of_completions = found.to_completions(found.token_ids, fill=-7)
    np.testing.assert_array_equal(of_completions[attended], flat_completions)
    assert (of_completions[~attended] == -7).all()


def check_jagged(seed: int) -> None:
    drawn, random = draw(seed), np.random.default_rng(seed)
    responses = bool(seed % 2)
    form = str(random.choice(["nested", "strided", "rows", "flat"]))
    ids = [p + c for p, c in zip(drawn.prompts, drawn.completions, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(drawn.lengths)])

    def shaped(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Any:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        chosen = str(random.choice([form, "flat"])) if rows is not ids else form
        if chosen == "rows":
            return [
                [list(r), tuple(r), np.array(r, t.numpy().dtype), t][int(random.integers(4))]
                for r, t in zip(rows, tensors, strict=True)
            ]
        if chosen == "flat":
            return torch.cat(tensors)
        layout = torch.jagged if chosen == "nested" else torch.strided
        return torch.nested.nested_tensor(tensors, layout=layout)

    def over(rows: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return (
            [r[len(p) :] for r, p in zip(rows, drawn.prompts, strict=True)] if responses else rows
        )

    masks = [[0] * len(p) + m for p, m in zip(drawn.prompts, drawn.masks, strict=True)]
    lengths = torch.tensor([len(c) for c in drawn.completions])
    numbers = {n: torch.tensor(v)[:, None] for n, v in drawn.numbers.items()}
    found = RolloutBatch.from_jagged(
        shaped(ids, torch.int64),
        shaped(over(masks), torch.int64),
        offsets=offsets if form == "flat" else None,
        response_lengths=lengths if responses else None,
        **numbers,
        **{
            name: [np.array(row) for row in over(rows)]
            if name in EITHER
            else shaped(over(rows), torch.float32)
            for name, rows in drawn.each.items()
        },
        **drawn.others,
    )
    without = () if "advantages" in drawn.numbers | drawn.each else ("has_advantages",)
    equal(found, drawn.batch(over_completions=responses), *without)
    right = np.arange(max(drawn.lengths)) < np.array(drawn.lengths)[:, None]
    np.testing.assert_array_equal(found.layout.mask(), right)
    if responses:
        attended = np.arange(int(lengths.max())) < lengths.numpy()[:, None]
        assert found.completion_layout is not None
        np.testing.assert_array_equal(found.completion_layout.mask(), attended)
        flat = np.array([t for c in drawn.completions for t in c], np.int64)
        np.testing.assert_array_equal(found.to_completions(found.token_ids)[attended], flat)
    else:
        assert found.completion_layout is None


@pytest.mark.parametrize("check", [check_padded, check_completions, check_jagged])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_rollouts_made_one_by_one(check: Callable[[int], None], seed: int) -> None:
    check(seed)


# The trainers' own forms ------------------------------------------------------------------------


def test_a_batch_that_trl_wrote() -> None:
    """A file of GRPOTrainer, read as a file and as tensors."""
    table = torch.load(FIXTURES / "trl-batch.pt")
    batch = RolloutBatch.from_completions(
        *(table[n] for n in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")),
        advantages=table["advantages"],
        old_logprobs=table["old_per_token_logps"],
        reference_logprobs=table["ref_per_token_logps"],
    )
    wanted = RolloutBatch(load_rollouts(FIXTURES / "trl-batch.pt"))
    equal(batch, wanted, "group_ids", "layout")  # files' readers name groups by their prompts
    old = batch.to_completions(torch.tensor(batch.old_logprobs, dtype=torch.float32))
    assert torch.equal(old, table["old_per_token_logps"] * table["completion_mask"])


def test_columns_of_trl() -> None:
    """Masks of tools that are 1 at padding; ratios of whole completions, [N, 1]."""
    rollouts = dumps.truth()
    table = dumps.tensors(dumps.trl(rollouts))
    assert (table["tool_mask"][table["completion_mask"] == 0] == 1).any()
    ratios = torch.rand(len(rollouts), 1)
    batch = RolloutBatch.from_completions(
        *(table[n] for n in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")),
        tool_mask=table["tool_mask"],
        advantages=table["advantages"],
        old_logprobs=table["old_per_token_logps"],
        weights=ratios,
    )
    for n, (made, true) in enumerate(zip(batch, rollouts, strict=True)):
        assert made.token_ids.tolist() == true.token_ids.tolist()
        assert made.loss_mask.tolist() == true.loss_mask.tolist()
        assert made.advantage == true.advantage and made.weights == float(ratios[n])
    assert batch.group_index.tolist() == RolloutBatch(rollouts).group_index.tolist()


def test_truncated_completions_of_trl_are_not_trained() -> None:
    """mask_truncated_completions sets completion_mask of the whole row to 0."""
    batch = RolloutBatch.from_completions(
        prompt_ids=[[0, 7], [6, 7]],
        prompt_mask=[[0, 1], [1, 1]],
        completion_ids=[[4, 5], [8, 9]],
        completion_mask=[[1, 1], [0, 0]],
        advantages=[1, math.nan],
    )
    assert [r.token_ids.tolist() for r in batch] == [[7, 4, 5], [6, 7]]
    assert batch.loss_mask.tolist() == [False, True, True, False, False]
    assert batch[1].advantage == 0.0
    assert batch.to_completions([1, 2, 3, 4, 5]).tolist() == [[2, 3], [0, 0]]
    assert batch.to_padded([1, 2, 3, 4, 5], fill=-1).tolist() == [[-1, 1, 2, 3], [4, 5, -1, -1]]


def test_groups_are_those_of_given_prompts(tmp_path: Path) -> None:
    """Completions that begin with a tool's tokens, one prompt, two others that are prefixes."""
    prompts = {
        "prompt_ids": [[5, 6], [5, 6], [0, 5], [5, 6]],
        "prompt_mask": [[1, 1], [1, 1], [0, 1], [1, 1]],
    }
    completions = {
        "completion_ids": [[1, 2], [1, 3], [6, 1], [4, 5]],
        "completion_mask": [[1, 1]] * 4,
        "loss_mask": [[0, 1], [1, 1], [0, 1], [0, 0]],
        "advantages": 1.0,
    }
    batch = RolloutBatch.from_completions(**prompts, **completions)
    assert batch.group_index.tolist() == [0, 0, 1, 0]
    assert batch.group_ids[0] == batch.group_ids[1] == batch.group_ids[3] != batch.group_ids[2]
    jagged = RolloutBatch.from_jagged(
        [r.token_ids for r in batch],
        completions["loss_mask"],
        response_lengths=[2] * 4,
        advantages=1.0,
    )
    assert jagged.group_index.tolist() == [0, 0, 1, 0]
    save_rollouts(tmp_path / "one.jsonl", batch)
    for again in (list(batch), load_rollouts(tmp_path / "one.jsonl"), batch.select([2, 1, 0])):
        assert len(RolloutBatch(again).groups()) == 2
    named = RolloutBatch.from_completions(**prompts, **completions, group_ids=[1, 1, None, None])
    assert named.group_index.tolist() == [0, 0, 1, 2] and named.group_ids[:2] == ("1", "1")
    usual = completions | {"loss_mask": [[1, 1], [1, 1], [1, 1], [1, 0]]}
    assert RolloutBatch.from_completions(**prompts, **usual).group_ids == (None,) * 4


def test_columns_of_verl() -> None:
    """The padded DataProto, and the nested tensors that its engines see."""
    rollouts = dumps.with_critic(dumps.truth())
    table = dumps.tensors(dumps.verl_critic(rollouts))
    width = table["prompts"].shape[1]
    mask = table["attention_mask"]
    fields = {
        "advantages": "advantages",
        "old_logprobs": "old_log_probs",
        "reference_logprobs": "ref_log_prob",
        "returns": "returns",
        "old_values": "values",
    }
    padded_batch = RolloutBatch.from_completions(
        table["prompts"],
        mask[:, :width],
        table["responses"],
        mask[:, width:],
        loss_mask=table["response_mask"],
        group_ids=table["uid"],
        **{name: table[own] for name, own in fields.items()},
    )
    lengths, responses = mask.sum(1), mask[:, width:].sum(1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.nested.nested_tensor_from_jagged(table["input_ids"][mask.bool()], offsets=offsets)

    def nested(name: str) -> torch.Tensor:
        rows = [row[:r] for row, r in zip(table[name], responses.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    response_mask = nested("response_mask")
    jagged_batch = RolloutBatch.from_jagged(
        ids,
        response_mask,
        response_lengths=response_mask.offsets().diff(),
        group_ids=table["uid"],
        **{name: nested(own) for name, own in fields.items()},
    )
    equal(jagged_batch, padded_batch)
    for made, true in zip(padded_batch, rollouts, strict=True):
        assert made.token_ids.tolist() == true.token_ids.tolist()
        assert made.loss_mask.tolist() == true.loss_mask.tolist()
        assert made.group_id == true.group_id
        on = made.loss_mask
        for name in ("old_logprobs", "reference_logprobs", "old_values"):
            np.testing.assert_array_equal(getattr(made, name)[on], getattr(true, name)[on])
    values = torch.arange(padded_batch.logical_tokens)
    assert torch.equal(padded_batch.to_completions(values), jagged_batch.to_completions(values))


def test_nested_tensors_with_gaps() -> None:
    """A narrowed nested tensor has lengths of its own, and values that belong to nobody."""
    values = torch.arange(1, 11).reshape(2, 5)
    ids = torch.nested.narrow(
        values, 1, torch.tensor([1, 0]), torch.tensor([3, 2]), layout=torch.jagged
    )
    batch = RolloutBatch.from_jagged(ids, [[0, 1, 1], [0, 1]], advantages=[1, 2])
    assert batch.token_ids.tolist() == [2, 3, 4, 6, 7]
    assert batch.advantages.tolist() == [1, 1, 1, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device() -> None:
    on_device = {name: x.to("cuda") for name, x in some().items()}
    logprobs = -torch.rand(3, 6, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ids = torch.arange(3, device="cuda")
    batch = RolloutBatch.from_padded(**on_device, old_logprobs=logprobs, group_ids=ids)
    equal(
        batch, RolloutBatch.from_padded(**some(), old_logprobs=logprobs.cpu(), group_ids=ids.cpu())
    )
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
    jagged = RolloutBatch.from_jagged(nested, [[0, 1, 1], [0, 1]], advantages=ids[:2])
    assert jagged.token_ids.tolist() == [0, 1, 2, 0, 1]


# The batch as any other -------------------------------------------------------------------------


def test_nothing_is_shared_with_what_was_given() -> None:
    logprobs = -torch.rand(3, 6, dtype=torch.float64)
    given = some(old_logprobs=logprobs, advantages=logprobs, temperatures=np.ones(3))
    batch = RolloutBatch.from_padded(**given)
    wanted = copy.deepcopy(list(batch))
    for values in given.values():
        values[:] = 0
    assert list(batch) == wanted
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        batch[0].token_ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.layout = None  # type: ignore[misc]


def pickled(batch: RolloutBatch) -> RolloutBatch:
    return pickle.loads(pickle.dumps(batch))


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, pickled])
def test_copies_and_pickles(through: Callable[[Any], Any], looked_at: bool) -> None:
    batch = RolloutBatch.from_completions(**split(old_logprobs=-np.ones((2, 3))))
    if looked_at:
        assert len(list(batch)) == 2
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
    assert batch.select([0]).to_padded([1, 2, 3, 4]).tolist() == [[1, 2, 3, 4, 0]]
    with pytest.raises(TypeError):
        batch.select([0.5])  # type: ignore[list-item]


def test_files_traces_and_plans(tmp_path: Path) -> None:
    """Readers of the rollouts one by one, and readers of the flat arrays."""
    drawn = next(d for d in map(draw, range(100)) if "advantages" in d.each and len(d.prompts) > 3)
    wanted = drawn.batch(over_completions=False)
    width = max(drawn.lengths)
    begins = [0] * len(wanted)

    def table(rows: Sequence[Sequence[Any]], junk: Any) -> list:
        return padded(rows, begins, width, [junk])

    batch = RolloutBatch.from_padded(
        table([r.token_ids.tolist() for r in wanted], 0),
        table([[1] * len(r) for r in wanted], 0),
        table([r.loss_mask.tolist() for r in wanted], 0),
        **drawn.numbers,
        **{name: table(values, None) for name, values in drawn.each.items()},
        **drawn.others,
    )
    save_rollouts(tmp_path / "one.jsonl", batch)
    save_rollouts(tmp_path / "two.jsonl", wanted)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    with record(tmp_path / "trace") as trace:
        trace.add(batch)
    (step,) = open_trace(tmp_path / "trace")
    assert list(step.batch) == list(wanted)
    assert make_plan(batch).to_dict() == make_plan(wanted).to_dict()


USE_ADVANTAGES = [losses.GRPO(), losses.GSPO(), losses.CISPO(), losses.SAPO(), losses.DPO(beta=0.1)]


@pytest.mark.parametrize("loss", USE_ADVANTAGES)
def test_losses_of_advantages_refuse_a_batch_without(loss: losses.Loss) -> None:
    logprobs = -np.ones((2, 3))
    fields = split(advantages=None, reference_logprobs=logprobs, group_ids=[0, 0])
    with pytest.raises(RolloutError, match=r"needs advantages, but the batch was made without any"):
        loss.check(RolloutBatch.from_completions(**fields))
    loss.check(RolloutBatch.from_completions(**(fields | {"advantages": [1, 2]})))


@pytest.mark.parametrize("loss", [losses.SFT(), losses.LogLikelihood()])
def test_losses_without_advantages_take_it(loss: losses.Loss) -> None:
    batch = RolloutBatch.from_completions(**split(advantages=None))
    loss.check(batch)
    assert not batch.advantages.any() and batch[0].advantage == 0.0


# Time -------------------------------------------------------------------------------------------


def test_a_large_batch_takes_little_time() -> None:
    """512 rollouts of 8,192 tokens: 0.04 s where nothing else runs, and the bar is 0.2 s. The test
    leaves room for memory that a busy machine is slow to give; a loop over tokens takes minutes."""
    shape = 512, 8192
    attention, mask = torch.ones(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    mask[:, :2048] = False
    ids = torch.arange(8192).expand(shape).clone()
    logprobs, advantages = torch.full(shape, -1.0), torch.ones(shape)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        batch = RolloutBatch.from_padded(
            ids, attention, mask, old_logprobs=logprobs, advantages=advantages
        )
        seconds.append(time.perf_counter() - begin)
    assert batch.logical_tokens == 512 * 8192 and batch.group_index.max() == 0
    assert min(seconds) < 1
