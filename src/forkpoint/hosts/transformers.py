"""Stock transformers models, entered without editing them.

Two things are changed while rows run, and put back after: the name of the attention function in the
model's configuration, and the forward of the causal language model itself, whose head then computes
the log-probs asked for instead of logits. Everything else is the model's own code.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forkpoint.engine.boundary import boundary
from forkpoint.engine.head import token_logprobs
from forkpoint.engine.rows import RowContext
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.base import HeadOutputs
from forkpoint.ops.attention import shared_attention
from forkpoint.plan.cost import ModelShape
from forkpoint.rollouts import RolloutBatch

ATTENTION_NAME = "forkpoint"
CONTEXT_ARGUMENT = "forkpoint_row"

# Arguments that attention layers pass besides those named in `forkpoint_attention`, and that change
# nothing in what it computes. Any other with a value is refused, for it may be a mask or a bias.
HARMLESS_ARGUMENTS = frozenset({"position_ids", "use_cache", "output_attentions"})

# Rotary embeddings whose frequencies depend on positions alone. Dynamic and longrope change them
# beyond the original context length, and are refused for longer rollouts; so are unknown ones.
LENGTH_FREE_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Family:
    """A model family whose modules have been shown exact."""

    model_class: str
    attention_class: str


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaAttention"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Attention"),
}


def forkpoint_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer of a row.

    query [B, H, L, D], key [B, K, L, D], value [B, K, L, E] hold the row's tokens; the result is
    [B, L, H, E].
    """
    context = kwargs.pop(CONTEXT_ARGUMENT, None)
    if context is None:
        raise UnsupportedError(
            f"attention {ATTENTION_NAME!r} was called outside of forkpoint: it needs to know what "
            "rows a row reads. Use policy.forward_backward or policy.score, and leave the model's "
            "attn_implementation as it was."
        )
    strange = sorted(k for k, v in kwargs.items() if v is not None and k not in HARMLESS_ARGUMENTS)
    if strange:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(strange)} to its attention function; "
            "forkpoint does not know what they change and so cannot be exact."
        )
    if attention_mask is not None or dropout:
        found = "a mask" if attention_mask is not None else f"dropout {dropout}"
        raise UnsupportedError(
            f"{type(module).__name__} asks for {found} in attention; forkpoint knows causal "
            "attention without either. Set attention_dropout to 0 and give no attention_mask."
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    batch, _, length, dim = query.shape
    q_THD, k_TKD, v_TKE = (
        x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3])
        for x in _autocast(query, key, value)
    )
    k_TKD = boundary(k_TKD, (layer, "k"), context.capture)
    v_TKE = boundary(v_TKE, (layer, "v"), context.capture)
    window = sliding_window or 0
    o_THE, _ = shared_attention(
        q_THD,
        k_TKD,
        v_TKE,
        table=context.table(window, query.device),
        arena=context.ancestors(layer),
        sinks=s_aux,
        scale=dim**-0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        window=window,
        kernel=context.kernel,
    )
    return o_THE.view(batch, length, *o_THE.shape[1:]), None


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """As torch's own attention does, which is among the operations that autocast casts."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


class TransformersHost:
    """A causal language model of transformers, perhaps inside a peft model.

    Raises UnsupportedError, naming what it is, for anything that has not been shown exact.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.causal = _causal_model(model)
        config = self.causal.config
        family = FAMILIES[config.model_type]
        self._configs = {
            id(config): config
            for m in self.causal.modules()
            if type(m).__name__ == family.attention_class
            for config in [cast(PreTrainedConfig, m.config)]
        }
        self.head = _head(self.causal)
        self._shape = self._read_shape()

    def _read_shape(self) -> ModelShape:
        config = self.causal.config.to_dict()
        size = next(self.causal.parameters()).element_size()
        return ModelShape.from_config(config, dtype_bytes=size)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def shape(self) -> ModelShape:
        checkpointed = self.model.training and _checkpointing(self.causal) is not None
        return replace(self._shape, checkpointed=checkpointed)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def loss_dtype(self) -> torch.dtype:
        return torch.float64 if self._embedding.dtype == torch.float64 else torch.float32

    @property
    def _embedding(self) -> Tensor:
        weight = self.causal.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()

    def check(self, batch: RolloutBatch, *, training: bool) -> None:
        batch.check_vocabulary(self._embedding.shape[0])
        _check_rope(self.causal, int(batch.lengths.max()))
        _check_devices(self.model)
        if training:
            _check_checkpointing(self.causal)
            if not any(p.requires_grad for p in self.model.parameters()):
                raise UnsupportedError(
                    "no parameter of the model requires a gradient; unfreeze some, or use "
                    "policy.score for log-probs alone."
                )
        if self.model.training:
            _check_dropout(self.model)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for config in self._configs.values():
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION_NAME
            own = self.causal.__dict__.get("forward")
            stack.callback(_put_back_forward, self.causal, own)
            self.causal.forward = self._causal_forward
            yield

    def forward(self, context: RowContext) -> HeadOutputs:
        # Through the outermost module: FSDP and peft do their work in its hooks and its forward.
        return self.model(
            input_ids=context.inputs.input_ids,
            position_ids=context.inputs.position_ids,
            **{CONTEXT_ARGUMENT: context},
        )

    def _causal_forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        forkpoint_row: RowContext,
        **kwargs: Any,
    ) -> HeadOutputs:
        """Stands in for the causal model's forward: its decoder, then our head on chosen slots."""
        assert not any(value is not None for value in kwargs.values()), kwargs
        decoder = self.causal.base_model
        top = decoder(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            **{CONTEXT_ARGUMENT: forkpoint_row},
        ).last_hidden_state
        inputs = forkpoint_row.inputs
        hidden_nC = top.reshape(-1, top.shape[-1]).index_select(0, inputs.head_slots)
        logprobs, entropies = token_logprobs(
            hidden_nC,
            self.head.weight,
            inputs.head_labels,
            bias_V=self.head.bias,
            temperature_T=inputs.head_temperatures,
            entropy=forkpoint_row.entropy,
            chunk_tokens=forkpoint_row.head_chunk_tokens,
        )
        return HeadOutputs(logprobs, entropies, top)


