"""Formats of trainers: names of columns, and the tokens to which entries belong.

Each function makes the rollouts of one record, which is a sample. Imports no torch.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from forkpoint.errors import RolloutError
from forkpoint.rollouts.batch import group_of
from forkpoint.rollouts.files import REQUIRED, rollout_of
from forkpoint.rollouts.formats.record import Format, Made, Record, RecordError, field_of, make
from forkpoint.rollouts.schema import SchemaError

NO_TEMPERATURE = (
    "This format has no sampling temperature; 1 is used. With another temperature, log-probs and "
    "gradients are wrong."
)
TEXT_NOTE = (
    "The file has text: the tokenizer computed the token ids again, without special tokens that "
    "the writer left out. Savings are approximate, and losses are not exact."
)
FORMATS: dict[str, Format] = {}
Rollouts = Iterator[Made]


def format_of(
    name: str, *signatures: str, key: str, without: str = "", **options: Any
) -> Callable[[Callable[[Record], Rollouts]], Callable[[Record], Rollouts]]:
    """Register a format: see `Format`. Keys are separated by spaces."""

    def register(rollouts: Callable[[Record], Rollouts]) -> Callable[[Record], Rollouts]:
        sets = tuple(frozenset(keys.split()) for keys in signatures)
        FORMATS[name] = Format(
            name, sets, frozenset(without.split()), tuple(key.split()), rollouts, **options
        )
        return rollouts

    return register


@format_of(
    "forkpoint",
    "token_ids loss_mask",
    without="inference_logprobs",  # prime-rl's
    key="token_ids",
)
def _forkpoint(record: Record) -> Rollouts:
    values = {name: _plain(record.get(name)) for name in record.values}
    for name in ("group_id", "rollout_id"):
        if isinstance(values.get(name), int):
            values[name] = record.text(name)  # raises an error for numbers of thousands of digits
    if record.media is not None and values.get("media") is not None:
        try:
            values["media"] = record.media.read(values["media"], "media")
        except SchemaError as error:
            raise record.fail("media", f"{error}.") from None
    try:
        yield rollout_of(values), False
    except RolloutError as error:
        missing = [name for name in REQUIRED if name not in values]
        field = missing[0] if missing else field_of(error)
        raise RecordError(f"{record.where}: {error}", field) from None


def _plain(value: Any) -> Any:
    """A Python number or text; for arrays a copy, because they may be views of a mapped file."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.item() if isinstance(value, np.generic) else value


@format_of(
    "verl", "prompts responses response_mask", "prompts responses attention_mask", key="responses"
)
def _verl(record: Record) -> Rollouts:
    """DataProto of verl: prompts padded on the left, responses on the right, entries for
    responses."""
    prompts, responses = record.ids("prompts"), record.ids("responses")
    ids, both = record.ids("input_ids"), np.concatenate([prompts, responses])
    if len(ids) != len(both):
        raise record.fail(
            "input_ids",
            f"input_ids has {len(ids)} entries, but prompts and responses have {len(prompts)} + "
            f"{len(responses)}.",
        )
    attended = record.mask("attention_mask", len(ids), "input_ids")
    if (differ := attended & (both != ids)).any():
        at = int(differ.argmax())
        raise record.fail(
            "input_ids", f"input_ids[{at}] is {ids[at]}, but prompts and responses have {both[at]}."
        )
    if record.has("position_ids"):
        positions = record.floats("position_ids", len(ids), "input_ids")
        if (positions[attended] != np.arange(attended.sum())).any():
            raise record.fail(
                "position_ids", "position_ids do not count the tokens of attention_mask from 0."
            )
    # Older versions have loss_mask over prompt and response instead of response_mask, which
    # excludes turns of tools. Without either, verl trains the whole response.
    mask = record.first("response_mask", "loss_mask", "attention_mask")
    if mask == "response_mask":
        trained = record.mask(mask, len(responses), "responses")
    else:
        trained = record.mask(mask, len(ids), "input_ids")[len(prompts) :]
    yield make(
        record,
        {"advantage": "advantages", "old_logprobs": ("old_log_probs", "rollout_log_probs"),
         "reference_logprobs": "ref_log_prob", "weights": "rollout_is_weights",
         "returns": "returns", "old_values": "values", "group_id": "uid",
         "reward": ("token_level_rewards", "token_level_scores", "rm_scores")},
        ids=ids,
        trained=trained,
        names=("input_ids", mask),
        entries=("responses", len(responses)),
        prompt=len(prompts),
        padding=(("attention_mask", attended),),
    )  # fmt: skip


