"""Kernels of the head for a chunk of logits: one pass over them each way.

Elementwise operations of torch read and write a chunk in float32 a dozen times, which for a large
vocabulary takes a third of the time of the matrix products. Here the forward reads the logits once,
in the dtype of the product. The backward reads them once and overwrites them with their gradient.
All arithmetic is in float32. Import this module only with Triton installed.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _stats_kernel(
    logits, scale, labels, logprobs, maxima, sums, entropies,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    microbatch = logits + t * VOCAB
    factor = tl.load(scale + t) if SCALED else 1.0
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for begin in range(0, VOCAB, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        x = tl.load(microbatch + v, mask=v < VOCAB, other=-float("inf")).to(tl.float32) * factor
        before = largest
        largest = tl.maximum(before, tl.max(x, 0))
        # If all entries so far are masked, nothing is added, because -inf - -inf is NaN.
        at = tl.where(largest == -float("inf"), 0.0, largest)
        less = tl.where(before == -float("inf"), 0.0, before - at)
        y = x - at
        e = tl.exp(y)
        rescale = tl.exp(less)
        if ENTROPY:
            weighted = (weighted + total * less) * rescale + tl.sum(e * tl.maximum(y, LEAST), 0)
        total = total * rescale + tl.sum(e, 0)
    label = tl.load(microbatch + tl.load(labels + t)).to(tl.float32) * factor
    # The maximum is subtracted first, because 1 - p would be lost in a sum of the two.
    tl.store(logprobs + t, (label - largest) - tl.log(total))
    tl.store(maxima + t, largest)
    tl.store(sums + t, total)
    if ENTROPY:
        # Both terms are positive, so there is no cancellation.
        tl.store(entropies + t, tl.log(total) - weighted / total)


@triton.jit
def _gradient_kernel(
    logits, scale, labels, maxima, sums, entropies, grad_logprobs, grad_entropies, first, width,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + t * width + v
    factor = tl.load(scale + t) if SCALED else 1.0
    x = tl.load(at, mask=v < width, other=0.0).to(tl.float32) * factor
    total = tl.load(sums + t)
    y = x - tl.load(maxima + t)
    share = tl.exp(y) / total
    wanted = tl.load(grad_logprobs + t)
    # d logprob / d logit_j = [j is the label] - p_j
    gradient = tl.where(v == tl.load(labels + t) - first, wanted, 0.0) - share * wanted
    if ENTROPY:
        # d entropy / d logit_j = -p_j * (log p_j + entropy)
        logprob = tl.maximum(y - tl.log(total), LEAST)
        gradient -= share * (logprob + tl.load(entropies + t)) * tl.load(grad_entropies + t)
    tl.store(at, (gradient * factor).to(logits.dtype.element_ty), mask=v < width)


def softmax_stats(
    logits_cV: Tensor,
    labels_c: Tensor,
    scale_c: Tensor | None,
    logprobs_c: Tensor,
    max_c: Tensor,
    sum_c: Tensor,
    entropies_c: Tensor | None,
    least: float,
) -> None:
    """Compute the label's log-prob, max z, sum exp(z - max) and the entropy for z = logits * scale.

    Logits are [c, V], contiguous, in any dtype of at most 32 bits. Others are [c], contiguous,
    float32, and labels int64. Results are written to the given tensors. The entropy raises
    log-probs below `least` to `least`.
    """
    assert logits_cV.is_contiguous()
    tokens, vocab = logits_cV.shape
    _stats_kernel[(tokens,)](  # pyright: ignore[reportIndexIssue]
        logits_cV,
        max_c if scale_c is None else scale_c,
        labels_c,
        logprobs_c,
        max_c,
        sum_c,
        sum_c if entropies_c is None else entropies_c,
        VOCAB=vocab,
        SCALED=scale_c is not None,
        ENTROPY=entropies_c is not None,
        LEAST=least,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def softmax_gradient_(
    logits_cV: Tensor,
    labels_c: Tensor,
    first: int,
    scale_c: Tensor | None,
    max_c: Tensor,
    sum_c: Tensor,
    entropies_c: Tensor | None,
    grad_logprobs_c: Tensor,
    grad_entropies_c: Tensor | None,
    least: float,
) -> Tensor:
    """Overwrite logits with their gradient, in their dtype; arguments as in `softmax_stats`.

    Logits are a slice of the vocabulary that begins at the entry `first`.
    """
    assert logits_cV.is_contiguous()
    tokens, width = logits_cV.shape
    entropy = grad_entropies_c is not None and entropies_c is not None
    _gradient_kernel[(tokens, triton.cdiv(width, _BLOCK))](  # pyright: ignore[reportIndexIssue]
        logits_cV,
        max_c if scale_c is None else scale_c,
        labels_c,
        max_c,
        sum_c,
        entropies_c if entropy else sum_c,
        grad_logprobs_c,
        grad_entropies_c if entropy else sum_c,
        first,
        width,
        SCALED=scale_c is not None,
        ENTROPY=entropy,
        LEAST=least,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return logits_cV
