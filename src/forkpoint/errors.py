"""The errors that forkpoint raises at its users.

Every message says what is wrong, which values were met, what is allowed and what to do. All of them
are ValueErrors, so that callers need not import this module. Broken internal invariants are plain
assertions instead.
"""


class ForkpointError(Exception):
    """Base class of every error that forkpoint raises on purpose."""


class RolloutError(ForkpointError, ValueError):
    """A rollout, a rollout file or a batch that cannot be trained on as it is."""


class TraceError(RolloutError):
    """A recorded trace that is changed, cut short, foreign or of a newer schema."""


class ConfigError(ForkpointError, ValueError):
    """An option whose value is not allowed, alone or together with another."""


class PlanError(ForkpointError, ValueError):
    """A batch for which no plan fits the limits that were set."""


class RankError(ForkpointError, RuntimeError):
    """A step of several ranks that ends on this rank because of another one."""


class UnsupportedError(ForkpointError, ValueError):
    """A model, layer, mask, kernel or wrapper that has not been shown to be exact."""
