"""What a device is called in files that are looked up by it."""

import platform

import torch


def device_name(device: torch.device) -> str:
    """A GPU's model; of a CPU its architecture and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine() or 'cpu'}, {threads} thread{'s' * (threads > 1)}"
