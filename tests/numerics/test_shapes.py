"""Public operations have the shapes that their names say, and the check of it can fail."""

import importlib
import inspect

import pytest
import torch
from torch import Tensor

from forkpoint.ops.head import token_logprobs
from shapes import OPERATIONS, SUFFIX, Documented, ShapeMismatch, shapes_checked


def product(x_TC: Tensor, weight_VC: Tensor, bias_V: Tensor | None = None) -> Tensor:
    y_TV = x_TC @ weight_VC.T
    return y_TV if bias_V is None else y_TV + bias_V


X, WEIGHT = torch.zeros(3, 4), torch.zeros(5, 4)


def test_names_that_are_true_pass() -> None:
    checked = shapes_checked(product, Documented(("TV",)))
    assert checked(X, WEIGHT).shape == checked(X, weight_VC=WEIGHT, bias_V=torch.zeros(5)).shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(X, WEIGHT, torch.zeros(1)), r"V is 1 in bias_V.* and 5 in weight_VC"),
        (lambda f: f(X[0], WEIGHT), r"x_TC has the shape \(4,\), and is named TC"),
        (lambda f: f(X, weight_VC=WEIGHT.T[None]), r"weight_VC has the shape \(1, 4, 5\)"),
    ],
)
def test_arguments_that_lie_fail(call, message: str) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        call(shapes_checked(product, Documented(("TV",))))


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (("VT",), r"V is 3 in result 0, of shape \(3, 5\), and 5 in weight_VC"),
        (("TC",), "C is 5 in result 0"),
        (("T",), "result 0 has the shape"),
        (("TV", "T"), "1 results, not"),
    ],
)
def test_results_that_lie_fail(results: tuple[str, ...], message: str) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        shapes_checked(product, Documented(results))(X, torch.zeros(5, 4))


def test_a_suffix_that_lies_fails() -> None:
    """The check reads the names of the function, so that a renamed argument is found."""

    def renamed(hidden_CT, weight_VC, labels_T):
        return token_logprobs(hidden_CT, weight_VC, labels_T)

    labels = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeMismatch, match="C is 4 in weight_VC"):
        shapes_checked(renamed, Documented(("T", "T")))(X, WEIGHT, labels)


@pytest.mark.usefixtures("checked_shapes")
def test_operations_are_checked_where_they_are_imported() -> None:
    labels = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeMismatch, match="V is 6 in bias_V"):
        token_logprobs(X, WEIGHT, labels, bias_V=torch.zeros(6))
    assert token_logprobs(X, WEIGHT, labels)[0].shape == (3,)


@pytest.mark.parametrize(("module", "name"), OPERATIONS)
def test_operations_document_their_shapes(module: str, name: str) -> None:
    """Every tensor that is an argument has a suffix, and the docstring has the results' shapes."""
    function = getattr(importlib.import_module(module), name)
    documented = OPERATIONS[module, name]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation in (Tensor, Tensor | None):
            assert SUFFIX.search(parameter.name) or parameter.name in documented.others
    text = " ".join((inspect.getdoc(function) or "").split())
    for letters in documented.results:
        if "?" not in letters and name != "token_logprobs_reference":
            assert f"[{', '.join(letters)}]" in text, letters


def test_every_public_operation_is_checked() -> None:
    """Functions of tensors that the packages of operations export."""
    for package in ("attention", "delta_rule", "selective_scan", "recurrence"):
        module = importlib.import_module(f"forkpoint.ops.{package}")
        for name in module.__all__:
            function = getattr(module, name)
            if not inspect.isfunction(function):
                continue
            annotations = [p.annotation for p in inspect.signature(function).parameters.values()]
            # The scan of over_levels has inputs of any dimensions.
            if Tensor in annotations and name != "over_levels":
                assert (module.__name__, name) in OPERATIONS
