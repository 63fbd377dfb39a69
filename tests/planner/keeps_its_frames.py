"""A module whose import leaves a cycle of a frame and an exception behind, with the frames that imported it beneath."""


def _meet() -> None:
    try:
        raise ValueError
    except ValueError as error:
        kept = error
        assert kept is not None


_meet()
