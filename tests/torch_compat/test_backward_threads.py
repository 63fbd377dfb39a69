"""Backwards that leave no thread, in processes of their own: the first backward of a process decides.

python -m pytest tests/torch_compat/test_backward_threads.py
"""

import subprocess
import sys

import pytest
import torch

BEGIN = """
import os
import torch
from memfit.torch_compat.backward_threads import backward_without_threads
from memfit.device.hardware.catalogue import find_device
from memfit.trace.step import on_virtual_device

def trained():
    net = torch.nn.Linear(3, 5, device="cuda")
    for _ in range(2):
        net(torch.ones(2, 3, device="cuda")).sum().backward()
    return tuple(net.weight.grad.shape)

def in_a_copy(work):
    process = os.fork()
    if process == 0:
        try:
            work()
        except RuntimeError as error:
            print(str(error).splitlines()[0], flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1]
"""


def said(code):
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_copy_made_behind_a_backward_runs_one():
    assert said("""
print(backward_without_threads())
with on_virtual_device(find_device("rtx4090")):
    print(trained(), len(os.listdir("/proc/self/task")), in_a_copy(trained))
""") == ["True", "(5, 3) 1 0"]


def test_without_it_a_copy_does_not():
    begun, refused, *rest = said("""
with on_virtual_device(find_device("rtx4090")):
    print(trained(), flush=True)
    print(in_a_copy(trained))
""")
    assert begun == "(5, 3)"
    assert "fork" in refused
    assert rest == ["256"]


def test_it_is_told_where_the_card_is_there_already():
    assert said("""
with on_virtual_device(find_device("rtx4090")):
    print(backward_without_threads(), trained())
""") == ["False (5, 3)"]


@pytest.mark.parametrize("has_device", [True, False])
def test_an_accelerator_keeps_its_threads_by_a_mock_of_torch(has_device):
    *begun, threads = said(f"""
from unittest import mock
with mock.patch("torch.accelerator.is_available", return_value={has_device}):
    print(backward_without_threads(), len(os.listdir("/proc/self/task")))
with on_virtual_device(find_device("rtx4090")):
    print(trained())
    print(len(os.listdir("/proc/self/task")))
""")
    assert begun == [f"{not has_device} 1", "(5, 3)"]
    assert (int(threads) > 1) is has_device
    if torch.version.cuda is None:  # a build for CUDA starts a thread for each device that it could have
        assert int(threads) == 1 + has_device


def test_what_a_hook_raises_in_a_backward_arrives():
    assert said("""
backward_without_threads()
with on_virtual_device(find_device("rtx4090")):
    weight = torch.ones(3, device="cuda", requires_grad=True)
    made = weight * 2
    made.register_hook(lambda gradient: 1 / 0)
    for _ in range(2):
        try:
            made.sum().backward(retain_graph=True)
        except ZeroDivisionError as error:
            print(error)
print(torch.ones(2).sum().item())
""") == ["division by zero", "division by zero", "2.0"]
