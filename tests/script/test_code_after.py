"""What a script does with its nets after the training: it is traced, and the answer says where if it is not."""

from pathlib import Path

import pytest

from memfit.script import stop_rule
from memfit.script.outcome import ScriptOutcome
from tests.script.script_trace import trace_alone, trace_here

TRAINS = """
import torch
from torch import nn
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 8)
net = nn.Linear(64, 512).cuda()
optimizer = torch.optim.AdamW(net.parameters())
def evaluate(some):
    with torch.no_grad():
        return [some(batch.cuda()).sum().item() for batch in loader]
def test():
    return evaluate(net)
def get_model_state_dict(some):
    return some.state_dict()
def show(numbers):
    return sum(numbers)
def train():
    for epoch in range(9):
        for batch in loader:
            net(batch.cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()
        evaluate(net)
        torch.save({"net": net.state_dict(), "epoch": int(epoch)}, f"{epoch}.pt")
"""
LINES = TRAINS.count("\n")


CALLER = """def main():
    with torch.device("cpu"):
        train()
    show([1])
    evaluate(net)
main()
"""
SAVES = """train()
torch.save(net.state_dict(), "last.pt")
torch.save(get_model_state_dict(net), "last.pt")
print(show([len(loader)]), sum(p.numel() for p in net.parameters()))
"""


@pytest.mark.parametrize(
    ("rest", "line", "shown"),
    [
        ("train()\nprint('test', test())\n", 2, "print('test', test())"),
        ("train(); show([1]); numbers = evaluate(net)\n", 1, "numbers = evaluate(net)"),
        (CALLER, 5, "evaluate(net)"),
        ("train()\nnet.load_state_dict(torch.load('8.pt'))\n", 2, "net.load_state_dict(torch.load('8.pt'))"),
        (SAVES, 0, ""),
    ],
    ids=["function", "one line", "caller", "loads", "saves"],
)
def test_the_answer_says_what_follows_the_training(tmp_path: Path, rest: str, line: int, shown: str) -> None:
    outcome = trace_here(tmp_path, TRAINS + rest, steps=3)
    follows = [text for text in outcome.not_seen if text.startswith("what follows the training")]
    place = f"{tmp_path / 'train.py'}:{LINES + line}"
    assert follows == ([f"what follows the training, from {place}: {shown}"] if shown else [])


LOOP = """
def fit(net, optimizer, loader, evaluate):
    import torch
    for epoch in range(9):
        for batch in loader:
            net(batch.cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()
        evaluate(net)
        torch.save(net.state_dict(), f"{epoch}.pt")
    net.cpu().double()
"""


def test_the_rest_of_a_library_that_trains_is_not_the_script_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "fitting_of_a_library.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(library))
    rest = "from fitting_of_a_library import fit\nfit(net, optimizer, loader, evaluate)\ntest()\n"
    outcome = trace_here(tmp_path, TRAINS + rest, steps=3)
    follows = [text for text in outcome.not_seen if text.startswith("what follows the training")]
    assert follows == [f"what follows the training, from {tmp_path / 'train.py'}:{LINES + 3}: test()"]


PROXY = """
class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("not bound")
    __dict__ = __class__
    def __call__(self):
        pass
proxy = Proxy()
def main():
    here = proxy
    train()
    here()
    evaluate(net)
main()
"""


def test_objects_of_the_script_may_answer_as_they_like(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, TRAINS + PROXY, steps=3)
    assert outcome.error is None
    follows = [text for text in outcome.not_seen if text.startswith("what follows the training")]
    assert follows == [f"what follows the training, from {tmp_path / 'train.py'}:{LINES + 14}: evaluate(net)"]


FINAL = """
torch.save(net.state_dict(), "last.pt")
net.load_state_dict(torch.load("last.pt"))
with torch.no_grad():
    net(torch.ones(1 << 16, 64).cuda())
"""
RESULT = (1 << 16) * 512 * 4
TRAINER = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 512)
    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": out.mean(), "logits": out[:, :1]}
data = [{"x": torch.ones(64), "labels": 0}] * 64
arguments = TrainingArguments("out", report_to=[], max_steps=1000, use_cpu=not torch.cuda.is_available(), **{more})
trainer = Trainer(Net(), arguments, train_dataset=data, eval_dataset=data)
net = trainer.model
trainer.train()
"""
EVALUATES = {"eval_strategy": "steps", "eval_steps": 50, "save_strategy": "steps", "save_steps": 50}
LIGHTNING = """
import torch
from torch import nn
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 512)
    def forward(self, x):
        return self.layer(x)
    def training_step(self, batch, number):
        return self(batch).mean()
    def validation_step(self, batch, number):
        self(batch)
    def test_step(self, batch, number):
        self(batch)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
net = Net()
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 8)
trainer = lightning.Trainer(max_epochs=100, logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(net, loader, loader)
trainer.test(net, torch.utils.data.DataLoader(torch.ones(1 << 16, 64), 1 << 16), ckpt_path="best")
"""


def test_the_rest_is_traced_where_validation_and_saving_were_seen(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, f"{TRAINS}train()\n{FINAL}")
    _has_the_rest(outcome)
    assert outcome.windows == 5, "an epoch of 4 steps, and one of the next"


@pytest.mark.parametrize(
    "text",
    [
        TRAINER.replace("{more}", repr(EVALUATES)) + FINAL.replace(".cuda()", ".to(trainer.args.device)"),
        TRAINER.replace("{more}", "{}") + FINAL.replace(".cuda()", ".to(trainer.args.device)"),
        LIGHTNING,
    ],
    ids=["trainer", "trainer without validation", "lightning"],
)
def test_the_rest_is_traced_after_a_library_s_loops(tmp_path: Path, text: str) -> None:
    outcome = trace_alone(tmp_path, text)
    _has_the_rest(outcome)
    assert outcome.windows < 15


LONG = """
class Long(nn.Module):
    def forward(self, x):
        for turn in range(10**6):
            x = x + 1
        return x
def last():
    show([1])
    Long()(torch.ones(1).cuda())
train()
last()
"""


def test_a_rest_that_takes_too_long_is_told_from_the_statement_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_rule, "SHORT_TRACE", 400)
    outcome = trace_here(tmp_path, TRAINS + LONG)
    follows = [text for text in outcome.not_seen if text.startswith("what follows the training")]
    place = f"{tmp_path / 'train.py'}:{LINES + 9}"
    assert follows == [f"what follows the training, from {place}: Long()(torch.ones(1).cuda())"]


def _has_the_rest(outcome: ScriptOutcome) -> None:
    assert outcome.error is None
    assert outcome.peak_bytes["validate"] > RESULT
    assert "save" in outcome.peak_bytes
    assert not any(text.startswith("what follows the training") for text in outcome.not_seen)


def test_a_rest_that_is_traced_is_not_told(tmp_path: Path) -> None:
    without_saves = TRAINS.replace("        torch.save", "        0 and torch.save")
    outcome = trace_here(tmp_path, f"{without_saves}train()\nprint(test())\ntorch.save(net.state_dict(), 'last.pt')\n")
    assert not any(text.startswith("what follows the training") for text in outcome.not_seen)
