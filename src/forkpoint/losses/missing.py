"""Fields that a loss reads although they are None."""

from types import TracebackType

from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.losses.base import SOURCES, Loss, LossBatch
from forkpoint.losses.outputs import LossOutputs


def computed(loss: Loss, outputs: LossOutputs, batch: LossBatch) -> Tensor:
    """The loss of a view.

    Raises what the loss does; ConfigError where that is Python's error for None in arithmetic and
    the loss reads a field of the view that is None.
    """
    try:
        return loss(outputs, batch)
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error):
            raise
        assert error.__traceback__ is not None
        read = _names(error.__traceback__.tb_next)
        if "entropies" in read and "logprobs" in outputs.per_token and outputs.entropies is None:
            raise ConfigError(
                f"the loss {loss!r} reads outputs.entropies, which is None because it does not ask "
                "for them. Give losses.FunctionLoss(function, needs_entropy=True), or set "
                "needs_entropy = True in its class."
            ) from error
        for name, source in SOURCES.items():
            if name in read and getattr(batch, name) is None:
                raise ConfigError(
                    f"the loss {loss!r} reads batch.{name}, which is None because the rollouts "
                    f"have none. Give every Rollout its {name}; {source}."
                ) from error
        raise


def _names(traceback: TracebackType | None) -> set[str]:
    """Names of attributes in the functions that an error has passed."""
    found: set[str] = set()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.update(code.co_names, (x for x in code.co_consts if isinstance(x, str)))
        traceback = traceback.tb_next
    return found
