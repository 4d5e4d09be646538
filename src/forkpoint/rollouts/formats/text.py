"""Token ids of text and messages, for files without ids. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError
from forkpoint.rollouts.batch import short
from forkpoint.rollouts.formats.limits import MemoryLimit

TEXT_BYTES = 400
"""Bytes of memory that tokenizers takes for each byte of text, if each byte is a token. Up to 312
were measured."""
Encode = Callable[[str], list[int]]
Render = Callable[[Sequence[Any], bool, Any], str]
"""Renders messages as text. Arguments: messages, whether to add the header of an answer, and tools
or None."""


@dataclass(frozen=True)
class Tokenizer:
    """Computes token ids of text, without special tokens that the text does not contain."""

    encode: Encode
    render: Render | None = None
    """The chat template; None if there is none."""

    def within(self, memory: MemoryLimit) -> "Tokenizer":
        """The same tokenizer, which raises an error if tokens of a text may exceed the memory
        limit."""

        def encode(text: str) -> list[int]:
            memory.check(TEXT_BYTES * len(text.encode(errors="replace")), "the tokens of a text")
            return self.encode(text)

        return replace(self, encode=encode)


def tokenizer_of(given: Any) -> Tokenizer:
    """Make a Tokenizer from a function from text to ids, a tokenizer of transformers, or the path
    of a tokenizer.json.

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
    except Exception as error:  # the library raises Exception itself
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
