"""Numeric layout of microbatches: places, launches of attention, levels of states. In numpy."""
