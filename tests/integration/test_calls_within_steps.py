"""Calls of a model while a step runs it, from other threads and from losses."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_models import lora
from steps import ACROSS, clear_gradients, forked_batch, gradients, model_state, small_model
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from forkpoint import Config, losses, wrap
from forkpoint.errors import ForkpointError
from forkpoint.losses import LossBatch, LossOutputs
from forkpoint.testing import ReadOnlyHook
from hybrids import tiny_hybrid
from lanes import slow_besides
from watched import watched

BATCH = forked_batch()
IDS = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 9, 2, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
HIDDEN = torch.linspace(-1, 1, 64, dtype=torch.float64).view(1, 2, 32)
CHOSEN = torch.tensor([[0, 1], [3, 2]])
MAY_CHANGE = Config(
    sharing="tree", boundary="across", max_microbatch_tokens=12, checkpointing="full"
)


def refused(call: Callable[[], Any]) -> str:
    """The message of a call's ForkpointError; any other outcome fails."""
    with pytest.raises(ForkpointError) as caught:
        call()
    return str(caught.value)


def from_a_thread(call: Callable[[], Any]) -> Any:
    """Call it in another thread: gives its value, and raises its error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((value, error),) = found
    if error is not None:
        raise error
    return value


def whole_calls(model: Any) -> dict[str, Callable[[], Any]]:
    """Calls of a model, and of parts that have attention."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    block = causal.model.layers[0]
    hidden = torch.zeros(2, 5, causal.config.hidden_size, dtype=torch.float64)
    rope = causal.model.rotary_emb(hidden, torch.arange(5)[None])
    mixer, arguments = getattr(block, "linear_attn", None), {}
    if mixer is None:
        mixer, arguments = block.self_attn, {"position_embeddings": rope, "attention_mask": None}
    other = wrap(model)
    greedy = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    return {
        "the model": lambda: model(input_ids=IDS, attention_mask=MASK),
        "without a mask": lambda: model(IDS),
        "the decoder": lambda: causal.model(input_ids=IDS, attention_mask=MASK),
        "a block": lambda: block(hidden, position_embeddings=rope, attention_mask=None),
        "attention": lambda: mixer(hidden, **arguments),
        "generate": lambda: model.generate(IDS, attention_mask=MASK, **greedy),
        "generate with a static cache": lambda: model.generate(
            IDS, attention_mask=MASK, cache_implementation="static", **greedy
        ),
        "a mask": lambda: create_causal_mask(causal.config, hidden, MASK, None),
        "another policy": lambda: wrap(model),
        "a score": lambda: other.score(BATCH),
        "another step": lambda: other.forward_backward(BATCH, losses.GRPO()),
    }


