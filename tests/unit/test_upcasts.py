"""Conversions of tensors while code of models computes in wider dtypes."""

import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from forkpoint.engine.changes import Changes
from forkpoint.hosts.upcasts import lift_bfloat16
from forkpoint.testing import lifted_upcasts, tiny_model

X = torch.tensor([1 + 1e-12], dtype=torch.float64)


def test_float64_stays_float64() -> None:
    with lifted_upcasts(nn.Linear(1, 1)):
        with lifted_upcasts(nn.Linear(1, 1)):
            pass
        assert X.float().equal(X) and X.bfloat16().equal(X)
    assert (X.float().dtype, X.bfloat16().dtype) == (torch.float32, torch.bfloat16)


def test_code_of_a_model_names_float64() -> None:
    """Until the outermost block ends; without it norms limit float64 models to 1e-7."""
    code = vars(modeling_qwen3)
    with lifted_upcasts(tiny_model("qwen3")):
        with lifted_upcasts(tiny_model("qwen3")):
            assert code["torch"].float32 is torch.float64
        assert code["torch"].bfloat16 is torch.bfloat16 and code["torch"] is not torch
        assert torch.ones(1, dtype=torch.int64).float().dtype == torch.float64
    assert code["torch"] is torch


def test_bfloat16_is_float32() -> None:
    with Changes() as changes:
        lift_bfloat16(changes)
        assert X.bfloat16().dtype == torch.float32
    assert X.bfloat16().dtype == torch.bfloat16
