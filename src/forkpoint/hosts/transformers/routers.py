"""Routers of transformers' mixtures of experts, and the load-balancing loss of their families."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from forkpoint.engine.host import FoundRouter
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import every_module, plain_class
from forkpoint.hosts.routers import GATE, ModelRouters, num_experts
from forkpoint.hosts.transformers.multimodal import decoder_of

LOAD_BALANCING = "load_balancing_loss_func"
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration")
CHOICE = "route_tokens_to_experts"
BIAS = "e_score_correction_bias"
COPIED = "original_module"
"""Attribute of peft's modules_to_save that holds the frozen module. peft trains a copy."""


class Routers(ModelRouters):
    """The routers of a model, in the order of its layers, if transformers records their logits."""

    def __init__(self, model: nn.Module, causal: PreTrainedModel) -> None:
        """`causal`: the model inside adapters. Routers have their names in `model`."""
        recorded = getattr(decoder_of(causal), "_can_record_outputs", None) or {}
        spec: Any = recorded.get("router_logits")
        kinds = tuple(
            getattr(entry, "target_class", entry)
            for entry in (spec if isinstance(spec, list) else [spec])
            if entry is not None
        )
        found = [(n, m) for n, m in every_module(model) if kinds and isinstance(m, kinds)]
        self.found: Sequence[FoundRouter] = [_chooser(model, *router) for router in found]
        self.layers: int = len(found)
        self.defines_loss: bool = defines_load_balancing(causal)
        if adds_load_balancing(causal):
            self.coefficient: float = float(causal.config.get_text_config().router_aux_loss_coef)

    def check(self) -> None:
        """Refuse routers in modules that peft copies (modules_to_save)."""
        for router in self.found:
            if COPIED in router.name.split("."):
                raise UnsupportedError(
                    f"the router {router.name} is in a module that peft copies (modules_to_save). "
                    "Steps with copied routers have not been shown exact. Leave modules with "
                    "routers out of modules_to_save."
                )

    @property
    def experts(self) -> int:
        return num_experts(self.found[0]) if self.found else self.elsewhere_experts

    @property
    def biases(self) -> list[Tensor]:
        """Bias buffers of DeepSeek-V3 and GLM-4-MoE."""
        gates = (getattr(router.module, GATE, router.module) for router in self.found)
        found = (getattr(gate, BIAS, None) for gate in gates)
        return [bias for bias in found if isinstance(bias, Tensor)]

    @property
    def chosen(self) -> int | None:
        found = getattr(self.found[0].module, "top_k", None) if self.found else None
        return found if isinstance(found, int) else None


def _chooser(model: nn.Module, name: str, router: nn.Module) -> FoundRouter:
    """The router, or the block around it if the block chooses experts from the router's logits, as
    in GLM-4.5V of transformers 5.10."""
    block = name.rpartition(".")[0]
    around = model.get_submodule(block)
    return FoundRouter(block, around) if hasattr(around, CHOICE) else FoundRouter(name, router)


def defines_load_balancing(causal: PreTrainedModel) -> bool:
    """Whether transformers defines a load-balancing loss for this model."""
    kind = plain_class(causal)
    file = sys.modules[kind.__module__]
    return hasattr(file, LOAD_BALANCING) and kind.__name__.endswith(LANGUAGE_MODELS)


def adds_load_balancing(causal: PreTrainedModel) -> bool:
    """Whether this model's own forward adds that loss."""
    wanted = getattr(causal.config.get_text_config(), "output_router_logits", False)
    return bool(wanted) and defines_load_balancing(causal)
