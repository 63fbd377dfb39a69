"""torch's private names stand in memfit/torch_compat alone."""

import ast
from pathlib import Path

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from memfit.installation import release_number
from memfit.torch_compat import FakeTensorMode
from memfit.torch_compat.distributed import OffsetBasedRNGTracker
from memfit.torch_compat.operators import ABSENT, has_operator

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


ATTRIBUTES = {
    name
    for thing in (
        torch.empty(1), torch.empty(1).untyped_storage(), torch.nn.Linear(1, 1), torch.ops.aten.add,
        torch.ops.aten.add.Tensor, torch.optim.SGD([torch.empty(1, requires_grad=True)]), GradScaler("cpu"),
        DataLoader([0]), RandomSampler([0]), iter(DataLoader([0])), DistributedDataParallel,
        ZeroRedundancyOptimizer, FakeTensorMode, torch.empty(1, requires_grad=True).exp().grad_fn,
        OffsetBasedRNGTracker, torch.utils.checkpoint, torch.nn.modules.module, torch._C, torch.autograd, torch.library,
        torch,
    )
    for name in dir(thing)
    if name.startswith("_") and not name.startswith(("__", *DOCUMENTED))
} | {"_local_tensor", "_unsharded_param", "_metadata", "_overloadpacket"}  # fmt: skip
"""Private attributes of torch's objects, functions and modules."""


def private_attributes(source: str) -> set[str]:
    """Private attributes of torch's objects that a module reads, sets, looks up, deletes or replaces.

    Of ``self``, what the module itself defines or sets is its own.
    """
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    names = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if not ((owner in ("self", "cls") and node.attr in own) or "aten" in owner):
                names.add(node.attr)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            if function in ("getattr", "setattr", "hasattr", "delattr", "object") and "aten" not in ast.unparse(node):
                names |= {str(given.value) for given in node.args[1:2] if isinstance(given, ast.Constant)}
            elif function == "replaced":
                names |= {word.arg for word in node.keywords if word.arg}
    return names & ATTRIBUTES


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("storage._cdata", {"_cdata"}),
        ("tensor._version == 0", {"_version"}),
        ("self._parameters = 1; self._parameters", set()),
        ("self._parameters", {"_parameters"}),
        ("net._buffers['a'] = x", {"_buffers"}),
        ("getattr(tensor, '_local_tensor', tensor)", {"_local_tensor"}),
        ("replaced(nn.Module, _apply=f)", {"_apply"}),
        ("mock.patch.object(DataLoader, '_get_iterator', f)", {"_get_iterator"}),
        ("torch.ops.aten._softmax", set()),
    ],
)
def test_what_is_a_private_attribute(source, private):
    assert private_attributes(source) == private


def test_no_module_reads_a_private_attribute_of_torch_on_its_own():
    by_name = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if path.parts[len(ROOT.parts)] != "torch_compat" and (names := private_attributes(path.read_text()))
    }
    assert by_name == {name: {path.rpartition(".")[2] for path in paths} for name, paths in EXPECTED.items()}


def test_an_operator_is_absent_only_before_its_first_version():
    for name, first in ABSENT.items():
        assert has_operator(name) is (release_number(torch.__version__) >= first)
