"""Stock models of Qwen3.5's shapes, dense and with a prefix in a cache: is a gradient not finite?

Shared, a model runs its prompt into a cache, the responses as a batch from copies of it, and the
prompt's backward from what gradients of the copies sum up to. Nothing of forkpoint runs but its
shapes; all but the cache is transformers' own. 5 GiB of free memory hold NaN before each pass. The
last layers whose output's gradient was finite, and the first whose was not, are named, together
with every parameter whose gradient is not finite.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from benchmarks.attention.cases import check_cuda
from benchmarks.rows import ResultRow
from benchmarks.runner import Benchmark, Deadline
from benchmarks.steps.hybrid import QWEN35_4B, TINY, make_model
from forkpoint.apps.cli.options import Count, Flag
from forkpoint.ops.delta_rule import fla

NAME = "stock-hybrid"


def poison(device: str) -> None:
    """Fill memory that nothing holds with NaN, in blocks of the sizes that are asked for."""
    if device != "cuda":
        return
    torch.cuda.empty_cache()
    sizes = [1 << 30] * 4 + [1 << 25] * 32 + [1 << 20] * 256
    blocks = [torch.full((n // 4,), torch.nan, device=device) for n in sizes]
    blocks += [torch.full((n,), torch.nan, device=device) for n in (128, 1024, 8192) * 64]
    torch.cuda.synchronize()
    del blocks


class Carry(LinearAttentionLayer):
    """A cache of a recurrent layer that autograd can look through: nothing is written in place."""

    def update_conv_state(self, conv_states, state_idx=0, conv_kernel_size=None, **_):
        size = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        self.conv_kernel_size[state_idx] = size
        whole = conv_states
        before = self.conv_states[state_idx]
        if self.has_previous_state[state_idx] and before is not None:
            whole = torch.cat([before, conv_states], -1)
        self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states, state_idx=0, **_):
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def differentiable(cache: Any) -> Any:
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            cache.layers[index] = Carry()
            cache.layers[index].record_past = True
    return cache


def states_of(layer: Any) -> list[tuple[Any, Any]]:
    """Where each tensor of a cache's layer is: its holder, and the name or key."""
    if isinstance(layer, Carry):
        return [(layer.conv_states, 0), (layer.recurrent_states, 0)]
    return [(vars(layer), "keys"), (vars(layer), "values")]


def checkpointed_blocks(made: Any) -> None:
    """Blocks keep their inputs alone. transformers' own checkpoints leave a cache out; here what a
    cache holds before a block is its input, and what it holds then its output."""
    for number, block in enumerate(made.model.layers):
        block.forward = _checkpointed(block.forward, number)


def _checkpointed(forward: Callable, number: int) -> Callable:
    def run(hidden: Tensor, **rest: Any) -> Tensor:
        cache = rest.get("past_key_values")
        if cache is None:
            return checkpoint(forward, hidden, use_reentrant=False, **rest)
        layer = cache.layers[number]
        given = [holder[key] for holder, key in states_of(layer)]

        def block(hidden: Tensor, *states: Tensor | None) -> tuple[Tensor, ...]:
            for (holder, key), state in zip(states_of(layer), states, strict=True):
                holder[key] = state
            if isinstance(layer, Carry):
                layer.has_previous_state[0] = states[0] is not None
            else:
                layer.is_initialized = states[0] is not None
            hidden = forward(hidden, **rest)
            return hidden, *(holder[key] for holder, key in states_of(layer))

        hidden, *states = checkpoint(block, hidden, *given, use_reentrant=False)
        for (holder, key), state in zip(states_of(layer), states, strict=True):
            holder[key] = state
        return hidden

    return run


class Watch:
    """Whether outputs and gradients of a model's layers are finite, in the order they come."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[str, bool] = {}
        self.phase: str = ""
        for name, module in model.named_modules():
            if name.startswith("model.layers.") and name.count(".") in (2, 3):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            where = f"{self.phase}{name}"
            self.see(f"{where} forward", tensor)
            if tensor.requires_grad:
                tensor.register_hook(lambda g: self.see(f"{where} gradient", g))

        return hook

    def see(self, where: str, tensor: Tensor) -> None:
        """Once not finite, it stays so, however often it is seen."""
        self.seen[where] = self.seen.get(where, True) and bool(tensor.isfinite().all())

    def rows(self, model: Any, loss: Tensor, case: str) -> Iterator[ResultRow]:
        """Counts of what was not finite, with their names in the notes."""
        for metric, wrong in (
            ("losses", [] if loss.isfinite() else ["loss"]),
            ("outputs and gradients of layers", [w for w, fine in self.seen.items() if not fine]),
            (
                "gradients of parameters",
                [
                    name
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None and not parameter.grad.isfinite().all()
                ],
            ),
        ):
            yield ResultRow(
                bench=NAME,
                case=case,
                metric=f"{metric} that are not finite",
                unit="1",
                value=len(wrong),
                bar=0.0,
                note=", ".join(wrong) or None,
            )
        yield ResultRow(
            bench=NAME, case=case, metric="looked at", unit="tensors", value=len(self.seen)
        )


def loss_of(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def stock(device: str, layers: int) -> Any:
    poison(device)
    shape, dtype = (QWEN35_4B, torch.bfloat16) if device == "cuda" else (TINY, torch.float32)
    return make_model(shape, layers, dtype, device)


def dense(device: str, layers: int, tokens: int) -> Iterator[ResultRow]:
    """A stock model, dense: which layer's gradient is the first, from the top, to go wrong."""
    made = stock(device, layers)
    watch = Watch(made)
    torch.manual_seed(2)
    ids = torch.randint(0, made.config.vocab_size, (1, tokens), device=device)
    poison(device)
    hidden = made.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -64:]
    loss = loss_of(made, hidden, ids[:, -64:])
    loss.backward()
    yield from watch.rows(made, loss, f"{layers} layers, dense, {tokens} tokens")


