"""Changes of a model between `policy.logprobs` and its backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_models import lora
from router_losses import routed_model
from steps import ACROSS, clear_gradients, forked_batch, gradients, relative_distance, small_model

from forkpoint import UnsupportedError, wrap
from forkpoint.testing import ReadOnlyHook, lifted_upcasts
from lanes import slow_besides
from versions import eager_experts
from watched import watched

BATCH = forked_batch()
LAYER = "model.layers.0"
pytestmark = [
    pytest.mark.usefixtures("without_sample"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*no longer merged:UserWarning"),
]


def with_adapters() -> Any:
    model = lora(small_model("qwen3"), target_modules=["q_proj", "v_proj"])
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("default")
    return model.double()


def with_biases() -> Any:
    model = routed_model("deepseek_v3")
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.normal_(std=0.1)
    return model


def with_experts() -> Any:
    """Adapters of experts, whose forward writes to the frozen weights."""
    model = eager_experts(routed_model("qwen3_moe"))
    return lora(model, target_modules=[], target_parameters=["mlp.experts.down_proj"]).double()


def with_trained_experts() -> Any:
    return with_experts().requires_grad_()


MODELS: dict[str, Callable[[], Any]] = {
    "experts": with_experts,
    "trained experts": with_trained_experts,
    "qwen3": lambda: small_model("qwen3").train(),
    "adapters": with_adapters,
    "biases": with_biases,
}


def layer_of(model: Any) -> Any:
    return model.get_submodule(LAYER)


def lora_of(model: Any) -> Any:
    return model.base_model.model.model.layers[1].self_attn.v_proj


def stock_forward(model: Any) -> None:
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)


def merge(model: Any) -> None:
    model.merge_adapter()


def frozen_written(model: Any) -> None:
    with torch.no_grad():
        lora_of(model).base_layer.weight.mul_(1.5)


def rescale(model: Any) -> None:
    lora_of(model).scaling["default"] *= 3


def other_data(model: Any) -> None:
    weight = layer_of(model).mlp.up_proj.weight
    weight.data = weight.data * 1.5


def averaged(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def one_written(model: Any) -> None:
    layer_of(model).self_attn.v_proj.weight.data.mul_(1.5)


def replaced(model: Any) -> None:
    layer_of(model).mlp = copy.deepcopy(layer_of(model).mlp)


def frozen(model: Any) -> None:
    layer_of(model).mlp.up_proj.weight.requires_grad_(False)


def biased(model: Any) -> None:
    counts = torch.arange(8).repeat(wrap(model).host.routers.layers, 1)
    wrap(model).update_router_biases(counts, rate=0.5)


REFUSED: dict[str, tuple[str, Callable[[Any], object], str, bool]] = {
    "another adapter": ("adapters", lambda m: m.set_adapter("other"), "active_adapter", False),
    "adapters merged": ("adapters", merge, "merged|other data", False),
    "a scale of an adapter": ("adapters", rescale, "v_proj.scaling", False),
    "other data": ("qwen3", other_data, "mlp.up_proj.weight was written to or has", False),
    "averaged weights": ("qwen3", averaged, "values differ from those", True),
    "one weight written by data": ("qwen3", one_written, "values differ from those", True),
    "another module": ("qwen3", replaced, rf"\({LAYER}.mlp\)", False),
    "a parameter frozen": ("qwen3", frozen, "up_proj.weight does not require", False),
    "a frozen weight written": ("adapters", frozen_written, "base_layer.weight was written", False),
    "trained experts": ("trained experts", stock_forward, "down_proj was written", False),
    "biases of routers": ("biases", biased, "e_score_correction_bias was written", False),
}
IN_CORE = (
    *("another adapter", "adapters merged", "a scale of an adapter", "other data"),
    *("averaged weights", "another module", "a parameter frozen", "trained experts"),
)


@pytest.mark.parametrize("what", slow_besides(IN_CORE, REFUSED))
def test_changes_are_refused_by_name(what: str) -> None:
    kind, change, message, runs = REFUSED[what]
    model = MODELS[kind]()
    policy, events = wrap(model, ACROSS), []
    loss = policy.logprobs(BATCH).sum()
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    policy = policy.with_config(restore_grads=True)
    change(model)
    with pytest.raises(UnsupportedError, match=message) as caught, watched(events.append):
        loss.backward()
    assert "policy.logprobs again" in str(caught.value) and "rank" not in str(caught.value)
    assert runs or not events
    if not runs:
        assert all(bool((p.grad == 1).all()) for p in parameters if p.grad is not None)
    after = policy.last_step
    assert after is None or after.gradients != "added"


def generated(model: Any) -> None:
    ids, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 2, "pad_token_id": 0}
    model.generate(ids, do_sample=False, **options)
    model.generate(ids, do_sample=False, cache_implementation="static", **options)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()


def with_a_hook(model: Any) -> None:
    layer_of(model).register_forward_hook(ReadOnlyHook(lambda *_: None))


def stepped(model: Any) -> None:
    other = wrap(model, ACROSS)
    before = gradients(model)
    other.logprobs(BATCH).sum().backward()
    other.score(BATCH)
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]


ALLOWED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "evaluation": ("qwen3", lambda m: m.eval()),
    "checkpointing": ("qwen3", checkpointed),
    "a stock forward": ("qwen3", stock_forward),
    "a stock forward with adapters of experts": ("experts", stock_forward),
    "generation": ("qwen3", generated),
    "a hook that watches": ("qwen3", with_a_hook),
    "other calls": ("qwen3", stepped),
    "compiled from outside": ("qwen3", lambda m: m.compile(backend="eager")),
    "an adapter there and back": (
        "adapters",
        lambda m: (m.set_adapter("other"), m.set_adapter("default")),
    ),
}


@pytest.mark.parametrize(
    "what", slow_besides(("evaluation", "checkpointing", "generation", "other calls"), ALLOWED)
)
def test_what_changes_no_value_may_change(what: str) -> None:
    kind, change = ALLOWED[what]
    model = MODELS[kind]()
    policy = wrap(model, ACROSS)
    with lifted_upcasts(model):
        policy.logprobs(BATCH).sum().backward()
        wanted = gradients(model)
        clear_gradients(model)
        loss = policy.logprobs(BATCH).sum()
        change(model)
        loss.backward()
    assert relative_distance(gradients(model), wanted) < 1e-10


def test_log_probs_may_be_written_to() -> None:
    """A backward compares with a copy that callers do not have."""
    model = small_model("qwen3")
    policy = wrap(model, ACROSS)
    logprobs = policy.logprobs(BATCH)
    logprobs *= 2.0
    loss = logprobs.sum()
    logprobs.detach().zero_()
    loss.backward()
    assert policy.last_step is not None and policy.last_step.gradients == "added"
