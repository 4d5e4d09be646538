"""verl's FSDP engine with steps of forkpoint. The rest is code of verl.

A mini-batch is one call of a policy. The loss is verl's function, called for verl's micro-batches,
so that its value and metrics do not change.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from forkpoint.engine.changes import Changes
from forkpoint.errors import ConfigError
from forkpoint.integrations.verl.groups import LOOKED_AT, RankPart, sharing_message
from forkpoint.integrations.verl.losses import ORDER, TOLERANCE, MicroBatch, MiniBatchLoss
from forkpoint.integrations.verl.patches import check_forwards, keep_forwards
from forkpoint.integrations.verl.refusals import check_batch, check_options, check_strategy
from forkpoint.integrations.verl.rows import Rows, jagged, placeholders_of
from forkpoint.integrations.verl.settings import Settings, load_settings
from forkpoint.losses.base import Decomposition, FunctionLoss
from forkpoint.parallel.call import RankGroup
from forkpoint.plan import Plan
from forkpoint.policy import Policy
from forkpoint.wrapping import wrap

_log = logging.getLogger("forkpoint")

PREFIX = "forkpoint/"
SQUARES, SQUARES_ASKED = "sum_pi_squared", "calculate_sum_pi_squared"
"""verl's names of the sum of squared probabilities, and of the key that requests it."""
LOG_SQUARES = "log_sum_sq_probs"
DIFFERS = 20 * TOLERANCE
"""Largest relative difference between the gradients that a step used and the correct ones."""


