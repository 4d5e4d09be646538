"""A head whose vocabulary lies on several ranks: each has some of its rows, and none gathers them.

Every rank computes what a softmax over its own logits needs, and three numbers per token are
combined: the largest logit, the sum of exponentials, and the label's logit, which one rank has; for
the entropy a fourth. So no rank sees the logits of another. (As in Megatron-LM, arXiv 1909.08053,
section 3, which computes the cross-entropy this way.)
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The rows of a head that this rank has, of those that a group of ranks has together.

    All ranks of the group compute the same tokens at the same time.
    """

    group: dist.ProcessGroup
    start: int
    """The vocabulary entry of the first row here."""

    def combine(
        self,
        labels_T: Tensor,
        vocab: int,
        logprobs_T: Tensor,
        max_T: Tensor,
        sum_T: Tensor,
        entropies_T: Tensor | None,
    ) -> None:
        """Replace numbers of this rank's logits by those of all ranks. Collective.

        Args:
            labels_T: int64 [T], counted from this rank's first row; outside of [0, vocab) they are
                another rank's.
            vocab: rows here; 0 where the others have all.
            logprobs_T: of the labels under the softmax of this rank's logits; not read where the
                label is another rank's.
            max_T: largest logits.
            sum_T: sums of exp(logit - max).
            entropies_T: of the softmax of this rank's logits, or None.
        """
        if not len(labels_T):
            return
        inside_T = (labels_T >= 0) & (labels_T < vocab)
        # A rank all of whose entries are masked, or that has none, takes no part.
        there_T = max_T > -torch.inf
        largest_T = max_T.clone()
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=self.group)
        shift_T = torch.where(there_T, max_T - largest_T, 0)
        share_T = torch.where(there_T, sum_T * shift_T.exp(), 0)
        logs_T = torch.where(there_T, sum_T, 1).log()
        label_T = torch.where(inside_T, logprobs_T + logs_T + shift_T, 0)
        found = [share_T, label_T]
        if entropies_T is not None:
            # The mean of logit - max under this rank's softmax is its log-sum less its entropy.
            found.append(torch.where(there_T, share_T * (logs_T - entropies_T + shift_T), 0))
        sums = torch.stack(found)
        dist.all_reduce(sums, group=self.group)
        max_T.copy_(largest_T)
        sum_T.copy_(sums[0])
        torch.sub(sums[1], sums[0].log(), out=logprobs_T)
        if entropies_T is not None:
            torch.sub(sums[0].log(), sums[2] / sums[0], out=entropies_T)
