"""Plans and runs training steps of a model: the public methods (step_run.py runs them)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from forkpoint.config import Config
from forkpoint.engine.host import Host
from forkpoint.engine.timing import Observer
from forkpoint.engine.transaction import StepOutcome as StepOutcome
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.losses.base import Denominators, Loss, LossFunction, as_loss
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
    """A model whose steps compute every shared token once. Made by `forkpoint.wrap`."""

    def __init__(self, host: Host, config: Config, model_state: ModelState | None = None) -> None:
        """Raises ConfigError where the configuration does not fit what holds the model on ranks."""
        check_config(host, config)
        self.host: Host = host
        self.config: Config = config
        self.observer: Observer | None = None
        """Called with each event of a step before it runs: for measurements."""
        self.last_step: StepOutcome | None = None
        """The effect on `.grad` of the last call of `forward_backward` that began to run: another
        object for every call, made once its arguments have been checked and its plan made."""
        self.model_state: ModelState = model_state or ModelState()

    def plan(
        self,
        batch: Rollouts,
        loss: Loss | LossFunction | None = None,
        *,
        router: RouterLoss | None = None,
        router_counts: Tensor | None = None,
    ) -> Plan:
        """Make the plan of a batch.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            loss: the loss it is for. A plan for one that couples rollouts (GSPO, DPO) begins with
                a pass of scores where these lie in several microbatches, and `forward_backward`
                takes no other plan for it. Rollouts whose terms the loss declares to be 0 are left
                out. None: a token-additive loss, scores, or log-probs, of all rollouts.
            router: the router loss that it is for. Where its statistics span microbatches the plan
                begins with a pass of scores, which counts experts.
            router_counts: as in `forward_backward`; then no such pass is needed.

        Raises:
            PlanError: nothing fits the limits of the configuration.
        """
        batch = as_batch(batch)
        check_batch(self.host, batch)
        work = router_work(self.host, batch, router, router_counts)
        return plan_batch(self, batch, loss, work.demand() if work else None)

    @property
    def memory_budget_bytes(self) -> int | None:
        """The most that activations and prefix cache may take; None is no limit.

        Of Config(memory_budget="auto") it is measured at the first plan, on CUDA.
        """
        return self.model_state.budgets.of(self.host, self.config)

    def use_memory_budget(self, size_bytes: int) -> None:
        """Take a budget in place of what Config(memory_budget="auto") measures, such as that of an
        earlier run, whose plans then come again."""
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
        """Add to `.grad` exactly what dense training on the batch would.

        Rollouts that give no gradient do not run, nor do tokens after the last trained one of a
        rollout; see docs/reference/losses.md.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            loss: one of `forkpoint.losses`, or a function of (outputs, batch).
            denominators: what the loss's means are taken over where a step has several calls or
                ranks; by default the batch's own counts.
            scale: a factor on every gradient, for accumulation and gradient scalers; the loss that
                is returned is without it.
            plan: one that `plan` made for this batch; by default it is made here.
            router: an auxiliary loss of a mixture's routers, whose gradients are added as well.
            router_counts: int64 [layers, experts], `expert_counts` of scores of this batch under
                the same weights; for a scope that is not the batch their `rollout_expert_counts`
                [rollouts, layers, experts]. Without them a loss whose statistics span microbatches
                runs a pass of scores first.
            expert_counts: whether `stats.expert_counts` are computed without a router loss, of all
                tokens.

        Raises:
            RolloutError: the batch does not fit the model or the loss.
            ConfigError: the loss, the denominators or the scale is none, or the loss does not fit
                the model: one of values for a language model, or the reverse.
            UnsupportedError: the model's present state has not been shown exact.
            PlanError: no plan fits, or the plan given is another batch's, or it lacks the pass of
                scores that the loss needs.

        Nothing is half added, whatever exception ends the step, and whenever it arrives
        (KeyboardInterrupt, say): either `.grad` has the whole gradient, or what had been added is
        taken back; see Config.restore_grads. `last_step.gradients` says which of these it is, and
        so does a note on the exception.
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
        """Log-probs of every trained token, which any loss can be computed from.

        `loss.backward()` then adds exactly what dense training would to `.grad` of all trainable
        parameters. It may come at any later time, before the weights change. Until then only the
        log-probs are held. It runs the plan's forwards again: `forward_backward`, which takes the
        losses of `forkpoint.losses` and functions that are declared token-additive, does not.
        It runs at the end of that backward, when gradients of other terms, such as a stock loss of
        the same model, are in `.grad`; if it fails, these stay there.

        Args:
            batch: the rollouts, as a RolloutBatch or a list.
            entropy: whether to give entropies (nats) as well.
            plan: one that `plan` made for this batch; by default it is made here.

        Returns:
            float32 (float64 for a float64 model) [T] on the model's device, entry i for token i of
            the batch, as in `score`; with `entropy` two of them; of a critic its values. Entries
            outside the loss mask are 0, and gradients that arrive there are ignored.

        Raises as `forward_backward`. The backward raises UnsupportedError where it is asked for
        gradients of some tensors alone (torch.autograd.grad) or of gradients (create_graph), where
        it runs a second time, and where weights have changed since. Under DistributedDataParallel
        torch leaves it out of a backward that is asked for gradients of some tensors alone.
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
        """Log-probs of every trained token, without a graph: for old and reference passes.

        Of a critic the values, which advantages are estimated with. With `expert_counts` experts
        are counted as well, of all tokens; with `router` they are counted as that loss counts them,
        for the `router_counts` of `forward_backward`, and `router_loss` is its value. Raises as
        `forward_backward`, and UnsupportedError where a critic is asked for entropies.
        """
        request = ScoreRequest(
            batch=batch, entropy=entropy, plan=plan, router=router, expert_counts=expert_counts
        )
        return run(self, request, finish_scores)

    def update_router_biases(
        self, expert_counts: Tensor, *, rate: float, centered: bool = False
    ) -> None:
        """Move the biases by which routers of DeepSeek-V3 and GLM-4-MoE balance their load.

        An expert that was chosen more often than its layer's mean loses `rate`, one less often
        gains it (Wang et al., arXiv 2408.15664). Called after an optimizer step, once for all its
        rollouts: counts of several calls are added up.

        Args:
            expert_counts: int64 [layers, experts], `stats.expert_counts`.
            rate: by how much; DeepSeek-V3 took 0.001.
            centered: whether each layer's moves have their mean taken away, as torchtitan does.

        Raises:
            UnsupportedError: the model's routers have no such biases.
            ConfigError: the counts are of another shape, or the rate is no finite number.
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
        """Compare every parameter's gradient, shared and dense, with a run in higher precision.

        A plan that shares within microbatches and one that shares across them are run, and the
        planner's own where it is neither. `progress` is called when each run begins, with text
        such as "reference (1 of 4)". The model's gradients are as before when this returns.
        `router` is an auxiliary loss of a mixture's routers, as in `forward_backward`.

        See `forkpoint.verify.comparison.verify`.
        """
        batch = as_batch(batch)
        check_batch(self.host, batch)
        if batch.routed_experts is not None:
            raise UnsupportedError(
                "the rollouts have routed_experts, and verify compares with a stock model, which "
                "cannot be held to them. Verify the batch without: "
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
        """The same model with other options.

        Raises ConfigError for a change of compile_blocks, which `wrap` decides.
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
