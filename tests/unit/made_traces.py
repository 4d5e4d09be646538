"""Traces that tests record, and lists of rollouts with every field."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from forkpoint import Rollout
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.rollouts.traces import record


def some(groups: int = 2, seed: int = 0) -> list[Rollout]:
    return synthetic_rollouts(
        groups=groups, rollouts_per_group=3, prompt_tokens=9, response_tokens=4, seed=seed
    )


def recorded(path: Path, batches: int = 3) -> Path:
    with record(path, notes={"run": 3}) as trace:
        for n in range(batches):
            trace.add(some(seed=n), {"scale": 0.5})
    return path


_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _FLOATS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def rollout_lists(draw: Any) -> list[Rollout]:
    """Rollouts of one batch: all of them have a field of floats, or none."""
    has_logprobs, has_weights, has_returns, has_routes = (draw(st.booleans()) for _ in range(4))
    made = []
    ids = draw(st.lists(st.text() | st.none(), min_size=1, max_size=4, unique_by=lambda i: i or i))
    for n, rollout_id in enumerate(ids):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
        length = len(tokens)
        per_token = st.lists(_FLOATS, min_size=length, max_size=length)
        logprobs = st.lists(st.floats(-1e300, 0), min_size=length, max_size=length)
        made.append(
            Rollout(
                tokens,
                [0, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))],
                draw(_FLOATS | per_token),
                old_logprobs=draw(logprobs) if has_logprobs else None,
                reference_logprobs=draw(logprobs) if has_logprobs else None,
                weights=draw(_FLOATS | per_token) if has_weights else None,
                returns=draw(_FLOATS | per_token) if has_returns else None,
                old_values=draw(per_token) if has_returns else None,
                temperature=draw(st.floats(1e-300, 1e300)),
                group_id=draw(st.none() | st.text()),
                rollout_id=rollout_id,
                extras=draw(st.none() | st.dictionaries(st.text(), _JSON, max_size=3)),
                routed_experts=np.full((length, 2, 3), [n, n + 1, n + 2]) if has_routes else None,
            )
        )
    return made
