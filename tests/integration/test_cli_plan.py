"""The command plan, run in this process on tiny files and models."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import VOCABULARY, Shell, changed, made_up_rollouts, write_config, write_rollouts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import forkpoint
from forkpoint import Config, Rollout, RolloutBatch, load_rollouts, record, save_rollouts, wrap
from forkpoint.apps.cli import options
from forkpoint.apps.cli.losses import Objective
from forkpoint.apps.cli.models import load_model
from forkpoint.apps.cli.options import Runtime
from forkpoint.apps.cli.plan_text import MOST_GROUPS, _what_fits, smaller_answers
from forkpoint.apps.cli.ranks import Ranks
from forkpoint.apps.cli.stages import Pipeline
from forkpoint.hosts.transformers.model_files import parameters_of_model, shape_of_model
from forkpoint.losses import GRPO
from forkpoint.parallel.placement.lockstep import predict_step
from forkpoint.plan import MODELS, ModelShape, make_plan
from forkpoint.plan.device_memory import DeviceMemory
from forkpoint.plan.parting import MOVE, GroupParting
from forkpoint.testing import tiny_model
from media_scenes import scene
from multimodal_models import tiny_multimodal

PLAN_FIELDS = {
    *("command", "file", "model", "dtype", "format", "skipped", "batches", "rollouts", "groups"),
    *("logical_tokens", "group_tokens", "unique_tokens", "computed_tokens", "trained_tokens"),
    *("left_out", "microbatches", "max_microbatch_tokens", "bound", "bound_unit", "plans"),
    *("predicted_peak_bytes", "predicted_ms", "predicted_speedup", "device_memory", "ranks"),
    *("cost", "cost_unit", "cost_without_limit"),
    *("prompts_part", "groups_part", "pipeline", "encoder", "longest_prompt_tokens"),
    *("sharing", "boundary", "reason", "candidates", "modes"),
}


def test_plan_counts_tokens(shell: Shell, rollouts: Path) -> None:
    batch = RolloutBatch(load_rollouts(rollouts))
    paths = [
        (group, tuple(rollout.token_ids.tolist()[:end]))
        for group, rollout in zip(batch.group_index.tolist(), batch, strict=True)
        for end in range(1, len(rollout) + 1)
    ]
    done = shell("plan", rollouts, "--details")
    assert done.code == 0 and done.err == ""
    result = done.result
    assert set(result) == PLAN_FIELDS
    counts = len(paths), len(set(paths)), len({path for _, path in paths})
    assert counts == (*(result["logical_tokens"], result["group_tokens"]), result["unique_tokens"])
    assert counts[0] > counts[1] > counts[2], "the rollouts show no difference"
    assert (result["rollouts"], result["groups"], result["bound_unit"]) == (9, 3, "tokens")
    assert result["trained_tokens"] == batch.trained_tokens
    assert "plans compared" in done.out, "explain() is missing"
    assert f"{result['computed_tokens']:,} of {counts[0]:,} tokens" in done.out
    assert f"{result['bound']:.2f}x" in done.out


@pytest.mark.parametrize("frozen", [False, True])
def test_plan_prices_encoders_without_pixels(frozen: bool, shell: Shell, tmp_path: Path) -> None:
    model, batch = tiny_multimodal("qwen3_vl"), scene("equal tokens", "qwen3_vl")
    model.config.dtype = "float64"
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "r.jsonl"
    save_rollouts(file, batch)
    (tmp_path / "r.jsonl.media.safetensors").unlink()
    base: Any = model.model
    base.visual.requires_grad_(not frozen)
    options = ["--loss", "grpo,kl=0.1", "--boundary", "across", "--sharing", "tree"]
    if frozen:
        options.append("--frozen-encoder")
    argv = ("plan", file, "--model", tmp_path, "--max-microbatch-tokens", 16, *options)
    done = shell(*argv)
    assert done.code == 0, done.err
    config = Config(boundary="across", sharing="tree", max_microbatch_tokens=16)
    policy = wrap(model, replace(config, calibration=None))
    wanted = policy.plan(batch, GRPO(kl=0.1))
    events = [event for event in wanted.events() if event.startswith("encode")]
    assert events == ["encode images 0, 1", "encode backward images 0, 1"][: 1 if frozen else 2]
    encodes, backwards = wanted.encoder_runs
    assert (encodes, backwards) == (2, 0 if frozen else 2)
    found = done.result["encoder"]
    assert (found["places"], found["forwards"], found["backwards"]) == (6, 2, backwards)
    encoder, shape = wanted.capabilities.encoder, wanted.shape
    assert encoder is not None and shape is not None and encoder.trained != frozen
    assert done.result["predicted_peak_bytes"] == wanted.predicted_peak_bytes
    one = encoder.forward_flops(wanted.media[0]) * (1 if frozen else 3)
    decoder, dense = wanted.shared.step_flops(shape), wanted.dense.step_flops(shape)
    assert found["share"] == pytest.approx(2 * one / (2 * one + decoder))
    assert found["bound"] == pytest.approx((6 * one + dense) / (2 * one + decoder))
    assert f"2 forwards and {backwards} backwards for 6 images" in done.out
    # With more memory so small a model has prompts of millions of tokens, which take long to find.
    memory = shell(*argv, "--device-memory", "1GB").result["device_memory"]
    parameters = sum(p.numel() for p in model.parameters())
    assert 0.9 < memory["weights_bytes"] / (8 * parameters) <= 1
    unpriced = shell("plan", file)
    assert unpriced.result["encoder"]["share"] is None
    assert (
        "for 6 images and videos in rollouts; without its model FLOPs are unknown" in unpriced.out
    )


def test_plan_obeys_its_options(shell: Shell, rollouts: Path, config: Path) -> None:
    result = shell(
        *("plan", rollouts, "--model", config, "--sharing", "group", "--limit", 6),
        *("--boundary", "across", "--max-microbatch-tokens", 32),
    ).result
    assert (result["sharing"], result["boundary"]) == ("group", "across")
    assert result["rollouts"] == 6 and result["max_microbatch_tokens"] == 32
    assert [(c["sharing"], c["boundary"]) for c in result["candidates"]] == [("group", "across")]
    assert result["bound_unit"] == "flops"
    peaks = [
        shell("plan", rollouts, "--model", config, *given).result["predicted_peak_bytes"]
        for given in (["--gradient-checkpointing"], [], ["--dtype", "float64"])
    ]
    assert peaks == sorted(set(peaks))
    budget = ("plan", rollouts, "--model", "qwen3-8b", "--memory-budget")
    wanted = shell(*budget, "0.6GB", "--checkpointing", "none").result
    assert wanted["microbatches"] > 1, "the budget changes nothing"
    assert shell(*budget, "600000000", "--checkpointing", "none").result == wanted
    assert shell(*budget, "2 gigs").code == 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plan_reads_the_shape_that_the_model_has(family: str, tmp_path: Path) -> None:
    """The planner reads config.json itself, without transformers; both must see one model."""
    tiny_model(family, dtype=torch.float32).save_pretrained(tmp_path)
    given = Runtime(gradient_checkpointing=True)
    shape = wrap(load_model(tmp_path, given)).host.shape
    assert given.shape(tmp_path) == shape
    assert Runtime().shape(tmp_path / "config.json") == replace(shape, checkpointed=False)


@pytest.mark.parametrize(
    "family",
    ["arcee", "gemma2", "gemma4_text", "glm4v", "granitemoehybrid", "llama4_text", "qwen2_5_vl"],
)
def test_plan_takes_what_a_configuration_lacks_from_its_family(family: str, tmp_path: Path) -> None:
    whole = AutoConfig.for_model(family)
    text = whole.get_text_config()
    whole.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    given = json.loads(file.read_text())
    if text is whole:
        given.pop("tie_word_embeddings")
        file.write_text(json.dumps(given))
    found, _ = parameters_of_model(file, shape_of_model(file))
    auto = AutoModelForCausalLM if text is whole else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(whole)
    model.tie_weights()
    assert found == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


@pytest.mark.parametrize("loss", ["gspo", "dpo", "grpo,kl=0.1"])
def test_plan_is_the_one_that_runs(loss: str, shell: Shell, tmp_path: Path, config: Path) -> None:
    """Candidates and costs are those of `policy.plan`, for losses that couple tokens as well.

    Rollouts are trained from their system tokens on, so that in short microbatches every one of
    them has trained tokens in several. One group has no advantages, except for pairs.
    """
    everything = [
        changed(r, loss_mask=np.arange(len(r)) > 0, reference_logprobs=-np.ones(len(r)))
        for r in made_up_rollouts(rollouts_per_group=2 if loss == "dpo" else 3)
    ]
    if loss == "dpo":
        everything = [changed(r, advantage=n % 2) for n, r in enumerate(everything)]
    else:
        everything[:3] = [changed(r, advantage=0.0) for r in everything[:3]]
    file = write_rollouts(tmp_path / "everything.jsonl", everything)
    arguments = ("plan", file, "--model", config, "--max-microbatch-tokens", 24, "--loss")
    result = shell(*arguments, loss).result
    policy = wrap(load_model(config, Runtime()), Config(max_microbatch_tokens=24))
    plan = policy.plan(RolloutBatch(everything), Objective(loss=loss).make())
    assert result["candidates"] == [asdict(candidate) for candidate in plan.candidates]
    assert (result["sharing"], result["boundary"]) == (plan.sharing, plan.boundary)
    assert result["microbatches"] == len(plan.microbatches)
    assert result["bound"] == pytest.approx(max(c["bound"] for c in result["modes"].values()))
    assert result["left_out"] == asdict(plan.left_out)
    costs = [candidate["cost"] for candidate in result["candidates"] if candidate["cost"]]
    flat = shell(*arguments, "likelihood", "--limit", 9).result["candidates"]
    dearer = costs != [candidate["cost"] for candidate in flat if candidate["cost"]]
    assert dearer == (loss in ("gspo", "dpo")), "leaving out, or another forward"


def test_plan_streams_batches(
    shell: Shell, tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer on a stream is the sum of its batches' plans."""
    made = made_up_rollouts(groups=6)
    file = write_rollouts(tmp_path / "six.jsonl", made)
    done = shell("plan", file, "--model", config, "--batch-rollouts", 6, "--details")
    result = done.result
    assert result["batches"] == 3 and ", 3 batches" in done.out and "the first batch:" in done.out
    parts = []
    for n in range(3):
        part = write_rollouts(tmp_path / f"{n}.jsonl", made[6 * n : 6 * n + 6])
        parts.append(shell("plan", part, "--model", config).result)
    for name in (
        *("logical_tokens", "group_tokens", "unique_tokens", "trained_tokens", "groups"),
        *("computed_tokens", "microbatches"),
    ):
        assert result[name] == sum(part[name] for part in parts)
    for mode in ("none", "group", "tree"):
        flops = sum(part["modes"][mode]["flops"] for part in parts)
        assert result["modes"][mode]["flops"] == flops
    assert result["predicted_peak_bytes"] == max(p["predicted_peak_bytes"] for p in parts) > 0
    assert result["candidates"] == parts[0]["candidates"]
    whole = shell("plan", file).result
    assert whole["batches"] == 1 and whole["unique_tokens"] < result["unique_tokens"]
    monkeypatch.setattr(options, "BATCH_TOKENS", 150)
    by_tokens = shell("plan", file).result
    assert 1 < by_tokens["batches"] < 6 and by_tokens["group_tokens"] == result["group_tokens"]
    monkeypatch.setattr(options, "BATCH_TOKENS", 20)
    assert shell("plan", file).result["batches"] > 6, "a group of more than twice as many is cut"


