"""Steps of one group whose prompt has images, beside a plain loop, TRL and dense forkpoint.

All three baselines run the encoder once for every rollout. Random tokens, pixels and weights.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.rows import ResultRow
from benchmarks.runner import Deadline
from benchmarks.shapes import SCALE_TINY, checkpoint, make_vision_model
from benchmarks.steps.cells import cell_row
from benchmarks.steps.options import Steps, check_at_least_one, check_groups, device_for
from benchmarks.steps.plain_loop import distance, measured, plain_step
from benchmarks.steps.trl_task import Task, stock_gradients, stock_update
from forkpoint import Config, Media, Rollout, RolloutBatch, wrap
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.losses import GRPO
from forkpoint.plan import Plan
from forkpoint.plan.pricing.cost import LINEAR_BACKWARD
from forkpoint.plan.pricing.totals import work_by_sharing
from forkpoint.policy import Policy

Encoder = Literal["trained", "frozen"]
IMAGE_TOKENS = 1000
PATCH_ROWS = 50
"""An image has 50 x 80 patches. Four patches make a token."""
LEAST_SHARE = 0.8
FLOAT32_BAR = 1e-4
BFLOAT16_BAR = 1.1
SAMPLE = 2
"""Rollouts that the baselines run; their times are scaled to all."""


@dataclass(frozen=True, kw_only=True)
class Images(Steps):
    """Time steps of one prompt of images with several responses, the encoder trained and frozen.

    The sides are a plain loop over rollouts, forkpoint with sharing and without, and TRL's
    GRPOTrainer where trl is installed.

    Attributes:
        shape: Whose sizes the model has.
        visual: Tokens of the prompt that stand for images, 1,000 each.
        text: Tokens of the prompt that are text.
        responses: How many responses.
        response: Tokens of each.
        rows: TRL's per_device_train_batch_size: how many rollouts TRL runs at once.
        encoder: Whether the encoder is trained.
        checkpointed: Let blocks keep only their inputs, on every side alike.
        repeats: Steps of each side that are timed, after two that are not.
    """

    NAME: ClassVar[str] = "images"

    shape: Literal["qwen3-vl-4b", "qwen3-vl-8b"] = "qwen3-vl-4b"
    visual: Count = 8000
    text: Count = 200
    responses: Count = 8
    response: Count = 300
    rows: Count = 1
    encoder: tuple[Encoder, ...] = ("trained", "frozen")
    checkpointed: Flag = False
    repeats: Count = 3

    def check(self) -> None:
        super().check()
        check_at_least_one("rows", self.rows)
        check_groups(1, self.responses, self.rows, "responses")

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        device = device_for(self.NAME, tiny=self.tiny)
        yield from self._checked(device)
        model = self._model(device, torch.bfloat16, self.layers)
        for encoder in self.encoder:
            case = f"{self.shape}, encoder {encoder}, {self.visual} visual and {self.text} other "
            case += f"tokens, {self.responses} responses of {self.response}"
            case += ", checkpointed" if self.checkpointed else ""
            if not deadline.over(case):
                model.model.visual.requires_grad_(encoder == "trained")
                yield from self._case(case, model, device, encoder)

    def _case(
        self, case: str, model: Any, device: torch.device, encoder: Encoder
    ) -> Iterator[ResultRow]:
        batch = self._batch(model, self.tiny)
        row = partial(cell_row, self.NAME, case)
        trained = [p for p in model.parameters() if p.requires_grad]
        compiled = self.blocks == "compiled"
        policy = wrap(model, Config(compile_blocks=compiled))
        dense = policy.with_config(sharing="none", boundary="within")
        sample = batch.select(list(range(SAMPLE)))
        sides: dict[str, tuple[Callable[[RolloutBatch], object], RolloutBatch]] = {
            "plain loop": (
                partial(plain_step, model, device, inputs=partial(_inputs, device)),
                sample,
            ),
            "without sharing": (partial(_one_by_one, dense), sample),
            "forkpoint": (partial(policy.forward_backward, loss=GRPO()), batch),
        }
        seconds: dict[str, float] = {}

        def figures(
            name: str, found: tuple[float, int] | None, rollouts: int, note: str | None = None
        ) -> Iterator[ResultRow]:
            if found is None:
                yield row(f"{name} out of memory", 1.0, "1", note=note)
                return
            scale = len(batch) / rollouts
            if scale != 1:
                note = f"{rollouts} rollouts, scaled by {scale:g}"
            seconds[name] = found[0] * scale
            yield row(f"{name} step", seconds[name] * 1e3, "ms", note=note)
            yield row(f"{name} peak", found[1], "bytes")

        for name, (step, rollouts) in sides.items():
            found = measured(step, trained, rollouts, self.repeats)
            for parameter in trained:
                parameter.grad = None
            yield from figures(name, found, len(rollouts))
        if find_spec("trl") is None:
            yield row("TRL left out, not installed", 1.0, "1")
        else:
            options = self._stock(batch)
            found = stock_update(model, _task(batch), repeats=self.repeats, **options)
            note = f"per_device_train_batch_size={options['rows']}, sdpa"
            yield from figures("TRL", found, len(batch), note)
        plan = policy.plan(batch, GRPO())
        bounds = encoder_bounds(plan, batch)
        yield row("bound, encoder once", bounds["once"], "x")
        yield row("bound, encoder as in the plan", bounds["plan"], "x")
        yield row("bound, encoder for every rollout", bounds["every"], "x")
        for name in ("plain loop", "without sharing", "TRL"):
            if name not in seconds or "forkpoint" not in seconds:
                continue
            ratio = seconds[name] / seconds["forkpoint"]
            beside: dict[str, Any] = {"baseline": name, "baseline_leaves_out": True}
            yield row(f"faster than {name}", ratio, "x", bound=bounds["plan"], **beside)
            if name == "without sharing":
                yield row(
                    "bound over faster",
                    bounds["plan"] / ratio,
                    "1",
                    bound=bounds["plan"],
                    bar=None if self.tiny else 1 / LEAST_SHARE,
                    **beside,
                )

    def _checked(self, device: torch.device) -> Iterator[ResultRow]:
        """Gradients of two layers at a small size, beside the plain loop in float32."""
        case = "gradients, 2 layers, 1 image and 4 responses"
        row = partial(cell_row, self.NAME, case)
        found: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        cuda = device.type == "cuda"
        for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
            model = self._model(device, dtype, 2)
            batch = self._batch(model, small=True)
            policy = wrap(model, Config(compile_blocks=False))
            sides: dict[str, Callable[[], object]] = {
                "plain": partial(plain_step, model, device, batch, partial(_inputs, device)),
                "ours": partial(policy.forward_backward, batch, GRPO()),
            }
            for name, step in sides.items():
                model.zero_grad()
                step()
                found[name, dtype] = [
                    p.grad.detach().float().cpu() for p in model.parameters() if p.grad is not None
                ]
        truth = found["plain", torch.float32]
        if find_spec("trl") is not None:
            model = self._model(device, torch.float32, 2)
            batch = self._batch(model, small=True)
            gradients = stock_gradients(model, _task(batch), **self._stock(batch))
            found["TRL", torch.float32] = [grad.cpu() for grad in gradients.values()]
        error = {key: distance(one, truth, device) for key, one in found.items()}
        yield row("error, float32", error["ours", torch.float32], "1", bar=FLOAT32_BAR)
        if ("TRL", torch.float32) in error:
            theirs = error["TRL", torch.float32]
            yield row("error of TRL, float32", theirs, "1", bar=FLOAT32_BAR)
        if cuda:
            ratio = error["ours", torch.bfloat16] / error["plain", torch.bfloat16]
            yield row("error over the plain loop's, bfloat16", ratio, "1", bar=BFLOAT16_BAR)

    def _stock(self, batch: RolloutBatch) -> dict[str, Any]:
        """Options of TRL's trainer; small batches have fewer rollouts than `rows` may divide."""
        return {"rows": math.gcd(self.rows, len(batch)), "checkpointed": self.checkpointed}

    def _model(self, device: torch.device, dtype: torch.dtype, layers: int | None) -> Any:
        dtype = dtype if device.type == "cuda" else torch.float32
        model = make_vision_model(self.shape, device, dtype=dtype, layers=layers, tiny=self.tiny)
        if self.checkpointed:
            checkpoint(model)
        return model

    def _batch(self, model: Any, small: bool) -> RolloutBatch:
        scale = SCALE_TINY if small else 1
        columns = 4 * IMAGE_TOKENS // PATCH_ROWS
        rows = 4 if small else PATCH_ROWS
        columns = 4 if small else columns
        return image_group(
            model.config,
            images=1 if small else max(1, self.visual // IMAGE_TOKENS),
            grid=(rows, columns),
            text=max(3, self.text // scale),
            lengths=[max(2, self.response // scale)] * (4 if small else self.responses),
        )


def encoder_bounds(plan: Plan, batch: RolloutBatch) -> dict[str, float]:
    """Counted work of training each rollout alone, over that of steps that share all tokens.

    The steps run the encoder once, as the plan does, or once for every rollout.
    """
    encoder, shape = plan.capabilities.encoder, plan.shape
    assert encoder is not None and shape is not None
    work = work_by_sharing(batch, plan.run_lengths, shape)
    forward = sum(encoder.forward_flops(medium) for medium in plan.media)
    once = forward * (1 + LINEAR_BACKWARD * encoder.trained)
    rollouts = len(batch)
    alone, shared = (work[mode].step_flops(shape) for mode in ("none", "tree"))
    dense = alone + rollouts * once
    return {
        "once": dense / (shared + once),
        "plan": dense / (shared + once + forward * plan.encodes_again),
        "every": dense / (shared + rollouts * once),
    }


def image_group(
    config: Any, *, images: int, grid: tuple[int, int], text: int, lengths: list[int]
) -> RolloutBatch:
    """One prompt of images and text with responses of those lengths, random tokens and pixels.

    Args:
        config: of a Qwen3-VL model.
        images: of the prompt.
        grid: rows and columns of the patches of an image.
        text: tokens of the prompt that stand for no image, spread evenly.
        lengths: of the responses.
    """
    rng = np.random.default_rng(0)
    vision, vocabulary = config.vision_config, config.text_config.vocab_size // 2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches, tokens = grid[0] * grid[1], grid[0] * grid[1] // vision.spatial_merge_size**2
    ids: list[int] = []
    types: list[int] = []
    media: list[Media] = []
    for part in np.array_split(rng.integers(0, vocabulary, text), images + 1):
        if ids:
            inputs = {
                "pixel_values": rng.normal(size=(patches, pixels)).astype(np.float32),
                "image_grid_thw": np.array([[1, *grid]]),
            }
            media.append(Media("image", inputs, tokens))
            ids += [config.image_token_id] * tokens
            types += [1] * tokens
        ids += part.tolist()
        types += [0] * len(part)
    # First tokens differ, so that responses share none.
    firsts = rng.permutation(vocabulary)[: len(lengths)]
    return RolloutBatch(
        Rollout(
            [*ids, firsts[n], *rng.integers(0, vocabulary, length - 1)],
            [0] * len(ids) + [1] * length,
            float(rng.normal()),
            group_id="g",
            media=media,
            media_types=[*types, *[0] * length],
        )
        for n, length in enumerate(lengths)
    )


def _inputs(device: torch.device, rollout: Rollout) -> dict[str, Any]:
    """Images and token types for the stock model, which makes logits of the response alone."""
    assert rollout.media_types is not None
    parts: dict[str, list[Tensor]] = {}
    for medium in rollout.media:
        for name, value in medium.inputs.items():
            parts.setdefault(name, []).append(torch.as_tensor(value, device=device))
    types = torch.as_tensor(rollout.media_types.astype(np.int64), device=device)[None]
    kept = int(rollout.loss_mask.sum()) + 1
    inputs = {name: torch.cat(each) for name, each in parts.items()}
    return {**inputs, "mm_token_type_ids": types, "logits_to_keep": kept}


def _task(batch: RolloutBatch) -> Task:
    """The group for TRL's trainer, with the inputs of its loss that TRL's processor would make."""
    prompts, completions = [], []
    for rollout in batch:
        begin = int(rollout.loss_mask.nonzero()[0][0])
        prompts.append(rollout.token_ids[:begin].tolist())
        completions.append(rollout.token_ids[begin:].tolist())
    inputs = [_inputs(torch.device("cpu"), rollout) for rollout in batch]
    names = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
    more: dict[str, Any] = {name: torch.cat([one[name] for one in inputs]) for name in names}
    more["num_images"] = [len(rollout.media) for rollout in batch]
    more["advantages"] = torch.tensor([rollout.advantage for rollout in batch])
    return Task(prompts[:1], [completions], more)


def _one_by_one(policy: Policy, batch: RolloutBatch) -> None:
    for n in range(len(batch)):
        policy.forward_backward(batch.select([n]), GRPO())
