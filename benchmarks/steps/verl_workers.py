"""verl's TrainingWorker in one process: random weights made on the device, mini-batches, heads.

ray is imported by verl and not started. On a CPU verl runs by the platform that its tests here
register.
"""

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.import_utils import is_flash_attn_4_available

from forkpoint.errors import ConfigError
from forkpoint.integrations.verl.settings import VARIABLE
from forkpoint.rollouts.batch import RolloutBatch

ROOT = Path(__file__).parents[2]
Vendor = Literal["none", "forkpoint"]
HEADS: dict[str, str | None] = {
    "head of logits": None,
    "use_fused_kernels torch": "torch",
    "use_fused_kernels triton": "triton",
}
"""verl's ways to log-probs, and the backend of its fused kernels."""
CUDNN, FLASH = "sdpa of cuDNN", "flash_attention_4"


def start(device: torch.device) -> None:
    """Import verl with forkpoint's engines, and make a process group of one rank.

    Raises ConfigError where verl is not installed.
    """
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    if device.type == "cpu":
        sys.path.insert(0, str(ROOT / "tests" / "integrations_verl"))
        os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "cpu_platform"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("verl.workers.engine_workers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"verl's workers cannot be imported ({error}); `make test-verl` has an environment "
            "with verl 0.9.1: .venv-verl/bin/python -m benchmarks verl."
        ) from error
    import_module("forkpoint.integrations.verl.plugin").register()
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        store = import_module("torch.distributed").HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    engine = import_module("verl.workers.engine.fsdp.transformer_impl").FSDPEngine
    engine._build_module = _random_module


def _random_module(engine: Any) -> Any:
    """In place of verl's, which reads a checkpoint: the same steps with weights made here."""
    config, given = engine.model_config, engine.engine_config
    dtype = import_module("verl.utils.torch_dtypes").PrecisionType.to_dtype(given.model_dtype)
    torch.manual_seed(0)
    with torch.device(import_module("verl.utils.device").get_device_name()):
        model = AutoModelForCausalLM.from_config(
            config.hf_config, dtype=dtype, attn_implementation="sdpa"
        )
    patches = import_module("verl.models.transformers.monkey_patch")
    patches.apply_monkey_patch(model, use_remove_padding=engine.use_remove_padding)
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def save_configuration(sizes: dict[str, Any], folder: Path) -> Path:
    """The configuration of a Qwen3, as verl reads it, without weights."""
    folder = folder / f"{sizes['num_hidden_layers']} layers"
    config = AutoConfig.for_model(**sizes)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def make_worker(
    vendor: Vendor,
    folder: Path,
    *,
    model_dtype: str,
    compute_dtype: str,
    checkpointing: bool,
    **options: bool | int,
) -> Any:
    """verl's TrainingWorker with AdamW and verl's PPO loss, of verl's own engine or of ours.

    options: of forkpoint's Config.
    """
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    path = folder / "forkpoint.toml"
    lines = [f"{name} = {str(value).lower()}" for name, value in options.items()]
    path.write_text("\n".join(["[config]", *lines, ""]))
    os.environ[VARIABLE] = str(path)
    configs = import_module("verl.workers.config")
    checkpoint = import_module("verl.trainer.config").CheckpointConfig()
    worker = import_module("verl.workers.engine_workers").TrainingWorker(
        configs.TrainingWorkerConfig(
            model_type="language_model",
            model_config=configs.HFModelConfig(
                path=str(folder),
                load_tokenizer=False,
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=checkpointing,
                use_remove_padding=True,
            ),
            engine_config=configs.FSDPEngineConfig(
                strategy="fsdp2",
                model_dtype=model_dtype,
                mixed_precision={"param_dtype": compute_dtype, "reduce_dtype": "fp32"},
                # One row each, which attention then needs no mask for.
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=1,
                infer_micro_batch_size_per_gpu=1,
            ),
            optimizer_config=configs.FSDPOptimizerConfig(lr=0.0, total_training_steps=100),
            checkpoint_config=checkpoint,
        )
    )
    with _head_in_the_root() if vendor == "none" else nullcontext():
        worker.reset()
    actor = configs.FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        use_kl_loss=True,
        kl_loss_coef=0.001,
    )
    loss = import_module("verl.workers.utils.losses").ppo_loss
    worker.set_loss_fn(partial(loss, config=actor))
    return worker


