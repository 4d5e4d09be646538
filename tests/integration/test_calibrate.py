"""`forkpoint calibrate` on the CPU: it measures, policies find what it wrote, and it predicts."""

import gc
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from weakref import ref

import numpy as np
import pytest
import torch
from commands import CONFIG
from steps import forked_batch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from forkpoint import Config, ConfigError, losses, save_rollouts, wrap
from forkpoint.apps.cli import main
from forkpoint.apps.cli.models import random_model
from forkpoint.engine.changes import Changes
from forkpoint.errors import UnsupportedError
from forkpoint.hosts.host import ModelHost
from forkpoint.hosts.libraries import host_of
from forkpoint.hosts.modules import cache_module_walks
from forkpoint.hosts.transformers.shapes import shallow_model
from forkpoint.ops.attention import operator, table
from forkpoint.plan import ModelShape, make_plan
from forkpoint.plan.capabilities import Capabilities
from forkpoint.plan.pricing.calibration import FOLDER_VARIABLE, Calibration, Curve
from forkpoint.rollouts.batch import RolloutBatch
from forkpoint.rollouts.synthetic import synthetic_rollouts
from forkpoint.step.calibrate import automatic, calibrator, microbatches
from forkpoint.step.calibrate import clock as clock_file
from forkpoint.step.calibrate import parts as parts_module
from forkpoint.step.calibrate.calibrator import QUICK, calibrate
from forkpoint.step.calibrate.clock import Clock, Times
from forkpoint.step.calibrate.microbatches import BlockTimes, Rows, StepTimes
from forkpoint.step.calibrate.parts import Parts
from forkpoint.tree import Table, full_table

MODEL = CONFIG | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_hidden_layers": 6,
}


CPU = torch.device("cpu")


def small_model(layers: int = 6) -> PreTrainedModel:
    return random_model(MODEL | {"num_hidden_layers": layers}, torch.float32, 0).train()


def cpu_clock(repeats: int = 1) -> Clock:
    return Clock(CPU, repeats=repeats, busy_products=0)


def cpu_rows(repeats: int = 1) -> Rows:
    return Rows(cpu_clock(repeats), kernel="auto", vocab=64, segment_tokens=16)


def endless() -> float:
    """Seconds that are left, for measurements without a limit."""
    return 1e9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model's configuration and its calibration, made by the command."""
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder / "found"))
        begin = time.perf_counter()
        assert main(["calibrate", "--model", str(folder / "config.json"), "--json"]) == 0
        assert time.perf_counter() - begin < 120
    return folder


def test_what_is_measured_makes_sense(folder: Path) -> None:
    (path,) = (folder / "found").iterdir()
    found = Calibration.load(path)
    assert found.shape.layers == 6 and found.shape.hidden == 64 and not found.compiled
    for curve in (found.block, found.head, found.causal, found.rectangle, found.part):
        assert min((*curve.forward, *curve.backward)) > 0
        assert list(curve.at) == sorted(curve.at)
    assert found.out_bytes_per_ms > 1e4 and found.back_bytes_per_ms > 1e4
    assert 0.01 < found.host_step_ms[0] < 1e3 and 0 <= found.host_step_ms[1] < 1e2
    none, selective, full = (found.kept_bytes[p] for p in ("none", "selective", "full"))
    # A checkpointed block keeps its input; the MLP of a whole one what has its inner width.
    assert full[0] == pytest.approx(64 * 4, rel=0.01)
    assert none[0] - selective[0] == pytest.approx(4 * 128 * 4, rel=0.1)
    assert none[0] == pytest.approx(found.shape.activation_bytes("none") / 6, rel=0.35)


