"""Simulated versions of TRL: code of its own modules that does something else."""

import importlib
import textwrap
from typing import Any

import pytest
from trl.trainer import utils

NEWER = "newer_loss"


def replace_method(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, source: str) -> None:
    """Put a method into a class of TRL as if its module defined it.

    source: of a function of that name; `known` in it is the one that was there.
    """
    module: Any = importlib.import_module(cls.__module__)
    names: dict[str, Any] = {}
    before = vars(module).copy()
    monkeypatch.setattr(module, NEWER, getattr(cls, name), raising=False)
    exec(textwrap.dedent(source).replace("known", NEWER), vars(module), names)
    assert vars(module).keys() - before.keys() == {NEWER}
    monkeypatch.setattr(cls, name, names[name])


def change_head(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let TRL's head take other values of `temperature` or `logit_scale` than it is given."""
    known: Any = utils._ChunkedLogProbFunction

    class Head:
        @staticmethod
        def apply(
            hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, chunk: int,
            softcap: Any, logit_scale: float, outputs: Any,
        ) -> Any:  # fmt: skip
            temperature = changes.get("temperature", temperature)
            logit_scale = changes.get("logit_scale", logit_scale)
            return known.apply(
                hidden, weight, bias, labels, temperature, chunk, softcap, logit_scale, outputs
            )

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Head)
