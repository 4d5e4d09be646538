"""Rollouts of one step placed on data-parallel ranks. Imports no torch."""

from forkpoint.parallel.placement.place import place as place
