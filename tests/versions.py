"""Versions of transformers that lack something which tests need."""

from typing import Any

import pytest
import transformers

from forkpoint.hosts.transformers.tensor_parallel import LEAST_VERSION

SPLITS_OTHERWISE = tuple(map(int, transformers.__version__.split(".")[:2])) < LEAST_VERSION
needs_splits = pytest.mark.skipif(
    SPLITS_OTHERWISE, reason="this transformers splits models otherwise"
)
# Only versions that are known to leave router logits out: another that does so fails.
OLDER = transformers.__version__.startswith(("5.10.", "5.17."))
NOT_RECORDED = ("deepseek_v3", "glm4_moe", "granitemoe", "granitemoehybrid")


def checkpoint_blocks(model: Any, **options: Any) -> None:
    """Enable gradient checkpointing: transformers is renaming the method, and the old name warns
    where there is the new one."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, name) for name in names if hasattr(model, name))(options or None)


def skip_without_router_logits(family: str) -> None:
    if OLDER and family in NOT_RECORDED:
        pytest.skip(f"transformers {transformers.__version__} records no router logits of {family}")


def skip_hidden_biases(family: str) -> None:
    if family == "glm4v_moe" and transformers.__version__.startswith("5.10."):
        pytest.skip("the forward of this version fails with peft's adapters, which hide a bias")


def eager_experts(model: Any) -> Any:
    """The model with experts one by one: the default's grouped matrix product has no float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model
