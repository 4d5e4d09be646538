"""Dumps of trainers, built by their documented schemas out of rollouts that are known.

Each function of TABLES gives a batch as its trainer holds it: columns by name, padded where the
trainer pads. PADDING stands for what lies in padding: a token id that is also a real token, and
numbers that would show if they were read.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy
import torch
import zstandard

from forkpoint import Rollout, RolloutBatch

PADDING = 5
JUNK = -77.0


def truth(seed: int = 0, groups: int = 3, rollouts_per_group: int = 3) -> list[Rollout]:
    """Groups in shuffled rows: prompts of several lengths, some responses with tool tokens."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = random.integers(1, 60, size=3 + 2 * group)
        advantages = random.normal(size=rollouts_per_group)
        for n in range(rollouts_per_group):
            response = random.integers(1, 60, size=int(random.integers(2, 7)))
            response[-1] = PADDING
            mask = np.ones(len(response), int)
            if n == 1:  # several turns: what a tool said stays in context and is not trained
                mask[1:-1] = 0
            length = len(prompt) + len(response)
            logprobs = -random.random((2, length)).astype(np.float32).astype(np.float64)
            logprobs[:, : len(prompt)] = 0
            made.append(
                Rollout(
                    np.append(prompt, response),
                    np.append(np.zeros(len(prompt), int), mask),
                    float(np.float32(advantages[n])),
                    old_logprobs=logprobs[0],
                    reference_logprobs=logprobs[1],
                    group_id=f"g{group}",
                )
            )
    return [made[n] for n in random.permutation(len(made))]


