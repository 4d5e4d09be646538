"""Stock transformers models as users have them: every state that is supported is exact, and
wrapping leaves a model usable as before.

In float64, with upcasts lifted, gradients equal ordinary training's to rounding; in float32 and
below, errors are those of the precision.
"""

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from steps import ACROSS, clear_gradients, forked_batch, gradients, model_state, step_error
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from forkpoint import Config, losses, wrap
from forkpoint.testing import dense_run, lifted_upcasts, tiny_model

BATCH = forked_batch()
LOSS = losses.GRPO(kl=0.1)
TREE_IN_ROW = Config(sharing="tree", boundary="in_row")
BARS = {torch.float64: 1e-10, torch.float32: 2e-5}

pytestmark = pytest.mark.filterwarnings(
    # peft with newer transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
families = pytest.mark.parametrize("family", ["llama", "qwen3"])
dtypes = pytest.mark.parametrize("dtype", list(BARS), ids=str)
configs = pytest.mark.parametrize("config", [ACROSS, TREE_IN_ROW], ids=["across", "in_row"])


def lora(model: nn.Module, **options: Any) -> PeftModel:
    """Adapters with weights as after some training: at first B is 0, and A gets no gradient."""
    chosen = {"target_modules": "all-linear", **options}
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=3, init_lora_weights=False, **chosen)
    torch.manual_seed(2)
    with warnings.catch_warnings():  # peft's, on merging and saving such adapters
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)  # type: ignore[arg-type]
    assert isinstance(adapted, PeftModel)
    return adapted