def parts_of(model: Any) -> dict[str, Callable[[], Tensor]]:
    """Calls of parts that a step leaves as they are."""
    return {
        "embedding": lambda: model.model.embed_tokens(IDS),
        "norm": lambda: model.model.norm(HIDDEN),
        "head": lambda: model.lm_head(HIDDEN),
        "experts": lambda: model.model.layers[0].mlp.experts(HIDDEN[0], CHOSEN, HIDDEN[0, :, :2]),
    }


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: small_model("qwen3"),
    "adapters": lambda: lora(small_model("qwen3"), target_modules=["q_proj", "v_proj"]),
    "gemma2": lambda: small_model("gemma2", sliding_window=4),
    "gated linear attention": lambda: tiny_hybrid("qwen3_next", dtype=torch.float64),
}
WHERE = ("a loss", "each event", "each event, checkpointed")
KEPT = [("qwen3", "a loss"), ("qwen3", "each event")]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "where"),
    slow_besides(KEPT, [(kind, where) for kind in MODELS for where in WHERE]),
)
def test_calls_are_refused_and_the_step_goes_on(kind: str, where: str) -> None:
    model = MODELS[kind]().eval()
    policy = wrap(model, MAY_CHANGE if "checkpointed" in where else ACROSS)
    policy.forward_backward(BATCH, losses.GRPO())
    calls, messages = whole_calls(model), []
    calls["generate with a static cache"]()  # of which transformers keeps the length
    wanted, state = gradients(model), model_state(model)
    logits = model(input_ids=IDS, attention_mask=MASK).logits
    clear_gradients(model)

    def calling(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        if where == "a loss":
            messages.extend(map(refused, calls.values()))
        return losses.GRPO()(outputs, batch)

    def watch(event: str) -> None:
        if "event" in where:
            messages.extend(refused(lambda c=c: from_a_thread(c)) for c in calls.values())

    with watched(watch):
        policy.forward_backward(BATCH, losses.FunctionLoss(calling, "token"))
    assert len(messages) >= len(calls)
    assert all("step of forkpoint" in m for m in messages), messages
    found = gradients(model)
    for name, gradient in wanted.items():
        assert gradient is None or torch.equal(gradient, found[name]), name  # type: ignore[arg-type]
    assert model_state(model) == state
    after = model(input_ids=IDS, attention_mask=MASK).logits
    # Rows of padding are NaN in some families.
    assert torch.equal(logits.nan_to_num(), after.nan_to_num())


def test_a_failing_call_ends_the_step() -> None:
    model = small_model("qwen3")
    policy = wrap(model, ACROSS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = model_state(model)
    logits = model(IDS).logits

    def distilled(outputs: LossOutputs, batch: LossBatch) -> Tensor:
        return outputs.logprobs.sum() + model(IDS).logits.sum()

    assert "call a copy" in refused(lambda: policy.forward_backward(BATCH, distilled))
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert model_state(model) == state and torch.equal(logits, model(IDS).logits)


def test_parts_that_stay_as_they_are_give_what_they_give() -> None:
    """Also the norm that a microbatch passes by where it ends early; a router is refused."""
    model: Any = small_model(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )
    policy, found = wrap(model, ACROSS), []
    calls = parts_of(model)
    wanted = [call().detach() for call in calls.values()]
    counts = policy.forward_backward(BATCH, losses.GRPO(), expert_counts=True).expert_counts

    def call(*_: Any) -> None:
        if not found:  # once, in the middle of the first forward
            router = refused(lambda: from_a_thread(lambda: model.model.layers[0].mlp(HIDDEN)))
            assert "when the step has ended" in router
            found.extend(from_a_thread(call) for call in calls.values())

    model.model.layers[1].input_layernorm.register_forward_hook(ReadOnlyHook(call))
    again = policy.forward_backward(BATCH, losses.GRPO(), expert_counts=True).expert_counts
    assert counts is not None and again is not None and torch.equal(counts, again)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_thread_that_entered_the_decoder_before_the_step() -> None:
    """It is refused where it would make no mask, and nothing of it outlives the step."""
    model: Any = small_model("qwen3")
    policy, messages = wrap(model, ACROSS), []
    config = model.model.config

    def watch(event: str) -> None:
        here = model.model.config
        messages.append(refused(lambda: from_a_thread(lambda: here._attn_implementation)))
        assert here.hidden_size == config.hidden_size

    with watched(watch):
        policy.forward_backward(BATCH, losses.GRPO())
    assert messages and model.model.config is config


def test_a_step_that_another_thread_begins() -> None:
    """It is refused as such during the self-check too, in which the model has hooks."""
    model: Any = small_model("qwen3")
    policy, messages = wrap(model, ACROSS), []

    def begin(*_: Any) -> None:
        messages.append(refused(lambda: from_a_thread(lambda: policy.score(BATCH))))

    model.model.layers[1].register_forward_hook(ReadOnlyHook(begin))
    policy.score(BATCH)
    assert messages and all("is inside a step" in message for message in messages)


def test_two_threads_that_begin_steps() -> None:
    """They leave the process's settings as they were."""
    convolutions: Any = torch.backends.cudnn.conv
    model, precision = small_model("qwen3"), convolutions.fp32_precision
    policy = wrap(model, ACROSS)
    policy.forward_backward(BATCH, losses.GRPO())
    wanted = gradients(model)
    barrier, outcomes = threading.Barrier(2), []

    def work() -> None:
        for _ in range(10):
            barrier.wait()
            try:
                outcomes.append(policy.score(BATCH).logprobs)
            except ForkpointError as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [x for x in outcomes if isinstance(x, Tensor)]
    assert len(outcomes) == 20 and values and convolutions.fp32_precision == precision
    assert all(torch.equal(x, values[0]) for x in values)
    clear_gradients(model)
    policy.forward_backward(BATCH, losses.GRPO())
    found = gradients(model)
    assert all(g is None or torch.equal(g, found[n]) for n, g in wanted.items())  # type: ignore[arg-type]
