"""`forkpoint demo`: a GRPO loop on a CPU that computes each gradient twice, shared and dense."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from forkpoint.apps.cli.options import Flag, Positive, Seed, whole_number
from forkpoint.apps.cli.output import Output, options
from forkpoint.apps.cli.replay import make_optimizer
from forkpoint.apps.demo.task import BLIND_REWARD, CONSONANTS, VOWELS, WORDS, spell
from forkpoint.rollouts.batch import Rollout

if TYPE_CHECKING:
    from forkpoint.apps.demo.loop import Step

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
# Rounding of float32 gives about 1e-6 here. A missing part of the gradient gives a much larger
# difference.
GRADIENT_BAR = 1e-4
SHOWN_WORDS = 10


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train with GRPO on a CPU, and compare shared with dense gradients. Nothing is downloaded.

    A tiny Qwen3 with random weights answers long prompts in a made-up language of five dialects.
    The reward is the share of a response's words in the most frequent dialect of its prompt.

    Attributes:
        steps: Number of optimizer steps, each on newly sampled responses.
        groups: Number of prompts in a step.
        rollouts_per_group: Number of responses to each prompt, at least 2.
        prompt_tokens: Number of tokens of a prompt.
        response_tokens: Number of tokens of a response.
        lr: Learning rate of AdamW.
        seed: Seed of the weights, the prompts and the sampling.
        json: Print one line of JSON and nothing else.
    """

    steps: Positive = 40
    groups: Positive = 4
    rollouts_per_group: Annotated[int, whole_number(2)] = 16
    prompt_tokens: Positive = 1024
    response_tokens: Positive = 24
    lr: Annotated[float, arg(metavar="RATE")] = 3e-3
    seed: Seed = 0
    json: Flag = False

    def run(self) -> int:
        out = Output(json_only=self.json)
        with out.waiting("making the model"):
            import torch

            from forkpoint.apps.cli.models import random_model
            from forkpoint.apps.demo.loop import ENTROPY_BONUS, Loop, summary
            from forkpoint.device import versions

            longest = self.prompt_tokens + self.response_tokens
            make = make_optimizer("adamw", self.lr)
            config = {**MODEL, "max_position_embeddings": longest}
            model = random_model(config, torch.float32, self.seed)
        loop = Loop(
            model,
            make(list(model.parameters())),
            groups=self.groups,
            rollouts_per_group=self.rollouts_per_group,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            seed=self.seed,
        )
        threads = torch.get_num_threads()
        parameters = sum(p.numel() for p in model.parameters())
        out.show(self._introduction(parameters, threads, ENTROPY_BONUS))

        with out.waiting("comparing gradients in float64"):
            first = sampled = loop.rollouts()
            report = loop.exact_report(first.batch)
        out.show(
            "agreement in float64: every parameter's gradient of the first group, shared and "
            f"dense, within {report.nearest.shared_error:.1e} of the gradient's norm "
            f"({'passed' if report.passed else 'FAILED'}; allowed {report.nearest.allowed:.0e})"
        )
        with out.waiting("warming up"):
            loop.warm_up(first.batch)
        out.show(
            f"\n{'step':>4} {'reward':>7} {'sampling ms':>12} {'dense ms':>9} {'shared ms':>10}"
            f" {'speed-up':>9}  grad difference"
        )
        steps: list[Step] = []
        # The lines of the steps show the progress, unless the output is JSON.
        with out.progress("training", self.steps) if self.json else nullcontext() as advance:
            for number in range(1, self.steps + 1):
                sampled = first if number == 1 else loop.rollouts()
                steps.append(loop.step(number, sampled))
                out.show(_line(steps[-1]))
                if advance is not None:
                    advance(1)
        values = summary(steps)
        passed = report.passed and values["max_gradient_difference"] <= GRADIENT_BAR
        out.show(
            f"\nfirst step: {_quote(first.batch[0])}\nlast step:  {_quote(sampled.batch[0])}",
            _conclusion(values),
        )
        out.result(
            {
                "command": "demo",
                "passed": passed,
                "gradient_error": report.nearest.shared_error,
                "allowed_gradient_error": report.nearest.allowed,
                **values,
                "allowed_gradient_difference": GRADIENT_BAR,
                "blind_reward": BLIND_REWARD,
                "entropy_bonus": ENTROPY_BONUS,
                "rollouts": self.steps * self.groups * self.rollouts_per_group,
                "dense_max_microbatch_tokens": loop.dense.config.max_microbatch_tokens,
                "parameters": parameters,
                "threads": threads,
                "config": options(self),
                "versions": versions(),
            }
        )
        return 0 if passed else 1

    def _introduction(self, parameters: int, threads: int, entropy_bonus: float) -> str:
        examples = ", ".join(WORDS[d * len(CONSONANTS)] for d in range(len(VOWELS)))
        tokens = self.groups * self.rollouts_per_group * (self.prompt_tokens + self.response_tokens)
        return (
            f"Language: {len(VOWELS)} dialects of {len(CONSONANTS)} words, distinguished by the "
            f"vowel ({examples}). Half of a prompt's words are of its dialect, the rest of any.\n"
            "Reward: the share of a response's words that are of the dialect most frequent in its "
            f"prompt. Without reading the prompt it is {BLIND_REWARD:.2f} on average.\n"
            f"Model: Qwen3, {MODEL['num_hidden_layers']} layers, {parameters:,} random parameters, "
            f"float32, {threads} CPU {'thread' if threads == 1 else 'threads'}.\n"
            f"A step: {self.groups} prompts of {self.prompt_tokens:,} tokens, "
            f"{self.rollouts_per_group} responses of {self.response_tokens} to each ({tokens:,} "
            "tokens in all), sampled from the policy; a dense and a shared gradient from the same "
            "weights, in alternating order; AdamW applies the shared one. The loss is GRPO's with "
            f"an entropy bonus of {entropy_bonus}."
        )


