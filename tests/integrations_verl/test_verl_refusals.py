"""Options of verl that are refused, by verl's own keys, and engines that nobody asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed here: make test-verl")

from harness import Case, configurations, mini_batch, padded_rows
from verl.utils import tensordict_utils as tu
from verl.workers.config.engine import QATEngineConfig
from verl.workers.config.model import MtpConfig
from verl.workers.engine import EngineRegistry

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.verl.refusals import check_batch, check_options

ENGINE = {
    "actor_rollout_ref.ref.pad_to_length is true": {"pad_to_length": True, "forward_only": True},
    "actor_rollout_ref.actor.fsdp_config.qat.enable is true": {"qat": QATEngineConfig(enable=True)},
    "actor_rollout_ref.actor.pad_to_length is true": {"pad_to_length": True},
    "actor_rollout_ref.actor.fsdp_config.offload_policy is true": {"offload_policy": True},
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype is 'fp16'": {
        "mixed_precision": {"param_dtype": "fp16"}
    },
}
MODEL = {
    "actor_rollout_ref.model.use_fused_kernels is true": {"use_fused_kernels": True},
    "actor_rollout_ref.model.use_liger is true": {"use_liger": True},
    "actor_rollout_ref.model.enable_activation_offload is true": {
        "enable_activation_offload": True
    },
    "actor_rollout_ref.model.tiled_mlp.enabled is true": {"tiled_mlp": {"enabled": True}},
    "actor_rollout_ref.model.mtp.enable_train is true": {"mtp": MtpConfig(enable_train=True)},
    # From config.json or override_config. It has no effect in the dense models of these tests.
    "actor_rollout_ref.model.override_config.output_router_logits is true": {
        "override_config": {"output_router_logits": True}
    },
}


def refused(case: Case, folder: Path) -> str:
    given = configurations(case, folder)
    with pytest.raises(UnsupportedError) as found:
        EngineRegistry.new(
            model_type="language_model", backend=given["engine_config"].strategy, **given
        )
    return str(found.value)


@pytest.mark.parametrize("begins", ENGINE)
def test_options_of_the_engine_are_refused(begins: str, folder: Path) -> None:
    message = refused(Case(engine=ENGINE[begins]), folder)
    assert message.startswith(f"{begins}; forkpoint's engine takes ")


@pytest.mark.parametrize("begins", MODEL)
def test_options_of_the_model_are_refused(begins: str, folder: Path) -> None:
    message = refused(Case(model=MODEL[begins]), folder)
    assert message.startswith(f"{begins}; forkpoint's engine takes false. ")


def test_keys_are_those_of_the_role(folder: Path) -> None:
    given = configurations(Case(engine={"offload_policy": True}), folder)
    given["model_config"].model_type = "value_model"
    with pytest.raises(UnsupportedError, match=r"^critic\.fsdp\.offload_policy is true"):
        check_options(given["engine_config"], given["model_config"])


def test_stock_options_are_taken(folder: Path) -> None:
    given = configurations(Case(), folder)
    check_options(given["engine_config"], given["model_config"])


@pytest.mark.parametrize(
    ("strategy", "model_type"), [("fsdp", "language_model"), ("megatron", "value_model")]
)
def test_another_strategy_is_refused_and_never_stock(
    strategy: str, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's default is fsdp, for which it would run its own engine."""
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "forkpoint")
    with pytest.raises(UnsupportedError, match=f"strategy.* is '{strategy}'.* 'fsdp2'"):
        EngineRegistry.new(model_type=model_type, backend=strategy)


BATCHES = ("distillation_use_topk", "use_fused_kernels", "enable_routing_replay")


@pytest.mark.parametrize("name", BATCHES)
def test_what_a_mini_batch_asks_for_is_refused(name: str) -> None:
    data = mini_batch(Case(), padded_rows(Case()), **{name: True})
    with pytest.raises(UnsupportedError, match=f"a mini-batch asks for {name}: "):
        check_batch(data, tu.get_non_tensor_data, scores=True)


def test_squared_probabilities_are_for_old_log_probs_alone() -> None:
    data = mini_batch(Case(), padded_rows(Case()), calculate_sum_pi_squared=True)
    check_batch(data, tu.get_non_tensor_data, scores=True)
    with pytest.raises(UnsupportedError, match="asks for calculate_sum_pi_squared"):
        check_batch(data, tu.get_non_tensor_data, scores=False)


def imported(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_entry_point_registers_the_engine_for_its_vendor_alone() -> None:
    code = """
import verl
from verl.workers.engine import EngineRegistry
print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""
    ours = imported(code)
    assert ours.stdout.split()[-1] == "ForkpointEngineWithLMHead", ours.stderr
    stock = imported(code, VERL_ENGINE_VENDOR="nvidia")
    assert stock.stdout.split()[-1] == "FSDPEngineWithLMHead", stock.stderr


def test_a_plugin_that_does_not_load_ends_the_process(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["forkpoint.integrations.verl.engine"] = None
import verl
print("verl goes on")
"""
    done = imported(code)
    assert done.returncode == 1
    assert "verl goes on" not in done.stdout
    assert "VERL_ENGINE_VENDOR is forkpoint, and forkpoint's engines for verl could not" in (
        done.stderr
    )
