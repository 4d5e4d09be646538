"""Errors that forkpoint raises.

Every message says what is wrong, which value was given, which values are allowed, and what to do.
All except RankError are ValueErrors. Broken internal invariants are assertions.
"""


class ForkpointError(Exception):
    """Base class of the errors of forkpoint."""


class RolloutError(ForkpointError, ValueError):
    """An invalid rollout, rollout file or batch."""


class TraceError(RolloutError):
    """A recorded trace that is truncated, has another schema, or is not a trace of forkpoint."""


class ConfigError(ForkpointError, ValueError):
    """A value of an option that is not allowed, alone or with another option."""


class PlanError(ForkpointError, ValueError):
    """A batch for which no plan fits the limits."""


class RankError(ForkpointError, RuntimeError):
    """A step of several ranks that ends on this rank because another rank failed."""


class UnsupportedError(ForkpointError, ValueError):
    """A model, layer, mask, kernel or wrapper that has not been shown to be exact."""
