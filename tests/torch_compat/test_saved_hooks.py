"""pytest tests/torch_compat/test_saved_hooks.py: hooks of saved tensors, where torch does not name them."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from memfit.torch_compat import top_saved_tensors_hooks
from memfit.torch_compat.saved_hooks import _remembering


@pytest.fixture(params=["torch's own", "remembered"])
def top(request, monkeypatch):
    """What says the innermost hooks: that of the installed torch, and the one for torch before 2.8."""
    if request.param == "torch's own":
        return top_saved_tensors_hooks
    autograd = torch._C._autograd
    names = ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks")
    replaced = SimpleNamespace(**{name: getattr(autograd, name) for name in names})
    asked = _remembering(replaced)
    for name in names:
        monkeypatch.setattr(autograd, name, getattr(replaced, name))
    return asked


def pack(tensor):
    return tensor


def unpack(tensor):
    return tensor


def other(tensor):
    return tensor


def test_the_innermost_hooks_are_named_and_none_outside(top):
    assert top(True) is None
    with saved_tensors_hooks(pack, unpack):
        assert tuple(top(True)) == (pack, unpack)
        with saved_tensors_hooks(other, unpack):
            assert tuple(top(True)) == (other, unpack)
        assert tuple(top(True)) == (pack, unpack)
    assert top(True) is None


def test_hooks_that_are_refused_are_not_named(top):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"), saved_tensors_hooks(pack, unpack):
            pass
        assert top(True) is None
