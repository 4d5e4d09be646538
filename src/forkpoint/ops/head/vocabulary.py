"""A head whose vocabulary is split over ranks by rows, which are not gathered.

Every rank computes softmax statistics of its own logits. Three numbers per token are combined over
ranks: the largest logit, the sum of exponentials, and the label's logit, which one rank has; a
fourth for the entropy. Logits are not exchanged. (Megatron-LM, arXiv 1909.08053, section 3,
computes the cross-entropy this way.)
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """This rank's rows of a head that is split over a group of ranks.

    All ranks of the group compute the same tokens at the same time.
    """

    group: dist.ProcessGroup
    start: int
    """The vocabulary entry of this rank's first row."""

    def combine(
        self,
        labels_T: Tensor,
        vocab: int,
        logprobs_T: Tensor,
        max_T: Tensor,
        sum_T: Tensor,
        entropies_T: Tensor | None,
    ) -> None:
        """Replace statistics of this rank's logits by those of all ranks' logits, in place.
        Collective.

        Args:
            labels_T: int64 [T], relative to this rank's first row. Labels outside of [0, vocab) are
                other ranks'.
            vocab: number of this rank's rows; 0 if other ranks have all.
            logprobs_T: log-probs of labels under the softmax of this rank's logits. Not read for
                labels of other ranks.
            max_T: largest logits.
            sum_T: sums of exp(logit - max).
            entropies_T: entropies of the softmax of this rank's logits, or None.
        """
        if not len(labels_T):
            return
        inside_T = (labels_T >= 0) & (labels_T < vocab)
        # A rank contributes nothing if it has no rows, or if all of its entries are masked.
        there_T = max_T > -torch.inf
        largest_T = max_T.clone()
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=self.group)
        shift_T = torch.where(there_T, max_T - largest_T, 0)
        share_T = torch.where(there_T, sum_T * shift_T.exp(), 0)
        logs_T = torch.where(there_T, sum_T, 1).log()
        label_T = torch.where(inside_T, logprobs_T + logs_T + shift_T, 0)
        found = [share_T, label_T]
        if entropies_T is not None:
            # The mean of logit - max under this rank's softmax is log(sum) minus the entropy.
            found.append(torch.where(there_T, share_T * (logs_T - entropies_T + shift_T), 0))
        sums = torch.stack(found)
        dist.all_reduce(sums, group=self.group)
        max_T.copy_(largest_T)
        sum_T.copy_(sums[0])
        torch.sub(sums[1], sums[0].log(), out=logprobs_T)
        if entropies_T is not None:
            torch.sub(sums[0].log(), sums[2] / sums[0], out=entropies_T)
