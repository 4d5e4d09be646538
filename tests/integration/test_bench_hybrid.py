"""The benchmark of hybrid models: tiny shapes run, rows are whole, and failures are named."""

import json
from pathlib import Path

import pytest
import torch
from commands import Shell

from benchmarks.commands import main
from benchmarks.kernel_kinds import kind_of
from benchmarks.steps import hybrid
from benchmarks.steps.hybrid_time import COMPILED, KINDS
from benchmarks.steps.stepper import Stepper
from forkpoint import ModelShape
from forkpoint.plan import make_plan
from forkpoint.plan.program import PHASES

METRICS = {
    *(f"{side} {m}" for side in ("dense", "shared") for m in ("step", "nonfinite", "rate")),
    *(f"{side} phase {phase}" for side in ("dense", "shared") for phase in PHASES),
    *(f"{side}{m} difference" for side in ("", "dense again: ") for m in ("log-prob", "gradient")),
    *("speed-up", "share of bound"),
}


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys, main)


def test_tiny_shapes_on_any_device(shell: Shell, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    done = shell(
        "hybrid", "--suite", "smoke", "--only", "R24", "--repeats", "1", "--output", output
    )
    assert done.code == 0, done.err
    rows = {row["metric"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert set(rows) == METRICS
    assert {row["case"] for row in rows.values()} == {"P70-R24-G3"}
    for side in ("dense", "shared"):
        assert rows[f"{side} nonfinite"]["value"] == 0 and rows[f"{side} step"]["value"] > 0
    assert "3 rollouts, scaled by 1;" in rows["dense step"]["note"]
    assert rows["speed-up"]["baseline"] == "dense" and rows["speed-up"]["bound"] > 1.5
    ratio = rows["dense step"]["value"] / rows["shared step"]["value"]
    assert rows["speed-up"]["value"] == pytest.approx(ratio)
    share = rows["speed-up"]["value"] / rows["speed-up"]["bound"]
    assert rows["share of bound"]["value"] == pytest.approx(share)
    for side in ("", "dense again: "):
        assert rows[f"{side}gradient difference"]["value"] < 1e-4
        assert rows[f"{side}log-prob difference"]["value"] < 1e-5
    assert rows["gradient difference"]["value"] > 0 < rows["log-prob difference"]["value"]
    last = done.result
    assert (last["benchmark"], last["cases"], last["rows"], last["failed"]) == ("hybrid", 1, 18, [])


def test_a_control_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(hybrid.make_model(hybrid.TINY, 1, torch.float32, "cpu"))
    logprobs, calls = hybrid._logprobs, iter(range(3))

    def full(*given):
        if next(calls) == 1:
            raise torch.OutOfMemoryError
        return logprobs(*given)

    monkeypatch.setattr(hybrid, "_logprobs", full)
    rows = {r.metric: r for r in hybrid.run_case(hybrid.SUITES["smoke"][0], stepper, repeats=1)}
    assert rows["dense again: fits"].value == 0 and "gradient difference" in rows
    assert "dense again: gradient difference" not in rows


def test_gradients_that_are_not_finite_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(hybrid.make_model(hybrid.TINY, 1, torch.float32, "cpu"))
    repeat = Stepper.repeat

    def spoiled(self, policy, batch, **options):
        timed = repeat(self, policy, batch, **options)
        if timed.plan.sharing == "group":
            self.model.model.layers[0].linear_attn.dt_bias.grad[0] = float("nan")
        return timed

    monkeypatch.setattr(Stepper, "repeat", spoiled)
    rows = {r.metric: r for r in hybrid.run_case(hybrid.SUITES["smoke"][0], stepper, repeats=1)}
    assert rows["dense nonfinite"].value == 0 and rows["dense nonfinite"].note is None
    assert rows["shared nonfinite"].value == 1
    assert rows["shared nonfinite"].failed and not rows["dense nonfinite"].failed
    assert "model.layers.0.linear_attn.dt_bias" in (rows["shared nonfinite"].note or "")


@pytest.mark.parametrize(
    ("prompt", "response", "bound"),
    [(16_384, 64, 8.65), (16_384, 128, 8.33), (16_384, 1024, 5.61), (8192, 4096, 2.18)],
)
def test_the_bounds_of_the_published_cases(prompt: int, response: int, bound: float) -> None:
    case = next(
        c for c in hybrid.SUITES["prompt-caching"] if (c.prompt, c.response) == (prompt, response)
    )
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 8
    shape = ModelShape.from_config({**hybrid.QWEN35_4B, "layer_types": kinds})
    found = make_plan(case.batch(1000), shape).bound
    assert round(found, 2) == bound

    def step(tokens: int, pairs: int) -> float:
        products = 2 * tokens * shape.linear_parameters + 2 * 9 * response * 2560 * 248_320
        return 3 * products + 3.5 * 8 * pairs * 2 * 16 * 512

    def below(edges: int) -> int:
        return edges * (edges + 1) // 2

    whole, shared = prompt + response - 1, prompt - 1
    dense = step(9 * whole, 9 * below(whole))
    pairs = below(shared) + 9 * (below(whole) - below(shared))
    assert found == pytest.approx(dense / step(shared + 9 * response, pairs))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta rule"),
        ("recompute_w_u_fwd_kernel", "delta rule"),
        ("main_kernel", "delta rule"),
        ("flash_fwd_sm90", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "matmul"),
        ("conv_depthwise2d_forward_kernel", "convolution"),
        ("triton_poi_fused__to_copy_add_constant_pad_nd_index_copy_mul_slice_0", "convolution"),
        ("triton_red_fused__to_copy_convert_element_type_mul_sum_1", "rest"),
        ("triton_tem_fused_mm_t_0", "matmul"),
        ("vectorized_elementwise_kernel", "rest"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind in (*KINDS, "rest")
    assert kind_of(kernel, KINDS, compiled=COMPILED) == kind
