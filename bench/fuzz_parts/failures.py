"""What is left of a failure, for ``memfit explain``, and scripts, for ``memfit lint``: one of them spoiled."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from bench.fuzz_parts.spoil import spoil_bytes, spoil_lines, spoil_value
from memfit.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SUMMARY = b"""\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 0                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 2         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |  20480 KiB |  30720 KiB | 102400 KiB |  81920 KiB |
| GPU reserved memory   |  43008 KiB |  43008 KiB |  43008 KiB |      0 B   |
|===========================================================================|
"""
SMI = b"""\
index, name, memory.total [MiB], memory.used [MiB]
0, NVIDIA GeForce RTX 4090, 24564 MiB, 24100 MiB
1, NVIDIA GeForce RTX 4090, 24564 MiB, 3 MiB
"""


class FailureInputs:
    """Cases of what ``explain`` and ``lint`` read. ``now`` is the folder of a case."""

    now: Path
    snapshot: bytes
    """A memory snapshot as memfit writes it."""

    def _case_snapshot(self, chance: random.Random) -> Any:
        """Its bytes spoiled, or one of its values replaced, in any of pickle's protocols."""
        if chance.random() < 0.5:
            content = spoil_bytes(self.snapshot, chance)
        else:
            content = pickle.dumps(spoil_value(pickle.loads(self.snapshot), chance), protocol=chance.randrange(6))
        return self._explained("snapshot.pickle", content, chance)

    def _case_failure(self, chance: random.Random) -> Any:
        """The text of an error, a summary, a table or metrics."""
        metrics = b"".join(b'{"window": %d, "measured_process_bytes": %d}\n' % (i, i << 20) for i in range(8))
        log = (EXAMPLES / "failures" / "out_of_memory.log").read_bytes()
        content = chance.choice((spoil_bytes, spoil_lines))(chance.choice((log, SUMMARY, SMI, metrics)), chance)
        return self._explained(chance.choice(("failure.log", "metrics.jsonl", "x")), content, chance)

    def _explained(self, name: str, content: bytes, chance: random.Random) -> Any:
        (self.now / name).write_bytes(content)
        return main(["explain", f"{self.now}/{name}", *chance.choice(([], ["--json"]))])

    def _case_script(self, chance: random.Random) -> Any:
        """A training script that ``lint`` reads and does not run."""
        script = chance.choice((EXAMPLES / "failures" / "mistakes.py", EXAMPLES / "scripts" / "gpt2.py")).read_bytes()
        (self.now / "train.py").write_bytes(chance.choice((spoil_bytes, spoil_lines))(script, chance))
        return main(["lint", f"{self.now}/train.py", *chance.choice(([], ["--json"]))])
