"""Writes the messages of prime-rl's rollouts, rollouts/step_N/rank_R.bin, as JSON lines.

Run it where prime-rl is installed: python prime_rl_lines.py rank_0.bin OUT.jsonl. A message has
its fields by place, and prime-rl's own class says which place is which field.
"""

import json
import sys
from pathlib import Path

import msgspec
from prime_rl.transports.rollouts.types import MicroBatch

COLUMNS = {"token_ids": "input_ids", "loss_mask": "loss_mask", "advantage": "advantages",
           "old_logprobs": "inference_logprobs", "reference_logprobs": "ref_logprobs",
           "weights": "rl_weights"}  # fmt: skip
with Path(sys.argv[2]).open("w") as file:
    for batch in msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=list[MicroBatch]):
        starts = [n for n, position in enumerate(batch.position_ids) if position == 0]
        for begin, end in zip(starts, [*starts[1:], len(batch.input_ids)], strict=True):
            line = {name: values[begin:end] for name, column in COLUMNS.items()
                    if (values := getattr(batch, column)) is not None}  # fmt: skip
            trained = [n for n in range(begin, end) if batch.loss_mask[n]]
            if trained and batch.mm_kwargs is None:
                line["temperature"] = batch.temperatures[trained[0]]
                file.write(json.dumps(line) + "\n")
