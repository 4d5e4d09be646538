"""Measurements of a device from which plans are priced: `forkpoint calibrate`."""