def test_plan_takes_the_batches_of_a_trace(shell: Shell, tmp_path: Path) -> None:
    made = made_up_rollouts(groups=4)
    with record(tmp_path / "trace") as trace:
        assert shell("plan", tmp_path / "trace").code == 2
        trace.add(made[:6])
        trace.add(made[6:])
    result = shell("plan", tmp_path / "trace").result
    assert (result["batches"], result["groups"], result["format"]) == (2, 4, "trace")
    assert shell("plan", tmp_path / "trace", "--batch-rollouts", 12).result["batches"] == 1


def no_hub(*_: str) -> str:
    raise OSError("the Hub is not asked")


def test_models_by_name(shell: Shell, rollouts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rollouts.parent)
    flops = {
        name: shell("plan", rollouts, "--model", name).result["modes"]["none"]["flops"]
        for name in ("qwen3-8b", "Qwen/Qwen3-8B")
    }
    assert flops["qwen3-8b"] == flops["Qwen/Qwen3-8B"] > 4e10 * 9 * 30
    monkeypatch.setattr("huggingface_hub.hf_hub_download", no_hub)
    done = shell("plan", rollouts, "--model", "Qwen/Qwen3-9B")
    assert done.code == 2 and "did you mean qwen3-" in done.err, done.err
    Path("Qwen/Qwen3-8B").mkdir(parents=True)
    write_config(Path("Qwen/Qwen3-8B/config.json"))
    own = shell("plan", rollouts, "--model", "Qwen/Qwen3-8B").result
    assert own["modes"]["none"]["flops"] < flops["qwen3-8b"] / 1000, "a folder comes first"


