"""Traces of training, recorded by any loop and read by batch; readers of any file of rollouts.

Imports no torch; torch files are read without it.
"""

from forkpoint.formats import FORMATS as FORMATS
from forkpoint.traces.reader import RolloutFile as RolloutFile
from forkpoint.traces.reader import Skipped as Skipped
from forkpoint.traces.reader import load_rollouts as load_rollouts
from forkpoint.traces.reader import open_rollouts as open_rollouts
from forkpoint.traces.recorder import Recorder as Recorder
from forkpoint.traces.recorder import record as record
from forkpoint.traces.trace import Trace as Trace
from forkpoint.traces.trace import TraceBatch as TraceBatch
from forkpoint.traces.trace import TraceEntry as TraceEntry
from forkpoint.traces.trace import open_trace as open_trace
