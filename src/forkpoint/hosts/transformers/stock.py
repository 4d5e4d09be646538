"""Stock forwards of transformers' models, also in higher precision, for comparisons."""

import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.entry import Stock
from forkpoint.hosts.modules import plain_class
from forkpoint.hosts.transformers.calls import configurations, set_stock_attention
from forkpoint.hosts.transformers.encoders import TransformersEncoder
from forkpoint.hosts.transformers.linear_attention import recurrent_modules
from forkpoint.hosts.transformers.multimodal import decoder_of, within_peft
from forkpoint.hosts.transformers.stages import layers_of_stage
from forkpoint.hosts.upcasts import lift_upcasts
from forkpoint.rollouts.media import ShownMedia


class TransformersStock(Stock):
    """The stock forward of a model of transformers or a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = model
        self._inner = within_peft(model)

    @property
    def is_critic(self) -> bool:
        return type(self._inner).__name__.endswith("ForTokenClassification")

    def logits(
        self, ids_NL: Tensor, keep: Tensor | None = None, shown: ShownMedia | None = None
    ) -> Tensor:
        more = {} if keep is None else {"logits_to_keep": keep}
        if shown is not None:
            encoder = TransformersEncoder(self._inner)
            encodes = layers_of_stage(decoder_of(self._inner).layers).start == 0
            more |= encoder.stock_arguments(shown, encodes=encodes)
        return self.model(input_ids=ids_NL, use_cache=False, return_dict=True, **more).logits

    def run_decoder_once(
        self, ids_NL: Tensor, changes: Changes, shown: ShownMedia | None = None
    ) -> None:
        decoder = getattr(self._inner, self._inner.base_model_prefix)
        own, ran = decoder.forward, []

        def once(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(own(*args, **kwargs))
            return ran[0]

        changes.replace_forward(decoder, once)
        self.logits(ids_NL, ids_NL.new_zeros(0), shown)

    def compute_in(self, dtype: torch.dtype, changes: Changes) -> None:
        run_plain_recurrences(self.model, changes)
        for config in configurations(self.model):
            # Grouped products of experts take few dtypes. The configuration's property is not used,
            # because it also sets inner configurations.
            changes.set(vars(config), "_experts_implementation_internal", "eager")
            # FlashAttention takes 16 bits only, and flex attention takes no float64.
            if re.search("flash|flex", config._attn_implementation or ""):
                changes.set(vars(config), "_attn_implementation_internal", "eager")
        if dtype == torch.float64:
            lift_upcasts(self.model, changes)

    def allow(self, dtype: torch.dtype, changes: Changes) -> None:
        set_stock_attention(self.model, changes)
        if dtype.itemsize > 2:  # kernels of packages multiply such inputs in TF32
            run_plain_recurrences(self.model, changes)


# In newer versions each is a wrapper of its torch form, which may run a package's kernel instead.
WRAPPED = (
    "torch_chunk_gated_delta_rule",
    "causal_conv1d_fn",
    "mamba2_chunk_scan",
    "mamba2_split_conv1d_scan_combined",
)
# In older versions modules hold the package's functions. None selects the torch form.
HELD: dict[str, str | None] = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "causal_conv1d_fn": None,
}


def run_plain_recurrences(model: nn.Module, changes: Changes) -> None:
    """Let stock recurrent layers run their torch forms, because kernels of packages take only 16
    bits."""
    for module in recurrent_modules(model).values():
        code = vars(sys.modules[plain_class(module).__module__])
        for name in WRAPPED:
            plain = getattr(code.get(name), "__wrapped__", None)
            if plain is not None:
                changes.set(code, name, plain)
        for name, form in HELD.items():
            if name in vars(module):
                changes.set(vars(module), name, code[form] if form else None)
