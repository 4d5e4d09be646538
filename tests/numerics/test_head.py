"""The head against all-logits PyTorch: values, gradients, error in 16 bits, memory, no syncs."""

import os
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forkpoint.config import HEAD_STATISTICS
from forkpoint.errors import ConfigError, UnsupportedError
from forkpoint.ops.head import logprobs, token_outputs
from head_reference import logits_reference, token_logprobs, token_logprobs_reference

TOKENS, VOCAB, WIDTH = 23, 37, 8
SYNCS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal", "item")


@pytest.fixture(autouse=True)
def kept_logits_are_several_tensors(monkeypatch):
    monkeypatch.setattr(logprobs, "KEPT_TOKENS", 12)


class Recorder(TorchDispatchMode):
    """The largest tensor that any operation returned, also by dtype, and the operations' names."""

    def __init__(self):
        super().__init__()
        self.max_numel, self.max_of, self.names = 0, Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names[func._schema.name.removeprefix("aten::")] += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.max_numel = max(self.max_numel, tensor.numel())
                self.max_of[tensor.dtype] = max(self.max_of[tensor.dtype], tensor.numel())
        return out


def make(tokens=TOKENS, vocab=VOCAB, width=WIDTH, dtype=torch.float64, *, bias=True, device="cpu"):
    torch.manual_seed(tokens)
    inputs = {
        "hidden_TC": torch.randn(tokens, width),
        "weight_VC": torch.randn(vocab, width),
        "bias_V": torch.randn(vocab) if bias else None,
    }
    leaves = {
        name: None if x is None else x.to(device, dtype).requires_grad_()
        for name, x in inputs.items()
    }
    rest = {
        "labels_T": torch.randint(vocab, (tokens,)).to(device),
        "temperature_T": (torch.rand(tokens) + 0.5).to(device, dtype),
    }
    return leaves, rest


def run(function, leaves, rest, *, entropy=True, **options):
    """Outputs and gradients of a fixed, uneven combination of both outputs."""
    logprobs_T, entropies_T = function(**leaves, **rest, entropy=entropy, **options)
    factor_T = torch.linspace(-1, 2, len(logprobs_T), device=logprobs_T.device)
    total = (logprobs_T * factor_T).sum()
    if entropy:
        total = total + (entropies_T * factor_T.flip(0).square()).sum()
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    grads = torch.autograd.grad(total, list(wanted.values()))
    outputs = {"logprobs": logprobs_T.detach()}
    if entropy:
        outputs["entropies"] = entropies_T.detach()
    return outputs | dict(zip(wanted, grads, strict=True))


def assert_close(actual, expected, atol=1e-12):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(actual[name], value, atol=atol, rtol=atol, msg=message)


def test_sure_tokens_keep_their_precision() -> None:
    """Where 1 - p is tiny it is not lost in the rounding of large logits."""
    tokens, vocab = 5, 7
    leaves = {"hidden_TC": 20 * torch.eye(tokens).double(), "weight_VC": torch.eye(vocab, tokens)}
    leaves["weight_VC"] = leaves["weight_VC"].double()
    for leaf in leaves.values():
        leaf.requires_grad_()
    rest = {"labels_T": torch.arange(tokens)}
    offset = {"bias_V": torch.full((vocab,), 1e4, dtype=torch.float64)}
    for entropy in (False, True):
        expected = run(token_logprobs_reference, leaves, rest, entropy=entropy)
        found = run(token_logprobs, {**leaves, **offset}, rest, entropy=entropy)
        for name, value in expected.items():
            assert 0 < value.norm() < 1e-4, "these tokens are not sure"
            assert (found[name] - value).norm() < 1e-6 * value.norm(), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 1, "entropy": False},
        {"chunk_tokens": 7, "keep_logits": True, "softcap": 2.0},
        {"chunk_tokens": 7, "logit_scale": 0.3, "entropy": False},
        {"chunk_tokens": 5, "softcap": 3.0, "logit_scale": 1.7, "keep_logits": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("bare", [False, True])
def test_equals_the_reference_in_float64(options, bare):
    leaves, rest = make(bias=not bare)
    if bare:
        del rest["temperature_T"]
    actual = run(token_logprobs, leaves, rest, **options)
    known = {n: x for n, x in options.items() if n not in ("chunk_tokens", "keep_logits")}
    assert_close(actual, run(token_logprobs_reference, leaves, rest, **known))


@pytest.mark.parametrize("wanted", [(), ("hidden_TC",), ("weight_VC",), ("bias_V", "hidden_TC")])
def test_gradients_nobody_needs_stay_none(wanted):
    leaves, rest = make()
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted)
    logprobs_T, _ = token_logprobs(**leaves, **rest)
    assert logprobs_T.requires_grad == bool(wanted)
    if wanted:
        with Recorder() as recorder:
            logprobs_T.sum().backward()
        # One product for each, and one for the logits.
        products = sum(recorder.names[name] for name in ("mm", "addmm", "addmm_"))
        assert products == 1 + len({"hidden_TC", "weight_VC"} & set(wanted))
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted)


