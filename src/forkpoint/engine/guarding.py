"""The guard of a step's gradients, made as the model and its wrapper need it."""

from forkpoint.config import Config
from forkpoint.engine.gradient_sums import GradientSums, twins
from forkpoint.engine.guard import GradientGuard, Step
from forkpoint.engine.host import Host


def guard_gradients(step: Step, host: Host, config: Config) -> GradientGuard:
    """Set `step.guard` and return it.

    Until the step's changes are undone it collects sums apart from `.grad` where these are needed.
    """
    parameters = [p for _, p in host.named_parameters() if p.requires_grad]
    group = host.group
    wide = config.grad_accumulation_dtype == "float32"
    apart = parameters if wide else group.apart(parameters) if group is not None else []
    guard = step.guard = GradientGuard(
        parameters,
        restore=config.restore_grads,
        sums=GradientSums(apart, wide=wide) if apart else None,
    )
    if group is not None:
        guard.reset = group.reset
        guard.held = lambda: group.gathered
        guard.missing = group.missing_bytes if group.reduces else None
    if guard.sums is not None:
        listens = group is not None and group.listens
        leaves = twins(host.model, apart, step.changes) if listens else apart
        guard.sums.collect(step.changes, leaves)
    return guard
