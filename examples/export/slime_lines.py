"""Writes what slime's save_debug_rollout_data saved as forkpoint's JSON lines.

Run it where slime is installed: python slime_lines.py ROLLOUTS.pt OUT.jsonl. Such a file can run
code when it is loaded, so trust it. Advantages are rewards, normalised within their group.
"""

import json
import statistics
import sys
from pathlib import Path

import torch

samples = torch.load(sys.argv[1], map_location="cpu", weights_only=False)["samples"]
groups, lines = {}, []
for sample in samples:
    groups.setdefault(sample["group_index"], []).append(float(sample["reward"]))
for sample in samples:
    rewards, count = groups[sample["group_index"]], sample["response_length"]
    before = [0] * (len(sample["tokens"]) - count)
    spread = statistics.pstdev(rewards)
    above = float(sample["reward"]) - statistics.fmean(rewards)
    line = {"token_ids": list(map(int, sample["tokens"])), "group_id": str(sample["group_index"]),
            "loss_mask": before + list(map(int, sample["loss_mask"] or [1] * count)),
            "advantage": above / spread if spread else 0.0}  # fmt: skip
    if sample.get("rollout_log_probs") is not None:
        line["old_logprobs"] = before + list(map(float, sample["rollout_log_probs"]))
    lines.append(json.dumps(line) + "\n")
Path(sys.argv[2]).write_text("".join(lines))
