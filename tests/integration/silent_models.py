"""Models that would train on other values than ordinary training does, without an error.

Each case changes a tiny model in float32. `FORWARD` change log-probs, so that a sample finds each.
`REFUSED` are refused by name. `EXACT` look like them and are exact.
"""

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import weight_norm
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.neftune import activate_neftune

from forkpoint.testing import tiny_model
from plain_attention import PLAIN_ATTENTION, plain_attention

Patch = pytest.MonkeyPatch
Change = Callable[[Any, Patch], Any]
"""Changes a model in place, or returns another one."""

MLP, ATTENTION, HEAD = "model.layers.1.mlp", "model.layers.1.self_attn", "lm_head"


def mixed(x: Tensor) -> Tensor:
    """Each token with a part of the mean over its sequence's tokens."""
    return x + 0.1 * x.mean(1, keepdim=True)


# Hooks -------------------------------------------------------------------------------------------


def forward_hook(where: str, function: Callable[[Tensor], Any]) -> Change:
    def change(model: Any, _: Patch) -> None:
        module = model.get_submodule(where)
        module.register_forward_hook(
            lambda module, args, out: (
                function(out) if isinstance(out, Tensor) else (function(out[0]), *out[1:])
            )
        )

    return change


def hook_of_the_causal_model(model: Any, _: Patch) -> None:
    def scale(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.1
        return output

    model.register_forward_hook(scale)


def global_forward_hook(model: Any, patch: Patch) -> None:
    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.1 if module is model.lm_head else None

    patch.setitem(torch_module._global_forward_hooks, 0, after)


def global_backward_hook(_: Any, patch: Patch) -> None:
    patch.setitem(torch_module._global_backward_hooks, 0, lambda *_: None)
    patch.setattr(torch_module, "_global_is_full_backward_hook", True)


def backward_hook(model: Any, _: Patch) -> None:
    model.get_submodule(MLP).register_full_backward_hook(lambda module, grad_in, grad_out: None)


def tensor_hook(model: Any, _: Patch) -> None:
    model.get_submodule(MLP).up_proj.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


def post_accumulate_hook(model: Any, _: Patch) -> None:
    weight = model.get_submodule(MLP).up_proj.weight
    weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))


def neftune(model: Any, _: Patch) -> None:
    activate_neftune(model, 5.0)
    model.train()


# Weights that are computed -----------------------------------------------------------------------


def normed(where: str) -> Change:
    def change(model: Any, _: Patch) -> None:
        with warnings.catch_warnings():  # torch has a newer way, which is refused by its class
            warnings.simplefilter("ignore", FutureWarning)
            weight_norm(model.get_submodule(where))
        moved(model)

    return change


def moved(model: Any) -> None:
    """As an optimizer's step does: what was computed from the parameters before is no longer so."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)


def embedding(**options: Any) -> Change:
    def change(model: Any, _: Patch) -> None:
        old = model.get_input_embeddings()
        new = nn.Embedding(old.num_embeddings, old.embedding_dim, **options)
        new.weight = old.weight
        model.set_input_embeddings(new)

    return change


# Modules and functions ---------------------------------------------------------------------------


def random_activation(model: Any, _: Patch) -> None:
    model.get_submodule(MLP).act_fn = nn.RReLU()
    model.train()


def class_forward(model: Any, patch: Patch) -> None:
    kind = type(model.get_submodule(MLP))
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: Any, x: Tensor) -> Tensor:
        return mixed(stock(self, x))

    patch.setattr(kind, "forward", forward)


def code_of_a_forward(model: Any, patch: Patch) -> None:
    kind = type(model.get_submodule(MLP))

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y + 0.1 * y.mean(1, keepdim=True)

    patch.setattr(kind.forward, "__code__", forward.__code__)


def instance_forward(model: Any, _: Patch) -> None:
    mlp = model.get_submodule(MLP)
    stock = mlp.forward
    mlp.forward = lambda x: mixed(stock(x))


def rotary_function(model: Any, patch: Patch) -> None:
    module = sys.modules[type(model).__module__]
    stock = module.apply_rotary_pos_emb  # type: ignore[attr-defined]

    def apply(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k = stock(q, k, *args, **kwargs)
        return q / (1 + 0.1 * q.shape[2]), k

    patch.setattr(module, "apply_rotary_pos_emb", apply)


def functional(model: Any, patch: Patch) -> None:
    stock = nn.functional.silu
    patch.setattr(nn.functional, "silu", lambda x, inplace=False: mixed(stock(x, inplace)))


# Attention ---------------------------------------------------------------------------------------


def biased_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    """ALiBi-like: what is further away counts less."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])[None, :]
    scores = (q @ k.mT) * q.shape[-1] ** -0.5 - 0.1 * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None


