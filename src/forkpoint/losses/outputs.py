"""Outputs of a model's head: log-probs and entropies of a policy, or values of a critic."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from forkpoint.errors import ConfigError

Head = Literal["logprobs", "values"]
"""Output for a token: a log-prob of a language model, or a value of a critic."""

MODELS: dict[Head, str] = {"logprobs": "a causal language model", "values": "a critic"}
REMEDIES: dict[Head, str] = {
    "logprobs": "wrap a causal language model for it",
    "values": "wrap a critic for it: transformers' AutoModelForTokenClassification with "
    "num_labels=1",
}


class PerToken:
    """Results of a head per token: tensors [T] by name.

    Reading a result that the model does not have raises ConfigError.
    """

    per_token: Mapping[str, Tensor]

    @property
    def logprobs(self) -> Tensor:
        """Log-prob of each token given the tokens before it, from a language model."""
        return self._of("logprobs")

    @property
    def entropies(self) -> Tensor | None:
        """Entropy (nats) of the distribution at each token; None unless requested."""
        return self.per_token.get("entropies")

    @property
    def values(self) -> Tensor:
        """Values of a critic: entry i is the value of the tokens before token i."""
        return self._of("values")

    def _of(self, name: Head) -> Tensor:
        if name not in self.per_token:
            other: Head = "values" if name == "logprobs" else "logprobs"
            raise ConfigError(
                f"{name} were asked for, but the model is {MODELS[other]}, which gives {other}; "
                f"use {other}, or {REMEDIES[name]}."
            )
        return self.per_token[name]


class LossOutputs(PerToken):
    """Outputs of the model for the T tokens of a view: float32 or float64 [T].

    Entries outside the loss mask are 0.

    logprobs: log-probs of a language model, with a graph.
    entropies: entropies of a language model, with a graph; None unless the loss has
        `needs_entropy`.
    values: values of a critic, with a graph.

    Reading log-probs of a critic, or values of a language model, raises ConfigError.
    """

    def __init__(self, **per_token: Tensor | None) -> None:
        """`per_token`: the outputs above, and results of Config(head_statistics=...), which have no
        graph. None is dropped."""
        self.per_token: Mapping[str, Tensor] = {
            name: value for name, value in per_token.items() if value is not None
        }
