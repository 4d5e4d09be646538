"""Plans and runs training steps of a model: the public methods (step/run.py runs them)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.engine.changes import Changes
from forkpoint.engine.transaction import StepOutcome as StepOutcome
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.modules import cache_module_walks
from forkpoint.losses.base import Denominators, Loss, LossFunction, as_loss
from forkpoint.losses.dpo import PairLoss
from forkpoint.losses.router import RouterLoss
from forkpoint.plan import Plan
from forkpoint.step.plan import as_batch, check_batch, check_config, finite, plan_batch
from forkpoint.step.request import LogprobsRequest, Rollouts, ScoreRequest, TrainRequest
from forkpoint.step.results import Scores as Scores
from forkpoint.step.results import StepStats as StepStats
from forkpoint.step.router_steps import move_biases, router_work
from forkpoint.step.run import finish_scores, finish_training, logprobs, run
from forkpoint.step.state import ModelState
from forkpoint.verify.comparison import VerifyReport, verify


class Policy:
    """Plans and runs training steps of a model. `forkpoint.wrap` makes it."""

    def __init__(
        self, host: ModelHost, config: Config, model_state: ModelState | None = None
    ) -> None:
        """Raises ConfigError if the options do not fit the parallelism of the model."""
        check_config(host, config)
        self.host: ModelHost = host
        self.config: Config = config
        self.last_step: StepOutcome | None = None
        """Effect on `.grad` of the last call of `forward_backward`. Each call replaces it after
        planning, before it runs."""
        self.model_state: ModelState = model_state or ModelState()

    def plan(
        self,
        batch: Rollouts,
        loss: Loss | LossFunction | None = None,
        *,
        router: RouterLoss | None = None,
        router_counts: Tensor | None = None,
        expert_counts: bool = False,
    ) -> Plan:
        """Make the plan of a batch.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            loss: the loss of the step. If it couples rollouts (GSPO, DPO) that are in several
                microbatches, the plan begins with a pass of scores. `forward_backward` refuses a
                plan without that pass. The plan leaves out rollouts whose terms the loss declares
                to be 0. None plans all rollouts, for a token-additive loss, scores or log-probs.
            router: the router loss of the step. If its statistics span microbatches, the plan
                begins with a pass of scores that counts experts.
            router_counts: as in `forward_backward`. With them this pass is not needed.
            expert_counts: whether the call counts experts, over all tokens. Plans with a loss of
                models that count experts in training run these tokens in any case.

        Raises:
            PlanError: no plan fits the limits of the configuration.
            RolloutError: the batch has no rollouts, is not a list of rollouts, or is not of pairs
                for a loss of pairs.
            ConfigError, UnsupportedError: as in `forward_backward`, for the loss and the router.
        """
        batch = as_batch(batch)
        with Changes() as changes:
            cache_module_walks(changes)
            check_batch(self.host, batch)
            if loss is not None:
                loss = as_loss(loss)
                loss.check_head(self.host.head)
                if isinstance(loss, PairLoss):
                    loss.check_pairs(batch)
            counts = expert_counts or (loss is not None and self.host.entry.counts.kept)
            work = router_work(self.host, batch, router, router_counts, expert_counts=counts)
            return plan_batch(self, batch, loss, work.demand() if work else None)

    @property
    def memory_budget_bytes(self) -> int | None:
        """Limit on the memory of activations and prefix cache, in bytes; None means no limit.

        With Config(memory_budget="auto") it is measured at the first plan on CUDA.
        """
        return self.model_state.budgets.of(self.host, self.config)

    def use_memory_budget(self, size_bytes: int) -> None:
        """Set the budget that Config(memory_budget="auto") would measure.

        Use it to repeat a run: pass the `memory_budget_bytes` of the earlier run.

        Args:
            size_bytes: the budget in bytes.

        Raises:
            ConfigError: `size_bytes` is not a whole number of at least 1.
        """
        self.model_state.budgets.use(self.config, size_bytes)

    def forward_backward(
        self,
        batch: Rollouts,
        loss: Loss | LossFunction,
        *,
        denominators: Denominators | None = None,
        scale: float = 1.0,
        plan: Plan | None = None,
        router: RouterLoss | None = None,
        router_counts: Tensor | None = None,
        expert_counts: bool = False,
    ) -> StepStats:
        """Add the gradients of ordinary training on the batch to `.grad`.

        Rollouts without gradient, and tokens after the last trained token of a rollout, do not run;
        see docs/reference/losses.md.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            loss: one of `forkpoint.losses`, or a function of (outputs, batch).
            denominators: counts that the means of the loss divide by, for steps of several calls.
                The default is the counts of the batch, over all ranks.
            scale: a factor on every gradient, for accumulation and gradient scalers. The returned
                loss does not include it.
            plan: a plan that `plan` made for this batch. By default the call makes it.
            router: an auxiliary loss of the routers of a mixture of experts. Its gradients are
                added too.
            router_counts: int64 [layers, experts], the `expert_counts` of scores of this batch
                under the same weights. For scopes other than the batch: their
                `rollout_expert_counts` [rollouts, layers, experts]. Without them, a router loss
                whose statistics span microbatches runs a pass of scores first.
            expert_counts: whether to compute `stats.expert_counts` without a router loss, over all
                tokens.

        Returns:
            The loss, log-probs, token counts, plan and times of the step.

        Raises:
            RolloutError: the batch does not fit the model or the loss.
            ConfigError: the loss, the denominators or the scale has a value that is not allowed, or
                the loss does not fit the model (a loss of values needs a critic).
            UnsupportedError: the present state of the model has not been shown exact.
            PlanError: no plan fits, the given plan belongs to another batch, or it lacks the pass
                of scores that the loss needs.

        After an exception of any kind (KeyboardInterrupt included) `.grad` either has the whole
        gradient, or is restored or cleared as Config.restore_grads says. `last_step.gradients` and
        a note on the exception say which.
        """
        request = TrainRequest(
            batch=batch,
            loss=loss,
            denominators=denominators,
            scale=scale,
            plan=plan,
            router=router,
            router_counts=router_counts,
            expert_counts=expert_counts,
        )
        return run(self, request, finish_training)

    @overload
    def logprobs(
        self, batch: Rollouts, *, entropy: Literal[False] = False, plan: Plan | None = None
    ) -> Tensor: ...

    @overload
    def logprobs(
        self, batch: Rollouts, *, entropy: Literal[True], plan: Plan | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def logprobs(
        self, batch: Rollouts, *, entropy: bool, plan: Plan | None = None
    ) -> Tensor | tuple[Tensor, ...]: ...

    def logprobs(
        self, batch: Rollouts, *, entropy: bool = False, plan: Plan | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute log-probs of every trained token, with a graph, for a custom loss.

        `loss.backward()` adds the gradients of ordinary training to `.grad` of all trainable
        parameters. Call it at any later time before the weights change. Until then only the
        log-probs are held in memory. The backward runs the forwards of the plan again;
        `forward_backward` does not. The plan runs at the end of the backward, after gradients of
        other terms (such as a stock loss of the same model) are in `.grad`. If the plan fails,
        these gradients stay there.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            entropy: whether to return entropies (nats) too.
            plan: a plan that `plan` made for this batch. By default the call makes it.

        Returns:
            Log-probs in nats: float32 (float64 for a float64 model) [T] on the device of the model.
            Entry i belongs to token i of the batch. With `entropy`, log-probs and entropies. For a
            critic, its values. Entries outside the loss mask are 0. Their gradients are ignored.

        Raises the errors of `forward_backward`. The backward raises UnsupportedError for
        torch.autograd.grad, for create_graph, for a second backward, and after the weights have
        changed. Under DistributedDataParallel, torch does not call this backward in
        `backward(inputs=...)`.
        """
        kind = LogprobsRequest if torch.is_grad_enabled() else ScoreRequest
        values = logprobs(self, kind(batch=batch, entropy=entropy, plan=plan))
        return values if len(values) > 1 else next(iter(values))

    def score(
        self,
        batch: Rollouts,
        *,
        entropy: bool = False,
        plan: Plan | None = None,
        router: RouterLoss | None = None,
        expert_counts: bool = False,
    ) -> Scores:
        """Compute log-probs of every trained token without a graph, for old and reference passes.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            entropy: whether to compute entropies (nats) too.
            plan: a plan that `plan` made for this batch. By default the call makes it.
            router: a router loss. `router_loss` is its value, and `expert_counts` are counted for
                the `router_counts` of `forward_backward`.
            expert_counts: whether to count experts without a router loss, over all tokens.

        Returns:
            Log-probs and entropies; for a critic, values.

        Raises the errors of `forward_backward`, and UnsupportedError for entropies of a critic.
        """
        request = ScoreRequest(
            batch=batch, entropy=entropy, plan=plan, router=router, expert_counts=expert_counts
        )
        return run(self, request, finish_scores)

    def update_router_biases(
        self, expert_counts: Tensor, *, rate: float, centered: bool = False
    ) -> None:
        """Update the biases that balance the routers of DeepSeek-V3 and GLM-4-MoE.

        The bias of an expert decreases by `rate` if the expert was chosen more often than the mean
        of its layer, and increases by `rate` if less often (Wang et al., arXiv 2408.15664). Call it
        once after each optimizer step. If the step had several calls, add up their counts.

        Args:
            expert_counts: int64 [layers, experts], `stats.expert_counts`.
            rate: size of the update; DeepSeek-V3 used 0.001.
            centered: whether to subtract the mean update of each layer, as torchtitan does.

        Raises:
            UnsupportedError: the routers of the model have no such biases.
            ConfigError: the counts have another shape, or the rate is not a finite number.
        """
        move_biases(self.host, expert_counts, finite("rate", rate), centered=centered)

    def verify(
        self,
        batch: Rollouts,
        loss: Loss | LossFunction,
        *,
        denominators: Denominators | None = None,
        router: RouterLoss | None = None,
        hold_routes: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> VerifyReport:
        """Compare gradients with and without sharing to a run in higher precision.

        The call runs a plan that shares within microbatches, a plan that shares across them, and
        the plan of the planner if that is a third one. It leaves the gradients of the model
        unchanged.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            loss: as in `forward_backward`.
            denominators: as in `forward_backward`.
            router: as in `forward_backward`.
            hold_routes: whether all runs of a mixture of experts use the experts that the run in
                higher precision chose. With False each run chooses its experts.
            progress: a function that is called at the start of each run, with text such as
                "reference (1 of 4)".

        Returns:
            The verdict and the errors of each parameter; docs/howto/verify.md explains them.

        Raises the errors of `forward_backward`, and UnsupportedError for rollouts with
        routed_experts and for a Loss with `across_ranks` on several ranks.
        """
        batch = as_batch(batch)
        check_batch(self.host, batch)
        if batch.routed_experts is not None:
            raise UnsupportedError(
                "the rollouts have routed_experts, and verify compares with a stock model, which "
                "cannot use them. Verify the batch without them: "
                "dataclasses.replace(rollout, routed_experts=None)."
            )
        return verify(
            self,
            batch,
            as_loss(loss),
            denominators,
            router=router,
            hold_routes=hold_routes,
            progress=progress,
        )

    def __copy__(self) -> "Policy":
        return self.with_config()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises UnsupportedError, for copy.deepcopy and for pickle."""
        raise UnsupportedError(
            "a policy belongs to a model in this process, and is neither copied (copy.deepcopy) "
            "nor pickled. Copy or save the model, and wrap that: "
            "forkpoint.wrap(copy.deepcopy(model), policy.config)."
        )

    def with_config(self, **changes: object) -> "Policy":
        """Make a policy of the same model with other options.

        Args:
            changes: options of `Config` by name. Other options keep their values.

        Raises:
            ConfigError: a value is not allowed, or compile_blocks changes, which only `wrap` sets.
            TypeError: an option does not exist.
        """
        asked = changes.get("compile_blocks", self.config.compile_blocks)
        if asked is not self.config.compile_blocks:
            raise ConfigError(
                f"the model was wrapped with compile_blocks={self.config.compile_blocks!r}, and "
                f"with_config asks for {asked!r}; wrap it again, with "
                f"Config(compile_blocks={asked!r})."
            )
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        return Policy(self.host, config, self.model_state)
