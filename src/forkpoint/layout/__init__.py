"""Numeric layout of microbatches: places, launches of attention, levels of states. In numpy."""

from forkpoint.layout.launches import FROM_CACHE as FROM_CACHE
from forkpoint.layout.launches import FROM_GATHER as FROM_GATHER
from forkpoint.layout.launches import FROM_OWN as FROM_OWN
from forkpoint.layout.launches import LAUNCH_COLUMNS as LAUNCH_COLUMNS
from forkpoint.layout.launches import Reach as Reach
from forkpoint.layout.launches import Table as Table
from forkpoint.layout.launches import full_table as full_table
from forkpoint.layout.launches import windowed_table as windowed_table
from forkpoint.layout.microbatch import Microbatch as Microbatch
from forkpoint.layout.microbatch import segment_widths as segment_widths
from forkpoint.layout.microbatch import token_steps as token_steps
from forkpoint.layout.recurrence import NOTHING as NOTHING
from forkpoint.layout.recurrence import ConvolutionLayout as ConvolutionLayout
from forkpoint.layout.recurrence import Level as Level
from forkpoint.layout.recurrence import StateLayout as StateLayout
from forkpoint.layout.recurrence import convolution_layout as convolution_layout
from forkpoint.layout.recurrence import state_layout as state_layout
