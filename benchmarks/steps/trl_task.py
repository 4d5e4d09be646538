"""Prompts and completions that are given to TRL's trainers, and the time of their steps.

TRL is imported when a trainer is made, so that the benchmarks' help needs none.
"""

import copy
import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.steps.plain_loop import WARM_STEPS
from forkpoint.config import Config
from forkpoint.errors import ConfigError
from forkpoint.rollouts.traces import load_rollouts

Base: Any = object
"""The trainer that a class here is put before."""
PAD, END, FIRST_WORD = 0, 1, 2
RATE = 1e-6
"""TRL's default learning rate."""


def check_installed() -> None:
    """Raises ConfigError where TRL is not installed."""
    if find_spec("trl") is None:
        raise ConfigError(
            "this benchmark runs trainers of TRL, which is not installed; "
            "pip install 'forkpoint[trl]' installs it."
        )


@dataclass(frozen=True)
class Task:
    """Prompts with completions that are given rather than sampled.

    prompts: token ids of each prompt.
    completions: for each prompt those of its completions.
    more: inputs of the loss for all completions in their order, such as images. They replace those
        that TRL makes, such as advantages.
    """

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Completions of all prompts, which are trained in one optimizer step."""
        return sum(map(len, self.completions))

    def given(self, prompts: list[str], _: object) -> dict[str, Any]:
        """The rollouts of a generation batch: a prompt's text is its number, and its completions
        come in their order. TRL takes this as `rollout_func`."""
        seen: dict[int, int] = {}
        chosen = []
        for number in map(int, prompts):
            chosen.append(self.completions[number][seen.get(number, 0)])
            seen[number] = seen.get(number, 0) + 1
        return {
            "prompt_ids": [self.prompts[int(number)] for number in prompts],
            "completion_ids": chosen,
            "logprobs": None,
        }


def make_task(
    file: Path | None, *, prompts: int, completions: int, tokens: int, vocab: int, length: int
) -> Task:
    """Prompts of a file's first groups, up to the first trained token, or made-up ones.

    Args:
        file: rollouts; None makes prompts of `length` random tokens.
        prompts, completions: how many, the latter for each prompt.
        tokens: of a completion. They are random, and first ones differ.
        vocab: of the model.
    """
    random = np.random.default_rng(0)
    found: dict[object, list[int]] = {}
    for rollout in load_rollouts(file) if file else ():
        if rollout.group_id not in found and len(found) < prompts:
            begin = int(np.flatnonzero(rollout.loss_mask)[0])
            found[rollout.group_id] = np.asarray(rollout.token_ids)[:begin].tolist()
    if file is None:
        found = {n: random.integers(FIRST_WORD, vocab, length).tolist() for n in range(prompts)}
    if len(found) < prompts:
        raise ConfigError(
            f"{file} has {len(found)} groups, fewer than the {prompts} prompts of a step; give a "
            "file with more, or --prompts."
        )
    if max(max(ids) for ids in found.values()) >= vocab:
        raise ConfigError(f"{file} has tokens outside of the model's vocabulary of {vocab}.")
    firsts = FIRST_WORD + random.permutation(vocab - FIRST_WORD)[: prompts * completions]
    rest = random.integers(FIRST_WORD, vocab, (prompts * completions, tokens - 1))
    rows = np.concatenate([firsts[:, None], rest], 1).tolist()
    return Task(
        list(found.values()),
        [rows[n * completions : (n + 1) * completions] for n in range(prompts)],
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that depends on the tokens, so that the advantages of a group differ."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def _tokenizer() -> PreTrainedTokenizerFast:
    """One that TRL can pad and decode with; texts of completions are read by nobody."""
    tokenizers = import_module("tokenizers")
    words = {"<pad>": PAD, "<eos>": END}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Spent:
    """Milliseconds of each optimizer step, and the most memory of any.

    update: from the inputs of the window's first loss to the end of its last backward.
    scores: log-probs of earlier weights, where the options ask for them.
    optimizer: the optimizer's own step, without clipping.
    whole: from Trainer's `on_step_begin` to `on_step_end`: all of these, rewards, advantages,
        padding, metrics, clipping.
    """

    update: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


class Clocked(Base):
    """Times the parts of steps; it is put before a trainer of TRL, stock or ours."""

    spent: Spent
    task: Task
    _began: float | None = None

    @contextmanager
    def _adding(self, name: str) -> Iterator[None]:
        """Time what runs within, the device idle at both ends, in this step's `name`."""
        synchronize()
        begin = time.perf_counter()
        yield
        synchronize()
        getattr(self.spent, name)[-1] += (time.perf_counter() - begin) * 1e3

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_inputs(*args, **kwargs)
        if self._began is None and self.model.training:
            synchronize()
            self._began = time.perf_counter()
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients and self._began is not None:
            synchronize()
            self.spent.update[-1] += (time.perf_counter() - self._began) * 1e3
            self._began = None
        return found

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        name = "_get_per_token_logps_and_entropies"
        scored = getattr(self, name)

        def timed(*inner: Any, **names: Any) -> Any:
            with self._adding("scores"):
                return scored(*inner, **names)

        # For the passes before losses alone: of a loss forkpoint wants TRL's own methods.
        setattr(self, name, timed)
        try:
            found = super()._generate_and_score_completions(*args, **kwargs)
        finally:
            delattr(self, name)
        device = self.accelerator.device
        for more, value in self.task.more.items():
            found[more] = value.to(device) if isinstance(value, Tensor) else value
        return found


