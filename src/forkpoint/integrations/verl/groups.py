"""Check that mini-batches of each rank have all rollouts of a prompt."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.parallel.agreement import group_digests
from forkpoint.plan import Plan
from forkpoint.rollouts.batch import RolloutBatch

LEAST_SAVED = 0.1
"""Smallest share of tokens that a mini-batch saves without a warning."""
LOOKED_AT = 8
"""Number of mini-batches that are checked at the start of a run."""


@dataclass(frozen=True)
class RankPart:
    """Part of one rank in a mini-batch.

    prompts: a number for each prompt, equal on all ranks.
    given, computed: tokens of rollouts that give gradients, and tokens that run. The last token of
        a rollout is never run, and does not count.
    exchanged: whether ranks exchange prompts that several of them have.
    """

    prompts: frozenset[int]
    given: int
    computed: int
    exchanged: bool = False

    @classmethod
    def of(cls, batch: RolloutBatch, plan: Plan) -> "RankPart":
        """Make the part from rollouts and their plan."""
        prompts = frozenset(int(x) for x in group_digests(batch))
        return cls(prompts, plan.dense.tokens, plan.computed_tokens, plan.split == "exchange")


def sharing_message(parts: Sequence[RankPart]) -> str | None:
    """Warning for a mini-batch that shares less than possible; None if there is no reason for
    one."""
    homes = Counter(prompt for part in parts for prompt in part.prompts)
    spread = sum(count > 1 for count in homes.values())
    # Exchanged prompts run on one rank only.
    if spread and not any(part.exchanged for part in parts):
        return (
            f"{spread} of {len(homes)} prompts of a mini-batch have rollouts on several ranks, and "
            "run on each: set VERL_USE_EXTERNAL_MODULES=forkpoint.integrations.verl.trainers and "
            "trainer.v1.trainer_mode=forkpoint_sync, or trainer.use_v1=false and "
            "actor_rollout_ref.actor.use_prefix_grouper=true (the prompts of a batch must be a "
            "multiple of the ranks). See docs/start/verl.md."
        )
    given, computed = sum(part.given for part in parts), sum(part.computed for part in parts)
    if given > 0 and computed > (1 - LEAST_SAVED) * given:
        return (
            f"a mini-batch shares little: {computed:,} of its {given:,} tokens run "
            f"({computed / given:.0%}). Possible causes: prompts are shorter than responses, "
            "actor_rollout_ref.rollout.n is small, groups are scattered over mini-batches (set "
            "actor.shuffle and critic.shuffle to false), or [config] sharing is none."
        )
    return None
