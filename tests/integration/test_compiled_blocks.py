"""Work of compiled blocks between their graphs, where attention runs outside of them."""

from dataclasses import replace

import pytest
import torch
from steps import ACROSS, forked_batch
from torch.profiler import ProfilerActivity, profile

from forkpoint import losses, wrap
from forkpoint.testing import tiny_model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_no_gradient_of_attention_is_copied_on_its_way_into_compiled_code() -> None:
    """Compiled backwards take gradients of what their forwards gave as contiguous, or copy them."""
    model, batch = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2), forked_batch()
    policy = wrap(model, replace(ACROSS, compile_blocks=True))
    policy.forward_backward(batch, losses.GRPO())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        policy.forward_backward(batch, losses.GRPO())
    events = found.events()
    assert events is not None
    assert any("CompiledFunctionBackward" in event.name for event in events)
    copied = [
        event.input_shapes[0]
        for event in events
        if event.name in ("aten::contiguous", "aten::clone") and len(event.input_shapes[0]) == 4
    ]
    assert not copied
