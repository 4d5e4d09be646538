"""Measurements of a device that plans are priced by: `forkpoint calibrate`."""