def custom_attention(model: Any, patch: Patch) -> None:
    patch.setitem(AttentionInterface._global_mapping, "biased", biased_attention)
    model.config._attn_implementation = "biased"


def replaced_attention(model: Any, patch: Patch) -> None:
    """A known name that stands for other code."""
    patch.setitem(AttentionInterface._global_mapping, "sdpa", biased_attention)
    model.config._attn_implementation = "sdpa"


def custom_mask(model: Any, patch: Patch) -> None:
    stock = AttentionMaskInterface._global_mapping["eager"]

    def narrow(*args: Any, **kwargs: Any) -> Any:
        mask = stock(*args, **kwargs)
        length = mask.shape[-1]
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        return mask.masked_fill(distance > 2, torch.finfo(mask.dtype).min)

    patch.setitem(AttentionMaskInterface._global_mapping, "eager", narrow)
    model.config._attn_implementation = "eager"


def both_directions(model: Any, _: Patch) -> None:
    model.config.is_causal = False


# Layers ------------------------------------------------------------------------------------------


def shared_block(model: Any, _: Patch) -> None:
    model.model.layers[2] = model.model.layers[1]


def copied_block(model: Any, _: Patch) -> None:
    """A layer copied for depth, with the `layer_idx` of the one it was copied from."""
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers += 1


def one_layer_idx(model: Any, _: Patch) -> None:
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0


def swapped_blocks(model: Any, _: Patch) -> None:
    layers = model.model.layers
    layers[0], layers[2] = layers[2], layers[0]


def shared_mlp(model: Any, _: Patch) -> None:
    """It works token by token, so nothing of it is kept for later tokens."""
    model.model.layers[2].mlp = model.model.layers[0].mlp


def tied_layers(model: Any, _: Patch) -> None:
    for mine, other in zip(
        model.model.layers[2].modules(), model.model.layers[0].modules(), strict=True
    ):
        for name, parameter in other.named_parameters(recurse=False):
            setattr(mine, name, parameter)


def hidden_states_collected(model: Any, _: Patch) -> None:
    """transformers installs hooks at the first call that asks for hidden states, and keeps them."""
    model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)


def inputs_require_gradients(model: Any, _: Patch) -> None:
    model.enable_input_require_grads()


def own_attention_of_a_test(model: Any, _: Patch) -> None:
    assert plain_attention is AttentionInterface._global_mapping[PLAIN_ATTENTION]
    model.config._attn_implementation = PLAIN_ATTENTION


FORWARD: dict[str, Change] = {
    "hook on the causal model": hook_of_the_causal_model,
    "global forward hook": global_forward_hook,
    "hook that mixes tokens": forward_hook(MLP, mixed),
    "hook that depends on the length": forward_hook(MLP, lambda x: x / (1 + x.shape[1] / 8)),
    "hook that draws numbers": forward_hook(MLP, lambda x: x + 0.1 * torch.randn_like(x)),
    "NEFTune": neftune,
    "weight norm on the head": normed(HEAD),
    "RReLU in training": random_activation,
    "class's forward patched": class_forward,
    "code of a forward replaced": code_of_a_forward,
    "forward on the instance": instance_forward,
    "rotary function replaced": rotary_function,
    "attention function registered": custom_attention,
    "attention function replaced": replaced_attention,
    "mask function replaced": custom_mask,
    "torch.nn.functional replaced": functional,
    "attention in both directions": both_directions,
    "block used twice": shared_block,
}

NAMED = (
    *(name for name in FORWARD if "hook" in name or "on the head" in name),
    *("NEFTune", "RReLU in training", "forward on the instance"),
    *("attention function registered", "attention function replaced", "mask function replaced"),
)
"""Of `FORWARD`, what is refused by name as well. The sample alone finds the rest."""

REFUSED: dict[str, Change] = {
    **{name: FORWARD[name] for name in NAMED},
    "backward hook": backward_hook,
    "global backward hook": global_backward_hook,
    "tensor hook on a parameter": tensor_hook,
    "post-accumulate hook on a parameter": post_accumulate_hook,
    "scale_grad_by_freq": embedding(scale_grad_by_freq=True),
    "embedding with max_norm": embedding(max_norm=1.0),
    "weight norm in a block": normed(f"{MLP}.up_proj"),
}

EXACT: dict[str, Change] = {
    "copied block": copied_block,
    "every layer_idx 0": one_layer_idx,
    "blocks swapped": swapped_blocks,
    "MLP used twice": shared_mlp,
    "weights of two layers tied": tied_layers,
    "hidden states collected before": hidden_states_collected,
    "inputs require gradients": inputs_require_gradients,
    "attention of forkpoint.testing": own_attention_of_a_test,
}


def model_of(change: Change, patch: Patch, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = tiny_model("llama", dtype=dtype)
    return change(model, patch) or model
