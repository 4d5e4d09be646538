"""Conversions of tensors while code of models computes in wider dtypes."""

import torch
from torch import nn

from forkpoint.engine.changes import Changes
from forkpoint.hosts.upcasts import lift_bfloat16
from forkpoint.testing import lifted_upcasts

X = torch.tensor([1 + 1e-12], dtype=torch.float64)


def test_float64_stays_float64() -> None:
    with lifted_upcasts(nn.Linear(1, 1)):
        with lifted_upcasts(nn.Linear(1, 1)):
            pass
        assert X.float().equal(X) and X.bfloat16().equal(X)
    assert (X.float().dtype, X.bfloat16().dtype) == (torch.float32, torch.bfloat16)


def test_bfloat16_is_float32() -> None:
    with Changes() as changes:
        lift_bfloat16(changes)
        assert X.bfloat16().dtype == torch.float32
    assert X.bfloat16().dtype == torch.bfloat16
