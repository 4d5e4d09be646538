"""Log-probs and entropies of chosen tokens from hidden states, with few logits alive at a time.

A vocabulary is a hundred times wider than a hidden state, so the logits of a long microbatch are
the largest tensor of a training step. Here few exist at a time, unless memory suffices to keep them
for the backward, which saves a third of its products. The forward runs over chunks of tokens, and
keeps a few numbers per token: the largest logit, the sum of exponentials, the entropy. With these,
the gradient of each logit can be computed separately, so the backward runs over slices of the
vocabulary. The weight's gradient is then one product over all tokens for each slice. Chunks of
tokens would add to the whole gradient many times, in a float32 copy of the largest weight.

Kept logits are one tensor for each KEPT_TOKENS tokens. If they are several, their gradients add to
such a copy. One tensor of all tokens (18.5 GB of 65,000 tokens and 152,000 entries) does not fit if
the free memory of a GPU is in smaller parts.

The result is that of a linear layer and a log-softmax in float32. On CUDA, one pass over logits
suffices in each direction (triton_softmax) if there is Triton, no softcap, and no bias, whose
gradient is a sum of unrounded gradients.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.ops.head.vocabulary import VocabularyShard

# exp(-1e4) is exactly 0 in float32 and in float64, so raising smaller log-probs to this value
# changes no result. It prevents 0 * -inf (NaN) in the entropy if a vocabulary entry is masked.
_NO_PROBABILITY = -1e4


KEPT_TOKENS = 8192
"""Number of tokens whose logits are kept as one tensor, rounded up to whole chunks."""


class _Options(NamedTuple):
    entropy: bool
    statistics: tuple[str, ...]
    softcap: float | None
    logit_scale: float | None
    chunk_tokens: int
    matmul_dtype: torch.dtype | None  # None: no autocast, the operands' own
    softmax_dtype: torch.dtype
    fused: bool
    keeps: bool
    kept_tokens: int
    """Number of tokens whose logits are kept as one tensor."""
    shard: VocabularyShard | None


def token_outputs(
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
    keep_logits: bool = False,
    shard: VocabularyShard | None = None,
    statistics: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Compute the label's log-prob and other outputs of each token's next-token distribution.

    With `z = hidden_TC @ weight_VC.T + bias_V`, then `z * logit_scale`, then `softcap * tanh(z /
    softcap)`, then `z / temperature_T` (each where given), the distribution of token i is
    `softmax(z_i)`. All results, also entropies, include the temperature.

    The product is computed in the operands' dtype (under autocast in autocast's, as by a linear
    layer; float64 stays), everything after it in float32, or float64 for float64 operands. No
    tensor has more than `chunk_tokens` x V elements of logits, forward or backward, unless the
    product is kept, in its own dtype. Log-probs and entropies can be differentiated once with
    respect to `hidden_TC`, `weight_VC` and `bias_V`. Gradients that are not required are not
    computed. Hidden and bias gradients are summed in float32 (float64 for float64).

    Args:
        hidden_TC: floating point, [T, C]; T may be 0.
        weight_VC: the head's weight, [V, C], of hidden's dtype except under autocast.
        labels_T: int64 [T], each in [0, V). No label is ignored.
        bias_V: [V], of the weight's dtype.
        temperature_T: [T], positive; it gets no gradient.
        entropy: whether to compute entropies, which takes one more pass over the logits.
        softcap: positive bound of the logits (Gemma 2's final_logit_softcapping).
        logit_scale: factor of the logits (Cohere's logit_scale).
        chunk_tokens: number of tokens whose logits exist at a time, at least 1.
        keep_logits: keep all T x V logits for the backward instead of computing them again. With
            more than KEPT_TOKENS tokens, the weight's gradient is summed in float32.
        shard: `weight_VC` and `bias_V` have only this rank's rows of the vocabulary. Labels are of
            the whole vocabulary. All ranks of the group must call this with the same tokens, and
            get the same results. The backward is collective as well.
        statistics: names in config.HEAD_STATISTICS; empty with a shard.

    Returns:
        "logprobs", "entropies" if asked for, and statistics without a gradient: "mean_logits",
        "is_top1" (1 where the label is the first of the largest, else 0) and "log_sum_sq_probs".
        All are [T], in float32 (float64 for float64).

    Raises:
        ConfigError: for a softcap that is not positive.
        UnsupportedError: for statistics with a shard.
    """
    if shard is not None and statistics:
        raise UnsupportedError(
            f"head_statistics are {statistics}, which take all logits of a token, and several "
            "ranks hold the vocabulary together. Leave head_statistics out, or the output head "
            "out of the model's tp_plan."
        )
    if softcap is not None and softcap <= 0:
        raise ConfigError(f"softcap is {softcap}; it takes a positive number, or None for no cap.")
    assert hidden_TC.ndim == 2 and labels_T.shape == hidden_TC.shape[:1], "one label per token"
    assert temperature_T is None or temperature_T.shape == labels_T.shape, "one temperature a token"
    double = hidden_TC.dtype == torch.float64
    device_type = hidden_TC.device.type
    autocast = torch.is_autocast_enabled(device_type) and not double
    options = _Options(
        entropy=entropy,
        statistics=statistics,
        softcap=softcap,
        logit_scale=logit_scale,
        chunk_tokens=chunk_tokens,
        matmul_dtype=torch.get_autocast_dtype(device_type) if autocast else None,
        softmax_dtype=torch.float64 if double else torch.float32,
        fused=not double and bias_V is None and softcap is None and _fuses(hidden_TC.device),
        keeps=keep_logits
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (hidden_TC, weight_VC, bias_V)),
        kept_tokens=-(-KEPT_TOKENS // chunk_tokens) * chunk_tokens,
        shard=shard,
    )
    if shard is not None:
        labels_T = labels_T - shard.start
    logprobs_T, entropies_T, *others = _TokenLogprobs.apply(
        hidden_TC, weight_VC, bias_V, labels_T, temperature_T, options
    )
    found = {"logprobs": logprobs_T} | ({} if entropies_T is None else {"entropies": entropies_T})
    return found | dict(zip(statistics, others, strict=True))


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
    ) -> tuple[Tensor | None, ...]:
        logprobs_T = hidden_TC.new_empty(labels_T.shape, dtype=options.softmax_dtype)
        max_T, sum_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        entropies_T = torch.empty_like(logprobs_T) if options.entropy else None
        others = [torch.empty_like(logprobs_T) for _ in options.statistics]
        weight = _cast(weight_VC, options)
        bias = None if bias_V is None else _cast(bias_V, options)
        scale_T = _scale(labels_T, temperature_T, options) if options.fused else None
        kept: list[Tensor] | None = [] if options.keeps else None
        shard, vocab = options.shard, len(weight_VC)
        # For a label of another rank, the log-prob of any entry is computed and not used.
        here_T = labels_T if shard is None else labels_T.clamp(0, max(0, vocab - 1))
        if not vocab:
            max_T.fill_(-torch.inf)
            sum_T.zero_()
        for chunk in _slices(len(labels_T), options.chunk_tokens) if vocab else ():
            if kept is None:
                product_cV = F.linear(_cast(hidden_TC[chunk], options), weight, bias)
            else:
                place = chunk.start % options.kept_tokens
                if not place:
                    rows = slice(chunk.start, chunk.start + options.kept_tokens)
                    kept.append(F.linear(_cast(hidden_TC[rows], options), weight, bias))
                product_cV = kept[-1][place : place + options.chunk_tokens]
            if others:
                temperature_c = None if temperature_T is None else temperature_T[chunk]
                logits_cV, _ = _logits(product_cV, temperature_c, options, copy=True)
                for name, values_T in zip(options.statistics, others, strict=True):
                    values_T[chunk] = _statistic(name, logits_cV, labels_T[chunk])
                del logits_cV
            if options.fused:
                from forkpoint.ops.head.triton_softmax import softmax_stats

                softmax_stats(
                    product_cV,
                    here_T[chunk],
                    None if scale_T is None else scale_T[chunk],
                    logprobs_T[chunk],
                    max_T[chunk],
                    sum_T[chunk],
                    None if entropies_T is None else entropies_T[chunk],
                    _NO_PROBABILITY,
                )
                continue
            temperature_c = None if temperature_T is None else temperature_T[chunk]
            logits_cV, _ = _logits(product_cV, temperature_c, options)
            # The maximum is subtracted first. Otherwise the log-sum-exp is rounded relative to the
            # size of the logits, and if p is close to 1, the result is mostly rounding.
            max_T[chunk] = logits_cV.amax(-1)
            logits_cV.sub_(max_T[chunk, None])
            sum_T[chunk] = logits_cV.exp().sum(-1)
            label_logits_c = logits_cV.gather(-1, here_T[chunk, None]).squeeze(-1)
            logprobs_T[chunk] = label_logits_c - sum_T[chunk].log()
            if entropies_T is not None:
                logprobs_cV = logits_cV.sub_(sum_T[chunk, None].log()).clamp_(min=_NO_PROBABILITY)
                entropies_T[chunk] = logprobs_cV.exp().mul_(logprobs_cV).sum(-1).neg_()
        if shard is not None:
            shard.combine(labels_T, vocab, logprobs_T, max_T, sum_T, entropies_T)
        ctx.save_for_backward(
            hidden_TC, weight_VC, bias_V, labels_T, temperature_T, max_T, sum_T, entropies_T
        )
        ctx.options = options
        # Not saved tensors, because the backward overwrites and frees them.
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*others)
        return logprobs_T, entropies_T, *others

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator's type)
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, grad_entropies_T, *_ = grad_outputs
        hidden_TC, weight_VC, bias_V, labels_T, _, max_T, *_ = ctx.saved_tensors
        options: _Options = ctx.options
        kept, ctx.kept = ctx.kept, None
        assert (kept is not None) == options.keeps, "logits are kept for one backward"
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(max_T)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        vocab, tokens = len(weight_VC), len(labels_T)
        size = tokens if kept is None else min(tokens, options.kept_tokens)
        groups, parts = _slices(tokens, max(1, size)), _parts(size, vocab, options.chunk_tokens)
        if kept is not None and options.fused:  # the kernel makes no other tensor
            parts = [slice(0, vocab)]
        if not vocab:  # the other ranks have all of the vocabulary
            groups = []
        wide = options.softmax_dtype
        hidden = _cast(hidden_TC, options)
        grad_hidden_TC = grad_weight_VC = grad_bias_V = None
        sums_hidden, sums_weight = len(parts) > 1 or options.shard is not None, len(groups) > 1
        if needs_hidden:
            grad_hidden_TC = torch.zeros_like(hidden, dtype=wide if sums_hidden else None)
        if needs_weight:
            grad_weight_VC = torch.zeros_like(weight_VC, dtype=wide if sums_weight else None)
        if needs_bias and bias_V is not None:
            grad_bias_V = torch.zeros_like(bias_V, dtype=wide)
        # The backward may run with or without autocast. Only the autocast of the forward counts.
        with torch.autocast(hidden_TC.device.type, enabled=False):
            for rows in groups:
                kept_tV = None if kept is None else kept.pop(0)
                for part in parts:
                    weight = _cast(weight_VC[part], options)
                    bias = None if bias_V is None else _cast(bias_V[part], options)
                    if kept_tV is None:
                        logits_tv = F.linear(hidden[rows], weight, bias)
                    else:
                        logits_tv = kept_tV[:, part]
                    gradient = _fused_gradient if options.fused else _gradient
                    grad_entropies_t = None if grad_entropies_T is None else grad_entropies_T[rows]
                    grad_tv = gradient(
                        ctx, rows, part, logits_tv, grad_logprobs_T[rows], grad_entropies_t
                    )
                    del logits_tv
                    if grad_bias_V is not None:
                        grad_bias_V[part] += grad_tv.sum(0)
                    grad_tv = grad_tv.to(hidden.dtype)
                    if grad_hidden_TC is not None:
                        put = _add_product if sums_hidden else _put_product
                        put(grad_hidden_TC[rows], grad_tv, weight)
                    if grad_weight_VC is not None:
                        put = _add_product if sums_weight else _put_product
                        put(grad_weight_VC[part], grad_tv.T, hidden[rows])
                    del grad_tv
                del kept_tV  # freed as soon as its gradient is
        if options.shard is not None and grad_hidden_TC is not None and grad_hidden_TC.numel():
            dist.all_reduce(grad_hidden_TC, group=options.shard.group)
        return (
            None if grad_hidden_TC is None else grad_hidden_TC.to(hidden_TC.dtype),
            None if grad_weight_VC is None else grad_weight_VC.to(weight_VC.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            *(None, None, None),
        )


def _gradient(
    ctx: Any,
    rows: slice,
    part: slice,
    product_Tv: Tensor,
    grad_logprobs_T: Tensor,
    grad_entropies_T: Tensor | None,
) -> Tensor:
    """The gradient of the linear layer's output for some tokens and a slice of the vocabulary."""
    labels_T, temperature_T, max_T, sum_T, entropies_T = _saved(ctx, rows)
    options: _Options = ctx.options
    logits_Tv, tanh_Tv = _logits(product_Tv, temperature_T, options)
    # d logprob / d logit_j = [j is the label] - p_j
    # d entropy / d logit_j = -p_j * (log p_j + entropy)
    factor_T1 = grad_logprobs_T[:, None]
    logits_Tv.sub_(max_T[:, None])
    if grad_entropies_T is None:
        grad_Tv = logits_Tv.exp_().mul_(-factor_T1 / sum_T[:, None])
    else:
        logprobs_Tv = logits_Tv.sub_(sum_T[:, None].log())
        grad_Tv = logprobs_Tv.clamp_(min=_NO_PROBABILITY).exp()
        logprobs_Tv.add_(entropies_T[:, None]).mul_(grad_entropies_T[:, None])
        grad_Tv.mul_(logprobs_Tv.add_(factor_T1).neg_())
    inside_T1 = ((labels_T >= part.start) & (labels_T < part.stop))[:, None]
    at_T1 = (labels_T[:, None] - part.start).clamp_(0, product_Tv.shape[1] - 1)
    grad_Tv.scatter_add_(-1, at_T1, factor_T1 * inside_T1)
    # Back through the temperature, the cap and the scale.
    if temperature_T is not None:
        grad_Tv.div_(temperature_T[:, None])
    if tanh_Tv is not None:
        grad_Tv.mul_(tanh_Tv.square_().neg_().add_(1))
    if options.logit_scale is not None:
        grad_Tv.mul_(options.logit_scale)
    return grad_Tv


def _fused_gradient(
    ctx: Any,
    rows: slice,
    part: slice,
    product_Tv: Tensor,
    grad_logprobs_T: Tensor,
    grad_entropies_T: Tensor | None,
) -> Tensor:
    """The same by one kernel, in the dtype of the logits. It overwrites the logits."""
    from forkpoint.ops.head.triton_softmax import softmax_gradient_

    labels_T, temperature_T, max_T, sum_T, entropies_T = _saved(ctx, rows)
    return softmax_gradient_(
        product_Tv,
        labels_T,
        part.start,
        _scale(labels_T, temperature_T, ctx.options),
        max_T,
        sum_T,
        None if grad_entropies_T is None else entropies_T,
        grad_logprobs_T.contiguous(),
        None if grad_entropies_T is None else grad_entropies_T.contiguous(),
        _NO_PROBABILITY,
    )


def _saved(ctx: Any, rows: slice) -> list[Any]:
    """Labels, temperatures, maxima, sums and entropies of some tokens."""
    return [None if x is None else x[rows] for x in ctx.saved_tensors[3:]]


def _scale(labels_T: Tensor, temperature_T: Tensor | None, options: _Options) -> Tensor | None:
    """Factor of each token's logits, float32; None for 1."""
    if temperature_T is not None:
        return (options.logit_scale or 1.0) / temperature_T.float()
    if options.logit_scale is not None:
        return torch.full(
            labels_T.shape, options.logit_scale, dtype=torch.float32, device=labels_T.device
        )
    return None


def _slices(count: int, size: int) -> list[slice]:
    return [slice(begin, begin + size) for begin in range(0, count, size)]


def _parts(tokens: int, vocab: int, chunk_tokens: int) -> list[slice]:
    """About equal slices of the vocabulary. A slice has at most as many logits, over all tokens, as
    a chunk.

    Widths of 64 or more are multiples of 64, with which matrix products are faster.
    """
    widest = max(1, chunk_tokens * vocab // max(1, tokens))
    widest -= widest % 64 if widest >= 64 else 0
    if widest >= vocab:
        return [slice(0, vocab)]
    width = -(-vocab // -(-vocab // widest))
    width = min(widest, -(-width // 64) * 64)
    return [slice(begin, min(vocab, begin + width)) for begin in range(0, vocab, width)]


def _cast(operand: Tensor, options: _Options) -> Tensor:
    return operand if options.matmul_dtype is None else operand.to(options.matmul_dtype)


def _statistic(name: str, logits_cV: Tensor, labels_c: Tensor) -> Tensor:
    if name == "mean_logits":
        return logits_cV.mean(-1)
    if name == "is_top1":
        return (logits_cV.argmax(-1) == labels_c).to(logits_cV.dtype)
    assert name == "log_sum_sq_probs", name
    return torch.logsumexp(2 * logits_cV, -1) - 2 * torch.logsumexp(logits_cV, -1)


def _logits(
    product_cV: Tensor, temperature_c: Tensor | None, options: _Options, *, copy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The logits of a chunk, which the caller may overwrite, and the softcap's tanh for its
    derivative.

    The product may be overwritten, except with `copy` or if it is kept for the backward.
    """
    logits_cV = product_cV.to(options.softmax_dtype, copy=copy or options.keeps)
    tanh_cV = None
    if options.logit_scale is not None:
        logits_cV.mul_(options.logit_scale)
    if options.softcap is not None:
        tanh_cV = logits_cV.div_(options.softcap).tanh_()
        logits_cV = tanh_cV * options.softcap
    if temperature_c is not None:
        logits_cV.div_(temperature_c[:, None])
    return logits_cV, tanh_cV


def _add_product(sum_TC: Tensor, left_Tv: Tensor, right_vC: Tensor) -> None:
    """sum_TC += left_Tv @ right_vC, without rounding the product to 16 bits if the device supports
    that."""
    if sum_TC.dtype == right_vC.dtype:
        sum_TC.addmm_(left_Tv, right_vC)
    elif sum_TC.is_cuda:
        torch.addmm(sum_TC, left_Tv, right_vC, out_dtype=sum_TC.dtype, out=sum_TC)
    else:
        sum_TC += left_Tv @ right_vC


def _put_product(out_TC: Tensor, left_Tv: Tensor, right_vC: Tensor) -> None:
    """out_TC = left_Tv @ right_vC, without rounding to 16 bits if the device supports that."""
    if out_TC.dtype == right_vC.dtype:
        torch.mm(left_Tv, right_vC, out=out_TC)
    elif out_TC.is_cuda and out_TC.dtype == torch.float32:
        torch.mm(left_Tv, right_vC, out_dtype=out_TC.dtype, out=out_TC)
    else:
        out_TC.copy_(left_Tv @ right_vC)