def test_a_batch_that_cannot_be_planned_is_named(
    shell: Shell, tmp_path: Path, config: Path
) -> None:
    made = made_up_rollouts(groups=2)
    ids = [*made[3].token_ids.tolist()[:-1], VOCABULARY]
    made[3] = changed(made[3], token_ids=ids, rollout_id=None)
    file = write_rollouts(tmp_path / "two.jsonl", made)
    done = shell("plan", file, "--model", config, "--batch-rollouts", 3)
    said = f"error: {file}, batch 1: Rollout '0': token_ids[{len(ids) - 1}] is 61, but"
    assert done.code == 2 and done.err.startswith(said)


def test_a_device_is_planned_for(shell: Shell, rollouts: Path) -> None:
    """Weights and gradients in bfloat16, as its configuration says, and AdamW in bfloat16."""
    plan = ("plan", rollouts, "--model", "Qwen/Qwen3-8B", "--device-memory", "80GB")
    fits = shell(*plan)
    assert fits.code == 0 and "memory        fits: " in fits.out
    assert " (no checkpointing) in 74.5 GiB" in fits.out
    facts = fits.result["device_memory"]
    assert facts["fits"] and facts["bytes"] == 80 * 10**9
    taken = sum(facts[f"{what}_bytes"] for what in ("weights", "gradients", "optimizer"))
    assert taken == pytest.approx(8.19e9 * 8, rel=0.01)
    too_much = shell(*plan, "--dtype", "float32")
    assert too_much.code == 0 and "DOES NOT FIT" in too_much.out, "it is an answer, no error"
    facts = too_much.result["device_memory"]
    assert not facts["fits"]
    ranks = facts["fits_from_ranks"]
    assert f"next          fits on {ranks} or more ranks (--ranks {ranks} " in too_much.out
    sharded = shell(*plan, "--dtype", "float32", "--ranks", ranks)
    assert f"each rank     1/{ranks} of all and, in a step, " in sharded.out
    sharded = sharded.result["device_memory"]
    assert sharded["fits"] and sharded["weights_bytes"] < facts["weights_bytes"] / 2
    ddp = shell(*plan, "--dtype", "float32", "--ranks", ranks, "--shard", "none")
    assert ddp.result["device_memory"]["weights_bytes"] == facts["weights_bytes"]
    assert "each rank     all weights" in ddp.out and "each rank" not in too_much.out
    assert all(len(line) <= 100 for line in (ddp.out + too_much.out).splitlines())


