"""Models that mix attention with layers that carry a state: exact, and verified."""

import functools
import importlib
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from experts import expert_batch
from host_models import lora, real_model
from scenarios import CHAIN, EVERY, LOSSES, TIGHT, acceptance_batch, paired_batch, with_logprobs
from steps import forked_batch
from transformers import PreTrainedModel
from yardstick import Truth, faults_of_steps, measure, own_logprobs

from forkpoint import Config, RolloutBatch, losses, wrap
from forkpoint.hosts.transformers import linear_attention
from forkpoint.losses import GRPO
from forkpoint.losses.base import as_loss
from forkpoint.testing import lifted_upcasts
from hybrids import ACROSS_MICROBATCHES, HYBRIDS, MIXED, WITHIN, Sabotage, tiny_hybrid
from lanes import slow_besides, slow_besides_every

CONFIGS: tuple[Config, ...] = (
    *EVERY,
    Config(sharing="tree", boundary="mixed", max_microbatch_tokens=TIGHT),
    Config(sharing="tree", boundary="within", max_microbatch_tokens=TIGHT),
    *(Config(sharing=s, boundary="across", max_microbatch_tokens=CHAIN) for s in ("none", "group")),
)


# Microbatches of 2 tokens: all but the shortest segments are chains, shorter than the convolution.
SHORTEST = [
    Config(sharing="tree", boundary=b, max_microbatch_tokens=2) for b in ("across", "mixed")
]  # type: ignore[arg-type]


def truth(model: PreTrainedModel, batch: RolloutBatch, loss: Any) -> Truth:
    return measure(model, with_logprobs(batch, own_logprobs(model, batch)), as_loss(loss))


@cache
def truth_of(family: str, loss: str, kinds: tuple[str, ...] = MIXED) -> Truth:
    """That of the acceptance batch, once for all plans of a model."""
    batch = paired_batch() if loss == "dpo" else acceptance_batch()
    return truth(tiny_hybrid(family, kinds=kinds), batch, LOSSES[loss])


def check(model: PreTrainedModel, expected: Truth, loss: Any, configs: Any) -> None:
    faults, _ = faults_of_steps(model, expected, loss, configs)
    assert not faults, f"{len(faults)} differences from dense:\n" + "\n".join(faults[:20])


# Exact -------------------------------------------------------------------------------------------


STEPS: dict[tuple[str, bool], list[Config]] = {
    ("grpo", True): [CONFIGS[4], CONFIGS[8], CONFIGS[-1]],
    ("gspo", False): [CONFIGS[1], CONFIGS[6], CONFIGS[9]],
    ("dpo", True): [CONFIGS[5], CONFIGS[7], CONFIGS[10]],
    ("coupled", False): [CONFIGS[0], CONFIGS[2], CONFIGS[3]],
}
IN_CORE = (("grpo", True),)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("loss", "checkpointed"), slow_besides(IN_CORE, STEPS))
def test_steps_are_those_of_dense_training(loss: str, checkpointed: bool) -> None:
    """Forks four deep, responses of one token, prefixes shorter than the convolution."""
    expected = truth_of("qwen3_5_text", loss)
    model = tiny_hybrid("qwen3_5_text", checkpointed=checkpointed)
    check(model, expected, LOSSES[loss], STEPS[loss, checkpointed])


@pytest.mark.slow
def test_limits_of_time_steps() -> None:
    """They bind: some time steps of the model are below, and some above."""
    model, loss = tiny_hybrid("granitemoehybrid", time_step_limit=(1.3, 1.4)), LOSSES["grpo"]
    check(model, truth(model, acceptance_batch(), loss), loss, CONFIGS[3:7])


@pytest.mark.slow
def test_microbatches_shorter_than_the_convolution() -> None:
    model, loss = tiny_hybrid("qwen3_5_text"), LOSSES["grpo"]
    check(model, truth_of("qwen3_5_text", "grpo"), loss, SHORTEST)


