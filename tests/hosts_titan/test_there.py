"""Whether torchtitan is there, without which no other file here is collected."""

import pytest


def test_torchtitan_is_installed() -> None:
    pytest.importorskip("torchtitan", reason="make test-titan makes an environment that has it")
