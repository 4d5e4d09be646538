"""Log-probs and entropies of chosen tokens from hidden states, with few logits alive at a time."""

from forkpoint.ops.head.logprobs import token_outputs
from forkpoint.ops.head.vocabulary import VocabularyShard

__all__ = ["VocabularyShard", "token_outputs"]
