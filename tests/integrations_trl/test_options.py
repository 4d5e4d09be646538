"""Options of TRL: each is listed, and what is refused is refused by its name before training."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setups_trl as setups
import torch
import trl
from accelerate import ParallelismConfig
from cases_trl import OURS, Pair
from peft import LoraConfig, PromptTuningConfig
from transformers.debug_utils import DebugOption

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl import shared_trainer
from forkpoint.integrations.trl.losses import check_routers
from forkpoint.integrations.trl.options import check_options, check_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("kind", "name", "value", "remedy"),
    [
        ("dpo", "activation_offloading", True, "activations='offload'"),
        ("grpo", "neftune_noise_alpha", 1.0, "leave it out"),
        ("dpo", "debug", [DebugOption.UNDERFLOW_OVERFLOW], "leave underflow_overflow out"),
        ("rloo", "torch_compile", True, "compile_blocks=True"),
        ("rloo", "optim", "lomo", "updates weights in step"),
        ("grpo", "optim", "galore_adamw_layerwise", "updates weights in step"),
        ("grpo", "gradient_checkpointing_kwargs", {"use_reentrant": True}, "use_reentrant to"),
        ("grpo", "parallelism_config", ParallelismConfig(sp_size=2), "sp_size=1"),
    ],
)
def test_refused(kind: str, name: str, value: Any, remedy: str, tmp_path: Path) -> None:
    args = setups.CONFIGS[kind](output_dir=str(tmp_path), use_cpu=True, bf16=False)
    check_options(OURS[kind], args)
    vars(args)[name] = value
    with pytest.raises(UnsupportedError) as caught:
        check_options(OURS[kind], args)
    assert f" has {name}=" in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize("makes_it", [False, True])
def test_refused_before_the_constructor_of_trl(
    makes_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference passes, which that runs, come later; a configuration that a subclass makes itself
    is seen as soon as it is given."""
    calls: list[str] = []
    for name in ("_prepare_dataset", "_precompute_ref_logps"):
        monkeypatch.setattr(trl.DPOTrainer, name, lambda *_, called=name: calls.append(called))

    class Changes(OURS["dpo"]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if makes_it:
                kwargs["args"] = copy.copy(kwargs["args"])
                kwargs["args"].neftune_noise_alpha = 1.0
            super().__init__(*args, **kwargs)

    options = {"precompute_ref_log_probs": True}
    options |= {} if makes_it else {"neftune_noise_alpha": 1.0}
    with pytest.raises(UnsupportedError, match="neftune_noise_alpha=1"):
        setups.trainer("dpo", Changes, tmp_path, **options)
    assert not calls


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dpo"])
def test_a_reference_model_without_a_name(kind: str, tmp_path: Path) -> None:
    """TRL's own error names an empty repository. Other errors of files stay as they are."""
    sampled = {} if kind == "dpo" else setups.SAMPLED
    args = setups.CONFIGS[kind](
        output_dir=str(tmp_path), **{**setups.COMMON, **sampled, "beta": 0.5}
    )
    data = {"train_dataset": setups.pairs() if kind == "dpo" else setups.prompts()}
    rewards = {} if kind == "dpo" else {"reward_funcs": [setups.reward]}

    def make(name: str) -> None:
        model = setups.model()
        model.config._name_or_path = name
        OURS[kind](model, args=args, processing_class=setups.tokenizer(), **data, **rewards)

    with pytest.raises(UnsupportedError, match=r"beta=0\.5, .*no name and no adapter") as caught:
        make("")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(OSError, match="none"):
        make(str(tmp_path / "none"))


@pytest.mark.parametrize(("kind", "name"), [("grpo", "model"), ("dpo", "model"), ("dpo", "ref")])
def test_models_that_are_compiled(kind: str, name: str, tmp_path: Path) -> None:
    """TRL trains them. Its head on the compiled code is refused as a forward of the user's."""
    models: dict[str, Any] = {"model": setups.model(), "ref": setups.model()}
    models[name] = torch.compile(models[name], backend="eager")
    made = {"ref_model": models["ref"]} if kind == "dpo" else {"reward_funcs": [setups.reward]}
    sampled = {} if kind == "dpo" else setups.SAMPLED
    args = setups.CONFIGS[kind](output_dir=str(tmp_path), **{**setups.COMMON, **sampled})
    data = setups.pairs() if kind == "dpo" else setups.prompts()
    match = r"torch\.compile of a Qwen3ForCausalLM, .* Pass .*_orig_mod: .*compile_blocks=True"
    with pytest.raises(UnsupportedError, match=match):
        OURS[kind](
            models["model"],
            args=args,
            processing_class=setups.tokenizer(),
            train_dataset=data,
            **made,
        )


def test_padding_free_trains_where_trl_leaves_it_out(tmp_path: Path) -> None:
    pair = Pair("dpo", tmp_path, padding_free=True)
    assert pair.apart < 2e-6
    pair.ours.padding_free = True
    with pytest.raises(UnsupportedError, match="has padding_free=True"):
        check_trainer(pair.ours)


def test_what_is_refused_of_a_model_is_refused_at_the_end_of_the_constructor(
    tmp_path: Path,
) -> None:
    """Dropout of a module and of a setting, and hooks of modules and of parameters."""

    def hooked(model: Any) -> None:
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)

    def dropping(model: Any) -> None:
        model.model.layers[0].self_attn.attention_dropout = 0.1

    for change, match in ((hooked, "hook"), (dropping, "dropout 0.1")):
        model = setups.model()
        change(model)
        model.eval()
        with pytest.raises(UnsupportedError, match=match):
            setups.trainer("dpo", OURS["dpo"], tmp_path, made={"model": model})
    trainer = setups.trainer("dpo", OURS["dpo"], tmp_path, made={"model": setups.model().eval()})
    assert not any(module.training for module in trainer.model.modules())
    trainer.model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(UnsupportedError, match="hook"):
        check_trainer(trainer)


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    trainer = setups.trainer("grpo", OURS["grpo"], tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UnsupportedError, match=r"deepspeed=.*FSDP version 2"):
        check_trainer(trainer)
    trainer.args.deepspeed_plugin = object()
    with pytest.raises(UnsupportedError, match=r"deepspeed=.*FSDP version 2"):
        check_options(OURS["grpo"], trainer.args)


