"""What is refused: by name, with what to do, before anything runs, leaving everything as it was."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from steps import ACROSS, clear_gradients, forked_batch, model_state, step_error
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

from forkpoint import (
    ConfigError,
    PlanError,
    Policy,
    Rollout,
    RolloutBatch,
    RolloutError,
    UnsupportedError,
    losses,
    wrap,
)
from forkpoint.hosts.transformers import ATTENTION_NAME
from forkpoint.testing import tiny_model

BATCH = forked_batch()

# Of peft with newer transformers, and of torch where a reentrant checkpoint has nothing to do.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint.*should be:UserWarning"),
]


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")


def lora(model: nn.Module, **options: Any) -> nn.Module:
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, **options)
    return get_peft_model(model, config)  # type: ignore[arg-type]


# Models that are not wrapped ---------------------------------------------------------------------


def other_family(model: nn.Module) -> nn.Module:
    config = AutoConfig.for_model("gpt2", vocab_size=61, n_embd=32, n_layer=1, n_head=4)
    return AutoModelForCausalLM.from_config(config)


def subclass(model: nn.Module) -> nn.Module:
    class MyLlama(LlamaForCausalLM):
        pass

    return MyLlama(model.config)  # type: ignore[arg-type]


def namesake(model: nn.Module) -> nn.Module:
    kind = type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": "mine"})
    return kind(model.config)


def decoder(model: nn.Module) -> nn.Module:
    return model.get_submodule("model")


def classifier(model: nn.Module) -> nn.Module:
    return AutoModelForSequenceClassification.from_config(model.config)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1").compile(backend="eager")
    return model


def compiled_decoder(model: nn.Module) -> nn.Module:
    model.model = torch.compile(model.get_submodule("model"), backend="eager")  # type: ignore
    return model


class MyMLP(nn.Module):
    """Not the family's: it could do anything, such as normalise over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def foreign_module(model: nn.Module) -> nn.Module:
    model.get_submodule("model.layers.1").mlp = MyMLP()
    return model


def instance_forward(model: nn.Module) -> nn.Module:
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return model


def mixed_precision(model: nn.Module) -> nn.Module:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    return accelerator.prepare_model(model.float(), evaluation_mode=True)


class Params4bit(nn.Parameter):
    """As quantization libraries do: a parameter whose values mean something else."""


def quantized(model: nn.Module) -> nn.Module:
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    linear.weight = Params4bit(torch.zeros(48, 32), requires_grad=False)
    return model


def integers(model: nn.Module) -> nn.Module:
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    linear.weight = nn.Parameter(torch.zeros(48, 32, dtype=torch.int8), requires_grad=False)
    return model


