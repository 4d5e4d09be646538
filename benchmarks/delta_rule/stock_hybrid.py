"""Stock models of Qwen3.5's shapes, dense and with a prefix in a cache: is a gradient not finite?

    python benchmarks/stock_hybrid.py --layers 32                        dense
    python benchmarks/stock_hybrid.py --layers 32 --shared --checkpoint  in three phases, and dense
    python benchmarks/stock_hybrid.py --device cpu --tokens 70           that it runs, small

With --shared a model runs its prompt into a cache, the responses as a batch from copies of it, and
the prompt's backward from what gradients of the copies sum up to. Nothing of forkpoint runs but its
shapes; all but the cache is transformers' own. 5 GiB of free memory hold NaN before each pass. The
last layers whose output's gradient was finite, and the first whose was not, are named, together
with every parameter whose gradient is not finite. Each line is a row of JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from benchmarks.steps.hybrid import QWEN35_4B, TINY, make_model
from forkpoint.environment import environment
from forkpoint.ops.delta_rule import fla


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

    def rows(self, model: Any, loss: Tensor, **case: Any) -> Iterator[dict[str, Any]]:
        yield {"case": "model", **case, "loss_finite": bool(loss.isfinite())}
        for what, fine in self.seen.items():
            if not fine:
                yield {"case": "model", "first_seen_nonfinite": what}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                yield {"case": "model", "parameter": name}
        wrong = sum(not fine for fine in self.seen.values())
        yield {"case": "model", "looked_at": len(self.seen), "nonfinite": wrong}


def loss_of(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def stock(device: str, layers: int) -> Any:
    poison(device)
    shape, dtype = (QWEN35_4B, torch.bfloat16) if device == "cuda" else (TINY, torch.float32)
    return make_model(shape, layers, dtype, device)


def dense(device: str, layers: int, tokens: int) -> Iterator[dict[str, Any]]:
    """A stock model, dense: which layer's gradient is the first, from the top, to go wrong."""
    made = stock(device, layers)
    watch = Watch(made)
    torch.manual_seed(2)
    ids = torch.randint(0, made.config.vocab_size, (1, tokens), device=device)
    poison(device)
    hidden = made.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -64:]
    loss = loss_of(made, hidden, ids[:, -64:])
    loss.backward()
    yield from watch.rows(made, loss, layers=layers, tokens=tokens)


def shared(
    device: str, layers: int, prompt: int, response: int, group: int, *, checkpointed: bool = False
) -> Iterator[dict[str, Any]]:
    """A stock model in three phases, beside its dense gradients.

    The last token of the prompt goes with the responses, so that the prefix needs no head.
    """
    made = stock(device, layers)
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
    yield from watch.rows(made, loss, layers=layers, what="dense", checkpointed=checkpointed)
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
    yield from watch.rows(made, loss, layers=layers, what="shared", checkpointed=checkpointed)
    norm = difference = 0.0
    for name, parameter in made.named_parameters():
        if parameter.grad is not None:
            norm += float(wanted[name].double().norm()) ** 2
            difference += float((parameter.grad.cpu().double() - wanted[name]).norm()) ** 2
    yield {"case": "model", "what": "shared", "difference": (difference / norm) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_448, help="of the dense sequence")
    parser.add_argument("--shared", action="store_true", help="in three phases, beside dense")
    parser.add_argument("--checkpoint", action="store_true", help="with --shared, each block")
    parser.add_argument("--prompt", type=int, default=16_384)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--group", type=int, default=9)
    options = parser.parse_args()
    if options.shared:
        sizes = options.prompt, options.response, options.group
        rows = shared(options.device, options.layers, *sizes, checkpointed=options.checkpoint)
    else:
        rows = dense(options.device, options.layers, options.tokens)
    for row in rows:
        print(json.dumps(row), flush=True)
    print(json.dumps(environment()))


if __name__ == "__main__":
    main()
