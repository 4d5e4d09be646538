"""Evidence that a model computes here what it computes by itself, on a small sample.

The lists of what is refused (`hosts.refusals`) name what is known to go wrong. A sample finds out
what they do not name. Three short sequences that share tokens, cut from the batch, run through the
stock model as its user would call it, and through forkpoint in microbatches that part at every
fork. Log-probs (a critic's values) must agree within what rounding does to this very model, which
is measured by a stock run whose embeddings are off by a rounding.
"""

from collections.abc import Callable, Hashable

import numpy as np
import torch

from forkpoint.config import Config
from forkpoint.engine.host import Host
from forkpoint.engine.transaction import Transaction
from forkpoint.errors import UnsupportedError
from forkpoint.rollouts.batch import Rollout, RolloutBatch
from forkpoint.step.sampler import SampleComparison, StockComparison, keep_random_state
from forkpoint.step.weight_changes import OptimizerSteps

WIDTH_TOKENS = 160
"""The longest sequence of a sample."""
LEAST_TOKENS = 8
"""Shorter rollouts are continued to this length."""
MOST_STATES = 64
"""States of a model, such as training and evaluation, that are remembered as checked."""


class SampleChecks:
    """Self-checks of one model: before its first step, its second, and the first after a change.

    At the second step weights have moved: values that a hook derives from them are then renewed.
    """

    def __init__(self) -> None:
        self._agreed: dict[Hashable, list[tuple[int, int]]] = {}
        """By state of the model: at which versions of its weights its sample has agreed."""
        self._steps: OptimizerSteps | None = None

    def run(
        self,
        transaction: Transaction,
        host: Host,
        config: Config,
        batch: RolloutBatch,
        fingerprint: int,
        *,
        training: bool,
        on_any_rank: Callable[[bool], bool],
    ) -> None:
        """Compare the model on a sample of a batch, and remember that it has agreed.

        Raises as `self_check`, whose arguments are given.
        """
        state, version = self._state(host, config, fingerprint, training=training)
        self_check(transaction, host, config, batch, training=training, on_any_rank=on_any_rank)
        self._agreed[state] = [*self._agreed.get(state, []), version]
        while len(self._agreed) > MOST_STATES:
            self._agreed.pop(next(iter(self._agreed)))

    def is_due(self, host: Host, config: Config, fingerprint: int, *, training: bool) -> bool:
        """Whether the model is to be compared on this rank."""
        if not config.self_check:
            return False
        state, version = self._state(host, config, fingerprint, training=training)
        versions = self._agreed.get(state, [])
        return len(versions) < 2 and version not in versions

    def _state(
        self, host: Host, config: Config, fingerprint: int, *, training: bool
    ) -> tuple[Hashable, tuple[int, int]]:
        """The state of the model, and the version of its weights."""
        kind = host.device.type
        state = (
            fingerprint,
            training,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            config.attention_kernel,
            config.recurrence_kernel,
        )
        weights = [p for _, p in host.named_parameters() if not p.is_inference()]
        if self._steps is None:
            self._steps = OptimizerSteps(weights)
        return state, (sum(p._version for p in weights), self._steps.count)


def self_check(
    transaction: Transaction,
    host: Host,
    config: Config,
    batch: RolloutBatch,
    *,
    training: bool,
    on_any_rank: Callable[[bool], bool] = bool,
) -> SampleComparison:
    """Compare forkpoint with the stock model on a sample of a batch.

    Args:
        transaction: the one whose `run` calls this; what is changed meanwhile is undone.
        host: the model.
        config: its kernels are used.
        batch: the sample's tokens are taken from it.
        training: whether forwards record a graph, as those of a step do.
        on_any_rank: tells the other ranks whether this one differs, and gives whether any does:
            forwards that look for the place may be collective. By default there are no others.

    Raises UnsupportedError where the two part, or where the stock model does not agree with itself.
    The message names the largest difference and the layer. Random generators are left as they were.
    """
    mark = transaction.changes.mark
    comparison = StockComparison(transaction, host, config, sample_of(batch), training)
    keep_random_state(host.device, transaction.changes)
    # Microbatches come first: a stock forward may renew what a hook derives from parameters,
    # such as the weight of a head under weight normalisation, and so hide that these do not.
    shared = comparison.shared()
    found = comparison.compared(shared)
    differs = not found.difference <= found.allowed  # NaN as well
    parting = comparison.parting() if on_any_rank(differs) else ""
    if found.repeated > found.allowed:
        raise UnsupportedError(
            f"the model does not agree with itself: on a sample of {found.tokens} tokens its "
            f"{host.head} differ by {found.repeated:.3g} (root mean square) between sequences "
            f"run one at a time and all at once, where rounding in {found.dtype} explains at "
            f"most {found.allowed:.3g}. It draws random numbers, or mixes the sequences of a "
            "batch, so a shared token has no one value. Remove what does that (a hook, a "
            "random module), or call model.eval()."
        )
    if found.elsewhere > found.allowed_elsewhere:
        raise UnsupportedError(
            f"on a sample of {found.tokens} tokens the model by itself sends {found.elsewhere:.2%} "
            "of them to other experts than forkpoint does, where rounding explains at most "
            f"{found.allowed_elsewhere:.2%}. Something changes what its routers compute, such as a "
            "patched function or a hook. Undo it. If the difference is meant to be, "
            "Config(self_check=False) turns this check off."
        )
    if differs:
        raise UnsupportedError(
            f"on a sample of {found.tokens} tokens forkpoint's {host.head} are not the "
            f"model's own: they differ by {found.difference:.3g} (root mean square), where "
            f"rounding in {found.dtype} explains at most {found.allowed:.3g}, and by "
            f"{found.largest:.3g} at {found.where}. Outputs part at {parting}. "
            "Something changes what the model computes that forkpoint does not run, or runs "
            "differently, such as a patched function, a hook or a changed module. Undo it. "
            "If the difference is meant to be, Config(self_check=False) turns this check off."
        )
    transaction.changes.undo(mark)
    return found


def sample_of(batch: RolloutBatch) -> RolloutBatch:
    """Three sequences of one length, cut from a batch: two share three quarters, all share half.

    The tokens that all share are not trained, so that their microbatch ends without a head as
    prompts do; all others are.
    """
    longest = int(np.argmax(batch.lengths))
    trunk = batch.token_ids[batch.offsets[longest] : batch.offsets[longest + 1]]
    width = min(len(trunk), WIDTH_TOKENS)
    if width < LEAST_TOKENS:
        trunk, width = np.resize(trunk, LEAST_TOKENS), LEAST_TOKENS
    known = np.unique(batch.token_ids)
    # A text of one token only: with 0 and 1 there are two.
    known = known if len(known) > 1 else np.array([0, 1])
    sequences = [trunk[:width]]
    for fork, donor in ((width * 3 // 4, -1), (width // 2, 0)):
        tail = np.resize(batch.token_ids[:: -1 if donor else 1], width - fork)
        if tail[0] == trunk[fork]:
            tail[0] = known[known != trunk[fork]][0]
        sequences.append(np.concatenate([trunk[:fork], tail]))
    mask = np.arange(width) > width // 2
    return RolloutBatch(Rollout(ids, mask, 0.0) for ids in sequences)
