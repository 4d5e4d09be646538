"""Stock models of transformers, as `ModelHost` runs them.

Two settings are changed while microbatches run, and put back after: the name of the attention
function in the model's configurations, and the forwards of recurrent layers.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.engine.changes import Changes
from forkpoint.hosts.calls import CallContext, EncoderContext
from forkpoint.hosts.code_provenance import Definition
from forkpoint.hosts.entry import Entry
from forkpoint.hosts.heads import ModelHead
from forkpoint.hosts.transformers import calls, refusals
from forkpoint.hosts.transformers.encoders import (
    check_encoder,
    check_media,
    encode,
    encoder_shape,
    positions,
    sample_medium,
)
from forkpoint.hosts.transformers.families import Family, known_family
from forkpoint.hosts.transformers.heads import head_of
from forkpoint.hosts.transformers.linear_attention import run_recurrences
from forkpoint.hosts.transformers.llama4 import place_queries
from forkpoint.hosts.transformers.multimodal import (
    check_language_model,
    decoder_of,
    deep_layers,
    idle_modules,
    packages_of,
)
from forkpoint.hosts.transformers.routers import Routers
from forkpoint.hosts.transformers.shallow import shallow_model
from forkpoint.hosts.transformers.shapes import model_shape
from forkpoint.hosts.transformers.stages import (
    check_cut,
    complete,
    gate_of,
    held_layers,
    hold_stage,
    layers_of_stage,
    tied_parameters,
)
from forkpoint.hosts.transformers.stock import TransformersStock, run_plain_recurrences
from forkpoint.hosts.transformers.tensor_parallel import SUMMED_HOOK
from forkpoint.plan.pricing.cost import ModelShape
from forkpoint.plan.pricing.encoders import EncoderShape
from forkpoint.plan.stages import Stage
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.media import Media, ShownMedia
from forkpoint.tree.forest import IntArray

FINAL_NORMS = ("norm", "final_layernorm")
"""Names of the norm that decoders of transformers apply after their last block."""


class TransformersEntry(Entry):
    """A causal language model or critic of transformers, perhaps inside a peft model."""

    known_hooks: tuple[Definition, ...] = refusals.KNOWN_HOOKS
    known_gradient_hooks: tuple[Definition, ...] = (SUMMED_HOOK,)
    registries: tuple[Any, ...] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)

    def __init__(self, model: nn.Module, splits: Sequence[Any] = ()) -> None:
        """`splits`: modules that are split over ranks."""
        self.model: nn.Module = model
        self.core: Any = refusals.supported_model(model)
        family = known_family(self.core.config.model_type)
        assert family is not None
        self.family: Family = family
        if splits:
            refusals.check_undivided(self.core, family, "tp_plan")
        self.head: ModelHead = head_of(self.core, self.family, splits)

    @property
    def decoder(self) -> nn.Module:
        return decoder_of(self.core)

    @property
    def blocks(self) -> list[nn.Module]:
        return held_layers(decoder_of(self.core).layers)

    @property
    def final_norms(self) -> Sequence[nn.Module]:
        found = (getattr(self.decoder, name, None) for name in FINAL_NORMS)
        return [norm for norm in found if isinstance(norm, nn.Module)]

    @property
    def embeddings(self) -> nn.Module:
        return self.core.get_input_embeddings()

    @property
    def idle(self) -> Collection[nn.Module]:
        return idle_modules(self.core)

    @property
    def routers(self) -> Routers:
        return Routers(self.model, self.core)

    def check_context_parallel(self, shape: ModelShape, ranks: int) -> None:
        refusals.check_undivided(self.core, self.family, "context parallelism")
        refusals.check_context_parallel(self.core, shape, ranks)

    def configs(self) -> list[Any]:
        return calls.configurations(self.model)

    def shape(self, splits: Sequence[Any]) -> ModelShape:
        return model_shape(self.core, self.head, splits)

    def shallow(self, layers: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return shallow_model(self.core.config.to_dict(), layers, device=device, dtype=dtype)

    @property
    def checkpointed(self) -> bool:
        return bool(refusals.checkpointed_modules(self.core))

    @property
    def first_layers(self) -> int:
        return max(1, deep_layers(self.core))

    def hold_stage(self, stage: Stage) -> None:
        refusals.check_undivided(self.core, self.family, "stages of a pipeline")
        hold_stage(self.core, stage, FINAL_NORMS)

    @property
    def layers(self) -> tuple[range, int]:
        layers = decoder_of(self.core).layers
        return layers_of_stage(layers), len(layers)

    def complete(self, exchange: Callable[[Any], list[Any]]) -> None:
        complete(self.core, FINAL_NORMS, exchange)

    @property
    def tied(self) -> frozenset[nn.Parameter]:
        return tied_parameters(self.core)

    def set_hidden(self, hidden_1TC: Tensor | None, changes: Changes) -> None:
        gate = vars(gate_of(decoder_of(self.core).layers))
        changes.set(gate, "open", True)
        changes.set(gate, "hidden", hidden_1TC)

    def check_model(self) -> None:
        check_language_model(self.core)
        check_cut(decoder_of(self.core).layers)
        refusals.check_causal(self.core)
        refusals.check_modules(self.model, packages_of(self.core), self.idle)
        refusals.check_attention_function(self.model)

    def check_state(self, *, training: bool, routed: bool, encodes: bool) -> None:
        if encodes:
            check_encoder(self.core, self.idle)
        if training:
            refusals.check_checkpointing(self.core, encodes=encodes)
            if not routed:
                refusals.check_router_loss(self.core)

    def check_batch(self, batch: RolloutBatch) -> None:
        refusals.check_rope(self.core, int(batch.lengths.max(initial=0)))
        check_media(self.core, self.family, batch)
        refusals.check_placeholders(self.core, self.family, batch)

    def attach(self, changes: Changes) -> None:
        calls.set_attention(self.decoder, changes)
        run_recurrences(self.core, changes)
        place_queries(self.decoder, changes)

    def run(self, ids_1T: Tensor, positions_1T: Tensor, context: CallContext) -> Any:
        given = {calls.CONTEXT_ARGUMENT: context}
        return self.model(input_ids=ids_1T, position_ids=positions_1T, **given)

    def run_encoder(self, context: EncoderContext) -> Any:
        given = {calls.CONTEXT_ARGUMENT: context}
        return self.model(input_ids=None, position_ids=None, **given)

    def encode(self, medium: Media) -> tuple[Tensor, ...]:
        return encode(self.core, medium)

    def encoder_shape(self) -> EncoderShape | None:
        return encoder_shape(self.core, self.family, self.idle)

    def positions(self, batch: RolloutBatch) -> IntArray | None:
        return positions(self.core, self.family, batch)

    def context_of(self, kwargs: dict[str, Any]) -> CallContext | None:
        return kwargs.get(calls.CONTEXT_ARGUMENT)

    def sample_medium(self, media: Sequence[Media]) -> Media:
        return sample_medium(self.core, self.family, media)

    def medium_of(self, kwargs: dict[str, Any]) -> Media | None:
        context = kwargs.get(calls.CONTEXT_ARGUMENT)
        return context.medium if isinstance(context, EncoderContext) else None

    def decode(
        self, input_ids: Tensor, position_ids: Tensor, forkpoint_context: CallContext, **kwargs: Any
    ) -> Tensor:
        kwargs.pop("return_dict", None)  # what peft's models of other tasks than language ask for
        assert not any(value is not None for value in kwargs.values()), kwargs
        return self.decoder(
            **self._reads(input_ids, forkpoint_context),
            position_ids=position_ids,
            use_cache=False,
            # Not as the configuration says: these would keep states and install hooks.
            output_attentions=False,
            output_hidden_states=False,
            return_dict=True,
            **{calls.CONTEXT_ARGUMENT: forkpoint_context},
        ).last_hidden_state

    def _reads(self, ids_1T: Tensor, context: CallContext) -> dict[str, Any]:
        """The decoder's inputs, with features of media at the tokens that stand for them."""
        features, rows = context.state.cache.media, context.inputs.media
        if features is None:
            return {"input_ids": ids_1T}
        embeds_1TC = features.anchored(self.core.get_input_embeddings()(ids_1T))
        if rows is None:
            return {"inputs_embeds": embeds_1TC}
        first, *deep = (x.to(embeds_1TC.dtype) for x in features.read(rows))
        read_1TC = embeds_1TC.index_copy(1, rows.places, first[None])
        found: dict[str, Any] = {"inputs_embeds": read_1TC}
        if deep:
            there_1T = torch.zeros_like(ids_1T, dtype=torch.bool).index_fill(1, rows.places, True)
            found |= {"visual_pos_masks": there_1T, "deepstack_visual_embeds": deep}
        return found

    def stock(self, ids_NL: Tensor, shown: ShownMedia | None = None) -> Tensor:
        return TransformersStock(self.model).logits(ids_NL, shown=shown)

    def allow_stock(self, dtype: torch.dtype, changes: Changes) -> None:
        calls.set_stock_attention(self.model, changes)
        if dtype.itemsize > 2:  # kernels of packages multiply such inputs in TF32
            run_plain_recurrences(self.model, changes)
