"""torch's private names stand in memfit/torch_compat alone."""

import ast
from pathlib import Path

import pytest
import torch

from memfit.torch_compat.operators import ABSENT, has_operator
from memfit.torch_compat.versions import release

ROOT = Path(__file__).parents[2] / "memfit"
DOCUMENTED = ("_foreach_", "_check")
"""Names with an underscore that torch's own documentation lists."""


def private_names(source: str) -> set[str]:
    """``torch._C`` and ``torch.a._b`` that a module imports or looks up."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if name.startswith("torch.") and is_private(name.removeprefix("torch."))}


def is_private(path: str) -> bool:
    if path.startswith("ops."):  # operators, not Python names: memfit.torch_compat.operators has those that may lack
        return False
    parts = [part for part in path.split(".") if not part.startswith("__")]
    return any(part.startswith("_") and not part.startswith(DOCUMENTED) for part in parts)


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("from torch.utils._python_dispatch import TorchDispatchMode", True),
        ("import torch._dynamo", True),
        ("torch._C._current_autograd_node()", True),
        ("from torch.optim.optimizer import _foreach_supported_types as a", False),
        ("torch._foreach_mul_(a, 2)", False),
        ("torch.ops.aten._softmax.default", False),
        ("from torch.nn.functional import pad", False),
        ("torch.__version__", False),
    ],
)
def test_what_is_private(source, private):
    assert bool(private_names(source)) is private


EXPECTED = {"jobs/nets/weight_norm.py": {"torch._weight_norm"}}
"""Built-in jobs are written as a user's own job is, with torch and memfit's public names alone. None may be added."""


def test_no_module_reaches_into_torch_on_its_own():
    by_name = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if path.parts[len(ROOT.parts)] != "torch_compat" and (names := private_names(path.read_text()))
    }
    assert by_name == EXPECTED


def test_an_operator_is_absent_only_before_its_first_version():
    for name, first in ABSENT.items():
        assert has_operator(name) is (release(torch.__version__) >= first)
