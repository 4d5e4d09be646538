"""Fields of rollouts from lists, arrays and tensors, and values put back. Imports no torch."""

from forkpoint.rollouts.batch_tensors.layout import PaddedLayout as PaddedLayout
