"""verl's newer trainers (`trainer.use_v1`) with whole groups on each rank.

verl imports this module if `VERL_USE_EXTERNAL_MODULES=forkpoint.integrations.verl.trainers` is set.
`trainer.v1.trainer_mode` selects a trainer: `forkpoint_sync` is verl's `sync` with whole groups,
and likewise for the other modes. verl balances single rollouts; these trainers place whole prompts
(`place_groups`). The rest is code of verl.
"""

import logging
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

_log = logging.getLogger("forkpoint")

PREFIX = "forkpoint_"
SPLIT = (
    "{split} of {prompts} prompts of a batch have rollouts on several ranks, since {rows} rollouts "
    "on {ranks} ranks leave no room for them whole. Let data.train_batch_size be a multiple of the "
    "ranks, and actor_rollout_ref.actor.ppo_mini_batch_size as well."
)


@dataclass(frozen=True)
class Placement:
    """Rows of each rank, the same number on each, and the prompts with rows on several ranks."""

    ranks: list[list[int]]
    split: list[Hashable]


def place_groups(
    prompts: Sequence[Hashable],
    prompt_tokens: Sequence[int],
    response_tokens: Sequence[int],
    ranks: int,
) -> Placement:
    """Assign the same number of rows to each rank, and keep prompts whole where possible.

    Prompts with the most tokens are placed first. Each goes to the rank with the fewest tokens
    among those with room for all of its rows. Tokens of a prompt count once. Prompts that fit on no
    rank are split to fill the ranks. On each rank prompts keep their order, and rows of a prompt
    are adjacent, so that mini-batches do not depend on lengths.

    Args:
        prompts: prompt of each row.
        prompt_tokens, response_tokens: numbers of tokens of each row.
        ranks: number of ranks. It must divide the number of rows.

    Raises:
        ValueError: `ranks` does not divide the number of rows.
    """
    count = len(prompts)
    if count % ranks:
        raise ValueError(
            f"{count} rows cannot be placed evenly on {ranks} ranks. Let data.train_batch_size be "
            "a multiple of the ranks."
        )
    room = [count // ranks] * ranks
    tokens = [0] * ranks
    placed: list[list[list[int]]] = [[] for _ in range(ranks)]
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)

    def cost(rows: list[int]) -> int:
        return max(prompt_tokens[row] for row in rows) + sum(response_tokens[row] for row in rows)

    def give(rank: int, rows: list[int]) -> None:
        placed[rank].append(rows)
        room[rank] -= len(rows)
        tokens[rank] += cost(rows)

    left: list[tuple[Hashable, list[int]]] = []
    for prompt, rows in sorted(groups.items(), key=lambda group: -cost(group[1])):
        fitting = [rank for rank in range(ranks) if room[rank] >= len(rows)]
        if fitting:
            give(min(fitting, key=lambda rank: (tokens[rank], rank)), rows)
        else:
            left.append((prompt, rows))
    for _, rows in left:
        while rows:
            # Ranks with the most room first, so that a prompt is on few ranks.
            rank = max(range(ranks), key=lambda rank: (room[rank], -tokens[rank]))
            part, rows = rows[: room[rank]], rows[room[rank] :]
            give(rank, part)
    return Placement(
        [[row for rows in sorted(parts) for row in rows] for parts in placed],
        [prompt for prompt, _ in left],
    )


class WholeGroups:
    """Methods that replace those of verl's trainer."""

    MODE = ""
    """verl's name of the mode of the trainer."""
    config: Any
    actor_rollout_wg: Any

    def __init__(self, config: Any) -> None:
        # verl reads this name where modes differ.
        config.trainer.v1.trainer_mode = self.MODE
        self._told = False
        cast(Any, super()).__init__(config)
        _log.info("forkpoint places the rollouts of each prompt on one rank")

    def _balance_batch(
        self,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        """Balance a batch like verl, which pads it and logs metrics, and then place whole groups on
        ranks."""
        came = {key: number for number, key in enumerate(batch.keys)}
        batch = cast(Any, super())._balance_batch(
            batch, metrics, logging_prefix=logging_prefix, keep_minibatch=keep_minibatch
        )
        places = [came.get(key, len(came)) for key in batch.keys]
        batch.reorder(sorted(range(len(places)), key=lambda row: places[row]))
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        prompts = [key.split("_")[0] for key in batch.keys]
        lengths = [tag["seq_len"] for tag in batch.tags]
        heads = [tag["prompt_len"] for tag in batch.tags]
        tails = [whole - head for whole, head in zip(lengths, heads, strict=True)]
        placement = place_groups(prompts, heads, tails, ranks)
        if placement.split and not self._told:
            self._told = True
            _log.warning(
                SPLIT.format(
                    split=len(placement.split),
                    prompts=len(set(prompts)),
                    rows=len(prompts),
                    ranks=ranks,
                )
            )
        batch.reorder([row for rows in placement.ranks for row in rows])
        balancing = import_module("verl.utils.seqlen_balancing")
        metrics.update(
            balancing.log_seqlen_unbalance(
                seqlen_list=lengths, partitions=placement.ranks, prefix=logging_prefix
            )
        )
        return batch


def register() -> None:
    """Register the trainers with verl. It may be called twice."""
    trainers = import_module("verl.trainer.ppo.v1.trainer_base")
    import_module("verl.trainer.ppo.v1")
    for mode, trainer in list(trainers.TRAINER_REGISTRY.items()):
        name = PREFIX + mode
        if mode.startswith(PREFIX) or name in trainers.TRAINER_REGISTRY:
            continue
        made = type(
            f"WholeGroups{trainer.__name__}",
            (WholeGroups, trainer),
            {"MODE": mode, "__module__": __name__},
        )
        trainers.register_trainer(name)(made)


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    register()
