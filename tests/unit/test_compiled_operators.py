"""Operators of compiled code: gradients, and what a graph holds."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from forkpoint.hosts.operators import differentiable, operator


def _product(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return factor * x * y, torch.tensor(7)


def _product_backward(do: Tensor, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return factor * do * y, factor * do * x


def _fake(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty((), dtype=torch.int64)


def _fake_backward(do: Tensor, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


forward = operator("test_product_forward", _product, _fake)
backward = operator("test_product_backward", _product_backward, _fake_backward)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        o, note = forward(x, y, factor)
        ctx.mark_non_differentiable(note)
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return o, note

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        found = backward(grad_outputs[0], *ctx.saved_tensors, ctx.factor)
        wanted = zip(found, ctx.needs_input_grad[:2], strict=True)
        return *(x if wants else None for x, wants in wanted), None


product = differentiable("test_product", _product, _Product)


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("learns", ["both", "one", "none"])
def test_graphs_call_the_operators_of_the_function(learns: str) -> None:
    torch._dynamo.reset()
    called: list[str] = []

    def note(graph: torch.fx.GraphModule, _: object) -> Any:
        targets = (str(node.target) for node in graph.graph.nodes)
        called.extend(target for target in targets if target.startswith("forkpoint."))
        return graph.forward

    compiled = torch.compile(
        lambda x, y: product(x.sin(), y, 3.0)[0].sum(),
        backend=aot_autograd(fw_compiler=note, bw_compiler=note),
    )
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=learns == "both")
    y = torch.randn(5, 2, dtype=torch.float64, requires_grad=learns != "none")
    value = compiled(x, y)
    torch.testing.assert_close(value, (3 * x.sin() * y).sum())
    expected = ["forkpoint.test_product_forward.default"]
    if learns != "none":
        value.backward()
        torch.testing.assert_close(y.grad, 3 * x.detach().sin())
        expected += ["forkpoint.test_product_backward.default"]
    if learns == "both":
        torch.testing.assert_close(x.grad, (3 * x.cos() * y).detach())
    assert called == expected


def test_schemas_and_fakes_agree_with_what_runs() -> None:
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    for checked, given in ((forward, (x, y, 2.0)), (backward, (x, x, y, 2.0))):
        torch.library.opcheck(checked, given, test_utils=("test_schema", "test_faketensor"))