class SharedEngine:
    """Methods that replace those of verl's FSDP engine with a head.

    policy: policy of the model.
    last_plan: plan of the last step or pass.
    """

    gives: str = "log_probs"
    """verl's name of the output of the head."""
    policy: Policy
    last_plan: Plan | None = None
    # Of verl's engine:
    engine_config: Any
    model_config: Any
    module: Any
    rank: int
    get_data_parallel_group: Callable[[], Any]
    get_data_parallel_size: Callable[[], int]
    ulysses_device_mesh: DeviceMesh | None
    ulysses_parallel_group: Any
    ulysses_sequence_parallel_size: int
    _autocast_dtype: torch.dtype
    _is_offload_param: bool
    _is_offload_optimizer: bool

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        check_strategy(engine_config.strategy, model_config.model_type)
        check_options(engine_config, model_config)
        self.settings: Settings = load_settings()
        self._unseen = LOOKED_AT
        """Number of mini-batches whose sharing is still to be checked, equal on all ranks."""
        self._decided: tuple[Any, bool, Decomposition] | None = None
        cast(Any, super()).__init__(
            model_config, engine_config, optimizer_config, checkpoint_config
        )

    def _build_fsdp_module(self, module: Any) -> Any:
        """Build the module like verl, except for engines that only score.

        verl keeps their parameters on the CPU during a pass (CPUOffloadPolicy). Here they are
        there between passes, as with param_offload.
        """
        config = self.engine_config
        if not config.forward_only:
            return cast(Any, super())._build_fsdp_module(module)
        config.forward_only = False
        try:
            return cast(Any, super())._build_fsdp_module(module)
        finally:
            config.forward_only = True
            self._is_offload_param = True
            self._is_offload_optimizer = False

    def _build_model_optimizer(self) -> None:
        with Changes() as changes:
            keep_forwards(self.model_config.hf_config.model_type, changes)
            cast(Any, super())._build_model_optimizer()
        config = replace(self.settings.config, all_logprobs=True)
        if self.engine_config.forward_only:
            config = replace(config, optimizer_bytes_per_parameter=0)
        # Features that have not been shown exact are refused here, before the first step.
        self.policy = wrap(self.module, config, mesh=self.ulysses_device_mesh)
        # verl sets this group while an engine works, and the attention of a stock forward would
        # exchange sequences over it. The self-check runs a stock forward on whole sequences.
        self.ulysses_parallel_group = None
        found = {repr(settings) for settings in self._ranks.exchange(self.settings)}
        if len(found) > 1:
            raise ConfigError(
                f"the workers have different options: {' and '.join(sorted(found))}. Give all "
                "nodes the same file in FORKPOINT_VERL_CONFIG."
            )
        if self.rank == 0:
            _log.info(
                "forkpoint runs the steps of %s, options %s", type(self).__name__, self.settings
            )

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the engine as verl does. Engines that only score move too."""
        cast(Any, super()).to(device=device, model=model, optimizer=optimizer, grad=grad)
        if self.engine_config.forward_only and model:
            moves = import_module("verl.utils.fsdp_utils")
            if device == "cpu":
                moves.offload_fsdp_model_to_cpu(self.module)
            else:
                moves.load_fsdp_model_to_gpu(self.module)

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run a mini-batch. Collective.

        Gradients are added to `.grad` unless `forward_only`.

        Returns:
            Outputs, losses and metrics by micro-batch, as verl's engine returns them.

        Raises:
            UnsupportedError, RolloutError: the mini-batch has options or values that are refused,
                or verl has replaced forwards since the engine was made.
            ConfigError: the loss does not decompose as it was taken to do, and there were gradients
                before the call.
        """
        check_forwards(self.model_config.hf_config.model_type)
        names = import_module("verl.utils.tensordict_utils")
        engines = import_module("verl.workers.engine.utils")
        check_batch(data, names.get_non_tensor_data, scores=forward_only and loss_function is None)
        group = self.get_data_parallel_group()
        device = self.policy.host.device
        trained = data["loss_mask"].sum().to(device)
        torch.distributed.all_reduce(trained, group=group)
        names.assign_non_tensor(
            data,
            sp_size=self.ulysses_sequence_parallel_size,
            batch_num_tokens=trained.item(),
            dp_size=self.get_data_parallel_size(),
        )
        entropy, squares = (
            self.gives == "log_probs"
            and bool(names.get_non_tensor_data(data=data, key=key, default=False))
            for key in ("calculate_entropy", SQUARES_ASKED)
        )
        parts, indices = engines.prepare_micro_batches(
            data=data, dp_group=group, same_micro_num_in_dp=True
        )
        placeholders, positions = placeholders_of(self.module.config), self.policy.host.positions
        read = partial(Rows.of, data, placeholders, positions, values=self.gives == "values")
        rows = self._together(read)
        micro_batches = _micro_batches(rows, parts, indices, device)
        outputs = {"logprobs" if self.gives == "log_probs" else "values": self.gives}
        if entropy:
            outputs["entropies"] = "entropy"
        loss = None
        if loss_function is not None:
            loss = MiniBatchLoss(
                loss_function, micro_batches, rows, names=outputs, dp_group=group, device=device
            )
        with self._autocast(device):
            if forward_only:
                found, metrics = self._score(rows, loss, outputs, micro_batches, squares), {}
            else:
                assert loss is not None
                self._fill(loss, rows, data)
                found, metrics = self._train(rows, loss, entropy)
        keeps = forward_only or names.get_non_tensor_data(
            data=data, key="return_model_output", default=False
        )
        if not keeps:
            for one in found:
                del one["model_output"]
        result = engines.postprocess_batch_func(output_lst=found, indices=indices, data=data)
        result["metrics"].update(metrics)
        return result

    def _score(
        self,
        rows: Rows,
        loss: MiniBatchLoss | None,
        outputs: dict[str, str],
        micro_batches: list[MicroBatch],
        squares: bool,
    ) -> list[dict[str, Any]]:
        """Outputs of a pass without gradients, and losses if there is a loss function."""
        policy = self.policy
        if squares:
            policy = policy.with_config(head_statistics=(LOG_SQUARES,))
        scores = policy.score(rows.batch, entropy="entropies" in outputs)
        self.last_plan = scores.plan
        if loss is not None:
            return self._together(partial(loss.results, dict(scores.per_token)))[0]
        found = {verls: scores.per_token[name] for name, verls in outputs.items()}
        if squares:
            found[SQUARES] = scores.per_token[LOG_SQUARES].exp()
        return [
            {
                "model_output": {
                    name: jagged(values, one.after, one.offsets) for name, values in found.items()
                },
                "loss": 1.0,  # as verl's
                "metrics": {},
            }
            for one in micro_batches
        ]

    def _train(
        self, rows: Rows, loss: MiniBatchLoss, entropy: bool
    ) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
        """Run a training step. Returns outputs, losses, and metrics of forkpoint.

        If the loss does not decompose as it was taken to do, the step is repeated as joint.
        """
        decomposition = self._decomposition(loss, entropy)
        parameters = list(self.module.parameters())
        fresh = all(parameter.grad is None for parameter in parameters)
        stats = self.policy.forward_backward(
            rows.batch, FunctionLoss(loss, decomposition, needs_entropy=entropy)
        )
        results = loss.whole
        if decomposition != "joint":
            work = partial(loss.results, dict(stats.per_token), gradients=True)
            results, difference = self._together(work)
            difference = max(self._ranks.exchange(difference))
            if difference > DIFFERS:
                for parameter in parameters:
                    parameter.grad = None
                self._decided = (loss.function, entropy, "joint")
                self._tell_coupled(difference, fresh)
                return self._train(rows, loss, entropy)
        if results is None:  # no token is trained, so no loss was called
            results, _ = self._together(partial(loss.results, dict(stats.per_token)))
        self.last_plan = stats.plan
        self._look_at_groups(rows, stats.plan)
        metrics = {
            "computed_tokens": float(stats.computed_tokens),
            "given_tokens": float(stats.logical_tokens),
            "bound": float(stats.plan.bound),
        }
        return results, {PREFIX + name: [value] for name, value in metrics.items()}

    def _tell_coupled(self, difference: float, fresh: bool) -> None:
        """Log that a step is repeated because terms of its loss depend on other rollouts.

        fresh: whether there were no gradients before the step on this rank. Collective.

        Raises ConfigError if there were gradients, which are lost.
        """
        found = (
            f"gradients for log-probs are off by {difference:.2g} of their norm (allowed "
            f"{DIFFERS:.2g}): terms of the loss depend on other rollouts."
        )
        remedy = 'Set decomposition = "joint" in the FORKPOINT_VERL_CONFIG file'
        if not all(self._ranks.exchange(fresh)):
            raise ConfigError(
                f"{found} All gradients are cleared, also those from before the call. {remedy}."
            )
        if self.rank == 0:
            _log.warning(
                "%s The step is repeated with dependent terms, as are further steps with this "
                "loss. %s to avoid this.",
                found,
                remedy,
            )

    def _look_at_groups(self, rows: Rows, plan: Plan) -> None:
        """Log one warning if one of the first mini-batches shares little."""
        if not self._unseen:
            return
        parts = self._ranks.exchange(RankPart.of(rows.batch, plan))
        message = sharing_message([parts[i] for i in self.policy.host.topology.contributors])
        self._unseen = 0 if message is not None else self._unseen - 1
        if message is not None and self.rank == 0:
            _log.warning("%s", message)

    def _decomposition(self, loss: MiniBatchLoss, entropy: bool) -> Decomposition:
        """Parts that the loss is a sum over, the same on all ranks.

        Found at the first step of a loss.
        """
        if self.settings.decomposition == "joint":
            return "joint"
        if self._decided is not None and self._decided[:2] == (loss.function, entropy):
            return self._decided[2]
        votes = self._ranks.exchange(self._together(loss.decomposition))
        known = [vote for vote in votes if vote is not None]
        if not known:
            return "joint"  # the next step may decide
        found = max(known, key=ORDER.index)
        self._decided = (loss.function, entropy, found)
        return found

    def _fill(self, loss: MiniBatchLoss, rows: Rows, data: Any) -> None:
        critic = self.gives == "values"
        name, key = ("values", "values") if critic else ("logprobs", "old_log_probs")
        if rows.responses is not None and key in data.keys():  # noqa: SIM118 - as in Rows
            loss.fill(name, rows.tokens(data[key]))

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The autocast context in which verl calls its model and its losses."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self._autocast_dtype)

    @property
    def _ranks(self) -> RankGroup:
        return RankGroup(self.policy.host.group.ranks)

    def _together(self, work: Callable[[], Any]) -> Any:
        """Result of `work` on each rank. If it raises on one rank, all ranks raise. Collective."""
        return self._ranks.each(work, tells=(Exception,))


