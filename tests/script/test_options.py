"""What each storage of a script is counted as, and the options that follow from it."""

from pathlib import Path

import pytest

from memfit.script.outcome import ScriptOption, ScriptOutcome
from tests.script.script_trace import trace_alone, trace_here

NET = (
    "import torch, copy, contextlib\n"
    "net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
)
WEIGHTS = 4 * 2 * 513 * 512


def option_of(outcome: ScriptOutcome, name: str) -> ScriptOption | None:
    assert outcome.error is None, outcome.error.text
    return next((option for option in outcome.options if option.name == name), None)


def categories_of(folder: Path, script: str) -> dict[str, int]:
    """Bytes of each category at the peak of training."""
    footprint = trace_here(folder, script).footprint
    assert footprint is not None
    return dict(footprint.phases["train"].categories)


AVERAGES = {
    "a copied net": (
        "average = copy.deepcopy(net)\n",
        "    with torch.no_grad():\n"
        "        for a, p in zip(average.parameters(), net.parameters()):\n"
        "            a.mul_(0.9).add_(p, alpha=0.1)\n",
    ),
    "a list": (
        "average = [p.detach().clone() for p in net.parameters()]\n",
        "    torch._foreach_lerp_(average, [p.detach() for p in net.parameters()], 0.1)\n",
    ),
    "torch's AveragedModel": (
        "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\n"
        "average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn())\n",
        "    average.update_parameters(net)\n",
    ),
    "a copied net that validates": (
        "average = copy.deepcopy(net).requires_grad_(False)\n",
        "    for a, p in zip(average.state_dict().values(), net.state_dict().values()):\n"
        "        a.copy_(0.9 * a + 0.1 * p)\n"
        "    with torch.no_grad():\n"
        "        average(torch.ones(1, 512).cuda())\n",
    ),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_the_weights_are_counted_as_such(tmp_path: Path, kind: str) -> None:
    made, updated = AVERAGES[kind]
    script = (
        f"{NET}{made}for step in range(3):\n"
        "    net(torch.ones(4, 512).cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        f"{updated}"
    )
    categories = categories_of(tmp_path, script)
    assert (categories["ema"], categories["parameters"]) == (WEIGHTS, WEIGHTS)


def test_a_sum_of_gradients_is_no_average_of_the_weights(tmp_path: Path) -> None:
    script = (
        f"{NET}sums = [torch.zeros_like(p) for p in net.parameters()]\n"
        "for step in range(3):\n"
        "    for part in range(2):\n"
        "        net(torch.ones(4, 512).cuda()).sum().backward()\n"
        "        torch._foreach_add_(sums, [p.grad for p in net.parameters()])\n"
        "    optimizer.step(); optimizer.zero_grad(); torch._foreach_zero_(sums)\n"
    )
    assert categories_of(tmp_path, script).get("ema", 0) == 0


def test_sums_that_a_backward_makes_are_gradients(tmp_path: Path) -> None:
    """As FSDP2 sums the gradients of a pipeline's micro-batches, and takes them after the last one."""
    script = (
        f"{NET}sums = {{}}\n"
        "def keep(p):\n"
        "    sums[p] = p.grad.clone() if p not in sums else sums[p]\n"
        "    p.grad = None\n"
        "for p in net.parameters():\n"
        "    p.register_post_accumulate_grad_hook(keep)\n"
        "for step in range(3):\n"
        "    larger = torch.ones(1024 << step).cuda()\n"
        "    net(torch.ones(4, 512).cuda()).sum().backward()\n"
        "    for p in net.parameters():\n"
        "        p.grad = sums.pop(p).mul_(0.5).clone()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
    )
    categories = categories_of(tmp_path, script)
    assert categories.get("ema", 0) == 0
    assert categories["gradients"] >= WEIGHTS


def test_half_the_batch_does_not_halve_what_no_batch_holds(tmp_path: Path) -> None:
    script = (
        f"{NET}table = torch.zeros(1 << 22).cuda()\n"
        "for step in range(3):\n"
        "    x = torch.ones(1024, 512).cuda()\n"
        "    net(x + table[0]).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    option = option_of(trace_here(tmp_path, script), "half the micro-batch")
    assert option is not None
    assert option.saves_bytes is not None
    assert 4 * 1024 * 512 < option.saves_bytes < 4 * 4 * 1024 * 512  # the table alone has 16 MiB


def test_gradients_that_others_replace_before_the_step_are_gradients(tmp_path: Path) -> None:
    script = (
        f"{NET}import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0], gradient_as_bucket_view=True)\n"
        "for step in range(3):\n"
        "    with wrapped.no_sync():\n"
        "        wrapped(torch.ones(4, 512).cuda()).sum().backward()\n"
        "    wrapped(torch.ones(4, 512).cuda()).sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
    )
    option = option_of(trace_here(tmp_path, script, world=2), "half the micro-batch")
    assert option is None or (option.saves_bytes or 0) < WEIGHTS // 2


@pytest.mark.parametrize(("zero_grad", "is_kept"), [("optimizer.zero_grad()", False), ("None", True)])
def test_gradients_stay_only_where_a_later_forward_sees_them(tmp_path: Path, zero_grad: str, is_kept: bool) -> None:
    script = (
        f"{NET}for step in range(3):\n"
        f"    net(torch.ones(4, 512).cuda()).sum().backward(); optimizer.step(); {zero_grad}\n"
    )
    assert (option_of(trace_here(tmp_path, script), "free gradients") is not None) is is_kept


def test_a_variable_that_the_expression_of_the_backward_reads_cannot_be_freed_before_it(tmp_path: Path) -> None:
    script = (
        f"{NET}for step in range(3):\n"
        "    made = net(torch.ones(256, 512).cuda())\n"
        "    loss = made.sum()\n"
        "    LOSS.backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    kept = trace_here(tmp_path, script.replace("LOSS", "loss"))
    assert option_of(kept, "free made") is not None
    read = trace_here(tmp_path, script.replace("LOSS", "(loss + 0 * made.detach().sum())"))
    assert option_of(read, "free made") is None


def test_options_name_the_call_of_the_net_that_they_change(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "class Generator(torch.nn.Sequential): pass\n"
        "class Judge(torch.nn.Sequential): pass\n"
        "def layer(width): return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())\n"
        "def layers(width): return [layer(width) for _ in range(6)]\n"
        "generator, judge = Generator(*layers(256)).cuda(), Judge(*layers(128)).cuda()\n"
        "optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, judge)]\n"
        "for step in range(3):\n"
        "    made = generator(torch.ones(2048, 256).cuda())\n"
        "    judge(made[:, :128]).sum().backward()\n"
        "    for optimizer in optimizers: optimizer.step(); optimizer.zero_grad()\n"
    )
    outcome = trace_here(tmp_path, script)
    assert outcome.error is None, outcome.error.text
    lines = {option.where.rpartition(":")[2] for option in outcome.options if option.name == "half the micro-batch"}
    assert lines == {"9"}
    assert {option.where.rpartition(":")[2] for option in outcome.options if "checkpoint" in option.name} == {"9", "10"}


def test_optimizers_of_failed_attempts_are_not_said_to_have_never_stepped(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "size = 1 << 15\n"
        "while True:\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).cuda()\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "    try:\n"
        "        for step in range(3):\n"
        "            net(torch.ones(size, 1024).cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "        break\n"
        "    except torch.cuda.OutOfMemoryError:\n"
        "        size //= 16\n"
    )
    outcome = trace_here(tmp_path, script, memory_bytes=900 << 20, enforced=True)
    assert outcome.failed_attempts == 1
    assert outcome.windows == 3
    assert not [line for line in outcome.not_seen if "never stepped" in line]


def test_a_variable_that_outlives_its_graph_saves_nothing_at_a_peak_that_needs_it(tmp_path: Path) -> None:
    script = (
        f"{NET}small = torch.nn.Linear(512, 1).cuda()\n"
        "for step in range(3):\n"
        "    small(torch.ones(1, 512).cuda()).sum().backward()\n"
        "    kept = net[1](net[0](torch.ones(4096, 512).cuda()))\n"
        "    net[2](kept).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    assert option_of(trace_here(tmp_path, script), "free kept") is None


TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        ids = torch.full((256,), i)
        return {"input_ids": ids, "labels": ids}

given = dict(per_device_train_batch_size=8, num_train_epochs=1, save_strategy="no", report_to="none", disable_tqdm=True)
model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=256, n_head=4, vocab_size=500))
Trainer(model, TrainingArguments("out", **given | ADDED), train_dataset=Words()).train()
"""


@pytest.mark.parametrize(
    ("name", "most"), [("checkpoint transformer.h", 1.25), pytest.param("bf16 autocast", 2, marks=pytest.mark.slow)]
)
def test_the_trainers_own_arguments_save_what_the_option_says(tmp_path: Path, name: str, most: float) -> None:
    """The words are evaluated as they are printed, given to the real Trainer, and the script is traced again. bf16
    saves more than is promised: of results that are no products' it is not known."""
    before = trace_alone(tmp_path, TRAINER.replace("ADDED", "{}"))
    option = option_of(before, name)
    assert option is not None
    assert option.saves_bytes is not None
    words = option.for_tools["transformers"].replace("TrainingArguments(", "dict(")
    after = trace_alone(tmp_path, TRAINER.replace("ADDED", words))
    assert after.error is None
    assert before.footprint is not None
    assert after.footprint is not None
    saved = before.footprint.phases["train"].allocated_bytes - after.footprint.phases["train"].allocated_bytes
    assert option.saves_bytes <= saved <= most * option.saves_bytes


def test_edits_of_an_optimizer_are_at_the_one_that_has_the_state(tmp_path: Path) -> None:
    """A search for the learning rate steps an optimizer without state before."""
    script = (
        f"{NET}for step in range(3):\n"
        "    net(torch.ones(8, 512).cuda()).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "trained = torch.optim.AdamW(net.parameters())\n"
        "for step in range(3):\n"
        "    net(torch.ones(8, 512).cuda()).sum().backward()\n"
        "    trained.step()\n"
        "    trained.zero_grad()\n"
    )
    outcome = trace_here(tmp_path, script)
    eight_bit, fused = (option_of(outcome, name) for name in ("8-bit optimizer state", "fused step"))
    assert eight_bit is not None
    assert eight_bit.where.endswith(":8")
    assert eight_bit.write == "bitsandbytes.optim.AdamW8bit(...) instead"
    assert 0 <= eight_bit.saves_bytes - 0.75 * 2 * WEIGHTS < 4096
    assert fused is not None
    assert fused.where.endswith(":8")


def test_optimizers_of_two_lines_have_edits_of_their_own(tmp_path: Path) -> None:
    script = (
        f"{NET}optimizer = torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9)\n"
        "second = torch.optim.Adam(net[2].parameters())\n"
        "for step in range(3):\n"
        "    net(torch.ones(8, 512).cuda()).sum().backward()\n"
        "    optimizer.step(), second.step()\n"
        "    optimizer.zero_grad(), second.zero_grad()\n"
    )
    outcome = trace_here(tmp_path, script)
    written = {o.where.rpartition(":")[2]: o.write for o in outcome.options if o.name == "8-bit optimizer state"}
    assert set(written) == {"4", "5"}
    assert "SGD8bit" in written["4"]
    assert "Adam8bit" in written["5"]
