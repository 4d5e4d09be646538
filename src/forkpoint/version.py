"""Version of forkpoint."""

__version__ = "0.2.0"
