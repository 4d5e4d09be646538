"""Stock models of transformers, as `ModelHost` runs them.

Two settings are changed while microbatches run, and put back after: the name of the attention
function in the model's configurations, and the forwards of recurrent layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.heads import LogprobHead, ModelHead
from forkpoint.hosts.modules import plain_class
from forkpoint.hosts.transformers import refusals
from forkpoint.hosts.transformers.calls import (
    ATTENTION_NAME,
    CONTEXT_ARGUMENT,
    ForwardConfig,
    configurations,
)
from forkpoint.hosts.transformers.critics import ValueHead
from forkpoint.hosts.transformers.families import FAMILIES, Family
from forkpoint.hosts.transformers.linear_attention import (
    check_recurrent_modules,
    run_recurrences,
)
from forkpoint.hosts.transformers.refusals import supported_model
from forkpoint.hosts.transformers.routers import Routers
from forkpoint.hosts.transformers.stock import TransformersStock
from forkpoint.hosts.transformers.tensor_parallel import SUMMED_HOOK, local_shape
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.mixtures import GROUPED, expert_activations
from forkpoint.rollouts.batch import RolloutBatch

FINAL_NORMS = ("norm", "final_layernorm")
"""Names of the norm that decoders of transformers apply after their last block."""


class TransformersEntry:
    """A causal language model or critic of transformers, perhaps inside a peft model."""

    known_hooks: tuple[Definition, ...] = refusals.KNOWN_HOOKS
    requiring_gradients: tuple[Definition, ...] = refusals.REQUIRING_GRADIENTS
    known_gradient_hooks: tuple[Definition, ...] = (SUMMED_HOOK,)

    def __init__(self, model: nn.Module, splits: Sequence[Any] = ()) -> None:
        """`splits`: modules that are split over ranks."""
        self.model: nn.Module = model
        self.core: Any = supported_model(model)
        self.family: Family = FAMILIES[self.core.config.model_type]
        self._is_critic = plain_class(self.core).__name__ == self.family.critic_class
        split = frozenset(module for _, module, _ in splits)
        self.head: ModelHead = (
            ValueHead(self.core)
            if self._is_critic
            else LogprobHead(
                lambda: refusals.plain_head(self.core),
                lambda: self.family.head_options(self.core),
                split,
            )
        )
        self._sizes: dict[str, Any] = {}

    @property
    def decoder(self) -> nn.Module:
        return self.core.base_model

    @property
    def blocks(self) -> nn.ModuleList:
        return self.core.base_model.layers

    @property
    def final_norms(self) -> Sequence[nn.Module]:
        found = (getattr(self.decoder, name, None) for name in FINAL_NORMS)
        return [norm for norm in found if isinstance(norm, nn.Module)]

    @property
    def embeddings(self) -> nn.Module:
        return self.core.get_input_embeddings()

    @property
    def routers(self) -> Routers:
        return Routers(self.core)

    # Checks
    # ------------------------------------------------------------

    def check_model(self) -> None:
        refusals.check_adapters(self.model)
        refusals.check_adapters(self.core)
        check_recurrent_modules(self.core)
        refusals.check_modules(self.model, self.family.package or self.core.config.model_type)
        refusals.check_attention_function(self.model)

    def check_state(self, *, training: bool, routed: bool) -> None:
        if training:
            refusals.check_checkpointing(self.core)
            refusals.check_routers(self.core, routed=routed)

    def check_batch(self, batch: RolloutBatch) -> None:
        refusals.check_rope(self.core, int(batch.lengths.max(initial=0)))
        refusals.check_media(self.core, self.family, batch)

    registries: tuple[Any, ...] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)

    def configs(self) -> list[Any]:
        return configurations(self.model)

    # Sizes
    # ------------------------------------------------------------

    def shape(self, splits: Sequence[Any]) -> ModelShape:
        self._sizes = self.core.config.to_dict()
        size = next(self.core.parameters()).element_size()
        width = {"vocab": self.head.width()} if self._is_critic else {}
        whole = ModelShape.from_config(self._sizes, dtype_bytes=size, **width)
        return local_shape(whole, self.core, splits) if splits else whole

    def present_shape(self, shape: ModelShape) -> ModelShape:
        shape = replace(shape, checkpointed=self.checkpointed)
        implementation = getattr(self.core.config, "_experts_implementation", None)
        if shape.expert_layers and implementation != GROUPED:
            grouped, own = (expert_activations(self._sizes, x) for x in (GROUPED, implementation))
            kept = shape.expert_activations * own // grouped
            shape = replace(shape, expert_activations=kept)
        return shape

    @property
    def checkpointed(self) -> bool:
        return refusals.checkpointed(self.core)

    # Runs
    # ------------------------------------------------------------

    def attach(self, changes: Changes) -> None:
        decoder = vars(self.decoder)
        changes.set(decoder, "config", ForwardConfig(decoder["config"]))
        for config in configurations(self.core):
            changes.set(vars(config), "_attn_implementation_internal", ATTENTION_NAME)
            if vars(config).get("output_router_logits"):  # which would keep them all
                changes.set(vars(config), "output_router_logits", False)
        run_recurrences(self.core, changes)

    def run(self, ids_1T: Tensor, positions_1T: Tensor, context: CallContext) -> Any:
        given = {CONTEXT_ARGUMENT: context}
        return self.model(input_ids=ids_1T, position_ids=positions_1T, **given)

    def context_of(self, kwargs: dict[str, Any]) -> CallContext | None:
        return kwargs.get(CONTEXT_ARGUMENT)

    def decode(
        self, input_ids: Tensor, position_ids: Tensor, forkpoint_context: CallContext, **kwargs: Any
    ) -> Tensor:
        kwargs.pop("return_dict", None)  # what peft's models of other tasks than language ask for
        assert not any(value is not None for value in kwargs.values()), kwargs
        return self.decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            # Whatever the configuration says: these would keep states and install hooks.
            output_attentions=False,
            output_hidden_states=False,
            return_dict=True,
            **{CONTEXT_ARGUMENT: forkpoint_context},
        ).last_hidden_state

    def stock(self, ids_NL: Tensor) -> Tensor:
        return TransformersStock(self.model).logits(ids_NL)

    def set_stock_attention(self, changes: Changes) -> None:
        for config in self.configs():
            if config._attn_implementation == ATTENTION_NAME:
                changes.set(vars(config), "_attn_implementation_internal", "eager")
