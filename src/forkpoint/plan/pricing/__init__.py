"""Prices of plans: counted FLOPs and bytes, or milliseconds from a calibration."""
