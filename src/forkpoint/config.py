"""Options of a policy. Imports no torch, so that the planner and the CLI can use it alone."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from forkpoint.errors import ConfigError
from forkpoint.units import MOST, MemorySize, size_in_bytes

Sharing = Literal["none", "group", "tree"]
Boundary = Literal["within", "across", "mixed"]
Activations = Literal["keep", "offload", "recompute"]
Gather = Literal["microbatch", "step"]
Split = Literal["replicate", "exchange"]
HEAD_STATISTICS = ("mean_logits", "is_top1", "log_sum_sq_probs")
"""Names of statistics of a token's distribution, without gradients; see
`ops.head.token_outputs`."""
AUTO = "auto"
_TAKES: dict[str, tuple[Any, str]] = {
    "attention_kernel": (str, "a kernel's name or 'auto'"),
    "recurrence_kernel": (str, "a kernel's name or 'auto'"),
    "calibration": (
        str | Path | None,
        "the path of a file that forkpoint calibrate wrote, 'auto' or None",
    ),
    "offload_folder": (str | Path | None, "the path of a folder, or None"),
}
_FLAGS = {bool: (True, False), bool | None: (True, False, None)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of planning and running batches.

    Attributes:
        sharing: Rollouts that share tokens: none (dense training), those of one group, or any of
            the batch (tree). With auto the planner chooses. On CUDA it may then leave out forks
            that lie fewer than 64 tokens below another fork.
        boundary: Position of forks: inside one packed microbatch (within), between a parent
            microbatch and its children (across), or both (mixed). With mixed, a subtree stays in
            one microbatch if it fits there.
        max_microbatch_tokens: Largest number of tokens in one forward. If such microbatches exceed
            memory_budget, the planner takes shorter ones. None means 16,384 or the longest rollout,
            and up to 65,536 under a memory budget.
        memory_budget: Memory for activations and prefix cache together, in bytes or as text such as
            "70GiB". None means no limit. On CUDA, auto is measured once, at the first plan of a
            policy: the free memory, minus gradients and optimizer states that do not exist yet,
            minus a margin, rounded down to GiB. If no plan fits, a measured budget logs a warning,
            and a budget that you set raises PlanError. On other devices auto means no limit.
        optimizer_bytes_per_parameter: Bytes of optimizer states for each trainable parameter. An
            automatic budget reserves them until the optimizer has allocated its states. Set 2 for
            AdamW in 8 bits and 0 for SGD. None means AdamW in the dtype of the parameters: 8 bytes
            in float32, 4 in bfloat16.
        activations: Storage of activations of microbatches that others read: on the device (keep),
            in host memory (offload), or nowhere (recompute), which runs a second forward. auto
            keeps the activations that fit.
        checkpointing: Activations that the backward of a microbatch computes again: none, those of
            the MLPs (selective), or those of whole decoder blocks (full). auto takes none if that
            fits the budget, else the cheapest choice that fits.
        prefix_cache: Storage of keys and values that other microbatches read, and of their
            gradients: on the device, or in host memory, with two layers at a time on the device.
            With auto they stay on the device if they fit. Otherwise as few layers as needed move to
            host memory. With a calibration they also move if that is predicted to be faster than
            recomputation.
        host_memory: Largest amount of host memory for offloaded activations and prefix caches, in
            the format of memory_budget. It is pinned on CUDA, and held as long as the policy
            exists. Data beyond it goes to offload_folder, or stays on the device. On CUDA, auto is
            half of the machine's memory, divided by the training processes on it. On other devices
            auto means no limit, as None does.
        offload_folder: Existing folder on a local disk for data beyond host_memory, in
            memory-mapped files without names. Their space is free again when the policy is deleted
            or the process ends. Copies take longer than to pinned memory, and predicted times do
            not include this. None means no files.
        calibration: Measured prices, by which the planner compares plans. auto takes the file that
            `forkpoint calibrate` wrote for this device and model shape. Without such a file, a
            policy on CUDA measures a few layers of random weights at its first plan. This takes
            some seconds, once for each device and software version. On other devices, and with
            None, prices are counted FLOPs and nominal rates. A path names another file of
            `forkpoint calibrate`.
        attention_kernel: Name of a kernel of `forkpoint.ops.attention`. A kernel that cannot run
            the model raises UnsupportedError.
        recurrence_kernel: Name of a kernel of `forkpoint.ops.delta_rule`, for layers that carry a
            state.
        head_chunk_tokens: Number of tokens whose logits exist at a time, unless logits are kept.
        head_logits: Storage of the logits of microbatches without children between forward and
            backward: kept, or computed again in chunks (recompute). Other microbatches always
            compute them again. auto keeps them if the memory budget has room.
        head_statistics: Additional results [T] in `per_token`, without gradients: "mean_logits",
            "is_top1" (1 or 0) and "log_sum_sq_probs" of the distribution at each trained token.
        all_logprobs: Whether steps also run rollouts whose terms the loss declares to be 0
            (`Loss.zero_rollouts`), for their log-probs in `per_token`. Otherwise these log-probs
            are NaN.
        compile_blocks: Whether decoder blocks are compiled, one by one. None compiles on CUDA,
            except for float64 models. If the compiler fails, blocks run eagerly, with a warning in
            the log.
        gather: Time at which ranks gather weights that fully_shard has sharded: for each forward
            and backward (microbatch), which all ranks run in lockstep, or once for each step
            (step). The second needs memory for all weights, and lets ranks run different programs.
            auto takes the choice that is predicted to be faster and fits the memory budget of every
            rank.
        split: Treatment of a prompt whose rollouts are on several ranks, in `forward_backward`:
            each of these ranks runs it (replicate), or one rank runs it, sends its prefix cache to
            the others and receives the cache's gradients (exchange). auto takes the choice that is
            predicted to be faster and fits the memory budget of every rank. Prompts that cannot be
            exchanged are replicated; see docs/howto/ranks.md.
        grad_accumulation_dtype: Dtype in which a step sums gradients of microbatches: that of each
            parameter, in `.grad`, or float32. Float32 sums take 4 bytes per parameter and are added
            to `.grad` at the end of the step. A step that fails earlier leaves gradients unchanged.
        self_check: Whether to compare log-probs of a small sample with those of the stock model,
            before the first step and after each change of the model's code, hooks or configuration;
            see docs/concepts/self-check.md. --no-self-check sets False.
        restore_grads: Whether to copy existing gradients before each step, so that a failed step
            can restore them.

    Raises:
        ConfigError: a value is not allowed.
        TypeError: an option does not exist.
    """

    sharing: Literal["auto", "none", "group", "tree"] = "auto"
    boundary: Literal["auto", "within", "across", "mixed"] = "auto"
    max_microbatch_tokens: int | None = None
    memory_budget: MemorySize | None = "auto"
    optimizer_bytes_per_parameter: float | None = None
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    prefix_cache: Literal["auto", "device", "host"] = "auto"
    host_memory: MemorySize | None = "auto"
    offload_folder: str | Path | None = None
    calibration: str | Path | None = "auto"
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
            value, allowed = getattr(self, field.name), _FLAGS.get(field.type, ())
            if get_origin(field.type) is Literal:
                allowed = get_args(field.type)
            if allowed and not any(type(value) is type(v) and value == v for v in allowed):
                listed = ", ".join(map(repr, allowed))
                raise ConfigError(f"{field.name} is {value!r}; allowed are {listed}.")
        for name, (kind, takes) in _TAKES.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it takes {takes}.")
        for name in ("memory_budget", "host_memory"):
            size = getattr(self, name)
            # An array would not compare as one value.
            size_in_bytes(None if isinstance(size, str) and size == AUTO else size, name)
        if self.offload_folder is not None and self.host_memory in (None, AUTO):
            raise ConfigError(
                f"offload_folder is {str(self.offload_folder)!r} and host_memory is "
                f"{self.host_memory!r}; the folder is for data beyond host_memory. Set host_memory "
                "to a size, for example '64GiB'."
            )
        cannot = {
            "sharing": self.sharing == "none",
            "boundary": self.boundary not in (AUTO, "mixed"),
        }
        for name, refused in cannot.items() if self.split == "exchange" else ():
            if refused:
                raise ConfigError(
                    f"split is 'exchange' and {name} is {getattr(self, name)!r}; an exchange needs "
                    "rollouts that share, and prompts in separate microbatches. Leave one of the "
                    "two options out."
                )
        if self.split == "exchange" and self.prefix_cache == "host":
            raise ConfigError(
                "split is 'exchange' and prefix_cache is 'host'; only prefix caches on the device "
                "can be exchanged. Leave one of the two options out."
            )
        given = self.head_statistics
        unknown = not isinstance(given, tuple) or [x for x in given if x not in HEAD_STATISTICS]
        if unknown or len(set(given)) < len(given):
            raise ConfigError(
                f"head_statistics is {given!r}; it takes a tuple of different names among "
                f"{', '.join(map(repr, HEAD_STATISTICS))}."
            )
        for name in ("max_microbatch_tokens", "head_chunk_tokens"):
            value = getattr(self, name)
            if value is None and name != "head_chunk_tokens":
                continue
            if isinstance(value, int) and abs(value) > MOST:  # Python may refuse to print it
                where = "above" if value > 0 else "below minus"
                raise ConfigError(
                    f"{name} is {where} {MOST}: it has {value.bit_length()} bits. Give a smaller "
                    "number of at least 1, or leave it out."
                )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it takes a whole number of at least 1.")
        each = self.optimizer_bytes_per_parameter
        number = isinstance(each, int | float) and not isinstance(each, bool)
        if each is not None and not (number and 0 <= each <= 1024):
            raise ConfigError(
                f"optimizer_bytes_per_parameter is {each!r}; it takes a number from 0 to 1024, or "
                "None for AdamW in the parameters' dtype."
            )

    @property
    def memory_budget_bytes(self) -> int | None:
        """`memory_budget` in bytes; None for no limit and for auto."""
        return None if self.memory_budget == AUTO else size_in_bytes(self.memory_budget)

    @property
    def host_memory_bytes(self) -> int | None:
        """`host_memory` in bytes; None for no limit and for auto."""
        return None if self.host_memory == AUTO else size_in_bytes(self.host_memory)