class Watch(TrainerCallback):
    """Begins and ends the time of a step, and stops a training when its time is up."""

    def __init__(self, spent: Spent, least: int, seconds: float) -> None:
        """At least `least` steps are run, and none begun after so many seconds."""
        self._spent, self._least, self._seconds = spent, least, seconds
        self._start = self._step = self._optimizer = time.perf_counter()
        self.gradients: dict[str, Tensor] | None = None
        """Filled in the first step where it is a dict."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        for each in (self._spent.update, self._spent.scores, self._spent.optimizer):
            each.append(0.0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        self._step = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        if self.gradients is not None and not self.gradients:
            for name, parameter in kwargs["model"].named_parameters():
                assert parameter.grad is not None, name
                self.gradients[name] = parameter.grad.detach().float().clone()
        synchronize()
        self._optimizer = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        synchronize()
        self._spent.optimizer[-1] += (time.perf_counter() - self._optimizer) * 1e3

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, kwargs
        synchronize()
        now = time.perf_counter()
        self._spent.whole.append((now - self._step) * 1e3)
        if torch.cuda.is_available():
            # Of the last step: the first ones compile, and make the optimizer's states.
            self._spent.peak_bytes = torch.cuda.max_memory_allocated()
        if state.global_step >= self._least and now - self._start > self._seconds:
            control.should_training_stop = True


def make_trainer(
    model: PreTrainedModel,
    task: Task,
    folder: str,
    *,
    forkpoint: Config | None,
    watch_seconds: float = 1e9,
    least: int = 1,
    **options: Any,
) -> tuple[Any, Watch]:
    """A trainer of TRL (`forkpoint` None) or ours, whose every optimizer step is the whole task.

    options: of GRPOConfig; what is not given is TRL's default.
    """
    trl, cuda = import_module("trl"), torch.cuda.is_available()
    dataset = import_module("datasets").Dataset.from_dict(
        {"prompt": [str(n) for n in range(len(task.prompts))]}
    )
    cls: Any = trl.GRPOTrainer
    own: dict[str, Any] = {}
    if forkpoint is not None:
        cls = import_module("forkpoint.integrations.trl").GRPOTrainer
        own = {"forkpoint": forkpoint}
    rows = options.pop("per_device_train_batch_size")
    args = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=task.rows // rows,
        num_generations=len(task.completions[0]),
        max_completion_length=len(task.completions[0][0]),
        learning_rate=RATE,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        use_cpu=not cuda,
        **options,
    )
    model.generation_config.eos_token_id = END
    trainer = type(cls.__name__, (Clocked, cls), {})(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=dataset,
        processing_class=_tokenizer(),
        rollout_func=task.given,
        **own,
    )
    trainer.spent, trainer.task = Spent(), task
    watch = Watch(trainer.spent, least, watch_seconds)
    trainer.add_callback(watch)
    trainer.remove_callback(import_module("transformers").PrinterCallback)
    return trainer, watch


def stock_update(
    model: PreTrainedModel,
    task: Task,
    *,
    rows: int,
    checkpointed: bool,
    repeats: int,
) -> tuple[float, int] | None:
    """Seconds (median) and peak bytes of an update by TRL's trainer; None where memory runs out.

    rows: completions that run at once.
    repeats: updates that are timed, after two that are not.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = _stock_trainer(model, task, folder, rows, checkpointed, WARM_STEPS + repeats)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            spent = None
        else:
            spent = trainer.spent
    del trainer
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()  # a trainer and its callbacks refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if spent is None:
        return None
    return median(spent.update[WARM_STEPS:]) / 1e3, spent.peak_bytes or 0


def stock_gradients(
    model: PreTrainedModel, task: Task, *, rows: int, checkpointed: bool
) -> dict[str, Tensor]:
    """Gradients of TRL's first update, in float32, by the names of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, watch = _stock_trainer(model, task, folder, rows, checkpointed, 1)
        watch.gradients = {}
        trainer.train()
    return watch.gradients


def _stock_trainer(
    model: PreTrainedModel, task: Task, folder: str, rows: int, checkpointed: bool, steps: int
) -> tuple[Any, Watch]:
    """TRL's trainer, whose optimizer has no states. It trains the model's parameters."""
    return make_trainer(
        copy.copy(model),  # TRL and accelerate set `forward` of the object that they train
        task,
        folder,
        forkpoint=None,
        per_device_train_batch_size=rows,
        gradient_checkpointing=checkpointed,
        max_steps=steps,
        max_grad_norm=0.0,
        optim="sgd",
        bf16=model.dtype is torch.bfloat16,
    )
