"""The early end of a microbatch stays within the last block: hooks around it see a forward that
returns."""

from collections import Counter

import pytest
from steps import ACROSS, forked_batch

from forkpoint import losses, wrap
from forkpoint.testing import tiny_model
from hybrids import tiny_hybrid

pytestmark = pytest.mark.usefixtures("poisoned_memory", "without_sample", "without_lists")


@pytest.mark.parametrize("name", ["llama", "phi", "qwen3_5_text"])
def test_hooks_around_blocks_and_model_see_forwards_that_return(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """phi's final norm has another name; the last layer of the hybrid carries a state."""
    model = tiny_hybrid(name) if name == "qwen3_5_text" else tiny_model(name)
    policy = wrap(model, ACROSS)
    monkeypatch.setattr(policy.host, "_check_model", lambda: None)  # which refuses hooks
    began: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    decoder = model.base_model
    watched = {
        "model": model,
        "decoder": decoder,
        "last block": decoder.layers[-1],
        "norm": getattr(decoder, "norm", None) or decoder.final_layernorm,
    }
    for what, module in watched.items():
        module.register_forward_pre_hook(lambda *_, what=what: began.update([what]))
        module.register_forward_hook(lambda *_, what=what: ended.update([what]))
    stats = policy.forward_backward(forked_batch(), losses.GRPO())
    ends = [i.ends_at for i in stats.plan.program.instructions if i.operation == "forward"]
    assert "boundary" in ends and "head" in ends
    assert began == ended == Counter(dict.fromkeys(watched, len(ends)))
