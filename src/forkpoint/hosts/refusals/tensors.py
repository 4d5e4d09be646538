"""Parameters, embeddings and the head: plain tensors that gradients reach."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forkpoint.errors import UnsupportedError
from forkpoint.hosts.modules import every_module, every_parameter, plain_class

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_parameters(model: nn.Module, *, sharded: bool = False) -> None:
    """Plain floating-point tensors, in memory, all on one device.

    sharded: whether torch's fully_shard holds the model, so that they are DTensors.
    """
    devices: dict[torch.device, str] = {}
    for name, parameter in every_parameter(model):
        if not _is_plain(parameter) and not (sharded and _is_sharded(parameter)):
            raise UnsupportedError(
                f"parameter {name} is a {type(parameter).__name__}; sharded and quantized "
                "parameters have not been shown exact, but for torch's fully_shard of the whole "
                "model. Wrap a model of plain tensors."
            )
        if parameter.dtype not in FLOATING:
            raise UnsupportedError(
                f"parameter {name} has dtype {parameter.dtype}; quantized parameters have not been "
                f"shown exact. Allowed are {', '.join(map(str, FLOATING))}."
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        ordered = sorted((str(device), name) for device, name in devices.items())
        found = ", ".join(f"{name} on {device}" for device, name in ordered)
        raise UnsupportedError(
            f"the model's parameters lie on {len(devices)} devices ({found}); put them all on one."
        )
    if meta := devices.get(torch.device("meta")):
        raise UnsupportedError(
            f"the parameters ({meta} and all others) lie on the meta device, without "
            "values; initialise or load the model before wrapping it."
        )


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and type(parameter.data) is Tensor


def _is_sharded(parameter: nn.Parameter) -> bool:
    kind = type(parameter.data)
    return (kind.__module__, kind.__name__) == ("torch.distributed.tensor", "DTensor")


def check_embeddings(model: nn.Module) -> None:
    """Embeddings whose gradient is the sum over tokens, and whose forward changes no weight."""
    for name, module in every_module(model):
        if not isinstance(module, nn.Embedding):
            continue
        options = {
            "scale_grad_by_freq": (
                module.scale_grad_by_freq,
                "its gradient is divided by how often a token is in the tensor at hand, which is "
                "another number in a microbatch than in ordinary training",
            ),
            "sparse": (module.sparse, "its gradient is a sparse tensor"),
            "max_norm": (
                module.max_norm is not None,
                "its forward changes the weights of the tokens at hand",
            ),
        }
        for option, (given, why) in options.items():
            if given:
                raise UnsupportedError(
                    f"{name} has {option}={getattr(module, option)!r}: {why}, so gradients would "
                    f"not be those of ordinary training. Make the embedding without {option}."
                )


def check_derived_weights(model: nn.Module) -> None:
    """Weights are parameters, and not tensors that a hook computes from other parameters."""
    for name, module in every_module(model):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise UnsupportedError(
                    f"{name}.{key} is a tensor that is computed from other parameters (as weight "
                    "normalisation, spectral normalisation and pruning do), so that a gradient of "
                    "it would not arrive there. Remove the reparametrization before wrapping "
                    "(torch.nn.utils.remove_weight_norm, torch.nn.utils.prune.remove)."
                )


def check_rotary_buffers(causal: PreTrainedModel) -> None:
    """Frequencies of rotary embeddings are finite.

    They are buffers of no checkpoint. Where a model was made on the meta device and its parameters
    alone were filled they hold what lay in memory before, and then all gradients may be NaN.
    """
    for name, buffer in causal.named_buffers():
        if name.endswith("inv_freq") and not bool(buffer.isfinite().all()):
            raise UnsupportedError(
                f"buffer {name} is not finite, so no gradient would be, in ordinary training as "
                "well: a model that is moved off the meta device by to_empty holds whatever lay in "
                "memory until its buffers are filled too. Make it with from_pretrained or "
                "from_config, or call its init_weights after to_empty."
            )


def plain_head(causal: PreTrainedModel) -> nn.Linear:
    """The output head, whose weights log-probs are computed from."""
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or plain_class(head) is not nn.Linear:
        raise UnsupportedError(
            f"the output head is a {type(head).__module__}.{type(head).__name__}; forkpoint "
            "computes log-probs from a plain torch.nn.Linear. Leave lm_head out of adapters and "
            "quantization."
        )
    return head