def test_policies_find_it_and_predict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    rollouts = synthetic_rollouts(
        groups=1, rollouts_per_group=4, prompt_tokens=128, response_tokens=64, vocab_size=512
    )
    batch = RolloutBatch(rollouts)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "missing"))
    counted = wrap(model).plan(batch)
    assert counted.predicted_ms is None
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "found"))
    policy = wrap(model)
    plan = policy.plan(batch)
    assert plan.predicted_ms is not None and "measured on" in plan.rests_on
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        policy.forward_backward(batch, losses.GRPO(), plan=plan)
        times.append((time.perf_counter() - begin) * 1e3)
    # Other processes share the machine, so that this shows no more than the right order.
    assert 0.1 < plan.predicted_ms / min(times) < 10

    (path,) = (folder / "found").iterdir()
    named = wrap(model, Config(calibration=path)).plan(batch)
    assert named.predicted_ms == plan.predicted_ms

    elsewhere = path.with_name("elsewhere.json")
    replace(Calibration.load(path), device="a faster one").save(elsewhere)
    with pytest.raises(ConfigError, match=r"measured on a faster one.*and here is"):
        wrap(model, Config(calibration=elsewhere)).plan(batch)
    elsewhere.unlink()


# A policy's own measurement
# ------------------------------------------------------------


def test_the_plan_command_takes_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_rollouts(tmp_path / "rollouts.jsonl", list(forked_batch()))
    (path,) = (folder / "found").iterdir()
    arguments = ["plan", str(tmp_path / "rollouts.jsonl"), "--model", str(folder / "config.json")]
    for options, predicts in ((("--calibration", str(path)), True), ((), False)):
        assert main([*arguments, "--json", *options]) == 0
        assert (json.loads(capsys.readouterr().out)["predicted_ms"] is not None) == predicts


