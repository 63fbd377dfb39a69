"""python -m pytest tests/verify/test_verified_world.py"""

from dataclasses import replace

from memfit.verify.verify import VerifiedWorld

WORLD = VerifiedWorld(
    world=2, engine="ddp", differences={"loss": 1e-7}, of_bounds={"loss": 0.5, "gradients": 1.0}, names={}, bound=1e-6
)


def test_a_difference_at_its_bound_is_rounding_and_one_above_it_is_not():
    assert WORLD.ok
    assert not replace(WORLD, of_bounds={"loss": 0.5, "gradients": 1.001}).ok
    assert not replace(WORLD, of_bounds={"loss": 2.0, "gradients": 0.0}).ok