def test_the_longest_prompt_is_said(shell: Shell, rollouts: Path) -> None:
    """With memory of the host it is longer, and a limit of that memory counts."""
    plan = ("plan", rollouts, "--model", "llama3-8b", "--device-memory", "70GiB")
    plan = (*plan, "--boundary", "across", "--sharing", "group", "--max-microbatch-tokens", 16_384)
    plan = (*plan, "--checkpointing", "full", "--activations", "recompute")
    found = {}
    for place in ("device", "host"):
        done = shell(*plan, "--prefix-cache", place)
        assert done.code == 0, done.err
        found[place] = done.result["longest_prompt_tokens"]
        assert f"longest       {found[place]:,} prompt tokens fit with " in done.out
    assert found["host"] > 1.5 * found["device"] > 0
    done = shell(*plan, "--prefix-cache", "host", "--host-memory", "1GiB")
    assert 0 < done.result["longest_prompt_tokens"] < found["host"]
    too_little = shell("plan", rollouts, "--model", "llama3-8b", "--device-memory", "60GiB")
    assert too_little.result["longest_prompt_tokens"] is None, "weights alone do not fit"
    limited = shell("plan", rollouts, "--model", "qwen3-0.6b", "--memory-budget", "1GiB")
    assert limited.result["longest_prompt_tokens"] > found["device"], "of a smaller model"


