"""memfit beside Transformers' Trainer: a step that does not fit is split, and the weights are the undisturbed run's.

pytest tests/integrations/test_transformers.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import memfit  # noqa: E402
from tests.accumulation.nets import MESSAGE  # noqa: E402

VOCABULARY, LENGTH = 32, 8


def rows(count: int = 24) -> list[dict[str, torch.Tensor]]:
    """Rows of which a part of the labels does not count, so that micro-batches have different numbers of tokens."""
    made = torch.Generator().manual_seed(0)
    result = []
    for index in range(count):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=made)
        labels = ids.clone()
        labels[: index % 5] = -100
        result.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return result


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


class Plain(torch.nn.Module):
    """A model whose loss is the mean over samples, and that knows nothing of a window's items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 4).double(), torch.nn.Linear(4, 1).double()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        value = self.head(self.embedding(input_ids)).square().mean((1, 2))
        return {"loss": value.mean(), "logits": value}


def trained(
    net: Any, tmp_path: Path, fail_at: set[int], *, resume: str | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}), mixin: type = memfit.transformers.SplitStep, **options: Any,
) -> Any:  # fmt: skip
    """The Trainer after three windows of two micro-batches, in whose ``fail_at``-th backwards memory runs out."""

    class Split(mixin, transformers.Trainer):
        pass

    calls = 0

    def hook(gradient: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 in fail_at:
            raise torch.OutOfMemoryError(MESSAGE)

    first = next(net.parameters())
    first.register_hook(hook)
    given = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": 3, "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd", "use_cpu": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0, "data_seed": 0,
    }  # fmt: skip
    training = transformers.TrainingArguments(**{**given, **arguments})
    trainer = Split(model=net, args=training, train_dataset=rows(), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("fail_at", [{0}, {1}, {2, 7}])
@pytest.mark.parametrize("kind", [model, Plain])
def test_a_split_step_ends_with_the_undisturbed_weights(tmp_path: Path, kind: Any, fail_at: set[int]) -> None:
    undisturbed, cut = kind(), kind()
    trained(undisturbed, tmp_path, set())
    trainer = trained(cut, tmp_path, fail_at)
    assert trainer.memory_failures == len(fail_at)
    for first, second in zip(undisturbed.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-12, rtol=0)


def test_one_sample_that_does_not_fit_is_the_failure_itself(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trained(model(), tmp_path, set(range(50)))


def test_the_callback_watches_each_step(tmp_path: Path) -> None:
    callback = memfit.transformers.WatchCallback(out=tmp_path / "m.jsonl", units=8)
    trained(model(), tmp_path, set(), callbacks=[callback])
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["window"] for line in lines] == [0, 1, 2]


class Unchanged:
    """The Trainer as it is."""


def test_auto_find_batch_size_learns_something_else_and_a_split_step_does_not(tmp_path: Path) -> None:
    """After a failure, the Trainer's own remedy trains with another batch, from weights that are no longer the first.

    It repeats the steps that were done before the failure, so that their samples count twice.
    """
    undisturbed, restarted, cut = model(), model(), model()
    trained(undisturbed, tmp_path, set())
    remedy = {"auto_find_batch_size": True}
    own = trained(restarted, tmp_path, {3}, arguments=remedy, mixin=Unchanged)
    ours = trained(cut, tmp_path, {3})
    assert own._train_batch_size < 4
    assert ours._train_batch_size == 4
    assert difference(restarted, undisturbed) > 1e-4
    assert difference(cut, undisturbed) < 1e-12


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))
