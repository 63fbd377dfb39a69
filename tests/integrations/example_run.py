"""Trains an example twice under a real limit, undisturbed and disturbed: example_run.py NAME FOLDER FAILURE.

FAILURE is the number of the decoder's backward that asks for more than the limit allows. The allocator itself fails
then: without the limit the request would be granted. FOLDER gets both weights; what was raised is printed as JSON.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch import Tensor, nn

from memfit.train.launch import memory_limit
from memfit.train.launch.warm_up import warm_torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "beside"
BUDGET = 384 << 20
"""Bytes that a run may take beside what is imported; most of it is the frameworks' own."""


class FailingBackward:
    """Asks the allocator for more than the budget in one backward of the decoder, counted from 0."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0
        self.raised: list[str] = []

    def watch(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """A forward hook on all modules."""
        if type(module).__name__ == "LlamaForCausalLM" and torch.is_grad_enabled():
            output.logits.register_hook(self._fail_where_due)

    def _fail_where_due(self, gradient: Tensor) -> None:
        self.calls += 1
        if self.calls - 1 != self.number:
            return
        try:
            torch.empty(BUDGET, dtype=torch.uint8)
        except RuntimeError as error:
            self.raised.append(str(error))
            raise


def main() -> None:
    name, folder, number = sys.argv[1:]
    if name == "deepspeed_engine":
        from memfit.engine.deepspeed import load

        load()
    sys.path.insert(0, str(EXAMPLES))
    train = runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"]
    failure = FailingBackward(int(number))
    warm_torch()
    memory_limit.limit(BUDGET)
    torch.save(train().state_dict(), Path(folder, "undisturbed.pt"))
    nn.modules.module.register_module_forward_hook(failure.watch)
    torch.save(train().state_dict(), Path(folder, "disturbed.pt"))
    print(json.dumps({"raised": failure.raised, "backwards": failure.calls}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