def adapter(config: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: get_peft_model(model, config)  # type: ignore[arg-type]


def injected_adapter(model: nn.Module) -> nn.Module:
    model.add_adapter(IA3Config(target_modules=["v_proj"], feedforward_modules=[]))  # type: ignore
    return model


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def partly_on_meta(model: nn.Module) -> nn.Module:
    model.get_submodule("lm_head").to("meta")
    return model


CAUSAL: Any = {"task_type": TaskType.CAUSAL_LM}
NOT_WRAPPED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "no model": (lambda m: nn.Linear(2, 2), r"linear\.Linear is not a transformers model"),
    "data parallel": (lambda m: nn.DataParallel(m), "DataParallel is not a transformers model"),
    "compiled": (compiled, "OptimizedModule is not a transformers model.*before torch.compile"),
    "compiled in place": (compiled_in_place, r"model\.layers\.1 was compiled in place"),
    "compiled decoder": (compiled_decoder, r"model runs torch\._dynamo\S*OptimizedModule"),
    "other family": (other_family, r"GPT2LMHeadModel .model_type 'gpt2'.* supported are Llama"),
    "subclass": (subclass, "MyLlama .* has not been shown exact.*not subclasses"),
    "namesake": (namesake, r"mine\.LlamaForCausalLM .* has not been shown exact"),
    "decoder alone": (decoder, r"LlamaModel .model_type 'llama'.* has not been shown exact"),
    "classifier": (classifier, "LlamaForSequenceClassification .* has not been shown exact"),
    "foreign module": (foreign_module, r"model\.layers\.1\.mlp runs test_refusals\.MyMLP"),
    "instance forward": (instance_forward, r"model\.layers\.1\.mlp has a forward of its own"),
    "accelerate": (mixed_precision, "the model has a forward of its own.*unwrap_model"),
    "quantized": (quantized, r"parameter model\.layers\.1\.mlp\.up_proj\.weight is a Params4bit"),
    "integers": (integers, r"up_proj\.weight has dtype torch\.int8.*Allowed are torch\.float64"),
    "prompt tuning": (adapter(PromptTuningConfig(**CAUSAL, num_virtual_tokens=2)), "PROMPT_TUNING"),
    "prefix tuning": (adapter(PrefixTuningConfig(**CAUSAL, num_virtual_tokens=2)), "PREFIX_TUNING"),
    "IA3": (injected_adapter, "adapter 'default' is IA3; only LORA"),
    "LoRA on the head": (
        lambda m: lora(m, target_modules=["lm_head"]),
        r"output head is a peft\.tuners\.lora\.layer\.Linear.*Leave lm_head out",
    ),
    "trained head": (
        lambda m: lora(m, modules_to_save=["lm_head"], target_modules=["q_proj"]),
        r"output head is a peft\S*ModulesToSaveWrapper",
    ),
    "aLoRA": (
        lambda m: lora(m, alora_invocation_tokens=[1, 2], target_modules=["q_proj"]),
        r"q_proj is the LoRA variant ALora",
    ),
    "meta": (on_meta, r"model\.embed_tokens\.weight and all others\) lie on the meta device"),
    "two devices": (partly_on_meta, r"lie on 2 devices \(model\.embed_tokens\.weight on cpu, lm_"),
}


@pytest.mark.parametrize("case", NOT_WRAPPED)
def test_models_that_are_not_wrapped(model: nn.Module, case: str) -> None:
    change, message = NOT_WRAPPED[case]
    changed = change(model)
    state = model_state(changed)
    with pytest.raises(UnsupportedError, match=message):
        wrap(changed)
    assert model_state(changed) == state


CHANGED_IN_PLACE = (
    "compiled in place",
    "compiled decoder",
    "foreign module",
    "instance forward",
    "accelerate",
    "quantized",
    "integers",
    "IA3",
    "LoRA on the head",
    "trained head",
    "aLoRA",
    "meta",
    "two devices",
)


@pytest.mark.parametrize("case", CHANGED_IN_PLACE)
def test_models_that_are_changed_after_they_were_wrapped(model: nn.Module, case: str) -> None:
    """A policy looks again at every step."""
    policy = wrap(model)
    change, message = NOT_WRAPPED[case]
    change(model)
    state = model_state(model)
    with pytest.raises(UnsupportedError, match=message):
        policy.forward_backward(BATCH, losses.GRPO())
    with pytest.raises(UnsupportedError, match=message):
        policy.score(BATCH)
    assert model_state(model) == state


def test_a_class_whose_code_was_patched(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that never calls the attention function would see all of a row."""
    attention = type(model.get_submodule("model.layers.0.self_attn"))
    monkeypatch.setattr(attention, "forward", lambda self, *args, **kwargs: None)
    with pytest.raises(UnsupportedError, match=r"self_attn runs test_refusals\."):
        wrap(model)


def test_accelerates_mixed_precision_can_be_undone(model: nn.Module) -> None:
    """Its unwrap_model leaves a forward on the instance, which then is the class's own."""
    prepared = mixed_precision(model)
    unwrapped = Accelerator(cpu=True).unwrap_model(prepared, keep_fp32_wrapper=False)
    assert "forward" in vars(unwrapped)
    state = model_state(unwrapped)
    assert step_error(unwrapped, BATCH, losses.GRPO()) < 1e-5
    clear_gradients(unwrapped)
    assert model_state(unwrapped) == state


@pytest.fixture
def process_group() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_data_parallel_wrappers_and_sharded_parameters(process_group: DeviceMesh) -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedError, match="DistributedDataParallel is not a transformers"):
        wrap(DistributedDataParallel(model))
    linear = model.get_submodule("model.layers.1.mlp.up_proj")
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), process_group))  # type: ignore
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight is a DTensor; sharded"):
        wrap(model)
    sharded = fully_shard(tiny_model("llama"), mesh=process_group)
    with pytest.raises(UnsupportedError, match=r"FSDPLlamaForCausalLM .* has not been shown exact"):
        wrap(sharded)


