"""Runs that are killed, stopped, starved and damaged by chance, and resumed; see bench/attack.py.

python -m pytest tests/attack/test_attack.py -m slow
"""

import pytest

from tests.attack.attacking import DAMAGES, DISTURBANCES, KINDS, Attacker, Case, Launch, draw_case


def test_cases_are_the_same_for_the_same_seed_and_reach_everything():
    cases = [draw_case(1, number) for number in range(300)]
    assert cases == [draw_case(1, number) for number in range(300)]
    launches = [launch for case in cases for launch in case.launches]
    assert {case.kind for case in cases} == set(KINDS)
    assert {launch.disturbance for launch in launches} == set(DISTURBANCES)
    assert {launch.damage for launch in launches} == set(DAMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_every_disturbance(tmp_path, disturbance):
    launch = Launch(disturbance=disturbance, after=0.8, damage="checkpoint byte")
    Attacker(tmp_path).attack(Case(number=0, kind="average", launches=[launch]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(tmp_path, kind):
    attacker = Attacker(tmp_path)
    for number in range(2):
        attacker.attack(draw_case(20, number, (kind,)))
