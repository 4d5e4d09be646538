"""Log-probs and entropies of chosen tokens from hidden states, with few logits alive at a time.

A vocabulary is a hundred times wider than a hidden state, so the logits of a long row are the
largest tensor of a training step. Here they exist for a chunk of tokens at a time: the forward
keeps a few numbers per token (the largest logit, the sum of exponentials, the entropy), and the
backward computes each chunk's logits again. The result is that of a linear layer followed by a
log-softmax in float32. On CUDA a chunk is read once each way (head_triton), where there is Triton
and neither a bias, whose gradient is a sum of unrounded ones, nor a softcap.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forkpoint.errors import ConfigError

# exp(-1e4) is exactly 0 in float32 and in float64, so raising a smaller log-probability to this
# changes no result; it keeps 0 * -inf (NaN) out of the entropy where a vocabulary entry is masked.
_NO_PROBABILITY = -1e4


class _Options(NamedTuple):
    entropy: bool
    softcap: float | None
    logit_scale: float | None
    chunk_tokens: int
    matmul_dtype: torch.dtype | None  # None: no autocast, the operands' own
    softmax_dtype: torch.dtype
    fused: bool


def token_logprobs(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature_T: Tensor | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    logit_scale: float | None = None,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor | None]:
    """The log-prob of each label under its token's next-token distribution, and its entropy.

    With `z = hidden_TC @ weight_VC.T + bias_V`, then `z * logit_scale`, then
    `softcap * tanh(z / softcap)`, then `z / temperature_T` (each where given), the distribution of
    token i is `softmax(z_i)`; both results are of this, temperature included.

    The product is computed in the operands' dtype (under autocast in autocast's, as by a linear
    layer; float64 stays), everything after it in float32, or float64 for float64 operands. No
    tensor has more than `chunk_tokens` x V elements of logits, forward or backward. The results can
    be differentiated once, by `hidden_TC`, `weight_VC` and `bias_V`; a gradient nobody needs is not
    computed. Weight and bias gradients are summed over chunks in float32 (float64 for float64).

    Args:
        hidden_TC: floating point, [T, C]; T may be 0.
        weight_VC: the head's weight, [V, C], of hidden's dtype except under autocast.
        labels_T: int64 [T], each in [0, V). There is no ignored label: leave such tokens out.
        bias_V: [V], of the weight's dtype.
        temperature_T: [T], positive; it gets no gradient.
        entropy: whether entropies are wanted; they cost one more pass over the logits.
        softcap: positive bound of the logits (Gemma 2's final_logit_softcapping).
        logit_scale: factor of the logits (Cohere's logit_scale).
        chunk_tokens: how many tokens' logits exist at a time.

    Returns:
        log-probs [T] and entropies [T] (None unless asked for), in float32 (float64 for float64).

    Raises:
        ConfigError: for a chunk_tokens below 1 or a softcap that is not positive.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}; it takes a whole number of at least 1.")
    if softcap is not None and softcap <= 0:
        raise ConfigError(f"softcap is {softcap}; it takes a positive number, or None for no cap.")
    assert hidden_TC.ndim == 2 and labels_T.shape == hidden_TC.shape[:1], "one label per token"
    assert temperature_T is None or temperature_T.shape == labels_T.shape, "one temperature a token"
    double = hidden_TC.dtype == torch.float64
    device_type = hidden_TC.device.type
    autocast = torch.is_autocast_enabled(device_type) and not double
    options = _Options(
        entropy=entropy,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_tokens=chunk_tokens,
        matmul_dtype=torch.get_autocast_dtype(device_type) if autocast else None,
        softmax_dtype=torch.float64 if double else torch.float32,
        fused=not double and bias_V is None and softcap is None and _fuses(hidden_TC.device),
    )
    return _TokenLogprobs.apply(hidden_TC, weight_VC, bias_V, labels_T, temperature_T, options)


def token_logprobs_reference(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature_T: Tensor | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    logit_scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` in plain PyTorch with all logits alive: the yardstick of its tests."""
    logits_TV = F.linear(hidden_TC, weight_VC, bias_V)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if logit_scale is not None:
        logits_TV = logits_TV * logit_scale
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    if temperature_T is not None:
        logits_TV = logits_TV / temperature_T[:, None]
    logprobs_TV = logits_TV.log_softmax(-1)
    logprobs_T = logprobs_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    return logprobs_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1) if entropy else None


def _fuses(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        temperature_T: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_T = hidden_TC.new_empty(labels_T.shape, dtype=options.softmax_dtype)
        max_T, sum_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        entropies_T = torch.empty_like(logprobs_T) if options.entropy else None
        weight = _cast(weight_VC, options)
        bias = None if bias_V is None else _cast(bias_V, options)
        scale_T = _scale(labels_T, temperature_T, options) if options.fused else None
        for chunk in _chunks(labels_T, options):
            hidden_cC = _cast(hidden_TC[chunk], options)
            if options.fused:
                from forkpoint.engine.head_triton import softmax_stats

                softmax_stats(
                    F.linear(hidden_cC, weight),
                    labels_T[chunk],
                    None if scale_T is None else scale_T[chunk],
                    logprobs_T[chunk],
                    max_T[chunk],
                    sum_T[chunk],
                    None if entropies_T is None else entropies_T[chunk],
                    _NO_PROBABILITY,
                )
                continue
            temperature_c = None if temperature_T is None else temperature_T[chunk]
            logits_cV, _ = _logits(hidden_cC, weight, bias, temperature_c, options)
            # The maximum comes off first: a log-sum-exp of logits as they are is rounded at their
            # size, and of 1 - p, where the model is sure of a token, only that would be left.
            max_T[chunk] = logits_cV.amax(-1)
            logits_cV.sub_(max_T[chunk, None])
            sum_T[chunk] = logits_cV.exp().sum(-1)
            label_logits_c = logits_cV.gather(-1, labels_T[chunk, None]).squeeze(-1)
            logprobs_T[chunk] = label_logits_c - sum_T[chunk].log()
            if entropies_T is not None:
                logprobs_cV = logits_cV.sub_(sum_T[chunk, None].log()).clamp_(min=_NO_PROBABILITY)
                entropies_T[chunk] = logprobs_cV.exp().mul_(logprobs_cV).sum(-1).neg_()
        ctx.save_for_backward(
            hidden_TC, weight_VC, bias_V, labels_T, temperature_T, max_T, sum_T, entropies_T
        )
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs_T, entropies_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's type)
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropies_T = grad_outputs
        hidden_TC, weight_VC, bias_V, labels_T, _, max_T, *_ = ctx.saved_tensors
        options: _Options = ctx.options
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(max_T)
        gradients_T = grad_logprobs_T, grad_entropies_T
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_TC = hidden_TC.new_empty(hidden_TC.shape) if needs_hidden else None
        grad_weight_VC = _zeros(weight_VC, options) if needs_weight else None
        grad_bias_V = _zeros(bias_V, options) if needs_bias else None
        # Backward may be called under autocast or outside it; what counts is where forward ran.
        with torch.autocast(hidden_TC.device.type, enabled=False):
            weight = _cast(weight_VC, options)
            bias = None if bias_V is None else _cast(bias_V, options)
            for chunk in _chunks(labels_T, options):
                hidden_cC = _cast(hidden_TC[chunk], options)
                if options.fused:
                    grad_cV = _fused_gradient(ctx, chunk, hidden_cC, weight, *gradients_T)
                else:
                    grad_cV = _gradient(ctx, chunk, hidden_cC, weight, bias, *gradients_T)
                if grad_bias_V is not None:
                    grad_bias_V += grad_cV.sum(0)
                grad_cV = grad_cV.to(hidden_cC.dtype)
                if grad_hidden_TC is not None:
                    grad_hidden_TC[chunk] = grad_cV @ weight
                if grad_weight_VC is not None:
                    _add_product(grad_weight_VC, grad_cV.T, hidden_cC)
        return (
            grad_hidden_TC,
            _as_dtype_of(weight_VC, grad_weight_VC),
            _as_dtype_of(bias_V, grad_bias_V),
            *(None, None, None),
        )


def _gradient(
    ctx: Any,
    chunk: slice,
    hidden_cC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad_logprobs_T: Tensor,
    grad_entropies_T: Tensor | None,
) -> Tensor:
    """The gradient of a chunk's logits as the linear layer left them."""
    *_, labels_T, temperature_T, max_T, sum_T, entropies_T = ctx.saved_tensors
    options: _Options = ctx.options
    temperature_c = None if temperature_T is None else temperature_T[chunk]
    logits_cV, tanh_cV = _logits(hidden_cC, weight, bias, temperature_c, options)
    # d logprob / d logit_j = [j is the label] - p_j
    # d entropy / d logit_j = -p_j * (log p_j + entropy)
    factor_c = grad_logprobs_T[chunk, None]
    logits_cV.sub_(max_T[chunk, None])
    if grad_entropies_T is None:
        grad_cV = logits_cV.exp_().mul_(-factor_c / sum_T[chunk, None])
    else:
        logprobs_cV = logits_cV.sub_(sum_T[chunk, None].log())
        grad_cV = logprobs_cV.clamp_(min=_NO_PROBABILITY).exp()
        logprobs_cV.add_(entropies_T[chunk, None]).mul_(grad_entropies_T[chunk, None])
        grad_cV.mul_(logprobs_cV.add_(factor_c).neg_())
    grad_cV.scatter_add_(-1, labels_T[chunk, None], factor_c)
    # Back through the temperature, the cap and the scale.
    if temperature_c is not None:
        grad_cV.div_(temperature_c[:, None])
    if tanh_cV is not None:
        grad_cV.mul_(tanh_cV.square_().neg_().add_(1))
    if options.logit_scale is not None:
        grad_cV.mul_(options.logit_scale)
    return grad_cV


def _fused_gradient(
    ctx: Any,
    chunk: slice,
    hidden_cC: Tensor,
    weight: Tensor,
    grad_logprobs_T: Tensor,
    grad_entropies_T: Tensor | None,
) -> Tensor:
    """The same by one kernel, in the dtype of the logits."""
    from forkpoint.engine.head_triton import softmax_gradient_

    *_, labels_T, temperature_T, max_T, sum_T, entropies_T = ctx.saved_tensors
    scale_T = _scale(labels_T, temperature_T, ctx.options)
    entropies_T = None if grad_entropies_T is None else entropies_T

    def here(x_T: Tensor | None) -> Tensor | None:
        return None if x_T is None else x_T[chunk].contiguous()

    return softmax_gradient_(
        F.linear(hidden_cC, weight),
        labels_T[chunk],
        here(scale_T),
        max_T[chunk],
        sum_T[chunk],
        here(entropies_T),
        grad_logprobs_T[chunk].contiguous(),
        here(grad_entropies_T),
        _NO_PROBABILITY,
    )


def _scale(labels_T: Tensor, temperature_T: Tensor | None, options: _Options) -> Tensor | None:
    """What each token's logits are multiplied by, float32; None for nothing."""
    if temperature_T is not None:
        return (options.logit_scale or 1.0) / temperature_T.float()
    if options.logit_scale is not None:
        return torch.full(
            labels_T.shape, options.logit_scale, dtype=torch.float32, device=labels_T.device
        )
    return None


def _chunks(labels_T: Tensor, options: _Options) -> list[slice]:
    size = options.chunk_tokens
    return [slice(start, start + size) for start in range(0, len(labels_T), size)]


def _cast(operand: Tensor, options: _Options) -> Tensor:
    return operand if options.matmul_dtype is None else operand.to(options.matmul_dtype)


def _zeros(parameter: Tensor, options: _Options) -> Tensor:
    return parameter.new_zeros(parameter.shape, dtype=options.softmax_dtype)


def _as_dtype_of(parameter: Tensor | None, grad: Tensor | None) -> Tensor | None:
    return None if parameter is None or grad is None else grad.to(parameter.dtype)


def _logits(
    hidden_cC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    temperature_c: Tensor | None,
    options: _Options,
) -> tuple[Tensor, Tensor | None]:
    """A chunk's logits, the caller's to overwrite, and the cap's tanh for its derivative."""
    logits_cV = F.linear(hidden_cC, weight_VC, bias_V).to(options.softmax_dtype)
    tanh_cV = None
    if options.logit_scale is not None:
        logits_cV.mul_(options.logit_scale)
    if options.softcap is not None:
        tanh_cV = logits_cV.div_(options.softcap).tanh_()
        logits_cV = tanh_cV * options.softcap
    if temperature_c is not None:
        logits_cV.div_(temperature_c[:, None])
    return logits_cV, tanh_cV


def _add_product(sum_VC: Tensor, left_Vc: Tensor, right_cC: Tensor) -> None:
    """sum_VC += left_Vc @ right_cC, rounding no product to 16 bits where the device can add it."""
    if sum_VC.dtype == right_cC.dtype:
        sum_VC.addmm_(left_Vc, right_cC)
    elif sum_VC.is_cuda:
        torch.addmm(sum_VC, left_Vc, right_cC, out_dtype=sum_VC.dtype, out=sum_VC)
    else:
        sum_VC += left_Vc @ right_cC