def test_no_tokens_give_empty_results_and_zero_gradients():
    leaves, rest = make(tokens=0)
    logprobs_T, entropies_T = token_logprobs(**leaves, **rest, entropy=True)
    assert logprobs_T.shape == entropies_T.shape == (0,)
    (logprobs_T.sum() + entropies_T.sum()).backward()
    assert leaves["hidden_TC"].grad.shape == (0, WIDTH)
    assert not leaves["weight_VC"].grad.any() and not leaves["bias_V"].grad.any()


def test_the_entropy_alone_may_be_differentiated():
    leaves, rest = make()
    results = []
    for function in (token_logprobs, token_logprobs_reference):
        _, entropies_T = function(**leaves, **rest, entropy=True)
        results.append(torch.autograd.grad(entropies_T.square().sum(), list(leaves.values())))
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


def test_a_vocabulary_entry_masked_by_its_bias_takes_no_part():
    leaves, rest = make()
    rest["labels_T"] = rest["labels_T"].clamp(max=VOCAB - 3)
    kept = {name: leaves[name].detach()[:-2].requires_grad_() for name in ("weight_VC", "bias_V")}
    with torch.no_grad():
        leaves["bias_V"][-2:] = -torch.inf
    actual = run(token_logprobs, leaves, rest)
    expected = run(token_logprobs_reference, {**leaves, **kept}, rest)
    for name in kept:
        assert not actual[name][-2:].any()
        actual[name] = actual[name][:-2]
    assert_close(actual, expected)


