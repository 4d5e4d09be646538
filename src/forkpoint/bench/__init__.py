"""Measurements of forkpoint beside its alternatives: `forkpoint bench`."""
