"""Tables that are made on the host, on the device that reads them."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device, by an asynchronous copy where that is another than the CPU."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