def test_non_contiguous_operands():
    leaves, rest = make()
    strided = {
        name: leaves[name].detach().T.contiguous().T.requires_grad_()
        for name in ("hidden_TC", "weight_VC")
    }
    assert not strided["hidden_TC"].is_contiguous()
    actual = run(token_logprobs, {**leaves, **strided}, rest, chunk_tokens=4)
    assert_close(actual, run(token_logprobs_reference, leaves, rest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("keep", "options"), [(False, {}), (True, {"softcap": 4.0, "logit_scale": 0.7})]
)
def test_16_bit_error_is_within_twice_that_of_pytorch(dtype, options, keep):
    leaves, rest = make(tokens=200, vocab=300, width=64, dtype=dtype)
    for leaf in leaves.values():
        leaf.data.mul_(0.3)
    exact = run(
        token_logprobs_reference,
        {name: x.detach().double().requires_grad_() for name, x in leaves.items()},
        rest,
        **options,
    )
    ours = run(token_logprobs, leaves, rest, chunk_tokens=16, keep_logits=keep, **options)
    plain = run(token_logprobs_reference, leaves, rest, **options)
    assert ours["logprobs"].dtype == ours["entropies"].dtype == torch.float32
    for name, value in exact.items():
        assert ours[name].dtype == plain[name].dtype
        error, bar = ((x[name].double() - value).norm() for x in (ours, plain))
        assert error <= 2 * bar + 1e-6 * value.norm(), name


def test_the_weight_gradient_is_summed_over_tokens_in_float32():
    # 4096 tokens add the same small amount; in bfloat16 the sum would stop growing at 256 of them.
    tokens = 4096
    hidden_TC = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight_VC = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels_T = torch.zeros(tokens, dtype=torch.int64)
    token_logprobs(hidden_TC, weight_VC, labels_T, chunk_tokens=1)[0].sum().backward()
    assert weight_VC.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


def test_the_hidden_gradient_is_summed_over_the_vocabulary_in_float32():
    # Each slice adds the same small amount; in bfloat16 the sum would stop growing at 256 of them.
    vocab = 4096
    hidden_TC = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    weight_VC = torch.ones(vocab, 1, dtype=torch.bfloat16)
    labels_T = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        weight_VC[0] = 0
    token_logprobs(hidden_TC, weight_VC, labels_T, chunk_tokens=1)[0].sum().backward()
    assert hidden_TC.grad.flatten().tolist() == pytest.approx([-1, -1], rel=1e-2)


def linear_then_log_softmax(hidden_TC, weight_VC, labels_T, *, bias_V, temperature_T, entropy):
    logits_TV = F.linear(hidden_TC, weight_VC, bias_V).float() / temperature_T[:, None]
    logprobs_TV = logits_TV.log_softmax(-1)
    logprobs_T = logprobs_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    return logprobs_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def test_autocast_is_that_of_a_linear_layer():
    leaves, rest = make(tokens=100, vocab=200, width=32, dtype=torch.float32)
    exact = run(
        token_logprobs_reference,
        {name: x.detach().double().requires_grad_() for name, x in leaves.items()},
        rest,
    )

    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = (run(f, leaves, rest) for f in (token_logprobs, linear_then_log_softmax))
    torch.testing.assert_close(ours["logprobs"], plain["logprobs"], atol=1e-5, rtol=1e-5)
    for name, value in exact.items():
        assert ours[name].dtype == torch.float32
        error, bar = ((x[name].double() - value).norm() for x in (ours, plain))
        assert error <= 2 * bar, name


def test_a_backward_under_autocast_is_that_of_the_forward():
    leaves, rest = make(dtype=torch.float32)
    grads = []
    for enabled in (False, True):
        logprobs_T, _ = token_logprobs(**leaves, **rest, chunk_tokens=5)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(logprobs_T.sum(), list(leaves.values())))
    for outside, inside in zip(*grads, strict=True):
        assert torch.equal(outside, inside)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"softcap": 4.0, "logit_scale": 0.7}), (torch.bfloat16, {})],
)
def test_no_more_logits_than_a_chunk_are_ever_alive(dtype, options):
    tokens, vocab, width, chunk_tokens = 512, 300, 4, 32
    leaves, rest = make(tokens, vocab, width, dtype=dtype)
    with Recorder() as recorder:
        run(token_logprobs, leaves, rest, chunk_tokens=chunk_tokens, **options)
    assert recorder.max_numel == chunk_tokens * vocab
    assert not recorder.names.keys() & set(SYNCS), "the host waits for no values"
    with Recorder() as recorder:
        run(token_logprobs_reference, leaves, rest, **options)
    assert recorder.max_numel == tokens * vocab


@pytest.mark.parametrize("keep", [False, True], ids=["again", "kept"])
def test_kept_logits_save_the_product_of_the_backward(keep):
    """Three products each way but for the logits', and none is kept where no gradient is wanted."""
    leaves, rest = make(bias=False, dtype=torch.float32)
    with Recorder() as recorder:
        run(token_logprobs, leaves, rest, chunk_tokens=TOKENS, keep_logits=keep)
    products = sum(recorder.names[name] for name in ("mm", "addmm", "addmm_"))
    assert products == (3 if keep else 4)
    with Recorder() as recorder, torch.no_grad():
        token_logprobs(**leaves, **rest, chunk_tokens=4, keep_logits=keep)
    assert recorder.max_numel <= 4 * VOCAB + VOCAB * WIDTH


