"""Options of TRL's trainers that are compared with stock TRL, and the comparison."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import setups_trl as setups
import trl

from forkpoint import Config
from forkpoint.integrations import trl as ours
from forkpoint.integrations.trl.counts import PREFIX

ACROSS = Config(sharing="tree", boundary="across", max_microbatch_tokens=48)
"""Shares across several microbatches, so that losses of whole windows need a pass of scores."""
STOCK = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer, "dpo": trl.DPOTrainer}
OURS = {name: getattr(ours, cls.__name__) for name, cls in STOCK.items()}
LATER = {"num_iterations": 2, "steps_per_generation": 4}
"""Old log-probs of an earlier model, from the second optimizer step on."""
TIMES = ("time", "runtime", "per_second", PREFIX)

GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo, tokens": {"loss_type": "luspo"},
    "luspo, sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "two iterations, KL": {"beta": 0.1, **LATER},
    "KL without correction, delta": {
        "beta": 0.1,
        "use_bias_correction_kl": False,
        "delta": 1.5,
        **LATER,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.001, **LATER},
    # At 0.3 a threshold is an entropy that several tokens have, and rounding decides.
    "top entropies": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"entropy_coef": 0.1, "use_adaptive_entropy": True},
    "truncated completions masked": {
        "mask_truncated_completions": True,
        "gradient_checkpointing": True,
    },
    "rewards of the batch": {"scale_rewards": "batch", "num_generations": 2},
    "window of three, generation of two": {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
    },
    "no accumulation": {"gradient_accumulation_steps": 1},
}
RLOO: dict[str, dict[str, Any]] = {
    "default": {},
    "later": {"beta": 0.1, **LATER},
    "normalized": {"normalize_advantages": True, "reward_clip_range": (-1.0, 4.0)},
}
DPO: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name]} for name in ("sigmoid", "ipo", "bco_pair", "aot", "apo_zero")},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "sigmoid and sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "ld_alpha": {"ld_alpha": 0.5},
    "weighting": {"use_weighting": True},
    "references beforehand": {"precompute_ref_log_probs": True},
    "forward KL": {"f_divergence_type": "forward_kl", "max_steps": 1},
    "alpha divergence": {"f_divergence_type": "alpha_divergence", "gradient_checkpointing": True},
    "short last window": {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
}


class Pair:
    """Stock TRL and ours after the same training, and what they came to."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        stock: type | None = None,
        shared: type | None = None,
        own: dict[str, Any] | None = None,
        streams: bool | None = None,
        made: dict[str, Any] | None = None,
        changed: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> None:
        """`streams` False has ours run TRL's own loss code for gradients; `changed` changes both
        trainers before they train."""
        self.stock = setups.trainer(
            kind, stock or STOCK[kind], folder / "stock", made=made, **options
        )
        own = {"forkpoint": ACROSS} if own is None else own
        self.ours = setups.trainer(
            kind, shared or OURS[kind], folder / "ours", made=made, own=own, **options
        )
        if streams is not None:
            self.ours.sharing.streams = streams
        for trainer in (self.stock, self.ours) if changed else ():
            changed(trainer)
        self.expected, self.stock_logs = setups.run(self.stock)
        self.found, self.logs = setups.run(self.ours)

    @property
    def apart(self) -> float:
        """The relative difference of the first optimizer step's gradients."""
        return setups.apart(self.found, self.expected)

    @property
    def weights_apart(self) -> float:
        """The relative difference of what the weights have moved by since the start."""
        ends = [dict(t.model.named_parameters()) for t in (self.ours, self.stock)]
        return setups.apart(*({k: v.detach() for k, v in end.items()} for end in ends))

    def check_metrics(self, but: tuple[str, ...] = ()) -> None:
        """The same names, and values within 1e-5."""
        assert len(self.logs) == len(self.stock_logs)
        for found, expected in zip(self.logs, self.stock_logs, strict=True):
            known = {k for k in found if not k.startswith(PREFIX)}
            assert known == expected.keys()
            for name, value in expected.items():
                if any(part in name for part in TIMES) or name in but:
                    continue
                if value is None:
                    assert found[name] is None
                    continue
                near = math.isclose(found[name], value, rel_tol=1e-5, abs_tol=1e-5)
                assert near, (name, found[name], value)

    @property
    def tokens(self) -> tuple[float, float]:
        """Computed and given tokens of the first step."""
        first = self.logs[0]
        return first[PREFIX + "computed_tokens"], first[PREFIX + "given_tokens"]