def test_sequences_that_accelerate_splits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an Accelerator that was made before the trainer has it."""
    trainer = setups.trainer("grpo", OURS["grpo"], tmp_path)
    check_trainer(trainer)
    found = ParallelismConfig(cp_size=2)
    monkeypatch.setitem(vars(trainer.accelerator.state), "parallelism_config", found)
    with pytest.raises(UnsupportedError, match=r"cp_size=2.*before any other Accelerator"):
        check_trainer(trainer)


def test_router_losses_of_routers_that_are_not_seen_are_refused(tmp_path: Path) -> None:
    trainer = setups.trainer("grpo", OURS["grpo"], tmp_path, made={"model": setups.mixture()})
    host: Any = SimpleNamespace(routers=SimpleNamespace(layers=2, defines_loss=False))
    with pytest.raises(UnsupportedError, match="router_aux_loss_coef=None, so that TRL adds"):
        check_routers(trainer, SimpleNamespace(host=host))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "peft",
    [
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1),
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ],
)
def test_adapters_that_are_refused(peft: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"PromptEmbedding|dropout|ModulesToSaveWrapper"):
        setups.trainer("grpo", OURS["grpo"], tmp_path, made={"peft_config": peft})


def test_saved_embeddings_are_matched(tmp_path: Path) -> None:
    """As the table says of `modules_to_save`."""
    peft = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    pair = Pair("grpo", tmp_path, made={"peft_config": peft})
    assert any("embed_tokens" in name for name in pair.found)
    assert pair.apart < 2e-6


def test_the_factory_gives_the_same_class_again() -> None:
    assert shared_trainer(trl.GRPOTrainer) is OURS["grpo"]
    assert shared_trainer(OURS["grpo"]) is OURS["grpo"]
