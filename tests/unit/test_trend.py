"""Whether a series drifts: noise is let pass, a bias is not."""

import numpy as np
import pytest

from forkpoint.apps.replay.trend import LIMIT, trend


def walk(seed: int, *, steps: int = 100, bias: float = 0.0, memory: float = 0.0) -> list[float]:
    """A random walk; `memory` is how much of a gain the next one keeps."""
    random = np.random.default_rng(seed)
    gain, gains = 0.0, []
    for _ in range(steps):
        gain = memory * gain + random.normal()
        gains.append(gain + bias)
    return np.cumsum(gains).tolist()


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_walks_without_drift_are_noise(memory: float) -> None:
    """At the rates that the limit's docstring names, with room for chance."""
    found = [trend(walk(seed, memory=memory)).is_noise for seed in range(500)]
    most = 500 * (1 / 1000 if memory == 0 else 1 / 70)
    assert len(found) - sum(found) <= 2 * most + 3


@pytest.mark.parametrize("bias", [-2.0, 2.0])
def test_a_bias_is_a_trend(bias: float) -> None:
    found = [trend(walk(seed, bias=bias)) for seed in range(200)]
    assert not any(one.is_noise for one in found)
    assert {np.sign(one.errors) for one in found} == {np.sign(bias)}
    assert np.mean([one.slope for one in found]) == pytest.approx(bias, abs=0.05)


def test_it_is_the_mean_gain() -> None:
    values = walk(3, steps=30)
    assert trend(values).slope == pytest.approx(values[-1] / 30)
    scaled = trend([1e-9 * value for value in values])
    assert scaled.errors == pytest.approx(trend(values).errors)


def test_a_series_that_never_changes() -> None:
    assert trend([0.0] * 10).errors == 0 and trend([0.0] * 10).is_noise
    straight = trend([float(n) for n in range(1, 33)])
    assert straight.errors > LIMIT and not straight.is_noise


@pytest.mark.parametrize("values", [[1.0] * 7, [0.0] * 9 + [np.nan], [np.inf] * 10])
def test_what_has_no_trend(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 8 finite values"):
        trend(values)
