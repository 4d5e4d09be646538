"""Choices of tuned kernels, shared: a tuner as Triton's that counts how often it chooses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forkpoint.ops.delta_rule.fla_tuning import share

BF16, F32, F16 = (torch.zeros(1, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float16))


class DoesNotFitError(Exception):
    pass


class Tuner:
    """As Triton's: one choice for each of its keys' values and list of dtypes.

    A choice is the number of what it was made for; `tight` holds pairs of a choice and a value of
    NB for which it does not fit.
    """

    def __init__(self) -> None:
        self.keys = ["D", "NB"]
        self.cache: dict[Any, Any] = {}
        self.tight: set[tuple[int, int]] = set()
        self.pre_hook: Any = None
        self.fn = SimpleNamespace(run=self._launch)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("x", "y", "D", "NB"), args, strict=False)), **kwargs}
        dtypes = [x.dtype for x in given.values() if isinstance(x, torch.Tensor)]
        key = (given["D"], given["NB"], *dtypes)
        number = self.cache.setdefault(key, len(self.cache))
        self.best_config = SimpleNamespace(
            pre_hook=self.pre_hook, all_kwargs=lambda: {"num_warps": number}
        )
        return self.fn.run(*args, **kwargs, num_warps=number)

    def _launch(self, *args: Any, **kwargs: Any) -> int:
        if (kwargs["num_warps"], kwargs.get("NB")) in self.tight:
            raise DoesNotFitError
        return kwargs["num_warps"]


@pytest.fixture
def tuner() -> Tuner:
    tuner = Tuner()
    share(tuner, DoesNotFitError)
    return tuner


def test_counts_of_tokens_and_further_tensors_choose_nothing_anew(tuner: Tuner) -> None:
    assert tuner.run(x=BF16, y=F32, h=None, D=128, NB=1) == 0
    assert tuner.run(x=BF16, y=F32, h=None, D=128, NB=7) == 0
    assert tuner.run(x=BF16, y=F32, h=F32, D=128, NB=7) == 0
    assert len(tuner.cache) == 1


def test_other_sizes_and_dtypes_choose_anew(tuner: Tuner) -> None:
    calls = [(BF16, 128), (BF16, 64), (F32, 128), (F16, 128)]
    for _ in range(2):
        assert [tuner.run(x=x, y=F32, D=d, NB=1) for x, d in calls] == [0, 1, 2, 3]


def test_a_choice_that_does_not_fit_is_left_to_the_tuner(tuner: Tuner) -> None:
    tuner.tight = {(0, 2)}
    assert [tuner.run(x=BF16, D=128, NB=n) for n in (1, 2, 1, 2, 3)] == [0, 1, 0, 1, 2]


def test_what_fits_nowhere_is_raised(tuner: Tuner) -> None:
    tuner.tight = {(0, 1)}
    with pytest.raises(DoesNotFitError):
        tuner.run(x=BF16, D=128, NB=1)


def test_what_is_given_by_position_or_has_a_hook_is_left_to_the_tuner(tuner: Tuner) -> None:
    assert [tuner.run(BF16, F32, 128, n) for n in (1, 2, 1)] == [0, 1, 0]
    tuner.pre_hook = print
    assert [tuner.run(x=F16, D=128, NB=n) for n in (1, 2, 1)] == [2, 3, 2]
