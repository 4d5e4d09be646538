"""The model shape that tests of plans count with: one layer sees all, the other a window."""

from forkpoint import ModelShape

SHAPE = ModelShape(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=16,
    intermediate=128,
    vocab=100,
    windows=(0, 8),
)
