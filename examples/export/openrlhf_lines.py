"""Writes OpenRLHF's Experience, or a list of them, from torch.save as forkpoint's JSON lines.

Run it where OpenRLHF is installed: python openrlhf_lines.py EXPERIENCE.pt OUT.jsonl. Such a file
can run code when it is loaded, so trust it.
"""

import json
import sys
from pathlib import Path

import torch

NAMES = {"advantages": "advantage", "action_log_probs": "old_logprobs",
         "base_action_log_probs": "reference_logprobs", "action_mask": "loss_mask"}  # fmt: skip
loaded = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
lines = []
for experience in loaded if isinstance(loaded, list) else [loaded]:
    for n, ids in enumerate(experience.sequences):
        real = experience.attention_mask[n].bool()
        line = {"token_ids": ids[real].tolist()}
        for name, ours in NAMES.items():
            if getattr(experience, name) is not None:
                row = getattr(experience, name)[n]  # of the last tokens
                row = torch.cat([row.new_zeros(len(ids) - len(row)), row])
                line[ours] = row[real].tolist()
        lines.append(json.dumps(line) + "\n")
Path(sys.argv[2]).write_text("".join(lines))
