"""Options of a policy. Imports no torch, so that the planner and the CLI can use it alone."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

from forkpoint.errors import ConfigError
from forkpoint.units import MemorySize, size_in_bytes

Sharing = Literal["none", "group", "tree"]
Boundary = Literal["within", "across", "mixed"]
Activations = Literal["keep", "offload", "recompute"]
Checkpointing = Literal["none", "selective", "full"]
Gather = Literal["microbatch", "step"]
Split = Literal["replicate", "exchange"]
HEAD_STATISTICS = ("mean_logits", "is_top1", "log_sum_sq_probs")
AUTO = "auto"
MOST = 2**63 - 1
"""Of a number of tokens or bytes, which numpy counts in int64."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a batch is planned and run.

    Attributes:
        sharing: Who may share tokens: nobody (dense), rollouts of one group, or any rollouts of the
            batch.
        boundary: Where a fork lies: inside one packed microbatch, between a parent microbatch and
            its child microbatches, or either, so that subtrees that fit in what is left of a
            microbatch stay whole (mixed).
        max_microbatch_tokens: The most tokens that go through the model in one forward; None lets
            the planner choose.
        memory_budget: The most memory, in bytes or as text such as "70GiB", that activations and
            prefix cache may take together; None is no limit. auto is measured on CUDA, once, when a
            policy makes its first plan: what is free then, less what gradients and the optimizer's
            states will take, less a margin, rounded down to GiB. A plan that needs more than is
            measured is run all the same, with a warning; beyond a budget that is given it is
            refused. Elsewhere auto is no limit.
        optimizer_bytes_per_parameter: Bytes of the optimizer's states for each trainable parameter,
            which an automatic budget leaves room for until an optimizer has them: 2 for AdamW in
            8 bits, 0 for SGD. None is AdamW in the parameters' dtype: 8 in float32, 4 in bfloat16.
        activations: Where activations of microbatches with children are while these run: on the
            device, in the memory of the host, or nowhere, so that a second forward makes them
            again. auto keeps what fits.
        checkpointing: Recomputation in a microbatch's own backward: nothing, the MLPs (selective),
            or whole decoder blocks (full). auto is nothing where that fits the budget, else what
            costs least of what fits.
        prefix_cache: Where keys and values that other microbatches read are between its use in one
            layer and the next, with their gradients: on the device, or in the memory of the host,
            from where two layers at a time come back. auto keeps on the device what fits, and moves
            as few layers as it takes where nothing fits.
        host_memory: The most memory of the host, written likewise, that offloaded activations and
            prefix caches may take (pinned, on CUDA), for as long as the policy lives; what does not
            fit stays on the device. None is no limit.
        calibration: Prices of plans. auto takes the file that `forkpoint calibrate` wrote for this
            device and model shape if there is one; else a policy measures a few layers of random
            weights at its first plan on CUDA, in some seconds, once for a device and its versions.
            Otherwise, and with None, prices are counted FLOPs and nominal rates. A path names
            another file of `forkpoint calibrate`.
        attention_kernel: A kernel of `forkpoint.ops.attention` by name; asking for one that cannot
            serve raises.
        recurrence_kernel: The same for layers that carry a state, of `forkpoint.ops.delta_rule`.
        head_chunk_tokens: How many tokens' logits exist at a time in the head, unless they are
            kept.
        head_logits: Whether the logits of a microbatch without children are kept from the head's
            forward to its backward, which follows at once, or computed again in parts; of other
            microbatches they always are. auto keeps them where memory_budget leaves room, and
            computes them again where there is no budget.
        head_statistics: Numbers of each trained token's distribution that results have in
            `per_token` besides log-probs, without gradients: "mean_logits", "is_top1" (1 or 0) and
            "log_sum_sq_probs". They are computed in the head's chunks.
        all_logprobs: Whether steps run rollouts whose terms the loss declares to be 0
            (`Loss.zero_rollouts`), for their log-probs in `per_token`. They are left out otherwise,
            and their log-probs are NaN.
        compile_blocks: Whether decoder blocks are compiled, each on its own; None does so on CUDA,
            but not for float64 models. Where the compiler fails, blocks run eagerly and a line of
            the log says so.
        gather: How ranks hold weights that fully_shard has sharded: gathered for each forward and
            backward of a microbatch, which all ranks then run in lockstep, or once for a whole
            step, which takes the memory of all weights and lets each rank run on its own. auto is
            what is predicted to take less time, of what fits the memory budget on every rank.
        split: Treatment of prompts whose rollouts several ranks have, in `forward_backward`:
            each runs them (replicate), or one rank does, sends their prefix cache to the others
            once and gets its gradients back once (exchange). auto is what is predicted to take less
            time, of what fits the memory budget on every rank. What exchange does not take is
            replicated; see docs/howto/ranks.md.
        grad_accumulation_dtype: Dtype in which a step sums its microbatches' gradients: each
            parameter's own dtype, in `.grad`, or float32, which is added to `.grad` at the end and
            takes 4 bytes a parameter until then. A step that fails before that leaves gradients as
            they were, without a copy.
        self_check: Compare log-probs on a small sample with the stock model's, before the first
            step and again when the model's code, hooks or configuration have changed; see
            docs/concepts/self-check.md.
        restore_grads: Copy existing gradients before each step, so that a failed step puts them
            back.

    Raises:
        ConfigError: a value is not allowed.
        TypeError: a name is unknown.
    """

    sharing: Literal["auto", "none", "group", "tree"] = "auto"
    boundary: Literal["auto", "within", "across", "mixed"] = "auto"
    max_microbatch_tokens: int | None = None
    memory_budget: MemorySize | None = AUTO
    optimizer_bytes_per_parameter: float | None = None
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    prefix_cache: Literal["auto", "device", "host"] = "auto"
    host_memory: MemorySize | None = None
    calibration: str | Path | None = AUTO
    attention_kernel: str = "auto"
    recurrence_kernel: str = "auto"
    head_chunk_tokens: int = 1024
    head_logits: Literal["auto", "keep", "recompute"] = "auto"
    head_statistics: tuple[str, ...] = ()
    all_logprobs: bool = False
    compile_blocks: bool | None = None
    gather: Literal["auto", "microbatch", "step"] = "auto"
    split: Literal["auto", "replicate", "exchange"] = "auto"
    grad_accumulation_dtype: Literal["parameter", "float32"] = "parameter"
    self_check: bool = True
    restore_grads: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                allowed = ", ".join(repr(v) for v in get_args(field.type))
                raise ConfigError(f"{field.name} is {value!r}; allowed are {allowed}.")
        for name in ("attention_kernel", "recurrence_kernel"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; it takes a kernel's name or 'auto'."
                )
        if not isinstance(self.calibration, str | Path | None):
            raise ConfigError(
                f"calibration is {self.calibration!r}; it takes the path of a file that forkpoint "
                "calibrate wrote, 'auto' or None."
            )
        cannot = {
            "sharing": self.sharing == "none",
            "boundary": self.boundary not in (AUTO, "mixed"),
        }
        for name, refused in cannot.items() if self.split == "exchange" else ():
            if refused:
                raise ConfigError(
                    f"split is 'exchange' and {name} is {getattr(self, name)!r}; prompts that are "
                    "exchanged lie in microbatches of their own, around packed ones whose rollouts "
                    "share. Leave one of the two options out."
                )
        if self.split == "exchange" and self.prefix_cache == "host":
            raise ConfigError(
                "split is 'exchange' and prefix_cache is 'host'; prompts are exchanged between "
                "devices. Leave one of the two options out."
            )
        given = self.head_statistics
        unknown = not isinstance(given, tuple) or [x for x in given if x not in HEAD_STATISTICS]
        if unknown or len(set(given)) < len(given):
            raise ConfigError(
                f"head_statistics is {given!r}; it takes a tuple of different names among "
                f"{', '.join(map(repr, HEAD_STATISTICS))}."
            )
        for name, allowed in (
            ("compile_blocks", (True, False, None)),
            ("all_logprobs", (True, False)),
            ("restore_grads", (True, False)),
            ("self_check", (True, False)),
        ):
            if not any(getattr(self, name) is value for value in allowed):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; allowed are "
                    f"{', '.join(map(repr, allowed))}."
                )
        for name in ("max_microbatch_tokens", "head_chunk_tokens"):
            value = getattr(self, name)
            if value is None and name != "head_chunk_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it takes a whole number of at least 1.")
            if value > MOST:
                raise ConfigError(f"{name} is above {MOST}, the most that it takes.")
        size_in_bytes(None if self.memory_budget == AUTO else self.memory_budget, "memory_budget")
        size_in_bytes(self.host_memory, "host_memory")
        each = self.optimizer_bytes_per_parameter
        number = isinstance(each, int | float) and not isinstance(each, bool)
        if each is not None and not (number and 0 <= each <= 1024):
            raise ConfigError(
                f"optimizer_bytes_per_parameter is {each!r}; it takes a number from 0 to 1024, or "
                "None for AdamW in the parameters' dtype."
            )

    @property
    def memory_budget_bytes(self) -> int | None:
        """`memory_budget` as a number of bytes; None where it is no limit, or auto."""
        return None if self.memory_budget == AUTO else size_in_bytes(self.memory_budget)

    @property
    def host_memory_bytes(self) -> int | None:
        """`host_memory` as a number of bytes."""
        return size_in_bytes(self.host_memory, "host_memory")
