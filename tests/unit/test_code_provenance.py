"""Functions that are known by the file that defines them."""

import functools
from typing import Any

from transformers.models.llama import modeling_llama

from forkpoint.hosts.code_provenance import is_defined_as

KNOWN = ("transformers.models.llama.modeling_llama", "rotate_half")


def rotate_half(x: Any) -> Any:
    """Another function of the same name."""
    return x


def test_a_function_of_the_same_name_is_another() -> None:
    known = modeling_llama.rotate_half
    assert is_defined_as(known, KNOWN) and not is_defined_as(modeling_llama.repeat_kv, KNOWN)
    assert not is_defined_as(rotate_half, KNOWN)
    # The names are copied, and the code is the wrapped function's.
    assert is_defined_as(functools.wraps(known)(lambda x: x), KNOWN)
    disguised = functools.wraps(known)(lambda x: x)
    del disguised.__wrapped__
    assert disguised.__qualname__ == "rotate_half" and not is_defined_as(disguised, KNOWN)
