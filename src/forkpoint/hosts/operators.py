"""Operators of compiled code that need little host time.

torch.library.custom_op runs Python four times a call, for checks and for autograd: 13 us of 17 for
an operator that does nothing. Compiled code calls the operators here directly. Their autograd
formula is used only when a graph is made.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "forkpoint"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(
    name: str, run: Callable[..., tuple[Tensor, ...]], fake: Callable[..., tuple[Tensor, ...]]
) -> torch._ops.OpOverload:
    """Make an operator without gradients that calls `run`. `run` must not change its arguments or
    return views of them.

    Args:
        run: function with annotations, from which the operator's schema is made.
        fake: returns the same results for tensors without values.
    """
    _library.define(
        name + torch.library.infer_schema(run, mutates_args=()), tags=torch.Tag.pt2_compliant_tag
    )
    _library.impl(name, run, "CompositeExplicitAutograd")
    # Otherwise autograd reads all arguments of each call, to warn of missing gradients.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def differentiable(
    name: str, like: Callable[..., Any], function: type[torch.autograd.Function]
) -> torch._ops.OpOverload:
    """Make an operator that applies `function`. Graphs contain the operators that its forward and
    backward call.

    Args:
        like: function with annotations of the same arguments and results.
    """
    _library.define(
        name + torch.library.infer_schema(like, mutates_args=()), tags=torch.Tag.pt2_compliant_tag
    )
    _library.impl(name, function.apply, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default
