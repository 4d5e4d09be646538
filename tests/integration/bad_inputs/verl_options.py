"""Options of verl, and of forkpoint's engines for it, that are not allowed. verl is not needed."""

from typing import Any

from bad_inputs.kind import Kind
from forkpoint.integrations.verl.refusals import check_batch, check_options, check_strategy


class Options(dict[str, Any]):
    """A configuration of verl, as far as the checks read one."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def checked(**engine: Any) -> None:
    check_options(Options(forward_only=False, **engine), Options())


def check_mini_batch(**options: Any) -> None:
    check_batch(options, lambda data, key, default: data.get(key, default), scores=False)


VERL = (
    Kind(
        call=lambda: check_strategy("fsdp", "language_model"),
        message="actor_rollout_ref.actor.strategy (or actor_rollout_ref.ref.strategy) is 'fsdp';",
    ),
    Kind(
        call=lambda: checked(qat=Options(enable=True)),
        message="actor_rollout_ref.actor.fsdp_config.qat.enable is true;",
    ),
    Kind(
        call=lambda: checked(mixed_precision=Options(param_dtype=16)),
        message="actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype is 16;",
    ),
    # verl's SFT trainers give the string of their configuration.
    Kind(
        call=lambda: check_mini_batch(pad_mode="right"),
        message="a mini-batch has pad_mode 'right';",
    ),
)
