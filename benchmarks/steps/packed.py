"""Two other ways to run equal tokens once: PrefixGrouper, and a tree in one row under a mask.

Both run one group a microbatch, through the stock model of transformers, with its head on the
positions that predict trained tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from forkpoint.rollouts.batch import RolloutBatch

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """Rollouts in one row, every token after those before it in any rollout.

    ids_T, depths_T: tokens, and their positions in their rollouts.
    ends_T: one past the last token of the row that comes after a token in a rollout of its own.
    places: for each rollout where its tokens are.
    """

    ids_T: IntArray
    depths_T: IntArray
    ends_T: IntArray
    places: list[IntArray]

    def sees(self, q: Any, k: Any, ends_T: Any) -> Any:
        """Whether token q sees token k, which is itself or comes before it in a rollout."""
        return (k <= q) & (q < ends_T[k])


def packed(rollouts: list[IntArray]) -> Packed:
    """The tree of rollouts in the order of a walk that goes down first."""
    order = sorted(range(len(rollouts)), key=lambda n: rollouts[n].tolist())
    places: list[IntArray] = [np.zeros(0, np.int64)] * len(rollouts)
    ids, depths, length = [], [], 0
    before = ids_before = np.zeros(0, np.int64)
    for n in order:
        tokens = rollouts[n]
        common = min(len(tokens), len(ids_before))
        differ = np.flatnonzero(tokens[:common] != ids_before[:common])
        same = int(differ[0]) if len(differ) else common
        new = np.arange(length, length + len(tokens) - same)
        places[n] = np.concatenate([before[:same], new])
        ids.append(tokens[same:])
        depths.append(np.arange(same, len(tokens)))
        length += len(new)
        before, ids_before = places[n], tokens
    ends_T = np.zeros(length, np.int64)
    for place in places:
        ends_T[place] = np.maximum(ends_T[place], place[-1] + 1)
    return Packed(np.concatenate(ids), np.concatenate(depths), ends_T, places)


def tree_step(model: Any, device: torch.device) -> Callable[[RolloutBatch], None]:
    """An update with each group as one row: FlexAttention on a GPU, sdpa elsewhere.

    FlexAttention has no backward on CPUs.
    """
    flex = device.type == "cuda"
    model.set_attn_implementation("flex_attention" if flex else "sdpa")
    return partial(_each_group, partial(_tree_logprobs, model, device, flex))


def grouper_step(model: Any, device: torch.device) -> Callable[[RolloutBatch], None]:
    """An update through the package PrefixGrouper, whose two calls of attention are torch's sdpa.

    The mask that it makes is of padding alone. Groups run one by one here, so that prompts have no
    padding, and padding after a response comes after all that its tokens see.
    """
    transformers = import_module("transformers")
    transformers.AttentionInterface.register("prefix_grouper", _grouped_attention)
    model.set_attn_implementation("prefix_grouper")
    return partial(_each_group, partial(_grouper_logprobs, model, device))


def _each_group(logprobs_of: Callable[[RolloutBatch], Tensor], batch: RolloutBatch) -> None:
    """The policy gradient, group by group, of the log-probs of trained tokens in their order."""
    trained = int(batch.loss_mask.sum())
    for rows in batch.groups():
        group = batch.select(rows)
        logprobs = logprobs_of(group)
        advantages = torch.as_tensor(
            group.advantages[group.loss_mask], dtype=logprobs.dtype, device=logprobs.device
        )
        (-(advantages * logprobs).sum() / trained).backward()


def _chosen(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """The log-prob of a token for each row of logits, at least in float32."""
    wide = logits_NV if logits_NV.dtype is torch.float64 else logits_NV.float()
    return wide.log_softmax(-1).gather(-1, ids_N[:, None])[:, 0]


def _tree_logprobs(model: Any, device: torch.device, flex: bool, group: RolloutBatch) -> Tensor:
    row = packed([rollout.token_ids for rollout in group])
    ends_T = torch.as_tensor(row.ends_T, device=device)
    length = len(row.ids_T)
    if flex:
        create = import_module("torch.nn.attention.flex_attention").create_block_mask
        # Compiled, for otherwise a mask of [T, T] is written out.
        mask = create(
            lambda b, h, q, k: row.sees(q, k, ends_T),
            *(None, None, length, length, device),
            _compile=True,
        )
    else:
        at = torch.arange(length, device=device)
        mask = row.sees(at[:, None], at[None], ends_T)[None, None]
    masks = [np.flatnonzero(rollout.loss_mask) for rollout in group]
    before = [place[mask - 1] for place, mask in zip(row.places, masks, strict=True)]
    logits_1NV = model(
        input_ids=torch.as_tensor(row.ids_T, device=device)[None],
        position_ids=torch.as_tensor(row.depths_T, device=device)[None],
        attention_mask=mask,
        use_cache=False,
        logits_to_keep=torch.as_tensor(np.concatenate(before), device=device),
    ).logits
    ids_N = torch.as_tensor(group.token_ids[group.loss_mask], device=device)
    return _chosen(logits_1NV[0], ids_N)


def _grouper_logprobs(model: Any, device: torch.device, group: RolloutBatch) -> Tensor:
    prompt = min(int(np.flatnonzero(rollout.loss_mask)[0]) for rollout in group)
    responses = [torch.tensor(rollout.token_ids[prompt:]) for rollout in group]
    lengths = torch.tensor([len(ids) for ids in responses])
    ids_NR = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True).to(device)
    mask_NR = (torch.arange(ids_NR.shape[1]) < lengths[:, None]).to(device)
    ids_1P = torch.tensor(group[0].token_ids[:prompt], device=device)[None]
    mask_1P = torch.ones_like(ids_1P, dtype=torch.bool)
    grouper = import_module("prefix_grouper").PrefixGrouper.from_ungrouped_masks(
        mask_1P, mask_NR, len(group), device=device
    )
    positions = [torch.arange(prompt), *(prompt + torch.arange(int(n)) for n in lengths)]
    hidden_1TD = model.model(
        input_ids=grouper.concat_input(ids_1P, mask_1P, ids_NR, mask_NR),
        position_ids=torch.cat(positions).to(device)[None],
        use_cache=False,
        prefix_grouper=grouper,
    ).last_hidden_state
    _, _, hidden_NRD, _ = grouper.split_output(hidden_1TD, include_prefix_last=1)
    # The last token of the prompt comes first in each row, and predicts the first of a response.
    trained = [torch.tensor(rollout.loss_mask[prompt:]) for rollout in group]
    trained_NR = torch.nn.utils.rnn.pad_sequence(trained, batch_first=True).to(device)
    logits_NV = model.lm_head(hidden_NRD[:, :-1][trained_NR])
    return _chosen(logits_NV, ids_NR[trained_NR])


def _grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    prefix_grouper: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    del module, attention_mask
    return prefix_grouper.forward(_attend, query, key, value, scale=scaling), None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Causal attention of the last tokens of the keys, [B, H, L, D] to [B, L, H, D]."""
    del mask
    causal: Any = causal_lower_right(q.shape[2], k.shape[2])
    found = scaled_dot_product_attention(q, k, v, causal, scale=scale, enable_gqa=True)
    return found.transpose(1, 2)
