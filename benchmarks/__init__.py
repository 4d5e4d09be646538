"""Benchmarks of forkpoint, run from a checkout: `python -m benchmarks NAME`."""
