"""Traces of training, which any loop can record, and readers of all files of rollouts.

Imports no torch. Torch files are read with torch, which is imported then.
"""

from forkpoint.rollouts.formats import FORMATS as FORMATS
from forkpoint.rollouts.traces.reader import RolloutFile as RolloutFile
from forkpoint.rollouts.traces.reader import Skipped as Skipped
from forkpoint.rollouts.traces.reader import load_rollouts as load_rollouts
from forkpoint.rollouts.traces.reader import open_rollouts as open_rollouts
from forkpoint.rollouts.traces.recorder import Recorder as Recorder
from forkpoint.rollouts.traces.recorder import record as record
from forkpoint.rollouts.traces.trace import Trace as Trace
from forkpoint.rollouts.traces.trace import TraceBatch as TraceBatch
from forkpoint.rollouts.traces.trace import open_trace as open_trace
