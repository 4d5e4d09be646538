"""Log-probs and entropies of chosen tokens from hidden states, with few logits alive at a time."""

from forkpoint.ops.head.logprobs import STATISTICS, token_outputs
from forkpoint.ops.head.vocabulary import VocabularyShard

__all__ = ["STATISTICS", "VocabularyShard", "token_outputs"]