@contextmanager
def _head_in_the_root() -> Iterator[None]:
    """Leave lm_head out of the modules that verl shards each on its own.

    verl's fused heads read its weight outside its forward, where it would be in parts.
    """
    utils: Any = import_module("verl.utils.fsdp_utils")
    select = utils._select_fsdp2_wrap_targets

    def chosen(model: Any, classes: Any) -> list[Any]:
        return [one for one in select(model, classes) if one is not model.lm_head]

    utils._select_fsdp2_wrap_targets = chosen
    try:
        yield
    finally:
        utils._select_fsdp2_wrap_targets = select


def mini_batch(batch: RolloutBatch, fields: dict[str, torch.Tensor], **told: Any) -> Any:
    """Rollouts of one prompt as verl's trainer hands them to its workers.

    fields: of responses, [N, longest response].
    """
    prompt = int((~batch.rollouts[0].loss_mask.astype(bool)).sum())
    tokens = [torch.tensor(r.token_ids) for r in batch]
    count, width = len(tokens), max(len(x) for x in tokens) - prompt
    lengths = torch.tensor([len(x) - prompt for x in tokens])
    there = (torch.arange(width) < lengths[:, None]).long()
    responses = torch.zeros(count, width, dtype=torch.int64)
    for row, ids in enumerate(tokens):
        responses[row, : lengths[row]] = ids[prompt:]
    prompts = torch.stack([ids[:prompt] for ids in tokens])
    mask = torch.cat([torch.ones_like(prompts), there], 1)
    data = import_module("verl.utils.tensordict_utils").get_tensordict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": there,
            **{name: x[:count, :width].contiguous() for name, x in fields.items()},
            "uid": ["prompt"] * count,
        }
    )
    data = import_module("verl.workers.utils.padding").left_right_2_no_padding(data)
    import_module("verl.utils.tensordict_utils").assign_non_tensor(
        data, **{"temperature": 1.0, "global_batch_size": count, "use_fused_kernels": False, **told}
    )
    return data


def padded_logprobs(output: Any, data: Any) -> torch.Tensor:
    """The log-probs of responses that a worker gave, [N, longest response]."""
    found = import_module("verl.utils.tensordict_utils").get(output, "log_probs")
    return import_module("verl.workers.utils.padding").no_padding_2_padding(found, data)


def metrics(output: Any) -> dict[str, float]:
    """The metrics of one update that are numbers of the loss, their lists summed."""
    found = import_module("verl.utils.tensordict_utils").get(output, "metrics")
    plain = {name: list(x.values) if hasattr(x, "values") else x for name, x in found.items()}
    wanted = ("pg_loss", "kl_loss", "ppo_kl", "grad_norm", "pg_clipfrac")
    return {
        name: float(torch.tensor(value, dtype=torch.float64).sum())
        for name, value in plain.items()
        if name.split("/")[-1] in wanted
    }


def use_head(worker: Any, head: str) -> bool:
    """Give the model of verl's own engine a head, as its use_fused_kernels does.

    Returns what mini-batches are to be told of it.
    """
    module, backend = worker.engine.module, HEADS[head]
    kind = type(module)
    if "forward" in vars(kind):
        del kind.forward
    if backend is not None:
        patches = import_module("verl.models.transformers.monkey_patch")
        patches.patch_forward_with_backends(module, True, backend)
    return backend is not None


def attentions(device: torch.device) -> list[str]:
    """The names by which verl's own engine can attend here."""
    if device.type == "cpu":
        return ["sdpa"]
    return ["sdpa", CUDNN, *([FLASH] if is_flash_attn_4_available() else [])]


def attention(worker: Any, name: str) -> AbstractContextManager[Any]:
    """The context in which verl's own engine attends by one of these names."""
    # Read at every forward.
    worker.engine.module.config._attn_implementation = FLASH if name == FLASH else "sdpa"
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if name == CUDNN else nullcontext()


class StepClock:
    """Seconds that an engine's optimizer takes, the device idle at both ends."""

    def __init__(self, engine: Any, cuda: bool) -> None:
        self.seconds: list[float] = []
        step = engine.optimizer_step

        def timed(_: Any) -> Any:
            begin = now(cuda)
            found = step()
            self.seconds.append(now(cuda) - begin)
            return found

        engine.optimizer_step = MethodType(timed, engine)


def now(cuda: bool) -> float:
    """Seconds, the device idle."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def quiet() -> Iterator[None]:
    """Send to stderr what verl prints."""
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout = kept
