"""Forests of segments, and layouts of microbatches: places, attention launches, levels of states.
Imports no torch."""

from forkpoint.tree.launches import FROM_CACHE as FROM_CACHE
from forkpoint.tree.launches import FROM_GATHER as FROM_GATHER
from forkpoint.tree.launches import FROM_OWN as FROM_OWN
from forkpoint.tree.launches import LONG_TOKENS as LONG_TOKENS
from forkpoint.tree.launches import REPEATED_BYTES as REPEATED_BYTES
from forkpoint.tree.launches import CacheSlots as CacheSlots
from forkpoint.tree.launches import LaunchLayout as LaunchLayout
from forkpoint.tree.launches import Table as Table
from forkpoint.tree.launches import full_table as full_table
from forkpoint.tree.launches import padded_length as padded_length
from forkpoint.tree.launches import windowed_table as windowed_table
from forkpoint.tree.microbatch import Microbatch as Microbatch
from forkpoint.tree.microbatch import token_steps as token_steps
from forkpoint.tree.recurrence import NOTHING as NOTHING
from forkpoint.tree.recurrence import ConvolutionLayout as ConvolutionLayout
from forkpoint.tree.recurrence import Level as Level
from forkpoint.tree.recurrence import StateLayout as StateLayout
from forkpoint.tree.recurrence import convolution_layout as convolution_layout
from forkpoint.tree.recurrence import state_layout as state_layout
