"""Writes a batch that verl's DataProto.save_to_disk pickled as forkpoint's JSON lines.

Run it where verl is installed: python verl_lines.py BATCH.pkl OUT.jsonl. A pickle can run code when
it is loaded, so trust the file.
"""

import json
import sys
from pathlib import Path

import torch
from verl import DataProto

NAMES = {"advantages": "advantage", "old_log_probs": "old_logprobs",
         "ref_log_prob": "reference_logprobs", "response_mask": "loss_mask"}  # fmt: skip
data = DataProto.load_from_disk(sys.argv[1])
batch, width = data.batch, data.batch["prompts"].shape[1]
lines = []
for n, uid in enumerate(data.non_tensor_batch["uid"]):
    real = batch["attention_mask"][n].bool()
    line = {"token_ids": batch["input_ids"][n][real].tolist(), "group_id": str(uid)}
    for name in NAMES.keys() & set(batch.keys()):
        row = batch[name][n]  # of the response alone
        line[NAMES[name]] = torch.cat([row.new_zeros(width), row])[real].tolist()
    if "temperature" in data.meta_info:
        line["temperature"] = float(data.meta_info["temperature"])
    lines.append(json.dumps(line) + "\n")
Path(sys.argv[2]).write_text("".join(lines))
