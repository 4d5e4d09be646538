"""Leaves of a loss's graph: the tensors that its backward adds gradients to."""

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

ACCUMULATES = "torch::autograd::AccumulateGrad"
"""The name of the nodes that add to `.grad` of a leaf."""


def leaves_of(value: Tensor) -> list[Tensor]:
    """Every leaf that a backward of `value` reaches, each once.

    value: requires a gradient.
    """
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
