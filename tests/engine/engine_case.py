"""A job on an engine, whose memory is traced and measured."""

from dataclasses import dataclass, field

from memfit.job import Shape
from memfit.mesh import MeshShape
from testing.nets import JOBS, SHAPES
from tests.engine import built_in_jobs, context_jobs, encoder_jobs, expert_jobs
from tests.engine.pipeline_jobs import STAGED
from tests.engine.tensor_jobs import CARRIED, Drawn

KINDS = {
    **JOBS, **CARRIED, **STAGED, **built_in_jobs.CARRIED, "s1": built_in_jobs.Tokens, **expert_jobs.CARRIED,
    "even mixture": expert_jobs.EvenMixture, "drawn": Drawn, **context_jobs.CARRIED, **context_jobs.STAGED,
    **context_jobs.MIXTURES, "even divided mixture": context_jobs.EvenDividedMixture,
    **encoder_jobs.CARRIED, **encoder_jobs.STAGED,
}  # fmt: skip


@dataclass(frozen=True)
class EngineCase:
    net: str
    engine: str
    micro_batches: int = 1
    settings: dict = field(default_factory=dict)
    choices: dict = field(default_factory=dict)
    mesh: MeshShape | None = None

    @property
    def shape(self):
        items, length = SHAPES.get(self.net, (4, self.job().longest))
        return Shape(items=items, length=length)

    def job(self):
        return KINDS[self.net](**self.settings)

    def __str__(self):
        words = [
            self.engine,
            self.net,
            str(self.micro_batches),
            *(f"{k}={v}" for k, v in {**self.settings, **self.choices}.items()),
            *([str(self.mesh)] if self.mesh else []),
        ]
        return " ".join(words)
