"""The composition against attention over whole paths, in float64 and in the usual rounding."""

from typing import Any

import pytest
import torch
from attention_cases import Case, check_exact, check_rounding, make_forest
from attention_cases import random_forest as forest

KERNELS = ("reference", "cpu_flash")
CUDA = pytest.param(
    "cuda",
    "auto",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)
ODD = [-1, 0, 0, 1, -1, 4, 5], [65, 1, 127, 65, 63, 1, 65]
EQUAL = [-1, -1, *[0] * 3, *[1] * 3], [20, 20, *[13] * 6]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "random": (forest(0), {}),
    "as many key heads": (forest(1), {"heads": (4, 4)}),
    "one key head": (forest(2), {"heads": (3, 1)}),
    "fused": (forest(3), {"fused": True}),
    "sinks": (forest(0), {"sinks": True}),
    "sinks of one launch": (make_forest([-1], [20]), {"sinks": True}),
    "window of one": (forest(0), {"window": 1}),
    "window of seven, sinks": (forest(1), {"window": 7, "sinks": True}),
    "window of more than all": (forest(2), {"window": 1000}),
    "window over blocks": (make_forest([-1, 0, 0], [9, 600, 530]), {"window": 300}),
    "window without ancestors": (make_forest([-1, -1], [30, 41]), {"window": 30}),
    "odd sizes": (make_forest(*ODD), {"heads": (2, 1), "dims": (17, 17)}),
    "odd sizes, cache": (make_forest(*ODD, [0, 4, 5], True), {"dims": (17, 17)}),
    "equal lengths": (make_forest(*EQUAL, by_level=True), {}),
    "equal lengths, cache": (make_forest(*EQUAL, [0, 1], True), {}),
}
REFERENCE_ALONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "softcap": (forest(2), {"softcap": 1.5, "sinks": True}),
    "softcap, window": (forest(2), {"softcap": 1.5, "window": 7}),
    "wider keys": (forest(3), {"dims": (12, 8), "sinks": True}),
    "wider values": (forest(3), {"dims": (1, 7)}),
}


@pytest.mark.parametrize(("device", "kernel"), [*(("cpu", k) for k in KERNELS), CUDA])
def test_equal_to_attention_over_paths(device: str, kernel: str) -> None:
    cases = CASES | (REFERENCE_ALONE if kernel != "cpu_flash" else {})
    for made, options in cases.values():
        check_exact(Case(made, kernel, device=device, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rounding(kernel: str, dtype: torch.dtype) -> None:
    lengths = [127, 63, 40, 1, 130, 65, 65, 7]
    made = make_forest([-1, 0, 1, 1, 0, 4, 4, 4], lengths, [0, 1])
    for options in ({}, {"window": 9}, {"sinks": True}, {"softcap": 1.5}):
        if "softcap" not in options or kernel == "reference":
            check_rounding(Case(made, kernel, dims=(32, 32), dtype=dtype, **options))
