"""Prices of plans: counted FLOPs and bytes, and milliseconds where a device was calibrated."""