def test_the_dtype_is_that_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a plan for the same configuration takes the file."""
    file, found = tmp_path / "rollouts.jsonl", tmp_path / "found.json"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL | {"dtype": "bfloat16"}), encoding="utf-8")
    save_rollouts(file, list(forked_batch()))
    measure = ["calibrate", "--model", str(config), "--output", str(found), "--json"]
    assert main([*measure, "--max-seconds", "0.01"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    plan = ["plan", str(file), "--model", str(config), "--calibration", str(found), "--json"]
    assert main(plan) == 0
    assert json.loads(capsys.readouterr().out)["predicted_ms"] is not None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of calibrations, empty; CPUs are measured."""
    monkeypatch.setattr(automatic, "MEASURED", {"cpu"})
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_a_policy_measures_once_and_leaves_the_model_as_it_was(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    plan = wrap(model).plan(forked_batch())
    assert plan.predicted_ms and "measured on" in plan.rests_on
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    (path,) = cache.iterdir()
    found = Calibration.load(path)
    assert found.shape.layers == 6 and found.shape.vocab == 512
    path.write_text("damaged")
    assert wrap(model).plan(forked_batch()).predicted_ms
    assert Calibration.load(path).shape == found.shape
    # A later process reads the file, also for another depth.
    monkeypatch.setattr(automatic, "calibrate", None)
    shallower = small_model(2)
    assert wrap(shallower).plan(forked_batch()).predicted_ms
    path.unlink()
    assert wrap(model, Config(calibration=None)).plan(forked_batch()).predicted_ms is None


def test_scores_in_inference_mode_measure_and_nothing_looks_for_anomalies(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*args: Any, **kwargs: Any) -> Calibration:
        assert torch.is_grad_enabled() and not torch.is_anomaly_enabled()
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(automatic, "calibrate", measured)
    policy = wrap(small_model())
    with torch.inference_mode(), torch.autograd.set_detect_anomaly(True):
        policy.score(forked_batch())
        assert torch.is_anomaly_enabled()
    assert list(cache.iterdir())
    assert policy.plan(forked_batch()).predicted_ms


@pytest.mark.slow
def test_a_step_that_measures_has_the_gradients_of_its_plan(cache: Path) -> None:
    model = small_model()
    policy = wrap(model)
    plan = policy.forward_backward(forked_batch(), losses.GRPO()).plan
    assert plan.predicted_ms
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    policy.forward_backward(forked_batch(), losses.GRPO(), plan=plan)
    for p, x in zip(model.parameters(), found, strict=True):
        assert p.grad is not None and x is not None and torch.equal(p.grad, x)


def test_where_nothing_is_measured_prices_are_nominal(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = small_model()
    frozen.model.layers[0].requires_grad_(False)
    assert wrap(frozen).plan(forked_batch()).predicted_ms is None
    assert "forkpoint calibrate" not in caplog.text

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(automatic, "calibrate", fails)
    policy = wrap(small_model())
    for _ in range(2):
        assert policy.plan(forked_batch()).predicted_ms is None
    assert caplog.text.count("no memory left") == 1 and not list(cache.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "MEASURED", {"cuda"})
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    wide = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
    config = {**MODEL, **wide, "num_key_value_heads": 8, "head_dim": 128}
    with torch.device("cuda"):
        model = random_model(config, torch.bfloat16, 0).train()
    policy = wrap(model)
    # Libraries allocate their memory in a first step.
    policy.with_config(calibration=None).forward_backward(forked_batch(), losses.GRPO())
    model.zero_grad(set_to_none=True)
    random, before = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    plan = policy.plan(forked_batch())
    (path,) = tmp_path.iterdir()
    found = Calibration.load(path)
    assert plan.predicted_ms and found.seconds - found.first_seconds < 3
    assert min(found.host_block_ms) > 0.05 and max(found.host_block_ms) < 20
    assert 0.5 < found.host_step_ms[0] + 28 * found.host_step_ms[1] < 100
    assert max(*found.host_write_ms, *found.host_read_ms) < 5
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert torch.cuda.memory_allocated() - before < 1 << 26
    assert all(p.grad is None for p in model.parameters())


def test_blocks_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(function: Callable, **_: object) -> Callable:
        return compiler(function, dynamic=True, backend="eager")

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    counters.clear()
    # As wide as the second of the lengths that are measured.
    model = small_model(1)
    assert model.config.hidden_size == QUICK["cpu"].row_tokens[1]
    calibrate(
        small_model,
        wrap(model).host.shape,
        compile_blocks=True,
        efforts=QUICK,
    )
    assert counters["stats"]["unique_graphs"] == 1


def test_a_steady_time_is_a_share_of_that_behind_products(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = cpu_clock()
    assert clock.steady_share(int, abs, Times(1, 1)) == 1.0, "a CPU has no clock to tell apart"
    clock.kind, marks = "cuda", itertools.count()
    monkeypatch.setattr(clock_file, "mark", lambda _: next(marks) / 1e3)
    cases = [(1.25, 0.0, 0.8), (1.25, 1.1, 1.0), (0.9, 0.0, 1.0), (9.0, 0.0, 0.7)]
    for whole, issued, share in cases:
        alone = Times(whole / 2, whole / 2, issued)
        assert clock.steady_share(int, abs, alone) == pytest.approx(share)


def test_launches_that_fill_the_device_tell_queries_from_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made-up times: 1e-3 ms a query, 1e6 pairs a ms, and a walk of 1e-3 ms a key or a query."""
    host = host_of(small_model())
    parts = Parts(cpu_clock(), host.shape, kernel="auto", filled_tokens=8192)

    def added(length: int, queries: int, keys: int, ancestors: int = 1) -> Times:
        pairs = queries * keys / 1e6
        forward, backward = max(pairs, 1e-3 * keys), max(pairs, 1e-3 * queries)
        return Times(1e-3 * queries + forward, 1e-3 * queries + backward)

    monkeypatch.setattr(parts, "_added", added)
    found = parts.rectangles(256, (1024, 8192))
    assert found.part.at == (256, 8192)
    assert [found.part.time(8192, backward=way) for way in (False, True)] == pytest.approx(
        [8.192] * 2
    )
    assert [*found.pairs.forward, *found.pairs.backward] == pytest.approx([1e6] * 4, rel=0.01)
    assert found.walk_ms == pytest.approx((1e-3, 1e-3), rel=0.01)


def test_launches_of_short_ancestors_have_several_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ancestor of 256 keys would leave most of a GPU idle in the backward."""
    host = host_of(small_model())
    parts = Parts(cpu_clock(), host.shape, kernel="auto", filled_tokens=32_768)
    made: list[tuple[int, tuple[int, ...]]] = []

    def timed(length: int, count: int, ancestors: tuple[int, ...] = ()) -> Times:
        made.append((length * count, ancestors))
        return Times(1.0 + len(made), 1.0 + len(made))

    monkeypatch.setattr(parts, "_attention_ms", timed)
    parts.rectangles(256, (256, 1024, 8192))
    assert made[1:4] == [(32_768, (256,) * 16), (32_768, (1024,) * 4), (4096, ())]
    assert made[4] == (4096, (8192,))


def test_timed_attention_divides_queries_among_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries have one ancestor, and the timed backward adds to no gradient of its inputs."""
    host = host_of(small_model())
    parts = Parts(cpu_clock(2), host.shape, kernel="auto", filled_tokens=64)
    inputs: list[torch.Tensor] = []
    layouts: list[Table] = []

    def attends(*qkv: torch.Tensor, **others: Any) -> Any:
        inputs.extend(qkv)
        return operator.shared_attention(*qkv, **others)

    def laid_out(layout: Table, **others: Any) -> table.AttentionTable:
        layouts.append(layout)
        return table.AttentionTable(layout, **others)

    monkeypatch.setattr(parts_module, "shared_attention", attends)
    monkeypatch.setattr(parts_module, "AttentionTable", laid_out)
    assert min(parts._attention_ms(4, 5, (3, 3))[:2]) > 0
    causal, rectangle = layouts[0].launches
    assert causal.q_lengths == (4, 4, 4, 4, 4, 1)
    assert rectangle.q_lengths == (10, 11) and rectangle.k_lengths == (3, 3)
    assert len(inputs) == 9 and all(x.grad is None for x in inputs)


def test_the_longest_row_is_timed_where_the_host_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is foreseen in proportion to the device's; the host's does not grow."""
    made: dict[int, list[int]] = {1: [], 3: []}

    class SlowHost(Rows):
        def __init__(self) -> None:
            pass

        def row_ms(self, host: Any, tokens: int) -> Times:
            made[host].append(tokens)
            return Times(tokens / 2e3, tokens / 1e3, 20.0, 40.0)

    effort = QUICK["cuda"]
    for left, sizes in ((0.5, [256, 2048, 8192]), (0.1, [256, 2048])):
        for each in made.values():
            each.clear()
        rows, hosts = SlowHost(), cast(Any, {1: 1, 3: 3})
        done, times = calibrator._timed_rows(rows, hosts, effort, lambda left=left: left)
        assert done == made[1] == made[3] == sizes and len(times[3]) == len(sizes)


def test_a_short_step_is_timed_by_its_microbatches_and_what_is_outside_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small_model()
    host, alive = host_of(model), ref(model)
    rows = cpu_rows()

    def timed(host: ModelHost) -> StepTimes:
        step = rows.host_step(host, 16, 16)
        assert rows.in_turn({"step": step}, endless) == {"step"}
        return step.times

    with Changes() as changes:
        cache_module_walks(changes)  # as within a step that measures at its first plan
        whole = timed(host)
        monkeypatch.setattr(host, "check", lambda *_, **__: time.sleep(0.05))
        slow = timed(host)
        assert slow.outside > 50 and whole.outside > 0
        assert min(*whole.prompt_block, *whole.reader_block) > 0
        assert MODEL["num_hidden_layers"] * min(whole.reader_block) < 10 * max(whole.reader)
        assert all(p.grad is not None for p in model.parameters())
        del model, host, changes
        monkeypatch.undo()
        gc.collect()
        assert alive() is None, "lists of the step around it hold no model that was measured"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_is_timed_where_the_next_begins(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """With a clock that only attention moves: by 10 ms forward, by 20 ms for each launch backward,
    and by 50 ms for a table, which the first block makes."""
    now = [0.0]

    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(microbatches, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(operator, "merge", slow(operator.merge, 0.01))
    monkeypatch.setattr(operator, "_launch_backward", slow(operator._launch_backward, 0.02))
    made = slow(table.AttentionTable.__init__, 0.05)
    monkeypatch.setattr(table.AttentionTable, "__init__", made)
    model = small_model(4)
    host = host_of(model, compile_blocks=compiled)
    rows = cpu_rows(2)
    step, forked = rows.host_step(host, 16, 16), rows.host_row(host, 16, 16, 2, shares=True)
    plain = {f"{count}": rows.host_row(host, 16, 16, count) for count in (1, 2)}
    rows.in_turn({"step": step, "forked": forked, **plain}, endless)
    for row in plain.values():
        assert row.block_ms == pytest.approx((10, 20))
    assert forked.block_ms == pytest.approx((10, 40))
    assert step.times.prompt_block == pytest.approx((10, 20))
    assert step.times.reader_block == pytest.approx((10, 40)), "it has two launches"
    assert "enter" not in vars(host), "the host is as before"


def test_settings_of_a_model_that_steps_refuse() -> None:
    """A load-balancing loss is left out, and dropout is named. In float64 experts are eager."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = MODEL | experts | {"model_type": "qwen3_moe", "output_router_logits": True}
    shape = ModelShape.from_config(config)

    def measure(**changes: Any) -> Calibration:
        make = partial(shallow_model, config | changes, device=CPU, dtype=torch.float64)
        return calibrate(make, shape, efforts=QUICK)

    assert measure().host_step_ms[0] > 0
    with pytest.raises(UnsupportedError, match=r"dropout 0\.1 in attention"):
        measure(attention_dropout=0.1)


def test_samples_run_in_turn_and_those_that_a_model_refuses_are_left_out() -> None:
    rows = cpu_rows()
    ran: list[str] = []

    def sample(name: str, seconds: float) -> Any:
        def run() -> None:
            ran.append(name)
            time.sleep(seconds if ran.count(name) == 1 else 0.0)
            if name == "long":
                raise UnsupportedError("no longer prompt")

        return SimpleNamespace(run=run)

    samples = {n: sample(n, 0.2) for n in ("plain", "long", "forked")}
    names = rows.in_turn(samples, endless, optional=["long"])
    assert names == {"plain", "forked"}
    assert ran == ["plain", "long", "forked"] + ["plain", "forked"] * 2
    assert 0 < rows.clock.seconds < 0.2, "first runs, which compile, are not counted"
    with pytest.raises(UnsupportedError):
        rows.in_turn(samples, endless)


@pytest.mark.parametrize(("seconds", "runs"), [(9.0, 7), (0.35, 4), (0.0, 3)])
def test_samples_of_the_host_end_when_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, seconds: float, runs: int
) -> None:
    """Each run takes 0.1 s by a clock of the test; the first, which is not counted, 5 s. No run
    begins that would end late, except the first three."""
    now, starts = [0.0], []
    monkeypatch.setattr(microbatches, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rows = cpu_rows(3)

    def run() -> None:
        now[0] += 0.1 if starts else 5.0
        starts.append(now[0])

    samples: dict[str, Any] = {"plain": SimpleNamespace(run=run)}
    assert rows.in_turn(samples, lambda: seconds - rows.clock.seconds) == {"plain"}
    assert len(starts) == runs


def test_the_least_time_of_each_block_counts_without_the_first_run() -> None:
    """Forwards and backwards of five blocks in four runs; another process takes time in two."""
    blocks = BlockTimes(cast(Any, SimpleNamespace(blocks=[None] * 5)))
    for way, ms in ((0, 2.0), (1, 3.0)):
        for run in range(4):
            # The first run is faster, the first two blocks of a forward slower.
            each = np.full(4, ms - 1.5 * (run == 0))
            each[:2] += 10.0 * (way == 0)
            each[run - 1] += 5.0 * (run in (1, 2))
            blocks._passes[way].append([0.0, *np.cumsum(each).tolist()])
    assert blocks.least(slice(1, None), slice(1, None)) == pytest.approx((2.0, 3.0))


@pytest.mark.parametrize("long_ms", [None, 0.03, 0.25])
def test_times_of_the_host_are_those_of_blocks(long_ms: float | None) -> None:
    """With made-up times: 2 and 3 ms a block, for every other block 1 and 2 ms for the first
    additional launch, and half of that for the others."""

    def block(more: float) -> tuple[float, float]:
        return 2.0 + more, 3.0 + 2 * more

    def step(layers: int) -> StepTimes:
        reader = (4.0 + 3.5 * layers, 5.0 + 5.25 * layers)
        return StepTimes(reader, 6.0 + 0.5 * layers, (2.25, 2.5), (3.5, 5.25))

    blocks = {"plain": block(0.0), "forked": block(0.5), "tree": block(0.5 + 3 * 0.25)}
    if long_ms is not None:
        blocks["long"] = block(long_ms)
    half = SimpleNamespace(blocks=[None] * 8, shape=SimpleNamespace(windows=(0, 64) * 4))
    found = calibrator._host_times(cast(Any, half), step(8), blocks)
    long_ms = 0.0 if long_ms in (None, 0.03) else long_ms
    assert found == {
        "host_block_ms": (2.0, 2.5),  # at most the time of a prompt, which also writes its cache
        "host_rest_ms": (4.0, 5.0),
        "host_write_ms": (0.25, 0.0),
        "host_read_ms": (1.0, 1.75),
        "host_launch_ms": (1.0, 2.0),
        "host_later_launch_ms": (0.5, 1.0),
        "host_long_ms": (long_ms, 2 * long_ms),
    }
    assert calibrator._host_step({1: step(1), 8: step(8)}) == (6.0, 0.5)
    longer = step(1)._replace(outside=8.5, tokens=1000)
    assert calibrator._host_token(step(1), longer) == 2e-3


@pytest.mark.parametrize("most", [None, 32])
def test_times_of_the_host_are_measured_as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    """Of a model of eight layers, and of rollouts of 65 tokens where the model takes them."""
    monkeypatch.setattr(calibrator, "LONG_TOKENS", 64)
    rope = {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": most,
    }
    config, made = MODEL | (rope if most else {}), []

    def make(layers: int) -> torch.nn.Module:
        made.append(layers)
        return random_model(config | {"num_hidden_layers": layers}, torch.float32, 0).train()

    shape = wrap(random_model(config, torch.float32, 0).train()).host.shape
    efforts = {"cpu": replace(QUICK["cpu"], host=True)}
    found = calibrate(make, shape, compile_blocks=False, efforts=efforts)
    assert made == [1, 3, 8]
    assert min(*found.host_block_ms, found.host_rest_ms[0], found.host_step_ms[0]) > 0
    if most:
        assert found.host_token_ms == 0.0, "its longest rollouts have fewer tokens"
    capabilities = Capabilities(runs_ahead=True)
    plans = [
        make_plan(forked_batch(), shape, calibration=each, capabilities=capabilities)
        for each in (found, replace(found, host_block_ms=(1e3, 1e3)))
    ]
    assert plans[0].predicted_ms and plans[1].predicted_ms
    assert plans[1].predicted_ms > 2e3 * shape.layers > plans[0].predicted_ms


def test_the_model_of_host_times_is_deep_where_layers_are_small() -> None:
    sizes = {1 << 20: 8, 200 << 20: 5, 1 << 30: 3, 8 << 30: 3}
    assert {n: calibrator.deep_layers(n) for n in sizes} == sizes


def test_rows_have_short_segments_whose_attention_is_not_part_of_a_block() -> None:
    host = host_of(small_model())
    rows = cpu_rows()
    run = rows._row(host, 70, labelled=2)
    with host.entered(), patch.object(host, "forward", wraps=host.forward) as forward:
        assert run().shape == (4 * 2,)
    assert np.bincount(forward.call_args.args[1].segments).tolist() == [17, 17, 18, 18]
    # A block takes 3 and 5 ms and attention to 10 pairs 1 ms, the rest 2 ms, a label 0.5 ms.
    sizes, segments = [16, 64], [1, 4]
    causal = Curve((16, 64), (10.0, 1.0), (10.0, 1.0))
    head = Curve((1, 8), (0.5, 4.0), (0.5, 4.0))
    timed = {
        layers: [
            Times(*(layers * (block + 13.6 * n) + 2 + 0.5 * n for block in (3.0, 5.0)))
            for n in segments
        ]
        for layers in calibrator.LAYERS
    }
    block = calibrator._block(sizes, timed, segments, causal)
    rest = calibrator._rest(sizes, timed, segments, head)
    assert (block.forward, block.backward) == ((pytest.approx(3),) * 2, (pytest.approx(5),) * 2)
    assert (*rest.forward, *rest.backward) == pytest.approx((2, 2, 2, 2))


def test_rows_of_the_host_have_a_launch_for_each_fork() -> None:
    host = host_of(small_model())
    rows = cpu_rows()
    config = Config(sharing="group", boundary="within")
    for forks, count in ((0, 1), (1, 2), (1, 4), (4, 5)):
        plan = make_plan(rows._group(24, 8, count, max(1, forks)), host.shape, config)
        (microbatch,) = plan.microbatches
        launches = full_table(plan.forest, microbatch, plan.cache_of).launches
        assert len(launches) == 1 + forks, (forks, count)
    rows.host_row(host, 24, 8, 5, shares=True, forks=4).run()


@pytest.mark.parametrize(
    ("host_ms", "lengths"),
    [(1.0, []), (2.0, [32]), (4.0, [64]), (5.0, [64, 128]), (7.0, [128]), (99.0, [128])],
)
def test_the_steady_row_is_longer_where_the_host_is_slow(
    monkeypatch: pytest.MonkeyPatch, host_ms: float, lengths: list[int]
) -> None:
    """The device takes 2 ms for 16 tokens. The host takes a tenth longer for each 16 more."""
    host = host_of(small_model())
    rows = cpu_rows()
    made: list[int] = []
    timed: list[int] = []
    row = rows._row

    def times(_: object, tokens: int) -> Times:
        timed.append(tokens)
        return Times(tokens / 16, tokens / 16, host_ms * (0.9 + tokens / 160))

    def share(forward: Callable[[], torch.Tensor], _: object, alone: Times) -> float:
        assert alone.waits_for_host == (host_ms == 99.0)
        return 0.9 if forward().requires_grad else 0.0

    monkeypatch.setattr(rows, "_row", lambda h, n, **k: made.append(n) or row(h, n, **k))
    monkeypatch.setattr(rows.clock, "steady_share", share)
    monkeypatch.setattr(rows, "row_ms", times)
    assert rows.steady_share(host, 16, times(host, 16)) == 0.9
    assert timed == [16, *lengths] and made == timed[-1:]

    def fails(*_: object) -> float:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(rows.clock, "steady_share", fails)
    assert rows.steady_share(host, 16, times(host, 16)) == 1.0


@pytest.mark.parametrize(("row_ms", "sizes"), [(1.0, 3), (200.0, 2)])
def test_what_would_be_over_later_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, row_ms: float, sizes: int
) -> None:
    shares: list[int] = []

    def row(rows: Rows, *_: object) -> Times:
        time.sleep(0.1)  # as long as compilation might take
        rows.clock.seconds += row_ms / 1e3
        return Times(row_ms / 2, row_ms / 2)

    def share(_: Rows, __: ModelHost, tokens: int, ___: Times) -> float:
        shares.append(tokens)
        return 0.5

    monkeypatch.setattr(Rows, "row_ms", row)
    monkeypatch.setattr(Rows, "steady_share", share)
    effort = replace(QUICK["cpu"], row_tokens=(4, 8, 16), repeats=1, max_seconds=0.5)
    model = small_model()
    shape = wrap(model).host.shape
    begin = time.perf_counter()
    found = calibrate(
        small_model,
        shape,
        compile_blocks=False,
        efforts={"cpu": effort},
    )
    assert len(found.block.at) == sizes and shares == ([16] if sizes == 3 else [])
    assert found.seconds <= time.perf_counter() - begin
    if sizes == 3:  # compilation takes none of its time
        assert 0.6 < found.first_seconds < found.seconds
