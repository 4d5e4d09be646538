"""Choices of tuned kernels, shared: a tuner as Triton's that counts how often it chooses."""

from typing import Any

import pytest

from forkpoint.ops.delta_rule.fla_tuning import share

BF16, F32 = "torch.bfloat16", "torch.float32"


class DoesNotFitError(Exception):
    pass


class Tuner:
    """As Triton's, as far as its cache goes; a choice is the key it was made for."""

    def __init__(self, *names: str) -> None:
        self.keys = list(names)
        self.cache: dict[tuple[Any, ...], Any] = {}
        self.chosen: list[tuple[Any, ...]] = []
        self.too_large: set[tuple[Any, Any]] = set()

    def run(self, *key: Any) -> Any:
        if key not in self.cache:
            self.chosen.append(key)
            self.cache[key] = key
        if (key, self.cache[key]) in self.too_large:
            raise DoesNotFitError
        return self.cache[key]


@pytest.fixture
def tuner() -> Tuner:
    tuner = Tuner("D", "NB")
    share(tuner, DoesNotFitError)
    return tuner


def test_counts_of_tokens_and_further_tensors_choose_nothing_anew(tuner: Tuner) -> None:
    first = tuner.run(128, 1, BF16, F32)
    assert tuner.run(128, 7, BF16, F32) == first
    assert tuner.run(128, 7, BF16, F32, F32) == first
    assert tuner.chosen == [first]


def test_other_sizes_and_dtypes_choose_anew(tuner: Tuner) -> None:
    keys = [(128, 1, BF16, F32), (64, 1, BF16, F32), (128, 1, F32), (128, 1, "torch.float16", F32)]
    assert [tuner.run(*key) for key in keys] == keys == tuner.chosen


def test_choices_made_before_are_shared_too() -> None:
    tuner = Tuner("D", "NB")
    first = tuner.run(128, 1, BF16)
    share(tuner, DoesNotFitError)
    assert tuner.run(128, 2, BF16) == first
    assert tuner.chosen == [first]


def test_a_choice_that_does_not_fit_is_made_anew(tuner: Tuner) -> None:
    first, other = (128, 1, BF16), (128, 2, BF16)
    tuner.too_large = {(other, first)}
    assert tuner.run(*first) == first
    assert tuner.run(*other) == other
    assert tuner.run(*first) == first
    assert tuner.chosen == [first, other]


def test_what_fits_nowhere_is_raised(tuner: Tuner) -> None:
    only = (128, 1, BF16)
    tuner.too_large = {(only, only)}
    with pytest.raises(DoesNotFitError):
        tuner.run(*only)
