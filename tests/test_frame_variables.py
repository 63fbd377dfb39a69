"""A look at a function's variables keeps nothing alive.

python -m pytest tests/test_frame_variables.py
"""

import sys
import weakref

from memfit.frame_variables import frame_variables


class Value:
    pass


def test_a_variable_that_is_set_anew_lets_its_value_go():
    first = Value()
    gone = weakref.ref(first)
    seen = frame_variables(sys._getframe())
    assert seen["first"] is first
    del seen
    first = None
    assert gone() is None


def test_the_dict_of_a_function_that_asked_for_its_locals_is_not_emptied():
    size = 3
    settings = locals()
    assert frame_variables(sys._getframe())["size"] == size
    assert settings["size"] == size


def test_variables_of_cells_and_of_modules_are_seen():
    inner = Value()

    def look():
        assert inner is not None
        return frame_variables(sys._getframe())

    assert look()["inner"] is inner
    names = {}
    exec("import sys\nvalue = 5\nseen = look(sys._getframe())", {"look": frame_variables}, names)
    assert names["seen"]["value"] == names["value"] == 5
