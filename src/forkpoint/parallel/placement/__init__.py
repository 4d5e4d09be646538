"""Placement of a step's rollouts on data-parallel ranks. Imports no torch."""

from forkpoint.parallel.placement.place import place as place
