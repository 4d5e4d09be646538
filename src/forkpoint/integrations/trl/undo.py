"""Copies of the state of a trainer that a loss reads and writes, to compute the loss again."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from forkpoint.errors import UnsupportedError

CLONED_BYTES = 1 << 20
"""Largest size of tensors that are copied. A loss that writes into a larger tensor is refused."""


class LossState:
    """Copy of the attributes of a trainer, with the contents of lists, dicts, sets, deques and
    tensors in them. The contents of other objects are not copied."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._attributes = dict(vars(trainer))
        self._contents: list[tuple[Any, list[Any] | dict[Any, Any]]] = []
        """Containers, each with its contents."""
        self._tensors: list[tuple[str, Tensor, int, Tensor | None]] = []
        """Tensors, each with its name, its version, and a copy if it is small."""
        self._seen: set[int] = set()
        for name, value in self._attributes.items():
            self._keep(name, value)

    def _keep(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor | dict | list | set | deque | tuple):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            small = value.numel() * value.element_size() <= CLONED_BYTES
            copy = value.detach().clone() if small else None
            self._tensors.append((name, value, _version(value), copy))
            return
        if isinstance(value, dict):
            self._contents.append((value, dict(value)))
        elif not isinstance(value, tuple):
            self._contents.append((value, list(value)))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            self._keep(f"{name}[{key!r}]", item)

    def restore(self) -> None:
        """Restore the state. It may be called several times.

        Raises UnsupportedError if a loss has written into a tensor that is too large to copy.
        """
        attributes = vars(self._trainer)
        for name in attributes.keys() - self._attributes.keys():
            del attributes[name]
        attributes.update(self._attributes)
        for value, before in self._contents:
            value.clear()
            if isinstance(value, list | deque):
                value.extend(before)
            else:
                value.update(before)
        for index, (name, value, version, copy) in enumerate(self._tensors):
            if _version(value) == version:
                continue
            if copy is None:
                raise UnsupportedError(
                    f"the loss writes into the trainer's {name}, a tensor of "
                    f"{value.numel() * value.element_size():,} bytes, which is too large to be put "
                    "back when the loss is computed again. Assign a new tensor to it."
                )
            with torch.no_grad():
                value.copy_(copy)
            self._tensors[index] = (name, value, _version(value), copy)


def _version(tensor: Tensor) -> int:
    """torch's counter of changes. Tensors of torch.inference_mode have none, and do not change."""
    return 0 if tensor.is_inference() else tensor._version