def test_the_dtype_is_that_of_the_configuration(
    shell: Shell, rollouts: Path, tmp_path: Path
) -> None:
    texts: list[str] = []

    def weights(**named: object) -> object:
        config = write_config(tmp_path / "config.json", **named)
        done = shell("plan", rollouts, "--model", config, "--device-memory", "80GB")
        texts.append("".join(line for line in done.out.splitlines() if line.startswith("dtype")))
        return done.result["device_memory"]["weights_bytes"] if done.code == 0 else done.err

    whole = weights()
    assert isinstance(whole, int)
    assert texts[0].split(":")[0].split() == ["dtype", "float32"] and "--dtype" in texts[0]
    assert weights(dtype="bfloat16") == weights(torch_dtype="float16") == whole // 2
    assert texts[1] == "dtype         bfloat16, of the model's configuration"
    assert "names the dtype 'int8'" in str(weights(dtype="int8"))


def test_parameters_of_a_stage() -> None:
    """One that has embeddings has those of its end."""
    shape = ModelShape.from_config(MODELS["qwen3-0.6b"])
    whole = DeviceMemory(total_bytes=80 * 10**9, parameters=1001, dtype_bytes=2, embeddings=101)
    one, two = (Pipeline.of(shape, count) for count in (1, 2))
    assert one.device(whole) == whole
    part, share = two.device(whole), max(stage.share for stage in two.stages)
    assert (part.parameters, part.embeddings) == (int(900 * share) + 51, 51)


def test_what_fits_is_computed_with_what_is_said() -> None:
    """Gradients of all parameters fit on no number of ranks."""
    device = DeviceMemory(total_bytes=80 * 10**9, parameters=60 * 10**9, dtype_bytes=2, layers=80)
    shares = [replace(device, trained_share=share).least_ranks(0) for share in (0.01, 0.1)]
    assert device.least_ranks(0) is None and shares == [2, 4]
    assert _what_fits(device, 0) == (
        "fits on 2 or more ranks (--ranks 2 --shard fully --trained-share 0.01)"
    )


def test_options_that_make_a_step_fit_are_named() -> None:
    """Those that are named fit on the devices given; the others do not."""
    device = DeviceMemory(total_bytes=16 * 10**9, parameters=17 * 10**8, dtype_bytes=2, layers=28)
    # The planner keeps to whole GiB on the devices with these options.
    left = [
        device.left_bytes,
        replace(device, optimizer_bytes_per_parameter=2).budget_bytes,
        replace(device, trained_share=0.01).budget_bytes,
    ]
    assert left == sorted(left) and device.least_ranks(left[0] + 1) == 2
    eight_bits, lora = (
        "--optimizer-bytes-per-parameter 2 (8-bit AdamW)",
        "--trained-share 0.01 (LoRA)",
    )
    named = [smaller_answers(device, peak) for some in left for peak in (some, some + 1)]
    both, one = {"or fits with": f"{eight_bits}, or {lora}"}, {"or fits with": lora}
    assert named == [{}, both, both, one, one, {}]


def test_what_limits_of_memory_cost_is_said(shell: Shell, rollouts: Path, config: Path) -> None:
    plan = ("plan", rollouts, "--model", config, "--batch-rollouts", 3)
    free = shell(*plan)
    assert free.result["cost_without_limit"] is None and "\ncost" not in free.out
    kept, full = (
        shell(*plan, *given) for given in (("--head-logits", "keep"), ("--checkpointing", "full"))
    )
    costs = [full.result[name] for name in ("cost", "cost_without_limit")]
    assert full.result["batches"] == 3 and full.result["cost_unit"] == "FLOPs"
    assert costs[1] == pytest.approx(kept.result["cost"], rel=1e-3) and costs[0] > 1.1 * costs[1]
    more = (
        f"cost          {costs[0] / costs[1] - 1:.1%} more than with everything kept on the device"
    )
    assert f"{more} (counted in FLOPs)" in full.out
    assert "cost          0.0% more than" in kept.out


def test_options_without_an_effect_are_named(shell: Shell, rollouts: Path, config: Path) -> None:
    plan = ("plan", rollouts, "--model", config, "--activations", "recompute")
    plan = (*plan, "--prefix-cache", "host")
    options = "--activations recompute and --prefix-cache host"
    assert f"no effect     {options}: no microbatch reads another\n" in shell(*plan).out
    across = (*plan, "--boundary", "across", "--max-microbatch-tokens", 64)
    assert "no effect" not in shell(*across).out
    logits = ("--head-logits", "recompute")
    said = "no effect     --head-logits recompute: logits are kept only within a memory budget\n"
    assert said in shell(*across, *logits).out
    for limit in (("--memory-budget", "8MiB"), ("--device-memory", "16GB")):
        assert "no effect" not in shell(*across, *logits, *limit).out


