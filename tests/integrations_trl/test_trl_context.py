"""accelerate's context parallelism: ranks that run their rows together, beside stock TRL.

accelerate shards models as on accelerators (see launched_trl.py), and its launcher's variables ask
for context parallelism.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import setups_trl as setups
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from cases_trl import ACROSS, OURS, STOCK, TIMES
from changes_trl import backwards, squared
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from forkpoint.errors import UnsupportedError
from forkpoint.integrations.trl.calls import PackedRows

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from processes import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
LIMIT_S = 240.0
SHARDED = {
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@contextmanager
def _launched(context: int = 1) -> Iterator[None]:
    """The variables of accelerate's launcher, with so many ranks for each sequence."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    if dist.get_world_size() > 1:
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
        given |= SHARDED
    if context > 1:
        given |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_CP_SIZE": str(context),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(dist.get_world_size() // context),
        }
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        yield


def _whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in tensors.items()}


def _shares_rows(trainer: Any) -> bool:
    """Whether steps of the trainer's model run the rows of two ranks together."""
    relations = trainer.sharing.policy(trainer.model_wrapped).host.topology.relations
    return len(relations.get("context", ())) == 2


# Beside stock TRL on the same ranks
# ------------------------------------------------------------


def _beside_stock(
    kind: str, change: Callable[[Any], type], options: dict[str, Any], folder: Path
) -> tuple[float, float, tuple[float, float]]:
    """The differences of gradients and of metrics, and the tokens that were run and given."""
    gradients, logs = [], []
    for name, classes, own in (("stock", STOCK, {}), ("ours", OURS, {"forkpoint": ACROSS})):
        with _launched(2 if name == "ours" else 1):
            cls = change(classes[kind])
            trainer = setups.trainer(kind, cls, folder / name, own=own, **options)
            found, log = setups.run(trainer)
        assert isinstance(trainer.model, FSDPModule)
        gradients.append(_whole(found))
        logs.append(log)
    assert _shares_rows(trainer)
    metrics = max(
        abs(ours[name] - value) / max(1.0, abs(value))
        for stock, ours in zip(*logs, strict=True)
        for name, value in stock.items()
        if isinstance(value, float) and not any(part in name for part in TIMES)
    )
    first = logs[1][0]
    tokens = first["forkpoint/computed_tokens"], first["forkpoint/given_tokens"]
    return setups.apart(*gradients), metrics, tokens


def as_it_is(base: type) -> type:
    return base


