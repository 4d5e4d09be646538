"""The automatic measurement of a device at a policy's first plan.

It runs layers with the model's sizes and random weights, not the model itself. It takes at most 3
seconds, without compilation, which the first step needs anyway. Later processes on the same device
with the same versions use its file.
"""

import logging
from contextlib import nullcontext

import torch

from forkpoint.device import device_name, measured_versions, usable_bytes
from forkpoint.errors import ConfigError
from forkpoint.hosts.compiled import one_line
from forkpoint.hosts.host import ModelHost
from forkpoint.plan.pricing.calibration import Calibration, calibration_path, is_stored
from forkpoint.step.calibrate.calibrator import LAYERS, QUICK, calibrate, deep_layers

_log = logging.getLogger("forkpoint")

MEASURED = {"cuda"}
"""Types of measured devices. Tests change this."""
MEASUREMENT = 15
"""Increase this when the measurement or a kernel changes, so that earlier files are not used."""
BEGINS = (
    "measuring layers of this model on this device, to price plans (once: the result is saved for "
    "later processes). Config(calibration=None) skips this."
)
DONE = (
    "measured in %.1f s, after %.1f s of first runs that compiled the layers; the next step needs "
    "the compiled layers too."
)
FAILED = (
    "this device was not measured for the model (%s); plans are priced by nominal rates. Run "
    "forkpoint calibrate to measure it; Config(calibration=None) skips the attempt."
)
NOT_SAVED = "the measurement of this device was not saved (%s); the next process measures again."


def measured(host: ModelHost, kernel: str, *, compiled: bool) -> Calibration | None:
    """This device's calibration for a model, from the file of an earlier measurement or a new one.

    Returns None if nothing is measured: on a CPU, for layers that carry a state, are frozen or are
    split over ranks, if memory does not suffice for a few more layers, and if the measurement
    fails.

    compiled: whether blocks are compiled.
    """
    shape, device = host.shape, host.device
    if device.type not in MEASURED or shape.recurrent_layers:
        return None
    setting = [kernel, str(host.compute_dtype), measured_versions(), MEASUREMENT]
    path = calibration_path(device_name(device), shape, compiled=compiled, measured_for=setting)
    if is_stored(path):
        try:
            found = Calibration.load(path)
            found.check_shape(shape)
            return found
        except ConfigError:
            pass  # damaged, so it is written again
    try:
        found = _measure(host, kernel)
    except Exception as error:
        _log.warning(FAILED, one_line(error))
        return None
    if found is not None:
        try:
            found.save(path)
        except OSError as error:
            _log.warning(NOT_SAVED, one_line(error))
    return found


def _measure(host: ModelHost, kernel: str) -> Calibration | None:
    if host.device.type == "cuda":
        layer = sum(p.numel() * p.element_size() for p in host.blocks[0].parameters())
        free = usable_bytes(host.device) - torch.cuda.memory_allocated(host.device)
        # Weights and gradients of these models, and about as many bytes of activations.
        if 4 * sum({*LAYERS, deep_layers(layer)}) * layer > free:
            return None
    if host.shallow(1) is None:
        return None

    def make(layers: int) -> torch.nn.Module:
        model = host.shallow(layers)
        assert model is not None
        return model

    on_cuda = host.device.type == "cuda"
    devices = [host.device] if on_cuda else []
    with (
        # Layers and kernels run outside of steps here, which set the device themselves.
        torch.cuda.device(host.device) if on_cuda else nullcontext(),
        torch.random.fork_rng(devices),
        torch.inference_mode(False),  # scores may be requested under it
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),  # it would multiply all times
    ):
        _log.warning(BEGINS)
        found = calibrate(
            make,
            host.shape,
            compile_blocks=host.compiling.asked,
            kernel=kernel,
            efforts=QUICK,
            announces=False,
        )
        _log.warning(DONE, found.seconds - found.first_seconds, found.first_seconds)
    return found
