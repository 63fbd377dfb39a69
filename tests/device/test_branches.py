"""Which answer leads past a check of data, and which out of a loop."""

import sys

import pytest
import torch

from memfit.device.virtual.branches import leaving_answer, passing_answer
from memfit.device.virtual.virtual_device import virtual_cpu
from memfit.torch_compat import has_kernel
from memfit.torch_compat.operators import has_operator


class Asks:
    """Answers as ``passing_answer`` says of the frame that asks."""

    def __bool__(self):
        self.answer = passing_answer(sys._getframe(1))
        return bool(self.answer)

    def item(self):
        self.answer = passing_answer(sys._getframe(1))
        return bool(self.answer)


_PLAIN: dict = {}
exec(  # pytest rewrites assertions in test files
    compile(
        "def asserted(ask):\n    assert ask.item(), 'wrong'\n"
        "def asserted_not(ask):\n    assert not ask.item()\n"
        "def ids_are_positive(ids, torch):\n    assert torch.all(ids >= 0).item()\n    return True\n",
        "checks.py",
        "exec",
    ),
    _PLAIN,
)
asserted, asserted_not, ids_are_positive = (_PLAIN[name] for name in ("asserted", "asserted_not", "ids_are_positive"))


def raised_if(ask):
    if ask:
        raise ValueError("wrong")


def raised_unless(ask):
    if not ask:
        text = "wrong"
        raise ValueError(text)
    return 1


def plain(ask):
    return 1 if ask else 2


def used(ask):
    return ask.item()


@pytest.mark.parametrize(
    ("check", "answer"),
    [(asserted, True), (asserted_not, False), (raised_if, False), (raised_unless, True), (plain, None), (used, None)],
)
def test_the_answer_with_which_a_check_passes(check, answer):
    ask = Asks()
    check(ask)
    assert ask.answer is answer


class AsksLoop:
    """Answers False, and then True, and keeps what ``leaving_answer`` says of the frame that asks."""

    def __init__(self):
        self.answers = []

    def __bool__(self):
        self.answers.append(leaving_answer(sys._getframe(1)))
        return len(self.answers) > 1

    def item(self):
        self.answers.append(leaving_answer(sys._getframe(1)))
        return len(self.answers) > 1


def until(ask):
    while not ask:
        pass


def endless(ask):
    while True:
        if ask.item():
            break


def returned(ask):
    for number in range(3):
        if ask:
            return number
    return None


def skipped(ask):
    for _ in range(3):
        if not ask:
            continue
        str(ask)


def stays(ask):
    for _ in range(3):
        if ask:
            str(ask)
        str(ask)


def within_another(ask):
    for number in range(3):
        if ask:
            for letter in "ab":
                str(letter)
        if number == 2:
            break


@pytest.mark.parametrize(
    ("loop", "last"),
    [
        (until, True),
        (endless, True),
        (returned, True),
        (skipped, None),
        (stays, None),
        (within_another, None),
        (plain, None),
    ],
)
def test_the_answer_that_leaves_a_loop(loop, last):
    ask = AsksLoop()
    loop(ask)
    assert ask.answers[-1] is last


def test_a_trace_passes_the_checks_of_its_batch():
    with virtual_cpu():
        ids = torch.zeros(3, dtype=torch.long)
        assert ids_are_positive(ids, torch)
        if (ids < 0).any():
            raise ValueError


def test_experts_get_equal_parts_of_the_tokens():
    with virtual_cpu():
        counts = torch.zeros(4, dtype=torch.long).tolist()
        parts = torch.ones(10, 2).split(counts)
    assert [len(part) for part in parts] == [3, 3, 2, 2]


has_grouped_products = pytest.mark.skipif(
    not has_operator("_grouped_mm.default")
    or not any(has_kernel("aten::_grouped_mm", key) for key in ("CPU", "CompositeExplicitAutograd")),
    reason="before torch 2.9 the CPU has no grouped product to compare with",
)


@has_grouped_products
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shapes_and_strides_of_a_real_run(dtype):
    def products():
        rows, weights, more = (torch.ones(*s, dtype=dtype) for s in ((16, 8), (2, 8, 24), (16, 40)))
        ends = torch.tensor([6, 16], dtype=torch.int32)
        made = torch._grouped_mm(rows, weights, offs=ends), torch._grouped_mm(rows.t(), more, offs=ends)
        return [(tuple(item.shape), item.stride(), item.dtype) for item in made]

    real = products()
    with virtual_cpu():
        assert products() == real


@has_grouped_products
@pytest.mark.parametrize(
    ("inner", "out", "view"),
    [(6, 8, None), (8, 6, None), (5, 7, None), (8, 8, lambda weights: weights[:, :, ::2].repeat(1, 1, 2)[..., ::2])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_of_unaligned_rows_are_refused_as_in_a_real_run(dtype, inner, out, view):
    def product():
        weights = torch.ones(2, inner, out, dtype=dtype)
        ends = torch.tensor([4, 10], dtype=torch.int32)
        torch._grouped_mm(torch.ones(10, inner, dtype=dtype), weights if view is None else view(weights), offs=ends)

    with pytest.raises(RuntimeError, match=r"multiple of 16 bytes|Invalid strides"):
        product()
    with virtual_cpu(), pytest.raises(RuntimeError, match=r"multiple of 16 bytes|Invalid strides"):
        product()