SEQUENCES = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
STEPS: dict[str, tuple[str, Callable[[Any], type], dict[str, Any]]] = {
    "grpo": ("grpo", as_it_is, {"max_steps": 2, "beta": 0.1}),
    "grpo, sequences": ("grpo", as_it_is, SEQUENCES),
    "grpo, a subclass": ("grpo", backwards, {"max_steps": 2}),
    "rloo": ("rloo", as_it_is, {"beta": 0.1, "num_iterations": 2, "max_steps": 2}),
    "dpo": ("dpo", as_it_is, {"max_steps": 2, "use_weighting": True}),
    "dpo, a subclass": ("dpo", squared, {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_stock_trl_on_the_same_ranks(name: str, tmp_path: Path) -> None:
    found = run_ranks(2, _beside_stock, *STEPS[name], tmp_path, limit_s=LIMIT_S)
    for gradients, metrics, (computed, given) in found:
        assert gradients < 2e-6 and metrics < 1e-5, found
        assert computed < given
    assert found[0][2] == found[1][2], "ranks of one sequence have one batch"


def test_two_batches_on_four_ranks(tmp_path: Path) -> None:
    found = run_ranks(4, _beside_stock, "grpo", as_it_is, {}, tmp_path, limit_s=LIMIT_S)
    for gradients, metrics, _ in found:
        assert gradients < 2e-6 and metrics < 1e-5, found
    tokens = [each[2] for each in found]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


# Beside stock TRL in one process
# ------------------------------------------------------------


def _completions(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    """Completions that depend on the prompt and on how often it came before in these rows."""
    seen: dict[tuple[int, ...], int] = {}
    found = []
    for prompt in map(tuple, prompt_ids):
        seen[prompt] = seen.get(prompt, 0) + 1
        draws = random.Random(f"{prompt} {seen[prompt]}")
        found.append([draws.randrange(3, setups.VOCABULARY) for _ in range(draws.randrange(1, 9))])
    return found, None


def _trained(
    cls: type, context: int, options: dict[str, Any], folder: Path, broken: bool = False
) -> list[float]:
    """The losses of two steps on completions that all ranks know. Saves by how much weights move.

    Batches have 16 rows, of one rank or of two.
    """
    if broken:
        PackedRows.joined = _of_first  # type: ignore[method-assign]
    own = {"forkpoint": ACROSS} if context > 1 else {}
    options = {**options, "max_steps": 2, "learning_rate": 0.05}
    with _launched(context):
        trainer = setups.trainer(
            "grpo", cls, folder, own=own, per_device_train_batch_size=8 // context, **options
        )
        trainer._generate_single_turn = _completions
        begin = {k: p.detach().clone() for k, p in trainer.model.named_parameters()}
        _, logs = setups.run(trainer)
    end = _whole({k: p.detach() for k, p in trainer.model.named_parameters()})
    assert context == 1 or _shares_rows(trainer)
    moved = {k: end[k] - x for k, x in begin.items()}
    torch.save(moved, folder / f"moved {dist.get_rank()}.pt")
    return [log["loss"] for log in logs if "loss" in log]


def _moved_apart(folder: Path) -> list[float]:
    """By rank, how far weights of two ranks are from those of one process."""
    one = torch.load(folder / "one" / "moved 0.pt")
    ranks = (torch.load(folder / "two" / f"moved {rank}.pt") for rank in range(2))
    return [setups.apart(each, one) for each in ranks]


def _of_first(self: PackedRows, values_t: Tensor) -> Tensor:
    """Values of the first rank alone, on all ranks."""
    return _joined(self, values_t if self.tokens.start == 0 else torch.zeros_like(values_t))


_joined = PackedRows.joined


ONE_PROCESS: dict[str, dict[str, Any]] = {"tokens": {"beta": 0.1}, "sequences": SEQUENCES}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_two_ranks_of_one_sequence_train_as_one_process(name: str, tmp_path: Path) -> None:
    options, folders = ONE_PROCESS[name], (tmp_path / "one", tmp_path / "two")
    (losses,) = run_ranks(1, _trained, STOCK["grpo"], 1, options, folders[0], limit_s=LIMIT_S)
    found = run_ranks(2, _trained, OURS["grpo"], 2, options, folders[1], limit_s=LIMIT_S)
    assert len(losses) == 2
    assert found == [pytest.approx(losses, rel=1e-5, abs=1e-6)] * 2
    assert max(_moved_apart(tmp_path)) < 5e-6


def test_gradients_of_one_rank_alone_are_seen(tmp_path: Path) -> None:
    options = ONE_PROCESS["sequences"]
    run_ranks(1, _trained, STOCK["grpo"], 1, options, tmp_path / "one", limit_s=LIMIT_S)
    run_ranks(2, _trained, OURS["grpo"], 2, options, tmp_path / "two", True, limit_s=LIMIT_S)
    assert min(_moved_apart(tmp_path)) > 1e-2


# Options
# ------------------------------------------------------------


def _configured(folder: Path) -> tuple[int, Any, str]:
    """Sizes by a configuration in the arguments, and the message that refuses routers."""
    given = ParallelismConfig(cp_size=2)
    with _launched():
        trainer = setups.trainer("dpo", OURS["dpo"], folder, parallelism_config=given)
    seen = trainer.accelerator.parallelism_config
    assert trainer.args.parallelism_config is given and seen.cp_size == 1
    with _launched(2), pytest.raises(UnsupportedError) as caught:
        setups.trainer("grpo", OURS["grpo"], folder, made={"model": setups.mixture()})
    return trainer.sharing.context_ranks, seen.dp_shard_size, str(caught.value)


def test_a_configuration_of_arguments_and_a_refusal(tmp_path: Path) -> None:
    for context, shards, refusal in run_ranks(2, _configured, tmp_path, limit_s=LIMIT_S):
        assert (context, shards) == (2, 2)
        assert "not been shown exact with a load-balancing loss" in refusal
