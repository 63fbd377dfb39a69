"""pytest tests/audit/test_units.py: what a finding about the global batch says."""

from memfit.audit import Meant, audit


def test_most_steps_are_named_and_not_the_mean_of_the_largest():
    batches = [64] * 19 + [16], [32] * 19 + [16]

    def target(rank, world):
        sizes = batches[rank] if world == 2 else [a + b for a, b in zip(*batches, strict=True)]
        starts = iter(range(rank * 10_000, 10_000 + rank * 10_000))
        return [[next(starts) for _ in range(size)] for size in sizes]

    (finding,) = [f for f in audit(target, (2,), meant=Meant(global_batch=64)).findings if f.code.startswith("global")]
    assert "2 ranks take 96 samples a step where 64 were meant: in most steps the ranks take 64, 32" in finding.text
