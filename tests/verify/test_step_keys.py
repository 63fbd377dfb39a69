"""Keys of the steps of a window.

python -m pytest tests/verify/test_step_keys.py
"""

import torch

from memfit.verify.bounds import bounds_of_steps, sum_bound
from memfit.verify.step_keys import at_the_end, key_before, step_key


def test_steps_of_a_parameter_have_keys_of_their_own():
    keys = [step_key("net.w", before) for before in range(3)]
    assert keys == ["net.w", "net.w, step 2", "net.w, step 3"]
    assert [key_before(key) for key in keys] == [None, *keys[:2]]
    values = {key: torch.tensor(float(number)) for number, key in enumerate([*keys, "net.b"])}
    assert {name: float(value) for name, value in at_the_end(values).items()} == {"net.w": 2.0, "net.b": 3.0}


def test_a_second_step_may_differ_by_what_the_first_one_did_too():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    keys = ["net.w", "net.w, step 2"]
    gradients = {key: torch.full((3,), 2.0) for key in keys}
    steps = [(optimizer, [[key]]) for key in keys]
    bounds = bounds_of_steps(steps, gradients, gradients, dict.fromkeys(keys, 1.0), sum_bound(2))
    torch.testing.assert_close(bounds[keys[1]], 2 * bounds[keys[0]])
