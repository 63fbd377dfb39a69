"""A function in the place of a method has the method's signature.

python -m pytest tests/test_replaced_methods.py
"""

import copy
import inspect
from functools import partial

import pytest

from memfit.replaced_methods import replaced_method


class Net:
    def forward(self, first, second=2, **more):
        """What it gives."""
        return first, second, more


def replaced(net, method):
    net.forward = replaced_method(net, method, lambda its, *args, **kwargs: (its, method(*args, **kwargs)))
    return net


@pytest.mark.parametrize("own", [lambda net: net.forward, lambda net: partial(Net.forward, net)])
def test_a_function_in_the_place_of_a_method_has_its_signature(own):
    plain = Net()
    net = replaced(plain, own(plain))
    assert list(inspect.signature(net.forward).parameters) == ["first", "second", "more"]
    assert net.forward(1) == (net, (1, 2, {}))


def test_its_name_and_its_documentation_are_those_of_the_method():
    plain = Net()
    net = replaced(plain, plain.forward)
    assert (net.forward.__name__, net.forward.__doc__) == ("forward", "What it gives.")


def test_of_a_copy_it_is_given_the_copy():
    plain = Net()
    copied = copy.deepcopy(replaced(plain, plain.forward))
    assert copied.forward(1)[0] is copied


def test_a_function_without_a_signature_is_replaced_too():
    net = replaced(Net(), print)
    assert net.forward() == (net, None)
