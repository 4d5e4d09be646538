"""Traces of training: recorded by any loop, read batch by batch. Imports no torch."""

from forkpoint.traces.recorder import Recorder as Recorder
from forkpoint.traces.recorder import record as record
from forkpoint.traces.trace import Trace as Trace
from forkpoint.traces.trace import TraceBatch as TraceBatch
from forkpoint.traces.trace import TraceEntry as TraceEntry
from forkpoint.traces.trace import open_trace as open_trace
