"""Sizes of one rank's part of a model that is split over ranks."""

from dataclasses import replace
from typing import Any

from forkpoint.errors import UnsupportedError
from forkpoint.plan.pricing.cost import ModelShape


def divided(
    shape: ModelShape,
    ranks: int,
    remedy: str,
    *,
    heads: bool = True,
    mlp: bool = True,
    experts: bool = True,
    vocab: bool = True,
) -> ModelShape:
    """The shape of one rank's part of a model. The parts that are True are divided by `ranks`.

    Raises UnsupportedError, with a remedy, if the heads cannot be divided evenly over the ranks.
    """
    changes: dict[str, Any] = {}
    if heads:
        for name, count in (("query", shape.heads), ("key-value", shape.kv_heads)):
            if count % ranks:
                raise UnsupportedError(
                    f"the model has {count} {name} heads, which {ranks} ranks cannot share evenly. "
                    f"{remedy}"
                )
        changes = {"heads": shape.heads // ranks, "kv_heads": shape.kv_heads // ranks}
        if shape.attention_parameters is not None:
            changes["attention_parameters"] = shape.attention_parameters // ranks
        changes["attention_activations"] = shape.attention_activations // ranks
    if experts:
        changes["expert_activations"] = shape.expert_activations // ranks
    if mlp:
        changes["intermediate"] = shape.intermediate // ranks
    if vocab:
        changes["vocab"] = -(-shape.vocab // ranks)
    return replace(shape, **changes)
