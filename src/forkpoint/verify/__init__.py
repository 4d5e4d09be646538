"""Comparison of shared steps with ordinary dense training."""