@format_of(
    "verl-text", "input output score", key="input", text=True, notes=(TEXT_NOTE, NO_TEMPERATURE)
)
def _verl_text(record: Record) -> Rollouts:
    """A line of text that verl logs with rollout_data_dir. A tokenizer computes the ids."""
    texts: list[str] = []
    for name in ("input", "output"):
        text = record.text(name)
        if text is None:
            raise record.fail(name, f"there is no {name}.")
        texts.append(text)
    if record.tokenize is None:
        raise record.fail(
            "input",
            "the record holds text and no token ids. Give the model's tokenizer.json (tokenizer=, "
            "--tokenizer) to estimate the savings. For training, dump the DataProto, which has the "
            "ids.",
        )
    prompt, response = map(record.encode, ("input", "output"), texts)
    group = record.text("uid")
    if group is not None and (parts := re.fullmatch(r"(.+)_\d+_\d+", group)):
        group = parts[1]  # verl's trainer with a queue writes uid_rollout_output here
    yield make(
        record,
        {"reward": "score"},
        ids=np.array(prompt + response, np.int64),
        trained=np.ones(len(response), np.bool_),
        names=("input", "output"),
        group_id=group or group_of(texts[0]),
    )


@format_of(
    "trl",
    "prompt_ids prompt_mask completion_ids completion_mask",
    without="completion_logprobs",  # prime-rl's
    key="completion_ids",
    notes=(NO_TEMPERATURE,),
)
def _trl(record: Record) -> Rollouts:
    """A batch of TRL's GRPOTrainer, without group ids, with shuffled rows and entries for
    completions."""
    prompts, completions = record.ids("prompt_ids"), record.ids("completion_ids")
    shown = record.mask("prompt_mask", len(prompts), "prompt_ids")
    kept = record.mask("completion_mask", len(completions), "completion_ids")
    trained = kept
    if record.has("tool_mask"):
        trained = kept & record.mask("tool_mask", len(completions), "completion_ids")
    yield make(
        record,
        {"advantage": "advantages", "old_logprobs": "old_per_token_logps",
         "reference_logprobs": "ref_per_token_logps", "weights": "importance_sampling_ratio"},
        ids=np.concatenate([prompts, completions]),
        trained=trained,
        names=("completion_ids", "completion_mask"),
        entries=("completion_ids", len(completions)),
        prompt=len(prompts),
        padding=(("prompt_mask", shown), ("completion_mask", kept)),
    )  # fmt: skip


@format_of("openrlhf", "sequences action_mask", key="sequences", notes=(NO_TEMPERATURE,))
def _openrlhf(record: Record) -> Rollouts:
    """An Experience of OpenRLHF. The A entries of action arrays belong to the last A tokens of the
    row."""
    if record.has("loss_mask"):  # SkyRL's Experience has the same names otherwise
        raise record.fail(
            "loss_mask",
            "there is a loss_mask in addition to action_mask, which OpenRLHF's Experience lacks. "
            "Leave it out, or combine the two into action_mask.",
        )
    ids, actions = record.ids("sequences"), record.row("action_mask", "biuf", "0 and 1")
    if len(actions) > len(ids):
        raise record.fail(
            "action_mask", f"action_mask has {len(actions)} entries, but sequences has {len(ids)}."
        )
    yield make(
        record,
        {"advantage": "advantages", "reward": "rewards",
         "old_logprobs": ("action_log_probs", "rollout_log_probs"),
         "reference_logprobs": "base_action_log_probs", "returns": "returns",
         "old_values": "values"},
        ids=ids,
        trained=record.mask("action_mask", len(actions), "action_mask"),
        names=("sequences", "action_mask"),
        entries=("action_mask", len(actions)),
        padding=(("attention_mask", record.mask("attention_mask", len(ids), "sequences")),),
    )  # fmt: skip


