"""Models of real proportions in bfloat16 on a CUDA device: no further from float32 than dense."""

from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES, make_group, make_model
from forkpoint import Config, wrap
from forkpoint.engine.engine import Engine
from forkpoint.engine.transaction import Transaction
from forkpoint.losses import GRPO, GSPO
from forkpoint.losses.views import batch_denominators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT, RESPONSES = 1777, [512, 300, 41, 640, 1, 255]
# The prompt in one microbatch with responses; in a microbatch of its own; cut into a chain.
PLANS = {
    "one-microbatch": {"boundary": "within"},
    "kept-logits": {"boundary": "within", "head_logits": "keep"},
    "leaves": {"boundary": "across", "max_microbatch_tokens": 1800},
    "mixed": {"boundary": "mixed", "max_microbatch_tokens": 1800},
    "chain-offload": {"boundary": "across", "max_microbatch_tokens": 500, "activations": "offload"},
    "recompute-checkpointing": {
        "boundary": "across",
        "max_microbatch_tokens": 1800,
        "activations": "recompute",
        "checkpointing": "full",
    },
}


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", PLANS)
def test_four_layers_of_an_8b(name: str, compiled: bool) -> None:
    """Bars of `verify` for bfloat16: 1.1 times dense's own error over all parameters, 1.5 for one.

    Llama3-8B's shapes with four of its layers.
    """
    model = make_model("llama3-8b", torch.device("cuda"), layers=4)
    batch = make_group(PROMPT, RESPONSES, vocab=SHAPES["llama3-8b"]["vocab_size"])
    options: Any = {"sharing": "group", "compile_blocks": compiled, **PLANS[name]}
    report = wrap(model, Config(**options)).verify(batch, GRPO())
    print(report.table())
    assert report.passed, report.table()


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns, and so does the mode
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("loss", [GRPO(), GSPO()], ids=["grpo", "gspo"])
@pytest.mark.parametrize("name", ["one-microbatch", "leaves"])
def test_the_host_never_waits_in_a_step(name: str, loss: Any, compiled: bool) -> None:
    """From the first microbatch to the last, in any phase; only what a step returns is read."""
    model = make_model("llama3-8b", torch.device("cuda"), layers=2)
    batch = make_group(PROMPT, RESPONSES, vocab=SHAPES["llama3-8b"]["vocab_size"])
    options: Any = {"sharing": "group", "compile_blocks": compiled, **PLANS[name]}
    policy = wrap(model, Config(**options))
    plan = policy.plan(batch, loss)
    policy.forward_backward(batch, loss, plan=plan)
    host, config, counts = policy.host, policy.config, batch_denominators(batch)

    def step(transaction: Transaction) -> None:
        Engine(host, config, transaction, plan, batch).forward_backward(loss, counts, 1.0)

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        Transaction(host.device).run(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
def test_other_counts_of_tokens_compile_nothing_anew() -> None:
    """Above and below what the compiler takes for a long microbatch, or for one of more than its
    width."""
    model = make_model("llama3-8b", torch.device("cuda"), layers=2)
    vocab = SHAPES["llama3-8b"]["vocab_size"]
    policy = wrap(model, Config(sharing="none", boundary="within", max_microbatch_tokens=32_768))
    for at, tokens in enumerate((12_000, 11_000, 600, 5_000, 20_000)):
        batch = make_group(tokens // 2, [tokens - tokens // 2], vocab=vocab)
        with torch._dynamo.config.patch(error_on_recompile=at >= 2):
            policy.forward_backward(batch, GRPO())