def _put_back_forward(module: nn.Module, own: Callable | None) -> None:
    if own is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = own


def _causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model within, or a refusal that names what was found."""
    inner: Any = model
    if type(model).__module__.split(".")[0] == "peft":
        kind = getattr(model.active_peft_config, "peft_type", None)
        if str(getattr(kind, "value", kind)) != "LORA":
            raise UnsupportedError(
                f"the peft adapter is {kind}; forkpoint has been shown exact with LORA only."
            )
        inner = model.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"{type(inner).__module__}.{type(inner).__name__} is not a transformers model; wrap "
            "the model itself, before torch.compile, DistributedDataParallel or the like."
        )
    known = ", ".join(f.model_class for f in FAMILIES.values())
    family = FAMILIES.get(inner.config.model_type)
    stock = type(inner).__module__.startswith("transformers.models.")
    if family is None or not stock or type(inner).__name__ != family.model_class:
        raise UnsupportedError(
            f"{type(inner).__name__} (model_type {inner.config.model_type!r}) has not been shown "
            f"exact; supported are {known}."
        )
    return inner


def _head(causal: PreTrainedModel) -> nn.Linear:
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedError(
            f"the output head is a {type(head).__name__}; forkpoint computes log-probs from a "
            "plain torch.nn.Linear. Leave lm_head out of adapters and quantization."
        )
    return head


def _check_rope(causal: PreTrainedModel, longest: int) -> None:
    parameters = getattr(causal.config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind in LENGTH_FREE_ROPE:
        return
    limit = parameters.get(
        "original_max_position_embeddings", causal.config.max_position_embeddings
    )
    if kind not in LENGTH_DEPENDENT_ROPE or longest > limit:
        raise UnsupportedError(
            f"rope_type is {kind!r} and the longest rollout has {longest} tokens: beyond {limit} "
            "tokens its frequencies depend on the total length, so rollouts would differ on tokens "
            f"they share. Use rollouts of at most {limit} tokens or another rope_type "
            f"({', '.join(sorted(LENGTH_FREE_ROPE))})."
        )


def _check_devices(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if type(parameter.data) is not Tensor and type(parameter.data) is not nn.Parameter:
            raise UnsupportedError(
                f"parameter {name} is a {type(parameter.data).__name__}; sharded and quantized "
                "parameters have not been shown exact. Wrap a model with plain tensors."
            )
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedError(
            f"the model's parameters lie on {', '.join(devices)}; put them all on one device."
        )


def _checkpointing(causal: PreTrainedModel) -> Callable | None:
    """The function that decoder layers are checkpointed with, None where they are not."""
    for module in causal.modules():
        if getattr(module, "gradient_checkpointing", False):
            return getattr(module, "_gradient_checkpointing_func", None)
    return None


def _check_checkpointing(causal: PreTrainedModel) -> None:
    function = _checkpointing(causal)
    if function is None:
        return
    options = getattr(function, "keywords", {})
    if options.get("use_reentrant", True) is not False:
        raise UnsupportedError(
            "gradient checkpointing is reentrant (use_reentrant=True): its forward keeps no graph, "
            "so gradients of shared tokens would be lost. Enable it with "
            'gradient_checkpointing_kwargs={"use_reentrant": False}.'
        )


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else 0.0
        rate = rate or getattr(module, "attention_dropout", 0.0)
        if module.training and isinstance(rate, float) and rate > 0:
            raise UnsupportedError(
                f"{name} has dropout {rate} in training mode: dense training would draw a new mask "
                "for every copy of a shared token. Set it to 0, or call model.eval()."
            )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, forkpoint_attention)