@pytest.mark.parametrize("chunk_tokens", [2, 4])
def test_logits_kept_in_one_tensor_need_no_float32_copy_of_the_weight(chunk_tokens):
    vocab, width = 300, 16
    leaves, rest = make(12, vocab, width, dtype=torch.bfloat16)
    with Recorder() as recorder:
        run(token_logprobs, leaves, rest, chunk_tokens=chunk_tokens, keep_logits=True)
    assert recorder.max_of[torch.float32] == chunk_tokens * vocab < vocab * width


def test_kept_logits_serve_one_backward():
    leaves, rest = make()
    logprobs_T, _ = token_logprobs(**leaves, **rest, keep_logits=True)
    logprobs_T.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="kept for one backward"):
        logprobs_T.sum().backward()


def test_a_negative_softcap_is_refused():
    leaves, rest = make()
    with pytest.raises(ConfigError, match=r"softcap is -1\.0"):
        token_logprobs(**leaves, **rest, softcap=-1.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 5, "keep_logits": True},
        {"softcap": 3.0, "logit_scale": 0.25, "chunk_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("bare", [False, True])
def test_statistics(options, dtype, bar, bare):
    """Of all logits at once, in float64; log-probs and gradients are as without them."""
    leaves, rest = make(dtype=dtype, bias=not bare)
    if bare:
        del rest["temperature_T"]
    found = token_outputs(**leaves, **rest, entropy=True, statistics=HEAD_STATISTICS, **options)
    plain = token_outputs(**leaves, **rest, entropy=True, **options)
    wanted = [x for x in leaves.values() if x is not None]
    grads = []
    for outputs in (found, plain):
        total = (outputs["logprobs"] + outputs["entropies"].square()).sum()
        grads.append([outputs["logprobs"], *torch.autograd.grad(total, wanted)])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    given = {n: None if x is None else x.detach().double() for n, x in leaves.items()}
    known = {n: x for n, x in options.items() if n not in ("chunk_tokens", "keep_logits")}
    z_TV = logits_reference(**given, temperature_T=rest.get("temperature_T"), **known)
    expected = {
        "mean_logits": z_TV.mean(-1),
        "is_top1": (z_TV.argmax(-1) == rest["labels_T"]).double(),
        "log_sum_sq_probs": z_TV.softmax(-1).square().sum(-1).log(),
    }
    for name, value in expected.items():
        assert found[name].dtype == dtype and not found[name].requires_grad
        torch.testing.assert_close(found[name].double(), value, rtol=bar, atol=bar)


def test_statistics_of_ties_of_large_logits_and_of_shards():
    found = token_outputs(
        torch.ones(3, 1),
        torch.tensor([[1.0], [300.0], [300.0]]),
        torch.arange(3),
        statistics=("is_top1", "log_sum_sq_probs"),
    )
    assert list(found) == ["logprobs", "is_top1", "log_sum_sq_probs"]
    assert found["is_top1"].tolist() == [0.0, 1.0, 0.0], "of equal logits the first is the largest"
    assert torch.allclose(found["log_sum_sq_probs"], torch.tensor(0.5).log(), atol=1e-3)
    leaves, rest = make()
    with pytest.raises(UnsupportedError, match="hold the vocabulary together"):
        token_outputs(**leaves, **rest, statistics=("is_top1",), shard=object())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("bias", [False, True], ids=["fused", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cuda_without_syncs_and_within_the_error_bars(dtype, bias, autocast, keep):
    leaves, rest = make(700, 10_000, 64, dtype=dtype, bias=bias, device="cuda")
    for leaf in leaves.values():
        if leaf is not None:
            leaf.data.mul_(0.3)
    exact = run(
        token_logprobs_reference,
        {n: None if x is None else x.detach().double().requires_grad_() for n, x in leaves.items()},
        rest,
    )
    plain_logits = token_logprobs_reference if dtype == torch.float64 else linear_then_log_softmax
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        plain = run(plain_logits, leaves, rest)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = run(token_logprobs, leaves, rest, chunk_tokens=64, keep_logits=keep)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, value in exact.items():
        assert ours[name].dtype == plain[name].dtype
        error, bar = ((x[name].double() - value).norm() for x in (ours, plain))
        assert error <= 2 * bar + 1e-6 * value.norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("triton") is None
    or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="there is no CUDA device, nor Triton with its interpreter (TRITON_INTERPRET=1)",
)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropies"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("vocab", [37, 4096, 10_001])
def test_the_fused_softmax_in_one_pass(vocab, scaled, entropy):
    """Whole blocks masked at either end, logits that are sure of a token, any vocabulary."""
    from forkpoint.ops.head.triton_softmax import softmax_gradient_, softmax_stats

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(vocab)
    tokens = 7
    logits_TV = 5 * torch.randn(tokens, vocab)
    logits_TV[0, : vocab // 2] = -torch.inf
    logits_TV[1, vocab // 3 :] = -torch.inf
    logits_TV[2, 3] = 200.0
    labels_T = torch.tensor([vocab - 1, 2, 3, 0, vocab // 2, 5, vocab - 2])
    scale_T = torch.rand(tokens) + 0.5 if scaled else None
    weights = torch.randn(2, tokens)
    exact_TV = logits_TV.double().requires_grad_()
    logprobs_TV = (exact_TV if scale_T is None else exact_TV * scale_T[:, None]).log_softmax(-1)
    expected_T = logprobs_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    kept = logprobs_TV.clamp(min=-1e4)
    entropies_T = -(kept.exp() * kept).sum(-1)
    total = (expected_T * weights[0]).sum()
    total = total + (entropies_T * weights[1]).sum() if entropy else total
    (gradient_TV,) = torch.autograd.grad(total, exact_TV)

    given_TV = logits_TV.to(device)
    labels, scale = labels_T.to(device), None if scale_T is None else scale_T.to(device)
    found = torch.full((4, tokens), torch.nan, device=device)
    entropies = found[3] if entropy else None
    softmax_stats(given_TV, labels, scale, *found[:3], entropies, -1e4)
    close = {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(found[0].cpu().double(), expected_T.detach(), **close)
    if entropy:
        torch.testing.assert_close(found[3].cpu().double(), entropies_T.detach(), **close)
    weights = weights.to(device)
    grads = (weights[0], weights[1] if entropy else None)
    stats = scale, *found[1:3], entropies
    # Parts of the vocabulary are as good as all of it.
    for begin, end in ((0, vocab), (0, vocab // 3), (vocab // 3, vocab)):
        given_Tv = given_TV[:, begin:end].clone(memory_format=torch.contiguous_format)
        ours_Tv = softmax_gradient_(given_Tv, labels, begin, *stats, *grads, -1e4)
        assert ours_Tv.data_ptr() == given_Tv.data_ptr()
        wanted_Tv = gradient_TV[:, begin:end]
        torch.testing.assert_close(ours_Tv.cpu().double(), wanted_Tv, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("triton") is None
    or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="there is no CUDA device, nor Triton with its interpreter (TRITON_INTERPRET=1)",
)
@pytest.mark.parametrize("tokens", [11, 12, 50], ids="{} tokens".format)
@pytest.mark.parametrize("keep", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("options", [{}, {"entropy": False}, {"logit_scale": 0.7}], ids=str)
def test_the_fused_head_equals_the_reference(monkeypatch, options, keep, tokens):
    monkeypatch.setattr(logprobs, "_fuses", lambda _: True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    leaves, rest = make(tokens, 101, 16, dtype=torch.float32, bias=False, device=device)
    exact = {
        n: None if x is None else x.detach().double().requires_grad_() for n, x in leaves.items()
    }
    expected = run(token_logprobs_reference, exact, rest, **options)
    found = run(token_logprobs, leaves, rest, chunk_tokens=3, keep_logits=keep, **options)
    for name, value in expected.items():
        assert (found[name].double() - value).norm() <= 1e-5 * value.norm(), name