def checkpointing(model: nn.Module, **options: Any) -> None:
    """By whatever name the installed transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable(options or None)
    model.train()


def count_calls(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


# State policies ----------------------------------------------------------------------------------


def plain(model: nn.Module) -> nn.Module:
    return model


def training(model: nn.Module) -> nn.Module:
    return model.train()


def frozen_below(model: nn.Module) -> nn.Module:
    model.get_submodule("model.embed_tokens").requires_grad_(False)
    for layer in ("model.layers.0", "model.layers.1"):
        model.get_submodule(layer).requires_grad_(False)
    return model


def frozen_above(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("model.layers.0.self_attn.k_proj").requires_grad_(True)
    return model


def only_the_head(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("lm_head").requires_grad_(True)
    return model


def only_the_last_mlp(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_submodule("model.layers.2.mlp").requires_grad_(True)
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    checkpointing(model, use_reentrant=False)
    return model


def checkpointed_by_default(model: nn.Module) -> nn.Module:
    checkpointing(model)
    return model


def checkpointed_partly(model: nn.Module) -> nn.Module:
    checkpointing(model, use_reentrant=False)
    model.get_submodule("model.layers.1").gradient_checkpointing = False
    return model


def keeping_hidden_states(model: nn.Module) -> nn.Module:
    model.config.output_hidden_states = True  # type: ignore
    model.config.output_attentions = False  # type: ignore
    return model


def resized(model: nn.Module) -> nn.Module:
    torch.manual_seed(4)
    model.resize_token_embeddings(67, mean_resizing=False)  # type: ignore[operator]
    return model


STATES: list[Callable[[nn.Module], nn.Module]] = [
    plain,
    training,
    frozen_below,
    frozen_above,
    only_the_head,
    only_the_last_mlp,
    checkpointed,
    checkpointed_by_default,
    checkpointed_partly,
    keeping_hidden_states,
    resized,
]


@configs
@dtypes
@pytest.mark.parametrize("state", STATES)
@families
def test_states_of_a_model(
    family: str, state: Callable[[nn.Module], nn.Module], dtype: torch.dtype, config: Config
) -> None:
    model = state(tiny_model(family, dtype=dtype))
    assert step_error(model, BATCH, LOSS, config) < BARS[dtype]


@configs
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 12},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 2048,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
        },
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ],
    ids=["tied", "bias", "mha", "mqa", "head_dim", "linear", "yarn", "llama3", "windows"],
)
@families
def test_shapes_of_a_model(family: str, changes: dict[str, Any], config: Config) -> None:
    assert step_error(tiny_model(family, **changes), BATCH, LOSS, config) < 1e-10


@configs
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@families
def test_whatever_attention_the_model_has(family: str, attention: str, config: Config) -> None:
    model = tiny_model(family, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    assert step_error(model, BATCH, LOSS, config) < 1e-10
    assert model.config._attn_implementation == attention


def test_bfloat16_parameters_and_autocast_follow_the_model() -> None:
    """Only dtypes here: how exact they are is verify's to say (test_verify.py)."""
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model = tiny_model("qwen3", dtype=dtype)
        seen: set[torch.dtype] = set()
        model.get_submodule("model.layers.1.mlp.up_proj").register_forward_hook(
            lambda module, args, output, seen=seen: seen.add(output.dtype)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stats = wrap(model, ACROSS).forward_backward(BATCH, LOSS)
        assert seen == {torch.bfloat16}
        assert stats.logprobs.dtype == torch.float32
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


def test_autocast_casts_queries_keys_and_values_as_torchs_attention_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary embeddings leave q and k in float32 there, and v in bfloat16."""
    from forkpoint.hosts import transformers as host

    attention, seen = host.shared_attention, []

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, **options)

    monkeypatch.setattr(host, "shared_attention", watched)
    model = tiny_model("llama", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wrap(model, ACROSS).score(BATCH)
    assert set(seen) == {(torch.bfloat16,) * 3}


# Adapters ----------------------------------------------------------------------------------------

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "queries": {"target_modules": ["q_proj"]},
    "keys": {"target_modules": ["k_proj"]},
    "last layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [2]},
    "last mlp": {"target_modules": ["down_proj"], "layers_to_transform": [2]},
    "first layer": {"target_modules": ["v_proj"], "layers_to_transform": [0]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "trained embeddings": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "trained tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [3, 5, 8]},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "bias": {"bias": "all", "lora_bias": True},
}


@configs
@dtypes
@pytest.mark.parametrize("adapter", ADAPTERS)
@families
def test_adapters_on_a_frozen_base(
    family: str, adapter: str, dtype: torch.dtype, config: Config
) -> None:
    model = lora(tiny_model(family, dtype=dtype), **ADAPTERS[adapter])
    assert step_error(model, BATCH, LOSS, config) < BARS[dtype]
    wrap(model, config).forward_backward(BATCH, LOSS)
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not any("base_layer" in name for name in trained)


def test_adapters_that_transformers_puts_in() -> None:
    model = tiny_model("qwen3")
    torch.manual_seed(0)
    model.add_adapter(
        LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "up_proj"])
    )
    assert step_error(model, BATCH, LOSS) < 1e-10
    assert all(p.requires_grad == ("lora" in n) for n, p in model.named_parameters())


def test_adapters_put_in_after_wrapping() -> None:
    model = tiny_model("llama")
    policy = wrap(model, ACROSS)
    adapted = lora(model)
    assert step_error(adapted, BATCH, LOSS, policy=wrap(adapted, ACROSS)) < 1e-10
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10


def test_a_tied_model_with_adapted_embeddings() -> None:
    model = lora(tiny_model("llama", tie_word_embeddings=True), target_modules=["embed_tokens"])
    assert step_error(model, BATCH, LOSS) < 1e-10


def test_adapters_on_a_bfloat16_base() -> None:
    """peft keeps adapters in float32 there. How exact they are is verify's to say."""
    model = lora(tiny_model("qwen3", dtype=torch.bfloat16), target_modules=["q_proj", "v_proj"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    for config in (ACROSS, TREE_IN_ROW):
        wrap(model, config).forward_backward(BATCH, LOSS)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (not parameter.requires_grad), name
            if parameter.grad is not None:
                assert parameter.grad.dtype == torch.float32
        clear_gradients(model)


def test_adapters_switched_off_score_as_the_base_does() -> None:
    base = tiny_model("llama")
    wanted = wrap(base, ACROSS).score(BATCH, entropy=True)
    model = lora(copy.deepcopy(base))
    policy = wrap(model, ACROSS)
    adapted = policy.score(BATCH)
    with model.disable_adapter():
        reference = policy.score(BATCH, entropy=True)
    assert torch.equal(reference.logprobs, wanted.logprobs)
    assert torch.equal(reference.entropies, wanted.entropies)  # type: ignore[arg-type]
    assert float((adapted.logprobs - wanted.logprobs).abs().max()) > 0.1


def test_another_adapter_of_the_model() -> None:
    model = lora(tiny_model("llama"), target_modules=["q_proj"])
    torch.manual_seed(7)
    other = LoraConfig(r=2, init_lora_weights=False, target_modules=["v_proj"])
    model.add_adapter("other", other)
    policy = wrap(model, ACROSS)
    for name, trained in (("default", "q_proj"), ("other", "v_proj")):
        model.set_adapter(name)
        assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
        policy.forward_backward(BATCH, LOSS)
        found = {n for n, p in model.named_parameters() if p.grad is not None}
        assert len(found) == 6 and all(f"{trained}.lora" in n and name in n for n in found)
        clear_gradients(model)


# Checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [False, True])
@families
def test_checkpointing_really_recomputes(family: str, adapted: bool) -> None:
    model = tiny_model(family)
    policed: nn.Module = lora(model) if adapted else model
    calls = [count_calls(model.get_submodule(f"model.layers.{n}.mlp")) for n in range(3)]

    def step() -> list[int]:
        for each in calls:
            each.clear()
        stats = wrap(policed, ACROSS).forward_backward(BATCH, LOSS)
        assert len(stats.plan.rows) == 7
        return [len(each) for each in calls]

    before = step()
    found = gradients(policed)
    clear_gradients(policed)
    checkpointing(model, use_reentrant=False)
    assert step() == [14, 14, 14]
    # The one row without trained tokens ends at the K and V of its last block.
    assert before == [7, 7, 6]
    for name, gradient in gradients(policed).items():
        expected = found[name]
        assert (gradient is None) == (expected is None)
        if gradient is not None and expected is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    clear_gradients(policed)
    assert step_error(policed, BATCH, LOSS, ACROSS) < 1e-10


def test_scores_are_not_recomputed() -> None:
    model = tiny_model("llama")
    checkpointing(model, use_reentrant=False)
    calls = count_calls(model.get_submodule("model.layers.0.mlp"))
    wrap(model, ACROSS).score(BATCH)
    assert len(calls) == 7


# As before, and no trace -------------------------------------------------------------------------


def use(model: PreTrainedModel) -> list[torch.Tensor]:
    """What people do with a model besides training it."""
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        masked = model(
            input_ids=ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
        ).logits
    written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clear_gradients(model)
    return [logits, masked, written, loss.detach(), *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("adapted", [False, True])
@families
def test_a_wrapped_model_is_usable_as_before(family: str, adapted: bool) -> None:
    model: Any = tiny_model(family, dtype=torch.float32)
    model = lora(model) if adapted else model
    wanted = use(model)
    state = model_state(model)
    policy = wrap(model, ACROSS)
    assert model_state(model) == state

    def check() -> None:
        assert model_state(model) == state
        for found, expected in zip(use(model), wanted, strict=True):
            assert torch.equal(found, expected)

    check()
    policy.forward_backward(BATCH, LOSS)
    clear_gradients(model)
    check()
    policy.score(BATCH, entropy=True)
    policy.verify(BATCH, LOSS)
    check()
    host = weakref.ref(policy.host)
    del policy
    gc.collect()
    assert host() is None, "something of the policy stays behind"
    check()


@families
def test_saving_copying_and_pickling(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.float32)
    policy = wrap(model, ACROSS)
    policy.forward_backward(BATCH, LOSS)
    clear_gradients(model)
    wanted = policy.score(BATCH).logprobs
    model.save_pretrained(tmp_path)
    assert "forkpoint" not in (tmp_path / "config.json").read_text()
    for twin in (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert torch.equal(wrap(twin, ACROSS).score(BATCH).logprobs, wanted)
        assert step_error(twin, BATCH, LOSS) < 2e-5


def test_two_policies_on_one_model() -> None:
    model = tiny_model("qwen3")
    first, second = wrap(model, ACROSS), wrap(model, TREE_IN_ROW)
    state = model_state(model)
    with lifted_upcasts(model):
        first.forward_backward(BATCH, LOSS)
        once = gradients(model)
        second.forward_backward(BATCH, LOSS)
    for name, parameter in model.named_parameters():
        expected = once[name]
        assert expected is not None and parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * expected, rtol=1e-10, atol=1e-12)
    assert model_state(model) == state
    del first
    assert step_error(model, BATCH, LOSS, policy=second) < 1e-10


def test_the_model_may_change_between_steps() -> None:
    """Nothing of it is remembered that a step depends on."""
    model = tiny_model("llama", dtype=torch.float32)
    policy = wrap(model, ACROSS)
    assert step_error(model, BATCH, LOSS, policy=policy) < 2e-5
    model.double()
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    resized(model)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    checkpointing(model, use_reentrant=False)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    model.lm_head = nn.Linear(32, 67, bias=True, dtype=torch.float64)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10
    frozen_below(model)
    assert step_error(model, BATCH, LOSS, policy=policy) < 1e-10


def test_hooks_of_the_user_run_as_in_any_forward() -> None:
    model = tiny_model("llama")
    calls = {name: count_calls(model.get_submodule(name)) for name in ("model", "model.layers.0")}
    whole = count_calls(model)
    stats = wrap(model, ACROSS).forward_backward(BATCH, LOSS)
    assert len(whole) == len(calls["model"]) == len(calls["model.layers.0"]) == 7
    assert len(stats.plan.rows) == 7


# Lifted upcasts ----------------------------------------------------------------------------------


@families
def test_lifted_upcasts_lift_the_limit_of_float32_norms_and_leave_no_trace(family: str) -> None:
    model = tiny_model(family)
    policy = wrap(model, ACROSS)
    module = sys.modules[type(model).__module__]

    def error() -> float:
        clear_gradients(model)
        policy.forward_backward(BATCH, LOSS)
        found = gradients(model)
        wanted = dense_run(model, BATCH, LOSS).gradients
        pairs = [(found[n], g) for n, g in wanted.items()]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)  # type: ignore

    assert error() > 1e-9
    with lifted_upcasts(model):
        assert module.torch is not torch
        assert module.torch.float32 is torch.float64
        assert module.torch.bfloat16 is torch.bfloat16
        assert torch.ones(1, dtype=torch.int64).float().dtype == torch.float64
        with lifted_upcasts(model):
            assert error() < 1e-12
        assert error() < 1e-12
    assert module.torch is torch
    assert "float" not in vars(torch.Tensor)
    assert torch.ones(1, dtype=torch.int64).float().dtype == torch.float32
    with pytest.raises(ZeroDivisionError), lifted_upcasts(model):
        raise ZeroDivisionError
    assert module.torch is torch
    assert "float" not in vars(torch.Tensor)