def _micro_batches(
    rows: Rows, parts: list[Any], indices: list[list[int]] | None, device: torch.device
) -> list[MicroBatch]:
    """verl's micro-batches on the device. `indices`: their rows; None for consecutive rows."""
    found, begin = [], 0
    for number, part in enumerate(parts):
        size = len(part)
        chosen = range(begin, begin + size) if indices is None else indices[number]
        begin += size
        offsets = part["input_ids"].offsets().long().to(device)
        after = rows.shifted(list(chosen)).to(device)
        found.append(MicroBatch(part.to(device), tuple(chosen), after, offsets))
    return found


class SharedValueEngine(SharedEngine):
    """SharedEngine for critics."""

    gives: str = "values"


def refusing(strategy: str, model_type: str) -> type:
    """Engine class for a strategy that forkpoint does not support. Its constructor raises.

    Without this class verl would silently run its own engine.
    """
    base = import_module("verl.workers.engine.base").BaseEngine

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        check_strategy(strategy, model_type)

    return type("RefusingEngine", (base,), {"__init__": refuse})


def engine_class(model_type: str) -> type:
    """forkpoint's engine for language models or critics, a subclass of verl's."""
    ours, head = {
        "language_model": (SharedEngine, "EngineWithLMHead"),
        "value_model": (SharedValueEngine, "EngineWithValueHead"),
    }[model_type]
    verls = import_module("verl.workers.engine.fsdp.transformer_impl")
    base = getattr(verls, f"FSDP{head}")
    return type(f"Forkpoint{head}", (ours, base), {"__module__": __name__})
