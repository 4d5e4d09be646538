"""Stock models of transformers, as `ModelHost` runs them.

Two settings are changed while microbatches run, and put back after: the name of the attention
function in the model's configurations, and the forwards of recurrent layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import CallContext
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.entry import Encoder, Entry, HeldStage, Stock
from forkpoint.hosts.heads import ModelHead
from forkpoint.hosts.transformers import calls, refusals
from forkpoint.hosts.transformers.calls import place_queries
from forkpoint.hosts.transformers.encoders import TransformersEncoder
from forkpoint.hosts.transformers.families import Family, family_of
from forkpoint.hosts.transformers.heads import head_of
from forkpoint.hosts.transformers.linear_attention import run_recurrences
from forkpoint.hosts.transformers.multimodal import check_language_model, decoder_of, packages_of
from forkpoint.hosts.transformers.routers import Routers
from forkpoint.hosts.transformers.shapes import model_shape, shallow_model
from forkpoint.hosts.transformers.stages import TransformersStage, final_norms, held_layers
from forkpoint.hosts.transformers.stock import TransformersStock
from forkpoint.hosts.transformers.tensor_parallel import SUMMED_HOOK
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.rollouts.batch import RolloutBatch


class TransformersEntry(Entry):
    """A causal language model or critic of transformers, perhaps inside a peft model."""

    context_argument: str = calls.CONTEXT_ARGUMENT
    known_hooks: tuple[Definition, ...] = refusals.KNOWN_HOOKS
    known_gradient_hooks: tuple[Definition, ...] = (SUMMED_HOOK,)
    registries: tuple[Any, ...] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)

    def __init__(self, model: nn.Module, splits: Sequence[Any] = ()) -> None:
        """`splits`: modules that are split over ranks."""
        self.model: nn.Module = model
        self.core: Any = refusals.supported_model(model)
        self.splits = splits
        self.family: Family = family_of(self.core)
        if splits:
            refusals.check_undivided(self.core, self.family, "tp_plan")
        self.head: ModelHead = head_of(self.core, self.family, splits)
        self.stock: Stock = TransformersStock(model)
        self.stage: HeldStage = TransformersStage(self.core)
        self._encoder = TransformersEncoder(self.core)
        self.encoder: Encoder = self._encoder

    @property
    def decoder(self) -> Any:
        return decoder_of(self.core)

    @property
    def embeddings(self) -> nn.Module:
        return self.core.get_input_embeddings()

    @property
    def blocks(self) -> list[nn.Module]:
        return held_layers(self.decoder.layers)

    @property
    def final_norms(self) -> Sequence[nn.Module]:
        return final_norms(self.decoder)

    @property
    def routers(self) -> Routers:
        return Routers(self.model, self.core)

    def configs(self) -> list[Any]:
        return calls.configurations(self.model)

    def shape(self) -> ModelShape:
        return model_shape(self.core, self.head, self.splits)

    def shallow(self, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return shallow_model(self.core.config.to_dict(), layers, device=device, dtype=dtype)

    @property
    def checkpointed(self) -> bool:
        return bool(refusals.checkpointed_modules(self.core))

    def check_model(self) -> None:
        check_language_model(self.core)
        self.stage.check()
        refusals.check_causal(self.core)
        refusals.check_modules(self.model, packages_of(self.core), self.encoder.modules)
        refusals.check_attention_function(self.model)
        refusals.check_windows(self.core)
        self.routers.check()

    def check_training(self, *, routed: bool, encodes: bool) -> None:
        refusals.check_checkpointing(self.core, encodes=encodes)
        if not routed:
            refusals.check_router_loss(self.core)

    def check_batch(self, batch: RolloutBatch) -> None:
        refusals.check_rope(self.core, int(batch.lengths.max(initial=0)))
        refusals.check_placeholders(self.core, self.family, batch)

    def check_context_parallel(self, ranks: int) -> None:
        refusals.check_undivided(self.core, self.family, "context parallelism")
        refusals.check_context_parallel(self.core, self.shape().heads, ranks)

    def attach(self, changes: Changes) -> None:
        calls.set_attention(self.decoder, changes)
        run_recurrences(self.core, changes)
        place_queries(self.decoder, changes)

    def run(self, ids_1T: Tensor | None, positions_1T: Tensor | None, context: Any) -> Any:
        given = {calls.CONTEXT_ARGUMENT: context}
        return self.model(input_ids=ids_1T, position_ids=positions_1T, **given)

    def decode(
        self, input_ids: Tensor, position_ids: Tensor, forkpoint_context: CallContext, **kwargs: Any
    ) -> Tensor:
        kwargs.pop("return_dict", None)  # argument of peft's models for other tasks
        assert not any(value is not None for value in kwargs.values()), kwargs
        return self.decoder(
            **self._encoder.decoder_inputs(input_ids, forkpoint_context),
            position_ids=position_ids,
            use_cache=False,
            # Not by the configuration: it may ask for outputs that keep states and install hooks.
            output_attentions=False,
            output_hidden_states=False,
            return_dict=True,
            **{calls.CONTEXT_ARGUMENT: forkpoint_context},
        ).last_hidden_state