def test_options_of_a_device_without_an_effect_are_named(
    shell: Shell, rollouts: Path, config: Path
) -> None:
    plan = ("plan", rollouts, "--model", config, "--trained-share", 0.5, "--shard", "none")
    said = "--trained-share 0.5 and --shard none and --restore-grads: without --device-memory fixed"
    assert f"no effect     {said} memory is not counted" in shell(*plan, "--restore-grads").out
    alone = shell(*plan, "--frozen-encoder", "--device-memory", "16GB").out
    said = "--shard none: one rank holds the whole model; --frozen-encoder: the rollouts have no"
    assert f"no effect     {said} images or videos\n" in alone
    ranks = (*plan, "--restore-grads", "--ranks", 2, "--device-memory", "16GB")
    assert "no effect" not in shell(*ranks).out
    ways = shell(*ranks, "--gather", "step", "--split", "replicate").out
    assert "no effect     --gather step and --split replicate: --ranks predicts gathers for" in ways


def test_sums_and_copies_of_gradients_are_counted(
    shell: Shell, rollouts: Path, config: Path
) -> None:
    """As a policy counts them in a budget that it measures."""
    plan = ("plan", rollouts, "--model", config, "--device-memory", "16GB", "--dtype", "bfloat16")
    float32 = ("--grad-accumulation-dtype", "float32")
    plain, summed, copied = (
        shell(*plan, *given).result["device_memory"]["gradients_bytes"]
        for given in ((), float32, (*float32, "--restore-grads"))
    )
    assert (summed, copied) == (3 * plain, 4 * plain)
    ranks = (*plan, *float32, "--ranks", 2)
    assert "fully_shard adds up gradients itself" in shell(*ranks).err
    assert shell(*ranks, "--shard", "none").code == 0


def test_checkpointing_by_the_model_is_named(shell: Shell, rollouts: Path, config: Path) -> None:
    plan = ("plan", rollouts, "--model", config, "--gradient-checkpointing")
    assert "of activations, the model's own checkpointing; see" in shell(*plan).out
    refused = shell(*plan, "--checkpointing", "full").err
    assert "gradient_checkpointing is set and checkpointing is 'full'; a step does not" in refused


def test_a_plan_that_runs_nothing_is_said(shell: Shell, tmp_path: Path, config: Path) -> None:
    alike = [changed(rollout, advantage=0.0) for rollout in made_up_rollouts(groups=1)]
    file = write_rollouts(tmp_path / "alike.jsonl", alike)
    for sharing in ("auto", "group"):
        options = ("--sharing", sharing, "--boundary", "across")
        done = shell("plan", file, "--model", config, *options)
        assert done.code == 0 and done.result["computed_tokens"] == 0
        assert "nothing: 0 tokens" in done.out


def test_prompts_that_part_are_named(shell: Shell, tmp_path: Path, config: Path) -> None:
    """A time of day at the top of each prompt of a group keeps the rest from being shared."""
    rest = list(range(50))
    stamped = [
        Rollout([1, 2, 50 + n, *rest, n], [0] * 53 + [1], 1.0, group_id="g") for n in range(3)
    ]
    done = shell("plan", write_rollouts(tmp_path / "stamped.jsonl", stamped))
    assert "diverge       prompts of group g diverge at token 2, 50 equal tokens" in done.out
    parts = {"grouped": True, "group": "g", "token": 2, "following": 50}
    assert "next" in done.out and done.result["prompts_part"] == parts
    priced = shell("plan", tmp_path / "stamped.jsonl", "--model", config)
    assert f"next          {MOVE}" in priced.out
    few = [Rollout([n, 7, n], [0, 0, 1], 1.0, group_id="g") for n in range(1, 4)]
    other = shell("plan", write_rollouts(tmp_path / "few.jsonl", few), "--model", config)
    assert "diverge       1 group at token 0, within the prompt; rollouts of 3 tokens" in other.out
    assert MOVE not in other.out and other.result["prompts_part"] is None