@format_of(
    "nemo-rl",
    "input_ids input_lengths token_mask",
    "token_ids input_lengths token_loss_mask",
    key="input_ids token_ids",
    notes=(NO_TEMPERATURE,),
)
def _nemo_rl(record: Record) -> Rollouts:
    """Train data of NeMo RL for GRPO or PPO, padded on the right after input_lengths. Entries are
    at their tokens.

    `values` are already shifted: entry i is the value of the state in which token i was chosen.
    """
    name = record.first("input_ids", "token_ids")
    ids = record.ids(name)
    end = record.count("input_lengths", len(ids), name)
    mask = record.first("token_mask", "token_loss_mask")
    sample = record.first("sample_mask", "sample_loss_mask")
    if (kept := record.number(sample)) not in (None, 0.0, 1.0):
        raise record.fail(sample, f"{sample} is {kept}; it takes 0 and 1.")
    trained = record.mask(mask, len(ids), name)
    yield make(
        record,
        {"advantage": "advantages", "reward": "rewards",
         "old_logprobs": ("prev_logprobs", "generation_logprobs"),
         "reference_logprobs": "reference_policy_logprobs", "returns": "returns",
         "old_values": "values"},
        ids=ids,
        trained=trained & (kept != 0.0),
        names=(name, mask),
        prompt=int(trained.argmax()) if trained.any() else len(ids),
        padding=(("input_lengths", np.arange(len(ids)) < end),),
    )  # fmt: skip


@format_of(
    "prime-rl",
    "token_ids loss_mask inference_logprobs trainer_logprobs",
    key="token_ids",
    notes=(NO_TEMPERATURE,),
)
def _prime_rl(record: Record) -> Rollouts:
    """A line of token_exports/, which prime-rl's trainer writes with enable_token_export. Entries
    are at their tokens.

    Columns that the batch lacks are rows of null.
    """
    weights = record.get("rl_weights")
    if isinstance(weights, list) and all(value is None for value in weights):
        record = replace(record, values={**record.values, "rl_weights": None})
    ids = record.ids("token_ids")
    yield make(
        record,
        {"advantage": "advantages", "old_logprobs": "inference_logprobs", "weights": "rl_weights"},
        ids=ids,
        trained=record.mask("loss_mask", len(ids), "token_ids"),
        names=("token_ids", "loss_mask"),
    )


@format_of(
    "slime",
    "tokens response_length",
    "tokens response_lengths",
    key="tokens",
    notes=(NO_TEMPERATURE,),
)
def _slime(record: Record) -> Rollouts:
    """A Sample of slime, or one of its train data. Entries belong to the response at the end."""
    ids = record.ids("tokens")
    count = record.count(record.first("response_length", "response_lengths"), len(ids), "tokens")
    mask = record.first("loss_mask", "loss_masks")
    trained = np.ones(count, np.bool_)
    if record.has(mask):
        trained = record.mask(mask, count, "the response")
    if record.get("remove_sample") is True:
        trained = np.zeros(count, np.bool_)
    yield make(
        record,
        # Rewards of train data are already normalised.
        {"advantage": ("advantages", "rewards"), "reward": "reward",
         "old_logprobs": ("log_probs", "rollout_log_probs"), "reference_logprobs": "ref_log_probs",
         "returns": "returns", "old_values": "values", "group_id": "group_index"},
        ids=ids,
        trained=trained,
        names=("tokens", mask),
        entries=("the response", count),
        prompt=len(ids) - count,
    )  # fmt: skip


@format_of(
    "skyrl", "prompt_token_ids response_ids loss_masks", key="response_ids", notes=(NO_TEMPERATURE,)
)
def _skyrl(record: Record) -> Rollouts:
    """A sample of SkyRL's GeneratorOutput. Entries belong to the response."""
    if record.number("is_last_step") == 0:
        raise record.fail(
            "is_last_step",
            "is_last_step is false: the record is a step of a trajectory, whose reward stands at "
            "its last step. Write each trajectory as one record.",
        )
    prompt, response = record.ids("prompt_token_ids"), record.ids("response_ids")
    group = record.get("trajectory_ids")
    if isinstance(group, Mapping):  # not text that consists of two ids
        group = Record(record.where, group).text("instance_id")
    yield make(
        record,
        {"reward": "rewards", "old_logprobs": "rollout_logprobs"},
        ids=np.concatenate([prompt, response]),
        trained=record.mask("loss_masks", len(response), "response_ids"),
        names=("response_ids", "loss_masks"),
        entries=("response_ids", len(response)),
        prompt=len(prompt),
        group_id=group if isinstance(record.get("trajectory_ids"), Mapping) else None,
    )
