"""How arrays become tensors on a device."""

import numpy as np
import pytest
import torch

from forkpoint.device import on_device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# torch says once of a process that this mode does not detect everything.
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchronization debug mode:UserWarning")
@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_the_host_waits_for_no_copy(count: int) -> None:
    values = np.random.default_rng(0).integers(0, 1000, count)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = on_device(values, torch.device("cuda"), torch.int32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.is_cuda and found.tolist() == values.tolist()