LONG = [
    Config(sharing="group", boundary="across"),
    Config(sharing="tree", boundary="within"),
    Config(sharing="tree", boundary="mixed", max_microbatch_tokens=200),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_segments_longer_than_chunks(family: str) -> None:
    """Prompts of 134 and 74 edges, forks at 60 and 45 more: none a multiple of a chunk of 64."""
    model, loss = tiny_hybrid(family), LOSSES["grpo"]
    expected = truth(model, forked_batch(stretch=15), loss)
    check(model, expected, loss, LONG)


@pytest.mark.parametrize(
    "family", slow_besides(["granitemoehybrid"], ["qwen3_5_text", "granitemoehybrid"])
)
def test_models_without_attention(family: str) -> None:
    """Microbatches that train on nothing end at the last layer's state."""
    kinds = ("linear_attention",)
    model, loss = tiny_hybrid(family, kinds=kinds), LOSSES["grpo"]
    check(model, truth_of(family, "grpo", kinds), loss, CONFIGS[3:11])


@pytest.mark.parametrize(
    ("family", "trained"),
    slow_besides(
        [("qwen3_5_text", "A_log")],
        [
            *product(["qwen3_5_text"], ["A_log", "dt_bias", "in_proj_a", "in_proj_b", "conv1d"]),
            *product(["granitemoehybrid"], ["A_log", "dt_bias", "in_proj", "conv1d", "mamba.D"]),
        ],
    ),
)
def test_one_parameter_of_a_layer_learns(family: str, trained: str) -> None:
    """Of what a state is made with, only some requires gradients, and states handed on do.

    Its gradient is that of a dense run in which everything learns.
    """
    model, expected = tiny_hybrid(family), truth_of(family, "grpo")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0." in name and trained in name)
    with lifted_upcasts(model):
        # Samples compare no gradients, and each of these would be the same.
        config = Config(
            sharing="tree", boundary="across", max_microbatch_tokens=CHAIN, self_check=False
        )
        wrap(model, config).forward_backward(expected.batch, LOSSES["grpo"])
    learns = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert learns
    for name, found in learns.items():
        wanted = expected.dense.gradients[name]
        assert found is not None and wanted is not None and wanted.norm() > 0
        assert float((found - wanted).norm() / wanted.norm()) <= 1e-10, name


# Lower precision, adapters -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "boundary"),
    list(product((torch.float32, torch.bfloat16), ("across", "within"))),
    ids=str,
)
def test_rounding_is_that_of_dense_training(dtype: torch.dtype, boundary: str) -> None:
    config = Config(sharing="group", boundary=boundary, max_microbatch_tokens=600)  # type: ignore[arg-type]
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    model = real_model("qwen3_5_text", dtype, num_hidden_layers=4, **linear)
    report = wrap(model, config).verify(
        expert_batch(vocab=512, prompt=200, response=(30, 60)), losses.GRPO()
    )
    assert report.passed, report.table()
    assert report.dense_error > 0


@pytest.mark.usefixtures("without_lists")
def test_autocast_gives_the_delta_rule_what_the_stock_model_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 bits, which are all that kernels for it take, though the hidden states are float32."""
    model = tiny_hybrid("qwen3_5_text").float()
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    stock, shared = [], []
    plain, operation = modeling.torch_chunk_gated_delta_rule, linear_attention.gated_delta_rule

    def seen(function: Callable[..., Any], found: list[torch.dtype]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*given: Any, **options: Any) -> Any:
            found.extend(x.dtype for x in given[:3])
            return function(*given, **options)

        return wrapped

    for module in model.modules():  # older versions of transformers
        if "chunk_gated_delta_rule" in vars(module):
            module.chunk_gated_delta_rule = seen(module.chunk_gated_delta_rule, stock)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", seen(plain, stock))
    monkeypatch.setattr(linear_attention, "gated_delta_rule", seen(operation, shared))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.tensor([[1, 2, 3]]))
        wrap(model).forward_backward(forked_batch(), GRPO())
    assert set(stock) == set(shared) == {torch.bfloat16}


def test_kernels_of_packages_that_round_float32_refuse_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They multiply in TF32, and steps of float32 models do not."""
    model = tiny_hybrid("qwen3_5_text").float()
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    name, ran = "chunk_gated_delta_rule", []

    def rounds(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*given: Any, **options: Any) -> Any:
            ran.append(True)
            return function(*(x.bfloat16().to(x.dtype) for x in given[:3]), *given[3:], **options)

        return wrapped

    held = [module for module in model.modules() if name in vars(module)]
    for module in held:  # older versions of transformers
        monkeypatch.setattr(module, name, rounds(getattr(module, name)))
    if not held:
        plain = getattr(modeling, f"torch_{name}")
        monkeypatch.setattr(modeling, f"torch_{name}", rounds(getattr(plain, "__wrapped__", plain)))
    model(torch.tensor([[1, 2, 3]]))
    assert ran
    wrap(model, Config(self_check=True)).forward_backward(forked_batch(), GRPO())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow
def test_adapters_on_every_projection() -> None:
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "v_proj"]
    model = lora(tiny_hybrid("qwen3_5_text"), target_modules=targets).double()
    config = Config(sharing="tree", boundary="across", max_microbatch_tokens=12)
    report = wrap(model, config).verify(forked_batch(), GRPO(kl=0.1))
    assert report.passed and report.dtype == "float64", report.table()


# Caught ------------------------------------------------------------------------------------------


ONE_GROUP = forked_batch().select(range(6))


@cache
def passes(family: str, config: Config) -> bool:
    """Whether a model without a bug does; called before any bug is put in."""
    return wrap(tiny_hybrid(family), config).verify(ONE_GROUP, GRPO()).passed


@pytest.mark.parametrize(
    "family", slow_besides(["qwen3_5_text"], ["qwen3_5_text", "granitemoehybrid"])
)
@pytest.mark.parametrize(
    ("sabotage", "tokens"),
    [*slow_besides_every(2, product(ACROSS_MICROBATCHES, [12])), *product(WITHIN, [None])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bugs_are_caught(
    family: str, sabotage: Sabotage, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In microbatches that read others, and in a microbatch of whole paths."""
    boundary = "across" if tokens else "within"
    config = Config(sharing="tree", boundary=boundary, max_microbatch_tokens=tokens)
    assert passes(family, config)
    sabotage(monkeypatch)
    assert not wrap(tiny_hybrid(family), config).verify(ONE_GROUP, GRPO()).passed
