"""A model on another CUDA device than the current one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES, make_group, make_model
from forkpoint import Config, wrap
from forkpoint.losses import GRPO
from forkpoint.plan.pricing.calibration import FOLDER_VARIABLE
from forkpoint.step.calibrate import automatic

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler looks at what warns
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_step_runs_where_the_model_is(activations: str, compiled: bool) -> None:
    """The same numbers as on the current device, up to sums in another order."""
    batch = make_group(777, [300, 41, 512], vocab=SHAPES["llama3-8b"]["vocab_size"])
    options: Any = {"boundary": "across", "max_microbatch_tokens": 500, "activations": activations}
    found = []
    for device in ("cuda:0", "cuda:1"):
        model = make_model("llama3-8b", torch.device("cuda:0"), layers=2).to(device)
        policy = wrap(model, Config(sharing="group", compile_blocks=compiled, **options))
        scores = policy.score(batch)
        stats = policy.forward_backward(batch, GRPO())
        assert torch.cuda.current_device() == 0
        assert {p.grad.device for p in model.parameters() if p.grad is not None} == {
            torch.device(device)
        }
        norm = sum(float(p.grad.float().norm()) ** 2 for p in model.parameters()) ** 0.5
        found.append((stats.loss, float(scores.logprobs.sum()), norm))
        assert all(ms >= 0 for ms in stats.event_ms)
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_a_measurement_runs_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "MEASURED", {"cuda"})
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    model: Any = make_model("llama3-8b", torch.device("cuda:0"), layers=2)
    batch = make_group(777, [300, 41], vocab=SHAPES["llama3-8b"]["vocab_size"])
    assert wrap(model.to("cuda:1")).plan(batch).predicted_ms
    assert torch.cuda.current_device() == 0 and len([*tmp_path.iterdir()]) == 1
