"""Shared-prefix attention on one GPU, beside its alternatives."""
