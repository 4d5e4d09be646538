"""Errors of gradients, and what of them is allowed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from forkpoint.verify.dense import DenseRun
from forkpoint.verify.report import ParameterError

T = TypeVar("T")
Gradients = Mapping[str, Tensor | None]

OVERALL_RATIO = 1.1
WORST_RATIO = 1.5
FLOAT64_BAR = 1e-10
# An error is one draw of rounding, and where dense happened to draw a small one, a ratio to it says
# little. So units in the last place are allowed on top: of the gradient of each parameter, and of
# the gradient as a whole, where draws average out.
PARAMETER_ULPS = {torch.float32: 8.0, torch.bfloat16: 1 / 4, torch.float16: 1 / 4}
OVERALL_ULPS = {torch.float32: 8.0, torch.bfloat16: 1 / 16, torch.float16: 1 / 16}
# A parameter whose gradient is less than this part of the others' is measured by that part: a
# gradient that cancels to nearly nothing is all rounding.
LEAST_PART = 0.01
PIECE_ELEMENTS = 1 << 24
"""Elements of a gradient that are compared at a time."""


@dataclass(frozen=True)
class Truth:
    """The reference, and how far ordinary training is from it."""

    reference: DenseRun
    norms: dict[str, float]
    dense_errors: dict[str, float]


def distances(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """By parameter, how far gradients are from others."""
    return {name: distance_of(found[name], other) for name, other in wanted.items()}


def parameter_errors(
    elements: Mapping[str, int],
    dtype: torch.dtype,
    shared_errors: Mapping[str, float],
    truth: Truth,
) -> list[ParameterError]:
    """`elements`: of each parameter and other leaf, by name."""
    norms = truth.norms
    total = math.hypot(*norms.values())
    typical = total / math.sqrt(max(1, sum(norm > 0 for norm in norms.values())))
    errors = []
    for name, count in elements.items():
        dense_error = truth.dense_errors[name]
        if dtype == torch.float64:
            allowed = FLOAT64_BAR * total
        else:
            few = 1 + 2 / math.sqrt(count)
            ulp = torch.finfo(dtype).eps * max(norms[name], LEAST_PART * typical)
            allowed = WORST_RATIO * few * dense_error + PARAMETER_ULPS[dtype] * ulp
        errors.append(ParameterError(name, norms[name], shared_errors[name], dense_error, allowed))
    return errors


def named(of_leaves: Mapping[Tensor, T]) -> dict[str, T]:
    """Values of leaves that are no parameters of the model, by names for a report."""
    return {
        f"leaf {number} of the loss, {tuple(leaf.shape)}": value
        for number, (leaf, value) in enumerate(of_leaves.items())
    }


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    """Flat pieces, so that copies in double precision stay small beside the largest parameter."""
    return iter(gradient.detach().reshape(-1).split(PIECE_ELEMENTS))


def norm_of(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return math.hypot(*(float(piece.double().norm()) for piece in _pieces(gradient)))


def distance_of(gradient: Tensor | None, truth: Tensor | None) -> float:
    if gradient is None or truth is None:
        present = gradient if truth is None else truth
        return norm_of(present)
    pieces = zip(_pieces(gradient), _pieces(truth), strict=True)
    return math.hypot(*(float((g.double() - t.to(g.device).double()).norm()) for g, t in pieces))
