"""Scripts whose batches are of a subclass of Tensor."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

SAMPLE = Path(__file__).parent / "samples" / "tensor_subclass.py"


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_batches_of_a_subclass_of_tensor_keep_their_class_and_attributes(device: str, tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, SAMPLE.read_text(), device=device)
    assert outcome.error is None, outcome.error.text
    assert outcome.windows == 4


def test_attributes_copied_between_tensors_take_no_known_content_along(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "class Image(torch.Tensor):\n"
        "    pass\n"
        "known = torch.arange(6).cuda().as_subclass(Image)\n"
        "known.label = 'six'\n"
        "other = torch.randint(0, 9, (3, 2)).cuda().as_subclass(Image)\n"
        "other.__dict__.update({key: known.__dict__[key] for key in known.__dict__})\n"
        "assert other.label == 'six' and other.cpu().shape == (3, 2) and other.device.type == 'cuda'\n"
        "net = torch.nn.Linear(2, 2).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for step in range(3):\n"
        "    net(other.float()).sum().backward()\n"
        "    optimizer.step()\n",
    )
    assert outcome.error is None, outcome.error.text


REFUSED = {
    "to a card": ("torch.nested.nested_tensor(rows, layout=torch.jagged).cuda()", "padded tensors"),
    "on a card": ("torch.nested.nested_tensor([row.cuda() for row in rows], layout=torch.jagged)", "padded tensors"),
    "strided": ("torch.nested.nested_tensor(rows).cuda()", "padded tensors"),
    "least squares": ("torch.linalg.lstsq(net.weight, net.weight).solution", "outputs do not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_cannot_follow_is_refused_by_its_line(name: str, tmp_path: Path) -> None:
    """It is no mistake of the script."""
    made, remedy = REFUSED[name]
    text = (
        "import torch\n"
        "net = torch.nn.Linear(64, 64).cuda()\n"
        "rows = [torch.randn(3, 64), torch.randn(5, 64)]\n"
        f"net({made}).sum().backward()\n"
    )
    error = trace_here(tmp_path, text).error
    assert error is not None
    assert remedy in error.hint
    assert "train.py:4" in error.summary + error.hint