# States in which nothing runs --------------------------------------------------------------------


def checkpointing(model: nn.Module, **options: Any) -> None:
    """By whatever name the installed transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, name) for name in names if hasattr(model, name))(options or None)


def reentrant(model: nn.Module) -> None:
    checkpointing(model.train(), use_reentrant=True)


def reentrant_by_default(model: nn.Module) -> None:
    checkpointing(model.train(), preserve_rng_state=True)


def unknown_checkpointing(model: nn.Module) -> None:
    checkpointing(model.train(), use_reentrant=False)
    model.get_submodule("model.layers.1")._gradient_checkpointing_func = checkpoint


def attention_dropout(model: nn.Module) -> None:
    model.train().get_submodule("model.layers.2.self_attn").attention_dropout = 0.1


def dropout_module(model: nn.Module) -> None:
    mlp = model.train().get_submodule("model.layers.0.mlp")
    mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.25))


def dropout_within_an_evaluated_model(model: nn.Module) -> None:
    dropout_module(model.eval())
    model.training = False


def bidirectional_masks(model: nn.Module) -> None:
    model.config.is_causal = False  # type: ignore


def bidirectional_configuration(model: nn.Module) -> None:
    model.config.use_bidirectional_attention = True  # type: ignore


def bidirectional_layer(model: nn.Module) -> None:
    model.get_submodule("model.layers.1.self_attn").is_causal = False  # type: ignore


def unknown_rope(model: nn.Module) -> None:
    model.config.rope_parameters["rope_type"] = "spiral"  # type: ignore


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def optimizer_in_backward(model: nn.Module) -> None:
    weight = model.get_submodule("model.norm").weight
    weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore


STATES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "reentrant": (reentrant, r"model is checkpointed with use_reentrant=True.*would be lost"),
    "reentrant by default": (reentrant_by_default, "is checkpointed with use_reentrant=True"),
    "unknown checkpointing": (unknown_checkpointing, r"layers\.1 is checkpointed by <function"),
    "attention dropout": (attention_dropout, r"layers\.2\.self_attn has dropout 0\.1 in training"),
    "dropout": (dropout_module, r"layers\.0\.mlp\.act_fn\.1 has dropout 0\.25 in training"),
    "dropout within": (dropout_within_an_evaluated_model, r"act_fn\.1 has dropout 0\.25"),
    "bidirectional masks": (bidirectional_masks, "is_causal=False, so that tokens see those after"),
    "bidirectional": (bidirectional_configuration, "has use_bidirectional_attention=True"),
    "bidirectional layer": (bidirectional_layer, r"layers\.1\.self_attn has is_causal=False"),
    "unknown rope": (unknown_rope, "rope_type is 'spiral', and it is not known"),
    "frozen": (frozen, "no parameter of the model requires a gradient"),
    "optimizer in backward": (optimizer_in_backward, r"model\.norm\.weight has a hook that runs"),
}
TRAINING_ONLY = {
    "reentrant",
    "reentrant by default",
    "unknown checkpointing",
    "frozen",
    "optimizer in backward",
}


@pytest.mark.parametrize("case", STATES)
def test_states_in_which_nothing_runs(model: nn.Module, case: str) -> None:
    change, message = STATES[case]
    change(model)
    policy, state = wrap(model, ACROSS), model_state(model)
    with pytest.raises(UnsupportedError, match=message):
        policy.forward_backward(BATCH, losses.GRPO())
    if case in TRAINING_ONLY:
        assert len(policy.score(BATCH).logprobs) == BATCH.logical_tokens
    else:
        with pytest.raises(UnsupportedError, match=message):
            policy.score(BATCH)
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("case", ["attention dropout", "dropout", "reentrant"])
def test_what_only_training_mode_does_is_fine_in_eval_mode(model: nn.Module, case: str) -> None:
    STATES[case][0](model)
    assert step_error(model.eval(), BATCH, losses.GRPO()) < 1e-10


def test_dropout_of_an_adapter(model: nn.Module) -> None:
    policy = wrap(lora(model, lora_dropout=0.05, target_modules=["q_proj"]).train())
    with pytest.raises(UnsupportedError, match=r"q_proj\.lora_dropout\.default has dropout 0\.05"):
        policy.forward_backward(BATCH, losses.GRPO())


def test_inference_mode(model: nn.Module) -> None:
    policy = wrap(model, ACROSS)
    wanted = policy.score(BATCH).logprobs
    with torch.inference_mode():
        with pytest.raises(UnsupportedError, match=r"torch\.inference_mode"):
            policy.forward_backward(BATCH, losses.GRPO())
        assert torch.equal(policy.score(BATCH).logprobs, wanted)


@pytest.mark.parametrize("family", ["gemma", "gemma3_text", "llama"])
def test_models_of_embeddings_see_later_tokens(family: str) -> None:
    """What is refused there does let the stock model see them."""
    given = {"is_causal": False} if family == "llama" else {"use_bidirectional_attention": True}
    model = tiny_model(family, layer_types=["full_attention"] * 3, **given)
    ids = torch.tensor([[0, 1, 2, 3, 4], [0, 5, 6, 7, 8]])
    with torch.no_grad():
        first, other = model(input_ids=ids).logits[:, 0]
    assert float((first - other).abs().max()) > 1e-3
    with pytest.raises(UnsupportedError, match="see those after them"):
        wrap(model).score(BATCH)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0] * 4,
    "factor": 4.0,
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 40), ("longrope", 20)])
def test_rope_that_depends_on_the_length(family: str, kind: str, limit: int) -> None:
    """Up to the limit rollouts agree on shared tokens, and beyond it they do not."""
    rope = DYNAMIC if kind == "dynamic" else {**LONGROPE, "original_max_position_embeddings": 20}
    model = tiny_model(
        family, max_position_embeddings=40, rope_parameters={"rope_theta": 1e4, **rope}
    )

    def batch(longest: int) -> RolloutBatch:
        prompt = [n % 61 for n in range(longest - 3)]
        endings = ([5, 6, 7], [5, 8, 9], [6, 4])
        return RolloutBatch(
            [Rollout(prompt + e, [0] * len(prompt) + [1] * len(e), 1.0) for e in endings]
        )

    policy = wrap(model, ACROSS)
    assert step_error(model, batch(limit), losses.GRPO(), policy=policy) < 1e-10
    message = (
        f"rope_type is '{kind}' and the longest rollout has {limit + 1} tokens: beyond {limit}"
    )
    for call in (policy.score, lambda batch: policy.forward_backward(batch, losses.GRPO())):
        with pytest.raises(UnsupportedError, match=message):
            call(batch(limit + 1))


# Attention that is asked for something else ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_mask", torch.zeros(1), "LlamaAttention asks for a mask in attention"),
        ("attn_bias", torch.zeros(1), "LlamaAttention passes attn_bias to its attention function"),
        ("indices", 3, "LlamaAttention passes indices"),
    ],
)
def test_arguments_of_attention_that_would_change_it(
    model: nn.Module, name: str, value: Any, message: str
) -> None:
    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, name: value}

    attention = model.get_submodule("model.layers.1.self_attn")
    handle = attention.register_forward_pre_hook(add, with_kwargs=True)
    policy, state = wrap(model, ACROSS), model_state(model)
    with pytest.raises(UnsupportedError, match=message):
        policy.forward_backward(BATCH, losses.GRPO())
    with pytest.raises(UnsupportedError, match=message):
        policy.score(BATCH)
    assert model_state(model) == state
    handle.remove()
    assert step_error(model, BATCH, losses.GRPO(), policy=policy) < 1e-10


def test_forkpoints_attention_outside_of_forkpoint(model: nn.Module) -> None:
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match="was called outside of forkpoint"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    stats = wrap(model, ACROSS).forward_backward(BATCH, losses.GRPO())
    assert stats.computed_tokens == 60
    assert model.config._attn_implementation == ATTENTION_NAME


# Input that is refused before anything runs ------------------------------------------------------

OTHER = RolloutBatch([Rollout([1, 2, 3], [0, 1, 1], 1.0), Rollout([1, 2, 4], [0, 0, 1], 1.0)])
BEYOND = RolloutBatch([Rollout([1, 2, 61], [0, 1, 1], 1.0)])
TOO_SMALL = {"sharing": "tree", "boundary": "in_row", "max_row_tokens": 4}

BAD_CALLS: dict[str, tuple[type[Exception], str, Callable[[Policy], Any]]] = {
    "scale nan": (
        ConfigError,
        "scale is nan",
        lambda p: p.forward_backward(BATCH, losses.GRPO(), scale=float("nan")),
    ),
    "scale inf": (
        ConfigError,
        "scale is inf",
        lambda p: p.forward_backward(BATCH, losses.GRPO(), scale=float("inf")),
    ),
    "class": (ConfigError, "pass an instance", lambda p: p.forward_backward(BATCH, losses.GRPO)),
    "no loss": (ConfigError, "The loss is 3", lambda p: p.forward_backward(BATCH, 3)),  # type: ignore
    "plan": (
        PlanError,
        "this plan was made for",
        lambda p: p.forward_backward(BATCH, losses.GRPO(), plan=p.plan(OTHER)),
    ),
    "plan of score": (
        PlanError,
        "this plan was made for",
        lambda p: p.score(BATCH, plan=p.plan(OTHER)),
    ),
    "vocabulary": (RolloutError, "61", lambda p: p.forward_backward(BEYOND, losses.GRPO())),
    "vocabulary of score": (RolloutError, "61", lambda p: p.score(BEYOND)),
    "reference": (
        RolloutError,
        "needs reference_logprobs",
        lambda p: p.forward_backward(OTHER, losses.DPO()),
    ),
    "pairs": (
        RolloutError,
        "exactly two rollouts",
        lambda p: p.forward_backward(BATCH, losses.DPO()),
    ),
    "rows": (PlanError, "max_row_tokens", lambda p: p.with_config(**TOO_SMALL).score(BATCH)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_leaves_everything_as_it_was(model: nn.Module, case: str) -> None:
    kind, message, call = BAD_CALLS[case]
    policy, ran = wrap(model, ACROSS), []
    model.get_submodule("model.embed_tokens").register_forward_hook(lambda *_: ran.append(1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    objects, state = {n: p.grad for n, p in model.named_parameters()}, model_state(model)
    with pytest.raises(kind, match=message) as caught:
        call(policy)
    assert not ran, "it was refused only after a row had run"
    assert not hasattr(caught.value, "__notes__")
    assert model_state(model) == state
    for name, parameter in model.named_parameters():
        assert parameter.grad is objects[name]
        assert bool((parameter.grad == 1).all())


@pytest.mark.parametrize(
    "returned", [torch.ones(3), 1.0, torch.tensor(1)], ids=["vector", "float", "integer"]
)
def test_a_loss_that_returns_no_scalar(model: nn.Module, returned: Any) -> None:
    policy, state = wrap(model, ACROSS), model_state(model)
    with pytest.raises(ConfigError, match="must return a floating-point scalar"):
        policy.forward_backward(BATCH, lambda outputs, batch: returned)
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())


def test_a_kernel_that_does_not_exist(model: nn.Module) -> None:
    policy = wrap(model, ACROSS).with_config(attention_kernel="none")
    state = model_state(model)
    with pytest.raises(UnsupportedError, match="no attention kernel 'none'"):
        policy.forward_backward(BATCH, losses.GRPO())
    assert model_state(model) == state
    assert all(p.grad is None for p in model.parameters())


def test_refusals_change_no_weights(model: nn.Module) -> None:
    """All of the above on one model, which then trains exactly."""
    policy, before = wrap(model, ACROSS), copy.deepcopy(model.state_dict())
    for kind, message, call in BAD_CALLS.values():
        with pytest.raises(kind, match=message):
            call(policy)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert step_error(model, BATCH, losses.GRPO(), policy=policy) < 1e-10
    clear_gradients(model)
