"""Arguments of the command line that cannot be read."""

from bad_inputs.kind import Kind


def argument_kind(
    name: str, *argv: str, message: str, means: str, remedy: str, named_in_message: bool = False
) -> Kind:
    return Kind(
        name=name,
        error=None,
        message=message,
        means=means,
        remedy=remedy,
        argv=argv,
        named_in_message=named_in_message,
    )


ARGUMENTS = (
    argument_kind(
        "A misspelt option",
        *("plan", "ok.jsonl", "--sharng", "tree"),
        message="forkpoint plan has no option --sharng (did you mean '--sharing'?). forkpoint plan "
        "--help-all lists its options.",
        means="No option has this name; nothing is guessed.",
        remedy="Take the one that is suggested, or see --help-all.",
    ),
    argument_kind(
        "An option of another command",
        *("plan", "ok.jsonl", "--optimizer", "sgd"),
        message="forkpoint plan has no option --optimizer; replay has it. forkpoint plan "
        "--help-all lists its options.",
        means="Each command has its own options.",
        remedy="Take a command that has it.",
    ),
    argument_kind(
        "A second file",
        *("plan", "ok.jsonl", "more.jsonl"),
        message="Unrecognized options: more.jsonl\nSee forkpoint plan --help.",
        means="A command reads one file.",
        remedy="Join the files; rollout_ids must differ.",
    ),
    argument_kind(
        "No file",
        "plan",
        message="Missing from forkpoint plan:\n"
        "FILE\n"
        "Rollouts, as a trainer or forkpoint writes them, or the folder of a\n"
        "trace. (required)\n"
        "See forkpoint plan --help.",
        means="The command works on a file of rollouts.",
        remedy="Name one, or run forkpoint demo, which makes rollouts up.",
    ),
    argument_kind(
        "No model",
        *("replay", "ok.jsonl"),
        message="Missing from forkpoint replay:\n"
        "--model DIR|CONFIG.json\n"
        "A transformers model's folder, or a config.json for random weights.\n"
        "Nothing is downloaded. (required)\n"
        "See forkpoint replay --help.",
        means="The command runs a model, and there is no default for it.",
        remedy="Give a folder, or a config.json for random weights.",
    ),
    argument_kind(
        "An option without its value",
        *("plan", "ok.jsonl", "--leaf-layout"),
        message="Missing value for argument '--leaf-layout'. Expected 1 values.\n"
        "See forkpoint plan --help.",
        means="The option is followed by a value.",
        remedy="See --help for what it takes.",
    ),
    argument_kind(
        "A value that is none of those allowed",
        *("plan", "ok.jsonl", "--sharing", "forest"),
        message="invalid choice 'forest' for argument '--sharing'. Expected one of ('auto',\n"
        "'none', 'group', 'tree').\n"
        "See forkpoint plan --help.",
        means="The option takes one of a few words.",
        remedy="Take one of those named.",
    ),
    argument_kind(
        "A loss that there is none of",
        *("replay", "ok.jsonl", "--model", "ok.json", "--loss", "reinforce"),
        message="invalid choice 'reinforce' for argument '--loss'. Expected one of ('auto',\n"
        "'grpo', 'ppo', 'dapo', 'bnpo', 'dr_grpo', 'cispo', 'sapo', 'gspo',\n"
        "'likelihood', 'sft', 'distillation', 'dpo', 'simpo').\n"
        "See forkpoint replay --help.",
        means="The command line knows losses by these names.",
        remedy="Take one of those named, or train with a loss of your own from Python.",
    ),
    argument_kind(
        "A dtype that there is none of",
        *("verify", "ok.jsonl", "--model", "ok.json", "--dtype", "int8"),
        message="invalid choice 'int8' for argument '--dtype'. Expected one of ('float32',\n"
        "'bfloat16', 'float64').\n"
        "See forkpoint verify --help.",
        means="Models are trained in these dtypes.",
        remedy="Take one of those named.",
    ),
    argument_kind(
        "A number that is none",
        *("plan", "ok.jsonl", "--limit", "1.5"),
        message="Error parsing --limit: '1.5' is no whole number.\n"
        "Argument helptext:\n"
        "--limit N\n"
        "Read only the first N rollouts of the file. (default: all)\n"
        "See forkpoint plan --help.",
        means="The option takes a whole number.",
        remedy="Give one, without a point, a unit or a thousands separator.",
    ),
    argument_kind(
        "A rate that is no number",
        *("replay", "ok.jsonl", "--model", "ok.json", "--lr", "fast"),
        message="Error parsing --lr: could not convert string to float: 'fast'\n"
        "Argument helptext:\n"
        "--lr RATE\n"
        "Its learning rate. (default: 1e-05)\n"
        "See forkpoint replay --help.",
        means="The option takes a number.",
        remedy="Give one, such as 1e-5.",
    ),
)
