"""Gradients of the gated delta rule, as an operation and in stock models."""
