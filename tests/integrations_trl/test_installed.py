"""The library that this folder's tests are about."""

import pytest


def test_trl_is_installed() -> None:
    pytest.importorskip("trl", reason="TRL is not installed: make test-trl has it")
