"""`forkpoint demo`: made-up rollouts, checked and then trained on, shared and dense."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from forkpoint.cli.options import Count, Flag
from forkpoint.cli.output import Output, options
from forkpoint.cli.replay import make_optimizer, show_report
from forkpoint.rollouts import RolloutBatch
from forkpoint.synthetic import synthetic_rollouts

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """See it work in half a minute on a CPU; nothing to prepare, nothing is downloaded.

    Makes up groups of rollouts with long prompts, checks that a tiny model's gradients are the same
    shared and dense, and then trains two copies of it side by side, one each way.

    Attributes:
        groups: How many prompts.
        rollouts_per_group: How many responses to each.
        prompt_tokens: Tokens of a prompt, a quarter of which all prompts share.
        response_tokens: Tokens of a response, on average.
        steps: How many optimizer steps, each on one group.
        seed: Seed of the rollouts and of the weights.
        json: Print only the JSON line.
    """

    groups: Count = 4
    rollouts_per_group: Count = 8
    prompt_tokens: Count = 3072
    response_tokens: Count = 64
    steps: Count = 4
    seed: Annotated[int, arg(metavar="N")] = 0
    json: Flag = False

    def run(self) -> int:
        out = Output(json_only=self.json)
        batch = RolloutBatch(
            synthetic_rollouts(
                groups=self.groups,
                rollouts_per_group=self.rollouts_per_group,
                prompt_tokens=self.prompt_tokens,
                system_tokens=self.prompt_tokens // 4,
                response_tokens=self.response_tokens,
                vocab_size=MODEL["vocab_size"],
                seed=self.seed,
            )
        )
        with out.waiting("making the model"):
            import torch

            from forkpoint.cli.environment import versions
            from forkpoint.cli.models import random_model
            from forkpoint.losses import GRPO
            from forkpoint.policy import wrap
            from forkpoint.replay import replay

            exact = random_model(MODEL, torch.float64, self.seed)
            model = random_model(MODEL, torch.float32, self.seed)
        out.show(
            f"{self.groups} made-up prompts with {self.rollouts_per_group} responses each: "
            f"{batch.logical_tokens:,} tokens. A tiny Qwen3 with random weights, on the CPU."
        )
        first = batch.select(batch.groups()[0].tolist())
        with out.waiting("comparing gradients"):
            report = wrap(exact).verify(first, GRPO())
        out.show(
            f"agreement: every parameter's gradient, shared and dense in float64, within "
            f"{report.shared_error:.1e} of the gradient's norm "
            f"({'passed' if report.passed else 'FAILED'}; allowed {report.allowed:.0e})"
        )
        with out.progress("training", self.steps) as advance:
            trained = replay(
                model,
                batch,
                GRPO(),
                optimizer=make_optimizer("adamw", 1e-4),
                steps=self.steps,
                on_step=lambda _: advance(1),
            )
        show_report(out, trained)
        out.result(
            {
                "command": "demo",
                "passed": report.passed,
                "gradient_error": report.shared_error,
                "allowed_gradient_error": report.allowed,
                **trained.to_dict(),
                "config": options(self),
                "versions": versions(),
            }
        )
        return 0 if report.passed else 1