def shared(
    device: str, layers: int, prompt: int, response: int, group: int, *, checkpointed: bool = False
) -> Iterator[ResultRow]:
    """A stock model in three phases, beside its dense gradients.

    The last token of the prompt goes with the responses, so that the prefix needs no head.
    """
    made = stock(device, layers)
    how = ", checkpointed" if checkpointed else ""
    case = f"{layers} layers, {group} of {prompt} + {response} tokens{how}"
    for module in made.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    if device == "cuda":
        # Else each new length is tuned for, which takes a minute and is not what is looked at.
        fla._chunk_gated_delta_rule()
    watch = Watch(made)
    if checkpointed:
        checkpointed_blocks(made)
    torch.manual_seed(2)
    vocab = made.config.vocab_size
    first = torch.randint(0, vocab, (1, prompt), device=device)
    rest = torch.randint(0, vocab, (group, response), device=device)
    wanted: dict[str, Tensor] = {}
    watch.phase = "dense "
    loss = torch.zeros(())
    for one in rest.split(1):
        poison(device)
        ids = torch.cat([first, one], 1)
        hidden = made.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss = loss_of(made, hidden[:, -response:], one) / group
        loss.backward()
    yield from watch.rows(made, loss, f"{case}, dense")
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            wanted[name], parameter.grad = parameter.grad.cpu(), None
    watch.seen.clear()

    watch.phase = "prefix "
    poison(device)
    cache = differentiable(DynamicCache(config=made.config))
    made.model(input_ids=first[:, :-1], past_key_values=cache, use_cache=True)
    places = [place for layer in cache.layers for place in states_of(layer)]
    outputs = [holder[key] for holder, key in places]
    leaves = [x.detach().requires_grad_() for x in outputs]
    for (holder, key), leaf in zip(places, leaves, strict=True):
        holder[key] = leaf.expand(group, *leaf.shape[1:])
    watch.phase = "responses "
    poison(device)
    ids = torch.cat([first[:, -1:].expand(group, 1), rest[:, :-1]], 1)
    hidden = made.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
    loss = loss_of(made, hidden, rest)
    loss.backward()
    poison(device)
    pairs = [(x, leaf.grad) for x, leaf in zip(outputs, leaves, strict=True)]
    for number, (_, gradient) in enumerate(pairs):
        if gradient is not None:
            watch.see(f"gradient of state {number}", gradient)
    watch.phase = "prefix's backward "
    used = [(x, gradient) for x, gradient in pairs if gradient is not None and x.requires_grad]
    torch.autograd.backward([x for x, _ in used], [gradient for _, gradient in used])
    yield from watch.rows(made, loss, f"{case}, shared")
    norm = difference = 0.0
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            norm += float(wanted[name].double().norm()) ** 2
            difference += float((parameter.grad.cpu().double() - wanted[name]).norm()) ** 2
    yield ResultRow(
        bench=NAME,
        case=f"{case}, shared",
        metric="gradient difference",
        unit="relative",
        value=(difference / norm) ** 0.5,
        baseline="dense",
    )


@dataclass(frozen=True, kw_only=True)
class StockHybrid(Benchmark):
    """Look for gradients that are not finite in stock models of Qwen3.5's shapes.

    Attributes:
        device: Where the model runs; on a CPU it is tiny.
        layers: How many layers it has.
        tokens: Tokens of the dense sequence.
        shared: Run a prompt, its responses and the prompt's backward in three phases through a
            cache, beside dense.
        checkpoint: With --shared, checkpoint each block.
        prompt: With --shared, tokens of the prompt.
        response: With --shared, tokens of each response.
        group: With --shared, how many responses there are.
    """

    NAME: ClassVar[str] = NAME

    device: Literal["cuda", "cpu"] = "cuda"
    layers: Count = 8
    tokens: Count = 16_448
    shared: Flag = False
    checkpoint: Flag = False
    prompt: Count = 16_384
    response: Count = 64
    group: Count = 9

    def check(self) -> None:
        if self.device == "cuda":
            check_cuda(self.NAME)

    def measure(self, deadline: Deadline) -> Iterator[ResultRow]:
        if self.shared:
            sizes = self.prompt, self.response, self.group
            return shared(self.device, self.layers, *sizes, checkpointed=self.checkpoint)
        return dense(self.device, self.layers, self.tokens)
