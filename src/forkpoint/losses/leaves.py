"""Leaves of a loss's graph: the tensors that its backward adds gradients to."""

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from forkpoint.errors import UnsupportedError

ACCUMULATES = "torch::autograd::AccumulateGrad"
"""The name of the nodes that add to `.grad` of a leaf."""


def check_leaves(value: Tensor, outputs: Iterable[Tensor]) -> None:
    """Check that a loss reads no trainable tensor but the model's outputs.

    Args:
        value: the loss; requires a gradient.
        outputs: leaves that it may read.

    Raises UnsupportedError.
    """
    known = {id(output) for output in outputs}
    for leaf in _leaves_of(value):
        if id(leaf) not in known:
            raise UnsupportedError(
                f"the loss reads a trainable tensor of shape {tuple(leaf.shape)} and dtype "
                f"{leaf.dtype}, which is none of the model's outputs. Compute such a loss from "
                "policy.logprobs() and call backward(), or detach the tensor."
            )


def _leaves_of(value: Tensor) -> list[Tensor]:
    """Every leaf that a backward of `value` reaches, each once."""
    todo: list[Node] = [get_gradient_edge(value).node]
    seen: set[Node] = set()
    found: dict[int, Tensor] = {}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATES:
            leaf: Tensor = node.variable  # pyright: ignore[reportAttributeAccessIssue]
            found.setdefault(id(leaf), leaf)
        todo.extend(below for below, _ in node.next_functions if below is not None)
    return list(found.values())
