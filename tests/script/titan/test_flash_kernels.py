"""FlashAttention 3 and 4 where they are not installed: pytest tests/script/titan/test_flash_kernels.py"""

import subprocess
import sys

import pytest

from memfit.errors import is_installed
from memfit.script.titan.describe import describe_target
from memfit.script.titan.flash_kernels import PACKAGES
from memfit.script.titan.target import parse_target

CODE = """
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
from memfit.script.titan.flash_kernels import stand_in_flash_kernels
stand_in_flash_kernels()
for name in ("FA3", "FA4"):
    activate_flash_attention_impl(name)
    assert current_flash_attention_impl() == name
restore_flash_attention_impl()
assert current_flash_attention_impl() is None
"""


@pytest.mark.skipif(any(map(is_installed, PACKAGES.values())), reason="FlashAttention 3 or 4 is installed")
def test_kernels_that_are_not_installed_are_activated_without_them() -> None:
    """In a process of its own: a registration is for good."""
    pytest.importorskip("torch.nn.attention._registry")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not is_installed("torchtitan"), reason="torchtitan is not installed")
@pytest.mark.parametrize(("config", "packs"), [("llama3_debugmodel", False), ("llama3_debugmodel_varlen_attn", True)])
def test_variable_length_attention_is_said_to_be_not_validated(config: str, packs: bool) -> None:
    lines = describe_target(parse_target(f"torchtitan:{config}", None, {})).not_validated
    assert [("variable-length attention" in line) for line in lines] == [True] * packs
