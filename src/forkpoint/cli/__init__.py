"""The command line: `forkpoint`, or `python -m forkpoint`."""

from forkpoint.cli.app import main as main

__all__ = ["main"]
