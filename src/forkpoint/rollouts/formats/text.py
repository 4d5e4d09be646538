"""Token ids of text and of messages, for files without ids. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats.limits import MemoryLimit

TEXT_BYTES = 400
"""Memory that tokenizers takes for a byte of text that is a token of its own: up to 312 bytes were
measured."""
Encode = Callable[[str], list[int]]
Render = Callable[[Sequence[Any], bool, Any], str]
"""The text of messages; whether the header of an answer ends it; and tools, or None."""


@dataclass(frozen=True)
class Tokenizer:
    """Token ids of text, without special tokens besides those written in it."""

    encode: Encode
    render: Render | None = None
    """The chat template; None where there is none."""

    def within(self, memory: MemoryLimit) -> "Tokenizer":
        """The same, refusing text whose tokens might take more memory than is left."""

        def encode(text: str) -> list[int]:
            memory.check(TEXT_BYTES * len(text.encode(errors="replace")), "the tokens of a text")
            return self.encode(text)

        return replace(self, encode=encode)


def tokenizer_of(given: Any) -> Tokenizer:
    """A tokenizer from a function from text to ids, a tokenizer of transformers, or the path of a
    tokenizer.json.

    Raises:
        ConfigError: the file cannot be read.
    """
    if hasattr(given, "apply_chat_template"):
        return _of_transformers(given)
    if not isinstance(given, str | Path):
        return Tokenizer(given)
    from tokenizers import Tokenizer as Fast

    try:
        made = Fast.from_file(str(given))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"tokenizer {given} cannot be read: {short(str(error))}. Give a tokenizer.json as "
            "Hugging Face's tokenizers write it."
        ) from None
    return Tokenizer(lambda text: made.encode(text, add_special_tokens=False).ids)


def _of_transformers(tokenizer: Any) -> Tokenizer:
    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def render(messages: Sequence[Any], answers: bool, tools: Any) -> str:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answers, tools=tools
        )

    return Tokenizer(encode, render if tokenizer.chat_template else None)
