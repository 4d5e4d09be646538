"""Pickles and torch files of trainers, read without running what they name.

A pickle is a program: Python's own reader calls what it names. A machine of forkpoint's runs it
instead (`pickle_machine`), which describes arrays, tensors and the classes of the dumps that are
read (`pickle_arrays`, `torch_tensors`), and refuses every other name. Neither pickle nor torch is
imported.
"""

from pathlib import Path
from typing import Any, BinaryIO

from forkpoint.errors import RolloutError
from forkpoint.formats import pickle_arrays, torch_tensors
from forkpoint.formats.budget import Budget, Malformed, Refused, Unsafe
from forkpoint.formats.pickle_machine import Machine
from forkpoint.formats.pickle_nodes import (
    CONTAINER_BYTES,
    ENTRY_BYTES,
    Builder,
    Name,
    Names,
    check_keys,
)
from forkpoint.formats.plain_values import (
    Consolidated,
    DataProto,
    Fields,
    Plain,
    PlainValues,
    Shell,
    TensorDict,
)
from forkpoint.formats.torch_files import read_storage, read_torch
from forkpoint.formats.torch_tensors import Storage

DATA_PROTO = 'torch.save({"batch": dict(data.batch.items()), "non_tensor_batch": ' + (
    'data.non_tensor_batch, "meta_info": data.meta_info}, path)'
)
DEFAULT_LIMIT_BYTES = 512 << 20
_FILE_TIMES = 4
"""Bytes are copied once out of a pickle, and become twice as many as bfloat16."""


def _shell(kind: type[Shell]) -> Builder:
    def made(args: tuple[Any, ...], _: Budget) -> Shell:
        if args:
            raise Unsafe(f"it makes a {kind.__name__} of {len(args)} arguments")
        return kind()

    return made


def _tensordict(args: tuple[Any, ...], _: Budget) -> TensorDict:
    match args:
        case (Name(full="tensordict._td.TensorDict"), dict() as state):
            made = TensorDict()
            made.build(state)
            return made
    raise Malformed("a TensorDict has no state")


def _consolidated(args: tuple[Any, ...], _: Budget) -> Consolidated:
    match args:
        case (metadata, storage):
            return Consolidated(metadata, storage)
    raise Malformed(f"a TensorDict is made of {len(args)} arguments")


def _set(args: tuple[Any, ...], budget: Budget) -> set[Any]:
    """A set, as protocols 2 and 3 write it: of a list."""
    match args:
        case ():
            return set()
        case (list(items),):
            budget.take(CONTAINER_BYTES + ENTRY_BYTES * len(items))
            check_keys(items, 0, of_set=True)
            return set(items)
    raise Malformed(f"a set is made of {len(args)} arguments")


NAMES: Names = {
    **pickle_arrays.NAMES,
    **torch_tensors.NAMES,
    "verl.protocol.DataProto": _shell(DataProto),
    "openrlhf.trainer.ppo_utils.experience.Experience": _shell(Fields),
    "openrlhf.trainer.ppo_utils.experience_maker.Experience": _shell(Fields),
    "openrlhf.trainer.ppo_utils.replay_buffer.BufferItem": _shell(Fields),
    "trl.experimental.async_grpo.async_rollout_worker.RolloutSample": _shell(Fields),
    "tensordict._td.TensorDict": _shell(TensorDict),
    "tensordict._reductions._make_td": _tensordict,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
    "builtins.set": _set,
    "__builtin__.set": _set,
}


def load_torch(
    source: Path | BinaryIO, where: str, *, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> Any:
    """Value that torch.save wrote: dicts, lists, numbers, text, and numpy arrays for tensors.

    Arrays may be views of the file's bytes, which are not to be written to.

    Args:
        source: the file.
        where: names it in messages.
        limit_bytes: the memory that is taken, besides four times what the file has. Where the file
            names a value several times, what copies of it would take is bounded by the same number.

    Raises RolloutError, naming `where`, for a file that is damaged, names code, holds what is of no
    kind that is read, or takes more memory.
    """
    content = _content(source, where)
    return _File(content, where, "torch file", limit_bytes + _FILE_TIMES * len(content)).torch()


def load_pickle(path: Path, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Any:
    """Value that pickle.dump wrote. Result, limit and errors are those of `load_torch`."""
    content = _content(path, str(path))
    return _File(content, str(path), "pickle", limit_bytes + _FILE_TIMES * len(content)).pickle()


def _content(source: Path | BinaryIO, where: str) -> bytes:
    try:
        return source.read_bytes() if isinstance(source, Path) else source.read()
    except MemoryError:
        raise RolloutError(
            f"{where} does not fit into memory. Write the rollouts into several files."
        ) from None


def read_file(path: Path, *, torch: bool, most: int) -> tuple[Any, int]:
    """The value of a torch file or of a pickle, and the bytes of memory that building it took.

    Args:
        path: the file.
        torch: whether it is a torch file.
        most: bytes that it may take, besides the file's own.

    Raises RolloutError as `load_torch` does.
    """
    content = _content(path, str(path))
    file = _File(content, str(path), "torch file" if torch else "pickle", most)
    value = file.torch() if torch else file.pickle()
    return value, file.taken_bytes


class _File:
    """One file, with one budget for all that is in it."""

    def __init__(self, content: bytes, where: str, kind: str, most_bytes: int) -> None:
        self._content = content
        self._where, self._kind = where, kind
        self._most_bytes = most_bytes
        self._budget = Budget(most_bytes)

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory that were taken so far."""
        return self._most_bytes - self._budget.left_bytes

    def _names(self) -> Names:
        """The names of a pickle; not kept, so that they and this file do not hold each other."""
        return {**NAMES, "torch.storage._load_from_bytes": self._storage}

    def pickle(self) -> Any:
        try:
            machine = Machine(self._content, self._names(), self._budget)
            value = machine.run()
            if machine.at != len(self._content):
                raise Malformed(
                    f"{len(self._content) - machine.at} bytes follow the end of the pickle",
                    "Write one pickle to a file; several batches can be a list.",
                )
        except Refused as error:
            raise self._refusal(error) from None
        return self._plain(value, machine.shared)[0]

    def torch(self) -> Any:
        return self._torch(self._content)[0]

    def _torch(self, content: bytes) -> Plain:
        try:
            value, shared = read_torch(content, self._where, self._names(), self._budget)
        except Refused as error:
            raise self._refusal(error) from None
        return self._plain(value, shared)

    def _inside(self, content: bytes) -> Plain:
        """The torch file that is a value of this file."""
        self._budget.take(len(content))
        return self._torch(content)

    def _storage(self, args: tuple[Any, ...], budget: Budget) -> Storage:
        """A storage in a pickle, which is a torch file of its own."""
        match args:
            case (bytes(content),):
                return read_storage(content, self._where, budget)
        raise Malformed(f"a storage is made of {len(args)} arguments")

    def _plain(self, value: Any, shared: set[int]) -> Plain:
        values = PlainValues(self._budget, self._most_bytes, shared, self._inside)
        return values.value(value, self._where)

    def _refusal(self, error: Refused) -> RolloutError:
        if isinstance(error, Unsafe):
            return RolloutError(
                f"{self._where} is a pickle that could run code: {error.reason}. Only arrays, "
                "tensors and plain containers are loaded. Write these alone; a verl batch with "
                f"{DATA_PROTO}."
            )
        return RolloutError(
            f"{self._where} cannot be read as a {self._kind}: {error.reason}. {error.advice}"
        )