def test_where_each_group_parts(shell: Shell, tmp_path: Path) -> None:
    """Line, table and JSON have the same numbers; the table ends, the JSON does not."""
    count = MOST_GROUPS + 2
    pairs = [
        Rollout([*range(n % 9 + 2), *tail], [0] * (n % 9 + 2) + [1] * len(tail), 1.0, group_id=n)
        for n in range(count)
        for tail in ([50, 51], [60])
    ]
    file = write_rollouts(tmp_path / "pairs.jsonl", pairs)
    done = shell("plan", file, "--details", "--batch-rollouts", str(2 * count - 2))
    assert (
        f"diverge       {count} groups at token 2 to 10, after the prompt; rollouts of 3 to 12"
        in (done.out)
    )
    listed = done.result["groups_part"]
    assert len(listed) == count - 1
    length = (count - 2) % 9 + 2
    assert listed[-1] == asdict(
        GroupParting(str(count - 2), 2 * count - 4, 2, length, length + 1, length + 2, False)
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines()]
    rows = [row for row in cells if row and row[-1] == "after the prompt"]
    assert len(rows) == MOST_GROUPS
    assert rows[4] == ["4", "8", "2", "7 to 8", "6", "after the prompt"]
    assert "1 more group with --json" in done.out
    assert shell("plan", write_rollouts(tmp_path / "x.jsonl")).result["prompts_part"] is None


def test_plan_on_stages(shell: Shell, rollouts: Path, config: Path) -> None:
    """The step is that of the order which stages run; all work is on some stage."""
    given = ("plan", rollouts, "--model", config, "--max-microbatch-tokens", 24)
    one = shell(*given, "--stages", 1).result["pipeline"]
    assert one["bubble"] == pytest.approx(0) and one["step_over_share"] == pytest.approx(1)
    done = shell(*given, "--stages", 2, "--device-memory", "80GB")
    found = done.result["pipeline"]
    assert 0 < found["bubble"] < 1 and found["step_over_share"] > 1
    assert [stage["layers"] for stage in found["stages"]] == [1, 1]
    assert done.result["longest_prompt_tokens"] is None, "not predicted for stages"
    assert done.result["device_memory"]["peak_bytes"] == max(
        stage["peak_bytes"] for stage in found["stages"]
    )
    assert "stage 1       1 layer and head: " in done.out
    small = shell(*given[:4], "--stages", 1, "--device-memory", "1MB").out
    assert "does not fit on 1 stage; this model can have 2" in small and "as asked" not in small
    for more in (("--stages", 3), ("--stages", 2, "--ranks", 2), ("--loss", "dpo")):
        assert shell(*given, *more).code == 2
    assert shell("plan", rollouts, "--stages", 2).code == 2


def test_lanes_of_stages_are_drawn(
    shell: Shell, rollouts: Path, config: Path, tmp_path: Path
) -> None:
    lanes, picture = tmp_path / "lanes.json", tmp_path / "lanes.svg"
    given = ("plan", rollouts, "--model", config, "--max-microbatch-tokens", 24)
    done = shell(*given, "--stages", 2, "--lanes", lanes)
    found = shell("report", lanes, "--output", picture)
    assert len(found.result["idle"]["predicted"]) == 2 and picture.stat().st_size > 1000
    assert f"{done.result['pipeline']['bubble']:.1%} of the stages' time idle" in found.out
    assert shell(*given, "--lanes", lanes).code == 2
    lanes.write_text("{}")
    assert shell("report", lanes, "--output", picture).code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device-memory", "80GB"), "without a model bytes cannot be predicted"),
        (("--model", "qwen3-8b", "--device-memory", "much"), "device_memory is 'much'"),
        (("--model", "qwen3-8b", "--trained-share", "2"), "trained_share is 2.0"),
    ],
)
def test_a_device_that_is_none(
    words: tuple[str, ...], message: str, shell: Shell, rollouts: Path
) -> None:
    done = shell("plan", rollouts, *words)
    assert done.code == 2 and message in done.err


def placements(shell: Shell, *arguments: object) -> dict[str, dict[str, Any]]:
    return shell("plan", *arguments).result["ranks"]["placements"]


