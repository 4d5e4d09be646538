"""Causal attention, rotary embeddings and media: a token depends on those before it alone."""

from typing import Any

import numpy as np
from transformers import PreTrainedModel

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.families import Family
from forkpoint.hosts.modules import every_module
from forkpoint.rollouts.batch import RolloutBatch

# Rotary embeddings whose frequencies depend on positions alone. Dynamic and longrope change them
# beyond a length, and are refused for longer rollouts; so are unknown ones.
LENGTH_FREE_ROPE = ("default", "linear", "llama3", "proportional", "yarn")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_causal(causal: PreTrainedModel) -> None:
    """No token sees later ones, as models that embed texts let them by their configuration."""
    # Neither name is in every configuration: any family's masks and modules heed the first where
    # it is there, and Gemma's the second.
    for name, wanted in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = getattr(causal.config, name, None)
        if value is not None and value is not wanted:
            raise UnsupportedError(
                f"the configuration has {name}={value!r}, so that tokens see those after them: a "
                "shared token would depend on what follows it in each rollout. Set it to "
                f"{wanted} if the model is meant to be causal."
            )
    if causal.config.return_dict is False:
        raise UnsupportedError(
            "the configuration has return_dict=False, with which the forward of transformers fails "
            "by itself ('tuple' object has no attribute 'last_hidden_state'). Set it to True; a "
            "call of the model may still ask for a tuple."
        )
    for name, module in every_module(causal):
        if vars(module).get("is_causal", True) is not True:
            raise UnsupportedError(
                f"{name} has is_causal={vars(module)['is_causal']!r}, so that tokens may see those "
                "after them; only causal attention can share tokens. Set it to True, or build the "
                "model from a configuration without use_bidirectional_attention."
            )


def check_rope(causal: PreTrainedModel, longest: int) -> None:
    """Frequencies that are the same for every rollout of at most `longest` tokens."""
    found: dict[str, Any] = getattr(causal.config, "rope_parameters", None) or {}
    # Families whose kinds of layers differ in it have one entry a kind; the others have one in all.
    for parameters in [found] if "rope_type" in found else list(found.values()) or [found]:
        _check_rope_parameters(causal, parameters, longest)


def _check_rope_parameters(
    causal: PreTrainedModel, parameters: dict[str, Any] | None, longest: int
) -> None:
    if parameters is None:
        return
    kind = parameters.get("rope_type")
    if kind in LENGTH_FREE_ROPE:
        return
    if kind not in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedError(
            f"rope_type is {kind!r}, and it is not known whether its frequencies depend on the "
            "length of a rollout; known are "
            f"{', '.join((*LENGTH_FREE_ROPE, *LENGTH_DEPENDENT_ROPE))}. Take one of these."
        )
    limit = causal.config.max_position_embeddings
    if kind == "longrope":
        limit = parameters["original_max_position_embeddings"]
    if longest > limit:
        raise UnsupportedError(
            f"rope_type is {kind!r} and the longest rollout has {longest} tokens: beyond {limit} "
            "tokens its frequencies depend on the total length, so rollouts would differ on tokens "
            f"they share. Use rollouts of at most {limit} tokens or another rope_type "
            f"({', '.join(LENGTH_FREE_ROPE)})."
        )


def check_media(causal: PreTrainedModel, family: Family, batch: RolloutBatch) -> None:
    """No token stands for an image or a video, whose features the rollout does not have."""
    for name, default in family.media:
        found = getattr(causal.config, name, default)
        (where,) = np.nonzero(batch.token_ids == found)
        if len(where):
            rollout = int(np.searchsorted(batch.offsets, where[0], side="right")) - 1
            raise UnsupportedError(
                f"token {found} ({name}) is at position {where[0] - batch.offsets[rollout]} of "
                f"rollout {rollout}, and {len(where)} in all: it stands for an image or a video, "
                "whose features are not part of a rollout here. Leave such rollouts out; text "
                "alone has been shown exact."
            )
