import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from forkpoint import Config
from forkpoint.ops.attention import fa4
from forkpoint.plan import ModelShape, Plan, make_plan
from forkpoint.plan.models import MODELS
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.step import faster_kernels

GPU = torch.device("cuda")


def plan_of(prompt: int, response: int, **options: Any) -> Plan:
    rollouts = synthetic_rollouts(
        groups=1, rollouts_per_group=8, prompt_tokens=prompt, response_tokens=response
    )
    shape = ModelShape.from_config(MODELS["qwen3-1.7b"], dtype_bytes=2)
    usual = {"sharing": "group", "boundary": "mixed", "max_microbatch_tokens": 1 << 16}
    config = Config(**{**usual, **options})
    return make_plan(RolloutBatch(rollouts), shape, config)


def test_the_gain_is_near_the_measured_one() -> None:
    """223 ms were measured for such a group without FlashAttention-4, and 203 with it (rag 9 of
    benchmarks/results/defaults-h200.jsonl)."""
    assert faster_kernels.predicted_gain(plan_of(8460, 40)) == pytest.approx(223 / 203, rel=0.05)
    assert 1 < faster_kernels.predicted_gain(plan_of(200, 40)) < 1.02


def test_what_cudnn_runs_gains_less() -> None:
    """Rectangles of many queries and keys run on it, as long segments do."""
    rates = faster_kernels.TFLOPS
    most = rates["fa4"] / rates["padded"]
    for options in ({}, {"boundary": "across", "max_microbatch_tokens": 32_768}):
        gain = faster_kernels.predicted_gain(plan_of(262_144, 4096, **options))
        assert 1.02 < gain < most
    short = faster_kernels.predicted_gain(plan_of(40_000, 1000, sharing="none"))
    assert short < most


def test_a_missing_package_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(8460, 40)
    monkeypatch.setattr(faster_kernels, "_is_settled", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fa4, "is_installed", lambda: False)
    with caplog.at_level(logging.INFO, "forkpoint"):
        faster_kernels.note_faster_kernels(plan, GPU, "fa2")
        faster_kernels.note_faster_kernels(plan_of(200, 40), GPU, "auto")
        assert plan.shape is not None
        wide = replace(plan, shape=replace(plan.shape, head_dim=256, value_dim=256))
        faster_kernels.note_faster_kernels(wide, GPU, "auto")
        assert not caplog.text, "rates are of head dims up to 128"
        for _ in range(2):
            faster_kernels.note_faster_kernels(plan, GPU, "auto")
    assert caplog.text.count("pip install 'forkpoint[fa4]'") == 1


def test_a_package_that_is_there_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, plan = list[bool](), plan_of(8460, 40)
    monkeypatch.setattr(faster_kernels, "_is_settled", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fa4, "is_installed", lambda: not looks.append(True))
    with caplog.at_level(logging.INFO, "forkpoint"):
        for _ in range(3):
            faster_kernels.note_faster_kernels(plan, GPU, "auto")
    assert len(looks) == 1 and not caplog.text


def test_nothing_is_predicted_for_other_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, plan = list[object](), plan_of(8460, 40)
    monkeypatch.setattr(faster_kernels, "_is_settled", False)
    monkeypatch.setattr(faster_kernels, "predicted_gain", lambda _: pytest.fail("a prediction"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: looks.append(d) or (8, 0))
    with caplog.at_level(logging.INFO, "forkpoint"):
        for _ in range(2):
            faster_kernels.note_faster_kernels(plan, GPU, "auto")
    assert len(looks) == 1 and not caplog.text
