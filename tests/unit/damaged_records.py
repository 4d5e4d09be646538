"""Dumps with one record that is wrong, and what is to be said of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import dumps
from dumps import rows_of, tensors, truth, write_torch

ROW = 4
"""The row that is damaged, so that others remain."""


def edited(make: Callable[[Any], dict[str, Any]], edit: Callable[[dict[str, Any]], None]) -> Any:
    """A writer of a torch file of a table with one edit."""

    def write(folder: Path) -> Path:
        table = make(truth())
        edit(table)
        return write_torch(folder / "x.pt", tensors(table))

    return write


def at(name: str, position: Any, value: Any, dtype: Any = None) -> Callable[[dict], None]:
    """Sets one entry of the damaged row of a column, in another dtype if asked for."""

    def edit(table: dict[str, Any]) -> None:
        if dtype is not None:
            table[name] = table[name].astype(dtype)
        if isinstance(table[name], np.ndarray):
            table[name][ROW, position] = value
        else:
            table[name][ROW][position] = value

    return edit


def put(name: str, value: Any) -> Callable[[dict], None]:
    """Sets the damaged row of a column of lists or numbers."""

    def edit(table: dict[str, Any]) -> None:
        table[name][ROW] = value

    return edit


def whole(name: str, value: Any) -> Callable[[dict], None]:
    def edit(table: dict[str, Any]) -> None:
        table[name] = value

    return edit


def without(name: str) -> Callable[[dict], None]:
    def edit(table: dict[str, Any]) -> None:
        del table[name]

    return edit


def cut(name: str, entries: int = 1) -> Callable[[dict], None]:
    """Takes the last entries of every row of a column away."""

    def edit(table: dict[str, Any]) -> None:
        table[name] = table[name][:, :-entries]

    return edit


def shorter(name: str) -> Callable[[dict], None]:
    """Takes the last row of a column away."""

    def edit(table: dict[str, Any]) -> None:
        table[name] = table[name][:-1]

    return edit


COUNT = len(truth())
VERL, TRL, OPENRLHF, NEMO = dumps.verl, dumps.trl, dumps.openrlhf, dumps.nemo_rl
PRIME, SLIME = dumps.prime_rl, dumps.slime


def critic(make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """The table of the same rollouts with what a critic gave."""
    return lambda rollouts: make(dumps.with_critic(rollouts))


VERL_CRITIC, OPENRLHF_CRITIC = critic(dumps.verl_critic), critic(dumps.openrlhf_critic)
NEMO_CRITIC, SLIME_CRITIC = critic(dumps.nemo_rl_critic), critic(dumps.slime_critic)

# name: (writer, parts of the message, the field it counts as when skipped or None where it is of
# the whole file)
RECORDS: dict[str, tuple[Any, list[str], str]] = {
    # ids
    "an id beyond int32": (edited(TRL, at("completion_ids", 0, 2**40)), [str(2**40)],
                           "completion_ids"),
    "no ids": (edited(PRIME, put("token_ids", None)), ["there is no token_ids"], "token_ids"),
    "no mask": (edited(lambda r: {"samples": rows_of(dumps.own(r))},
                       lambda t: t["samples"][ROW].pop("loss_mask")), ["has no loss_mask"],
                "loss_mask"),
    # masks
    "a mask of 2": (edited(VERL, at("response_mask", 0, 2)), ["response_mask[0] is 2"],
                    "response_mask"),
    "trained padding": (edited(VERL, whole("response_mask", np.ones((COUNT, 6), int))),
                        ["response_mask[", "padding"], "response_mask"),
    "a hole in the prompt": (edited(TRL, at("prompt_mask", -2, 0)), ["0 between tokens"],
                             "prompt_mask"),
    "a trained first token": (edited(PRIME, at("mask", 0, True)), ["loss_mask[0] is 1", "mask"],
                              "mask"),
    # numbers
    "an advantage of NaN": (edited(TRL, put("advantages", np.nan)), ["advantages is nan"],
                            "advantages"),
    "an infinite reward": (edited(OPENRLHF, put("rewards", np.inf)), ["rewards is inf"], "rewards"),
    "two temperatures": (edited(PRIME, at("temperatures", -1, 0.5)), ["0.5", "takes one"],
                         "temperatures"),
    "a value of NaN": (edited(VERL_CRITIC, at("values", 0, np.nan)),
                       ["old_values[", "nan", "the record's values"], "values"),
    "returns for fewer tokens (slime)": (edited(SLIME_CRITIC, put("returns", [0.5])),
                                         ["returns has 1 entries, but the response has"],
                                         "returns"),
    # lengths
    "log-probs too short": (edited(PRIME, put("logprobs", [-1.0])), ["logprobs has 1 entries"],
                            "logprobs"),
    "a response longer than all": (edited(SLIME, put("response_lengths", 99)),
                                   ["response_lengths is 99"], "response_lengths"),
    "a length beyond the row": (edited(NEMO, put("input_lengths", 999)), ["input_lengths is 999"],
                                "input_lengths"),
    # other fields
    "positions that begin again": (edited(VERL, at("position_ids", -6, 0)), ["position_ids"],
                                   "position_ids"),
    "positions of three axes": (edited(VERL, lambda t: t.update(
        position_ids=np.repeat(t["position_ids"][:, None], 3, 1))), ["position_ids has 2 dim"],
        "position_ids"),
    "a group that is no name": (edited(VERL, put("uid", 0.5)), ["uid is 0.5"], "uid"),
    "images": (edited(VERL, lambda t: t.update(multi_modal_inputs=np.array(
        [{"pixel_values": 1} if n == ROW else None for n in range(COUNT)], object))),
        ["multi_modal_inputs holds media"], "multi_modal_inputs"),
    "a mask of another trainer": (edited(OPENRLHF, lambda t: t.update(
        loss_mask=[[1] * 12 if n == ROW else None for n in range(COUNT)])),
        ["there is a loss_mask besides action_mask"], "loss_mask"),
    "a reward of NaN among several": (edited(dumps.skyrl, put("rewards", [np.nan, *[1.0] * 4])),
                                      ["rewards is nan at token"], "rewards"),
    "rewards for more tokens": (edited(dumps.skyrl, put("rewards", [0.0] * 99)),
                                ["rewards has 99 entries, but response_ids has"], "rewards"),
    "a step of a trajectory": (edited(dumps.skyrl, whole("is_last_step", [
        n != ROW for n in range(COUNT)])), ["is_last_step is false", "as one record"],
        "is_last_step"),
    "several rewards": (edited(lambda r: dumps.slime_samples(r),
                               lambda t: t["samples"][ROW].update(reward={"a": 1, "b": 2})),
                        ["reward is {'a': 1, 'b': 2}"], "reward"),
}  # fmt: skip
EVERY_ROW = {"trained padding", "positions of three axes"}
