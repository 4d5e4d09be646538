"""Conditions of training: no randomness, no router losses, gradients that arrive whole."""

import functools

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import every_module, every_parameter
from forkpoint.hosts.origins import name_of
from forkpoint.hosts.routers import adds_load_balancing

_FULL = "an expert that is full leaves tokens out by what else is in the batch"
_BALANCED = "tokens are assigned by what else is in the batch"
COUPLED_ROUTING = {
    **dict.fromkeys(
        ("capacity_factor", "moe_capacity_factor", "expert_capacity_factor", "expert_capacity"),
        _FULL,
    ),
    **dict.fromkeys(("drop_tokens", "moe_token_drop_policy", "token_drop_policy"), _FULL),
    **dict.fromkeys(("expert_choice", "use_expert_choice", "sinkhorn"), _BALANCED),
    **dict.fromkeys(("router_type", "routing_type", "moe_router_load_balancing_type"), _BALANCED),
}
"""Settings under which a token's experts depend on other tokens, and how."""
# Values of router types that route each token by itself.
LETS_ALL_THROUGH = (
    *("topk", "top_k", "top-k", "greedy", "noaux_tc", "group_limited_greedy"),
    *("aux_loss", "seq_aux_loss", "none"),
)


def check_routers(causal: PreTrainedModel, *, routed: bool) -> None:
    """Mixtures of experts route every token by itself, and no loss is left out.

    routed: whether the step has a router loss.
    """
    if not routed and adds_load_balancing(causal):
        raise UnsupportedError(
            "the configuration has output_router_logits=True, so that ordinary training adds a "
            "load-balancing loss, and the step has none. Give "
            "router=forkpoint.losses.RouterLoss(), or set output_router_logits to False."
        )
    for name, reason in COUPLED_ROUTING.items():
        value = getattr(causal.config, name, None)
        if value and value not in LETS_ALL_THROUGH:
            raise UnsupportedError(
                f"the configuration has {name}={value!r}: {reason}, so that copies of a shared "
                "token may be routed differently, and one copy cannot stand for them. Train "
                "without it."
            )
    for name, module in every_module(causal):
        jitter = vars(module).get("jitter_noise") or 0
        if module.training and jitter:
            raise UnsupportedError(
                f"{name} has router jitter {jitter} in training mode: dense training would draw "
                "new noise for every copy of a shared token. Set it to 0, or call model.eval()."
            )


def checkpointed(causal: PreTrainedModel) -> bool:
    """Whether activations of some layer are recomputed in its backward."""
    return any(m.training and _flagged(m) for _, m in every_module(causal))


def _flagged(module: nn.Module) -> bool:
    # Not getattr: where it is missing, which is nearly everywhere, modules take long to say so.
    return vars(module).get("gradient_checkpointing", False)


def check_checkpointing(causal: PreTrainedModel) -> None:
    """Recomputation that keeps a graph of the forward."""
    for name, module in every_module(causal):
        if not (module.training and _flagged(module)):
            continue
        function = getattr(module, "_gradient_checkpointing_func", None)
        if not isinstance(function, functools.partial):
            raise UnsupportedError(
                f"{name} is checkpointed by {name_of(function)}, which has not been shown "
                "exact. Enable checkpointing by the model's own method, with use_reentrant=False."
            )
        # Without the argument torch checkpoints reentrantly.
        reentrant = function.keywords.get("use_reentrant", True)
        if reentrant is not False:
            raise UnsupportedError(
                f"{name} is checkpointed with use_reentrant={reentrant}: such a forward keeps no "
                "graph, and gradients of shared tokens would be lost. Enable checkpointing with "
                'gradient_checkpointing_kwargs={"use_reentrant": False} (in newer transformers '
                "activation_checkpointing_kwargs)."
            )


def check_random(model: nn.Module) -> None:
    """No module in training mode draws random numbers."""
    for name, module in every_module(model):
        # Some families call dropout as a function, with a rate that the module keeps.
        kept = (v for k, v in vars(module).items() if "dropout" in k and isinstance(v, float))
        rate = module.p if isinstance(module, _DropoutNd) else max(kept, default=0)
        if module.training and rate:
            raise UnsupportedError(
                f"{name} has dropout {rate} in training mode: dense training would draw a new mask "
                "for every copy of a shared token. Set it to 0, or call model.eval()."
            )
        if module.training and isinstance(module, nn.RReLU) and module.lower != module.upper:
            raise UnsupportedError(
                f"{name} is a torch.nn.RReLU in training mode: dense training would draw new "
                "slopes for every copy of a shared token. Use torch.nn.LeakyReLU, or call "
                "model.eval()."
            )


def check_trainable(model: nn.Module) -> None:
    """Some parameter gets a gradient."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "forward_backward was called under torch.inference_mode, where nothing has gradients; "
            "leave it, or use policy.score for log-probs alone."
        )
    if not any(p.requires_grad for _, p in every_parameter(model)):
        raise UnsupportedError(
            "no parameter of the model requires a gradient; unfreeze some, or use policy.score for "
            "log-probs alone."
        )
