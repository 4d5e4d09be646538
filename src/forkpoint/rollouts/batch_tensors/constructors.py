"""The methods of a batch that take and give tensors."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from numpy.typing import ArrayLike

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch_tensors.columns import Columns, Fields
from forkpoint.rollouts.batch_tensors.layout import PaddedLayout
from forkpoint.rollouts.batch_tensors.readers import read_completions, read_jagged, read_padded

Ids = ArrayLike | Sequence[str | int | None]
"""Ids of rollouts or groups, [N]."""


class FromTensors:
    """Methods that RolloutBatch inherits: it is made from tensors, and values are padded as they
    were.

    layout: the cells of the tensors [N, W] that the batch was made from.
    completion_layout: the cells of the completions' tensors [N, C], or None.
    """

    __slots__ = ()

    layout: PaddedLayout
    completion_layout: PaddedLayout | None

    @classmethod
    @abstractmethod
    def _of_columns(cls, columns: Columns) -> Self:
        """The batch of these arrays."""

    @classmethod
    def from_padded(
        cls,
        input_ids: ArrayLike,
        attention_mask: ArrayLike,
        loss_mask: ArrayLike,
        *,
        advantages: ArrayLike | None = None,
        old_logprobs: ArrayLike | None = None,
        reference_logprobs: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        returns: ArrayLike | None = None,
        old_values: ArrayLike | None = None,
        temperatures: ArrayLike | None = None,
        group_ids: Ids | None = None,
        rollout_ids: Ids | None = None,
        extras: Sequence[dict[str, Any] | None] | None = None,
    ) -> Self:
        """A batch of the rows of padded tensors [N, W]; padding may be on both sides of a row.

        Torch tensors of any device, numpy arrays and lists of rows are taken, of the types that
        Rollout takes. A tensor is copied to the host once, without its graph. Values at padding are
        not read, whichever id the padding has; those of tokens have the meaning and the limits that
        they have in Rollout.

        input_ids: [N, W]. Prompts and responses.
        attention_mask: [N, W]; 1 for tokens, 0 for padding. The tokens of a row are neighbours.
        loss_mask: [N, W]; 1 for trained tokens, 0 for others and for padding.
        advantages, weights, returns: [N, W]; or [N] or [N, 1], one number per rollout; or a single
            number for all. Without advantages `has_advantages` is False.
        old_logprobs, reference_logprobs, old_values: [N, W]; the entry at a token belongs to it.
        temperatures: [N], or a single number; 1 if left out.
        group_ids: [N] texts or whole numbers. Rollouts without one form a group where their prompts
            are equal, a prompt being the tokens before the first trained one.
        rollout_ids: [N] texts or whole numbers, all different; positions if left out.
        extras: N dicts or None.

        Raises RolloutError where a value or a shape is not allowed, for rows without tokens, for
        padding between tokens, and for padding that is trained.
        """
        fields = Fields(
            advantages=advantages,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            weights=weights,
            returns=returns,
            old_values=old_values,
            temperatures=temperatures,
            group_ids=group_ids,
            rollout_ids=rollout_ids,
            extras=extras,
        )
        return cls._of_columns(read_padded(input_ids, attention_mask, loss_mask, fields))

    @classmethod
    def from_completions(
        cls,
        prompt_ids: ArrayLike,
        prompt_mask: ArrayLike,
        completion_ids: ArrayLike,
        completion_mask: ArrayLike,
        *,
        loss_mask: ArrayLike | None = None,
        tool_mask: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        old_logprobs: ArrayLike | None = None,
        reference_logprobs: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        returns: ArrayLike | None = None,
        old_values: ArrayLike | None = None,
        temperatures: ArrayLike | None = None,
        group_ids: Ids | None = None,
        rollout_ids: Ids | None = None,
        extras: Sequence[dict[str, Any] | None] | None = None,
    ) -> Self:
        """A batch of prompts [N, P] and completions [N, C], padded on their own, as TRL has them.

        Per-token fields are over the completions, [N, C]; their prompts' entries in the batch are
        0. What is not said here is as in `from_padded`.

        prompt_ids, prompt_mask: [N, P]; prompt n is repeated for each of its completions.
        completion_ids, completion_mask: [N, C]; 1 for tokens, those of tools included. A
            completion without tokens is a rollout of its prompt, with nothing trained.
        loss_mask: [N, C]; 1 for trained tokens. Without it all tokens of completions are trained.
        tool_mask: [N, C], in place of loss_mask; 0 for tokens of tools. It is not read at padding,
            where TRL has 1.
        group_ids: [N], or None: then equal prompts form a group, whatever is trained. Where loss
            masks that begin late would hide that, rollouts get group_ids that stand for prompts.

        Raises RolloutError as `from_padded` does, and where loss_mask and tool_mask are both given.
        """
        fields = Fields(
            advantages=advantages,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            weights=weights,
            returns=returns,
            old_values=old_values,
            temperatures=temperatures,
            group_ids=group_ids,
            rollout_ids=rollout_ids,
            extras=extras,
        )
        ids = (prompt_ids, prompt_mask, completion_ids, completion_mask)
        return cls._of_columns(read_completions(*ids, loss_mask, tool_mask, fields))

    @classmethod
    def from_jagged(
        cls,
        input_ids: Any,
        loss_mask: Any,
        *,
        offsets: ArrayLike | None = None,
        response_lengths: ArrayLike | None = None,
        advantages: Any = None,
        old_logprobs: Any = None,
        reference_logprobs: Any = None,
        weights: Any = None,
        returns: Any = None,
        old_values: Any = None,
        temperatures: ArrayLike | None = None,
        group_ids: Ids | None = None,
        rollout_ids: Ids | None = None,
        extras: Sequence[dict[str, Any] | None] | None = None,
    ) -> Self:
        """A batch of rows of different lengths without padding: nested tensors, as verl has them.

        Per-token fields are nested tensors [N, j] of either layout, lists of N rows, or flat values
        [T], back to back. What is not said here is as in `from_padded`.

        input_ids: prompts and responses: nested, a list of rows, or flat values with `offsets`.
        loss_mask: as long as input_ids; 1 for trained tokens.
        offsets: [N + 1], where input_ids are flat: the starts of the rollouts, and T.
        response_lengths: [N], tokens of the responses, where loss_mask and the other per-token
            fields are over these alone, as verl's `response_mask` is; responses come last. For
            verl's nested responses it is `responses.offsets().diff()`. Groups are then formed by
            prompts as in `from_completions`.

        Raises RolloutError as `from_padded` does, and where lengths do not fit.
        """
        fields = Fields(
            advantages=advantages,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            weights=weights,
            returns=returns,
            old_values=old_values,
            temperatures=temperatures,
            group_ids=group_ids,
            rollout_ids=rollout_ids,
            extras=extras,
        )
        return cls._of_columns(read_jagged(input_ids, loss_mask, offsets, response_lengths, fields))

    def to_padded(self, values: Any, *, fill: float = 0) -> Any:
        """Per-token values in the cells of the tensors that the batch was made from: [N, W].

        A batch from `from_completions` has W = P + C: prompts, then completions, as in
        `torch.cat([prompt_ids, completion_ids], 1)`. One from rollouts or jagged tensors is padded
        on the right to the longest rollout.

        values: [T] over the batch's tokens in their order, such as `scores.logprobs`, or [T, ...];
            a torch tensor, a numpy array or a list.
        fill: the number at padding, one that the dtype has.

        Returns [N, W, ...] of the same dtype: for a torch tensor one on its device, with a graph to
        it, otherwise a numpy array.

        Raises RolloutError for values of another length, ConfigError for a fill that they cannot
        be.
        """
        return self.layout.pad(values, fill)

    def to_completions(self, values: Any, *, fill: float = 0) -> Any:
        """Per-token values in the cells of the completions' tensors: [N, C]; else as `to_padded`.

        Values of prompts are left out. Completions of a batch from `from_jagged` are those of
        `response_lengths`, padded on the right.

        Raises also RolloutError for a batch that was not given its completions apart.
        """
        if self.completion_layout is None:
            raise RolloutError(
                "The batch has no completions apart from prompts: it was not made by "
                "from_completions, or by from_jagged with response_lengths. Use to_padded."
            )
        return self.completion_layout.pad(values, fill)
