"""One kind of bad input: how it is met, and the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import write_config, write_rollouts

from forkpoint.errors import ForkpointError, UnsupportedError

# Of peft with newer transformers, and of torch where a reentrant checkpoint has nothing to do.
QUIET = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint.*should be:UserWarning"),
]
Prepare = Callable[[pytest.MonkeyPatch], object]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of bad input, met by the library, by the command line, or by both.

    It is met in an empty folder that is the present one, with rollouts in ok.jsonl and the
    configuration of a tiny model in ok.json.
    """

    message: str
    """Part that names the fault; the whole message where docs/reference/errors.md quotes it."""
    error: type[ForkpointError] = UnsupportedError
    call: Callable[[], object] | None = None
    """Call that raises it in the library."""
    argv: tuple[str, ...] = ()
    """The command that meets it."""
    prepare: Prepare | None = None
    """Writes the files that it names, or makes the machine another one."""

    @property
    def name(self) -> str:
        """The beginning of the message."""
        return self.message[:60]


def stock_files() -> None:
    """Write the files that every kind may name."""
    write_rollouts(Path("ok.jsonl"))
    write_config(Path("ok.json"))


GOOD = '{"token_ids":[1,2,3],"loss_mask":[0,1,1],"advantage":0.5,"rollout_id":"a"}'


def with_field(name: str, value: str) -> str:
    """The good rollout as a line of JSON, with another value of a field."""
    old = {"token_ids": "[1,2,3]", "loss_mask": "[0,1,1]", "advantage": "0.5", "rollout_id": '"a"'}
    if name in old:
        return GOOD.replace(f'"{name}":{old[name]}', f'"{name}":{value}')
    return f'{GOOD[:-1]},"{name}":{value}}}'