def with_critic(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same with a critic's values before the update, and returns: one in a few for all tokens
    of a rollout, as they are where nothing is discounted."""
    random = np.random.default_rng(0)
    made = []
    for n, rollout in enumerate(rollouts):
        values, returns = random.normal(size=(2, len(rollout))).astype(np.float32).astype(float)
        made.append(
            replace(rollout, old_values=values, returns=float(returns[0]) if n % 3 else returns)
        )
    return made


def prompt_of(rollout: Rollout) -> int:
    """How many tokens the prompt has."""
    return int(rollout.loss_mask.argmax())


def left(rows: Sequence[Any], fill: float, dtype: Any = None) -> np.ndarray:
    """Rows padded on the left to the longest."""
    width = max(map(len, rows))
    return np.array([np.append([fill] * (width - len(r)), r) for r in rows]).astype(dtype)


def right(rows: Sequence[Any], fill: float, dtype: Any = None) -> np.ndarray:
    """Rows padded on the right to the longest."""
    width = max(map(len, rows))
    return np.array([np.append(r, [fill] * (width - len(r))) for r in rows]).astype(dtype)


def _responses(rollouts: Sequence[Rollout], name: str) -> list[np.ndarray]:
    return [
        np.broadcast_to(getattr(r, name), len(r))[prompt_of(r) :].astype(np.float64)
        for r in rollouts
    ]


def verl(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    prompts = [r.token_ids[: prompt_of(r)] for r in rollouts]
    responses = [r.token_ids[prompt_of(r) :] for r in rollouts]
    ids = left(prompts, PADDING, np.int64), right(responses, PADDING, np.int64)
    attention = np.concatenate(
        [
            left([np.ones(len(p)) for p in prompts], 0, np.int64),
            right([np.ones(len(p)) for p in responses], 0, np.int64),
        ],
        axis=1,
    )
    return {
        "prompts": ids[0],
        "responses": ids[1],
        "input_ids": np.concatenate(ids, axis=1),
        "attention_mask": attention,
        "position_ids": np.clip(attention.cumsum(1) - 1, 0, None),
        "response_mask": right(_responses(rollouts, "loss_mask"), 0, np.int64),
        "old_log_probs": right(_responses(rollouts, "old_logprobs"), JUNK, np.float32),
        "ref_log_prob": right(_responses(rollouts, "reference_logprobs"), JUNK, np.float32),
        "advantages": right(_responses(rollouts, "advantage"), JUNK, np.float32)
        * right(_responses(rollouts, "loss_mask"), 0, np.float32),
        "uid": np.array([r.group_id for r in rollouts], dtype=object),
    }


def verl_critic(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """With a critic, whose values and returns are those of the responses' tokens."""
    return verl(rollouts) | {
        "values": right(_responses(rollouts, "old_values"), JUNK, np.float32),
        "returns": right(_responses(rollouts, "returns"), JUNK, np.float32),
    }


def trl(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    table = verl(rollouts)
    completion = right([np.ones(len(r) - prompt_of(r)) for r in rollouts], 0, np.int64)
    return {
        "prompt_ids": table["prompts"],
        "prompt_mask": table["attention_mask"][:, : table["prompts"].shape[1]],
        "completion_ids": table["responses"],
        "completion_mask": completion,
        "tool_mask": np.where(completion, table["response_mask"], 1),
        "advantages": np.array([r.advantage for r in rollouts], np.float32),
        "old_per_token_logps": table["old_log_probs"],
        "ref_per_token_logps": table["ref_log_prob"],
        "num_items_in_batch": int(sum(map(len, rollouts))),
    }


def _rows(rollouts: Sequence[Rollout], name: str, fill: float, dtype: Any) -> np.ndarray:
    return right([np.broadcast_to(getattr(r, name), len(r)) for r in rollouts], fill, dtype)


def openrlhf(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Rows padded on the right; action arrays are of all tokens but the first."""

    def actions(name: str, fill: float, dtype: Any) -> np.ndarray:
        return _rows(rollouts, name, fill, dtype)[:, 1:]

    return {
        "sequences": right([r.token_ids for r in rollouts], PADDING, np.int64),
        "attention_mask": right([np.ones(len(r)) for r in rollouts], 0, np.int64),
        "action_mask": actions("loss_mask", 0, bool),
        "action_log_probs": actions("old_logprobs", JUNK, np.float32),
        "base_action_log_probs": actions("reference_logprobs", JUNK, np.float32),
        "advantages": actions("advantage", JUNK, np.float32),
        "rewards": np.zeros(len(rollouts), np.float32),
        "index": None,
        "prompts": ["text"] * len(rollouts),
        "labels": [],
        "images": [],
        "info": {},
    }


def openrlhf_critic(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return openrlhf(rollouts) | {
        "values": _rows(rollouts, "old_values", JUNK, np.float32)[:, 1:],
        "returns": _rows(rollouts, "returns", JUNK, np.float32)[:, 1:],
    }


def openrlhf_left(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """As of older versions: prompts padded on the left, action arrays of the responses alone."""
    table = verl(rollouts)
    return {
        "sequences": table["input_ids"],
        "attention_mask": table["attention_mask"],
        "action_mask": table["response_mask"].astype(bool),
        "action_log_probs": table["old_log_probs"],
        "base_action_log_probs": table["ref_log_prob"],
        "advantages": table["advantages"],
    }


def nemo_rl(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    rows = partial(_rows, rollouts)
    return {
        "input_ids": rows("token_ids", PADDING, np.int64),
        "input_lengths": np.array(list(map(len, rollouts))),
        "token_mask": rows("loss_mask", 0, np.int64),
        "sample_mask": np.ones(len(rollouts), np.float32),
        "advantages": rows("advantage", JUNK, np.float32),
        "generation_logprobs": rows("old_logprobs", JUNK, np.float32) - 1,
        "prev_logprobs": rows("old_logprobs", JUNK, np.float32),
        "reference_policy_logprobs": rows("reference_logprobs", JUNK, np.float32),
    }


def nemo_rl_critic(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Train data of PPO, whose values are shifted: entry i is what was expected before token i."""
    return nemo_rl(rollouts) | {
        "rewards": np.zeros(len(rollouts), np.float32),
        "values": _rows(rollouts, "old_values", JUNK, np.float32),
        "returns": _rows(rollouts, "returns", JUNK, np.float32),
    }


def slime(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Train data, whose rewards are normalised."""
    return {
        "tokens": [r.token_ids.tolist() for r in rollouts],
        "response_lengths": [len(r) - prompt_of(r) for r in rollouts],
        "loss_masks": [r.loss_mask[prompt_of(r) :].astype(int).tolist() for r in rollouts],
        "rewards": [r.advantage for r in rollouts],
        "raw_reward": [0.0] * len(rollouts),
        "rollout_log_probs": [v.tolist() for v in _responses(rollouts, "old_logprobs")],
        "ref_log_probs": [v.tolist() for v in _responses(rollouts, "reference_logprobs")],
        "sample_indices": list(range(len(rollouts))),
    }


def slime_critic(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Train data of PPO: rewards are as the environment gave them, advantages are per token."""
    return slime(rollouts) | {
        "rewards": [0.0] * len(rollouts),
        "advantages": [v.tolist() for v in _responses(rollouts, "advantage")],
        "values": [v.tolist() for v in _responses(rollouts, "old_values")],
        "returns": [v.tolist() for v in _responses(rollouts, "returns")],
    }


def slime_train_data(table: dict[str, Any], version: int) -> dict[str, Any]:
    """Data that save_debug_train_data writes: a rank's columns, or since version 2 samples."""
    columns = {
        name: [torch.tensor(row) if isinstance(row, list) else row for row in column]
        for name, column in table.items()
    }
    if version == 1:
        return {"rollout_id": 3, "rank": 0, "rollout_data": columns}
    whole = {"raw_reward": columns.pop("raw_reward")}
    columns["sample_index"] = columns.pop("sample_indices")
    samples = [
        {"data_parallel_rank": 0, **dict(zip(columns, row, strict=True))}
        for row in zip(*columns.values(), strict=True)
    ]
    layout = [{"rank": 0, "data_parallel_rank": 0, "micro_batch_indices": [[0], [1]]}]
    return {
        "format_version": 2,
        "rollout_id": 3,
        "rank": 0,
        "samples": samples,
        "dp_shards": layout,
        **whole,
    }


def slime_samples(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Data that save_debug_rollout_data writes; rewards are advantages to be, and 1 apart here."""
    samples = []
    for n, rollout in enumerate(rollouts):
        own = prompt_of(rollout)
        samples.append(
            {
                "group_index": int(str(rollout.group_id)[1:]),
                "index": n,
                "prompt": "text",
                "tokens": rollout.token_ids.tolist(),
                "response_length": len(rollout) - own,
                "loss_mask": rollout.loss_mask[own:].astype(int).tolist(),
                "rollout_log_probs": _listed(rollout.old_logprobs)[own:],
                "reward": rollout.advantage,
                "status": "completed",
                "multimodal_inputs": None,
                "remove_sample": False,
            }
        )
    return {"rollout_id": 3, "samples": samples}


def skyrl(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """A GeneratorOutput: its rewards are advantages to be, of every second rollout per token."""
    return {
        "prompt_token_ids": [r.token_ids[: prompt_of(r)].tolist() for r in rollouts],
        "response_ids": [r.token_ids[prompt_of(r) :].tolist() for r in rollouts],
        "rewards": [
            [0.0] * (len(r) - prompt_of(r) - 1) + [r.advantage] if n % 2 else r.advantage
            for n, r in enumerate(rollouts)
        ],
        "loss_masks": [r.loss_mask[prompt_of(r) :].astype(int).tolist() for r in rollouts],
        "stop_reasons": ["stop"] * len(rollouts),
        "rollout_metrics": {"generate/avg_num_tokens": 4.0},
        "rollout_logprobs": [v.tolist() for v in _responses(rollouts, "old_logprobs")],
        "trajectory_ids": [
            {"instance_id": r.group_id, "repetition_id": n} for n, r in enumerate(rollouts)
        ],
        "is_last_step": None,
    }


def own(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "token_ids": [r.token_ids.tolist() for r in rollouts],
        "loss_mask": [r.loss_mask.astype(int).tolist() for r in rollouts],
        "advantage": [r.advantage for r in rollouts],
        "old_logprobs": [_listed(r.old_logprobs) for r in rollouts],
        "reference_logprobs": [_listed(r.reference_logprobs) for r in rollouts],
        "group_id": [r.group_id for r in rollouts],
    }


def _listed(values: Any) -> list[float]:
    return values.tolist()


TABLES: dict[str, Callable[[Sequence[Rollout]], dict[str, Any]]] = {
    "forkpoint": own,
    "verl": verl,
    "trl": trl,
    "openrlhf": openrlhf,
    "openrlhf, padded left": openrlhf_left,
    "nemo-rl": nemo_rl,
    "slime": slime,
}


# Files -------------------------------------------------------------------------------------------


def listed(table: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in table.items()}


def rows_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a table, each with what all share."""
    plain = {name: value for name, value in listed(table).items() if value != []}
    count = max(len(v) for v in plain.values() if isinstance(v, list))
    return [{k: v[n] if isinstance(v, list) else v for k, v in plain.items()} for n in range(count)]


def tensors(table: dict[str, Any]) -> dict[str, Any]:
    """Columns as tensors, those of text as lists."""
    return {
        k: (v.tolist() if v.dtype == object else torch.from_numpy(v.copy()))
        if isinstance(v, np.ndarray)
        else v
        for k, v in table.items()
    }


def write_json(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def write_torch(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def write_safetensors(path: Path, table: dict[str, Any]) -> Path:
    arrays = {
        name: np.ascontiguousarray(value)  # safetensors writes views wrongly
        for name, value in table.items()
        if isinstance(value, np.ndarray) and value.dtype != object
    }
    path.write_bytes(safetensors.numpy.save(arrays))
    return path


def write_parquet(path: Path, table: dict[str, Any]) -> Path:
    rows = pyarrow.Table.from_pylist(
        [{k: v for k, v in row.items() if v != {}} for row in rows_of(table)]
    )
    pyarrow.parquet.write_table(rows, path, row_group_size=4, write_page_checksum=True)
    return path


def write(path: Path, container: str, table: dict[str, Any]) -> Path:
    """A file of a kind: rows or a whole batch of JSON lines, torch, safetensors or parquet."""
    if container == "torch":
        return write_torch(path, tensors(table))
    if container == "safetensors":
        return write_safetensors(path, table)
    if container == "parquet":
        return write_parquet(path, table)
    return write_json(path, rows_of(table) if container == "rows" else [listed(table)])


# What was read ----------------------------------------------------------------------------------


def same(found: list[Rollout], wanted: list[Rollout], *without: str) -> None:
    """All fields are equal, groups as the same partition: not every format names them."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for name in ("token_ids", "loss_mask", "old_logprobs", "reference_logprobs"):
            if name not in without:
                a, b = getattr(one, name), getattr(other, name)
                assert a is not None and b is not None, name
                np.testing.assert_allclose(
                    np.where(other.loss_mask, a, 0) if name.endswith("logprobs") else a,
                    np.where(other.loss_mask, b, 0) if name.endswith("logprobs") else b,
                    rtol=0,
                    atol=0,
                    err_msg=name,
                )
        if "advantage" not in without:
            assert one.advantage == other.advantage
    groups = RolloutBatch(replace(r, rollout_id=None) for r in found).group_index
    assert groups.tolist() == RolloutBatch(wanted).group_index.tolist()