def _line(step: "Step") -> str:
    return (
        f"{step.step:>4} {step.reward:>7.3f} {step.sampling_ms:>12,.0f} {step.dense_ms:>9,.0f} "
        f"{step.shared_ms:>10,.0f} {step.dense_ms / step.shared_ms:>8.1f}x "
        f"{step.gradient_difference:>16.1e}"
    )


def _quote(rollout: Rollout) -> str:
    prompt, response = (rollout.token_ids[rollout.loss_mask == part] for part in (False, True))
    more = " …" if len(response) > SHOWN_WORDS else ""
    words = f"… {spell(prompt[-SHOWN_WORDS:])} → {spell(response[:SHOWN_WORDS])}{more}"
    return f"{words} ({(rollout.extras or {})['reward']:.2f})"


def _conclusion(values: dict[str, Any]) -> str:
    difference = values["max_gradient_difference"]
    verdict = "passed" if difference <= GRADIENT_BAR else "FAILED"
    return (
        f"reward: {values['first_quarter_reward']:.2f} in the first quarter of the steps, "
        f"{values['last_quarter_reward']:.2f} in the last\n"
        f"agreement in float32: gradients of every step within {difference:.1e} of their norm "
        f"({verdict}; allowed {GRADIENT_BAR:.0e})\n"
        f"tokens run: {values['computed_tokens']:,} of {values['logical_tokens']:,}\n"
        f"time of the gradients, planning included: shared {values['shared_ms']:,.0f} ms (median "
        f"step {values['shared_median_ms']:,.0f}), dense {values['dense_ms']:,.0f} ms (median step "
        f"{values['dense_median_ms']:,.0f}); sampling {values['sampling_ms']:,.0f} ms\n"
        f"speed-up: {values['speedup']:.2f}x over all steps, median step "
        f"{values['median_speedup']:.2f}x; counted bound {values['bound']:.2f}x"
    )