def test_plan_on_ranks(shell: Shell, rollouts: Path, config: Path) -> None:
    done = shell("plan", rollouts, "--model", config, "--ranks", 2)
    assert done.code == 0 and done.err == ""
    lines = done.out.splitlines()
    assert [line.split("  ")[0] for line in lines[-3:]] == ["ranks", "placed", "or placed"]
    found = done.result["ranks"]["placements"]
    assert set(found) == {"forkpoint", "token counts", "file order"}
    # The figures are those of the plans of what `place` gives.
    batch, shape = RolloutBatch(load_rollouts(rollouts)), Runtime().shape(config)
    placed = forkpoint.place(batch, ranks=2, model=shape)
    plans = [make_plan(batch.select(own), shape) for own in placed]
    step = predict_step(plans)
    one = predict_step([make_plan(batch, shape)]).lockstep
    assert found["forkpoint"]["step_over_share"] == pytest.approx(2 * step.lockstep / one)
    assert found["forkpoint"]["idle_share"] == pytest.approx(1 - step.mean / step.lockstep)
    tokens = sum(plan.computed_tokens for plan in plans)
    assert found["forkpoint"]["replicated_tokens"] == tokens - done.result["computed_tokens"]
    for way in placements(shell, rollouts, "--model", config, "--ranks", 1).values():
        assert way["step_over_share"] == pytest.approx(1)
        assert (way["replicated_tokens"], way["groups_split"]) == (0, 0)


def test_memory_of_ranks_is_that_of_the_fullest() -> None:
    """The costliest rollout is on the first rank."""
    lengths = (300, 20)
    batch = RolloutBatch(Rollout([n] * n, [0] + [1] * (n - 1), 1.0) for n in lengths)
    shape = ModelShape.from_config(MODELS["qwen3-0.6b"])
    ranks = Ranks(2, shape, None, Config(), whole_groups=False)
    ranks.add(batch, make_plan(batch, shape), lambda part, _: make_plan(part, shape))
    assert ranks.predicted_peak_bytes == make_plan(batch.select([0]), shape).predicted_peak_bytes


def test_groups_of_ranks(shell: Shell, rollouts: Path) -> None:
    """The file is cut where its pieces end, but a pair of dpo is not taken apart."""
    found = placements(shell, rollouts, "--batch-rollouts", 5, "--ranks", 3)
    assert found["file order"]["groups_split"] > 0
    made = made_up_rollouts(rollouts_per_group=2)
    write_rollouts(rollouts, [changed(r, advantage=float(n)) for n, r in enumerate(made)])
    pairs = placements(shell, rollouts, "--ranks", 6, "--loss", "dpo")
    assert [way["groups_split"] for way in pairs.values()] == [0, 0, 0]
    assert placements(shell, rollouts, "--ranks", 6)["file order"]["groups_split"] == 3


# The Hub ------------------------------------------------------------------------------------------


def test_a_model_and_a_file_of_the_hub(
    shell: Shell, rollouts: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub resolves both; of the model its config.json alone is fetched."""
    asked = []

    def hf_hub_download(name: str, file: str) -> str:
        asked.append((name, file))
        return str(config)

    class Files:
        def get_file(self, remote: str, local: str) -> None:
            asked.append(remote)
            Path(local).write_bytes(rollouts.read_bytes())

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (Files(), url.partition("//")[2]))
    url = "hf://datasets/someone/data/rollouts.jsonl"
    done = shell("plan", url, "--model", "someone/model-of-theirs")
    assert done.code == 0 and done.result["file"] == url
    assert asked == [
        ("someone/model-of-theirs", "config.json"),
        "datasets/someone/data/rollouts.jsonl",
    ]
    wanted = shell("plan", rollouts, "--model", config).result
    assert done.result["modes"] == wanted["modes"]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", no_hub)
    missing = shell("plan", rollouts, "--model", "someone/model-of-theirs")
    assert missing.code == 2 and "the Hub gives no config.json of it" in missing.err


def test_a_tokenizer_by_its_folder_or_name(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that a folder names is not run."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(folder)
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a b", "completion": "b b"}')
    done = shell("plan", file, "--tokenizer", folder)
    assert done.code == 0 and done.result["logical_tokens"] == 4
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **_: named[name])
    named = {"someone/tokenizer": PreTrainedTokenizerFast(tokenizer_object=words)}
    assert shell("plan", file, "--tokenizer", "someone/tokenizer").result == done.result
    assert shell("plan", file, "--tokenizer", "someone/other").code == 2
    monkeypatch.undo()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    shell("plan", file, "--tokenizer", folder)
    assert not (tmp_path / "ran").exists()
