"""The audit: what a sampler, loader or loop really gives to each rank, found by counting."""

from memfit.batch.audit.cures import CURES
from memfit.batch.audit.findings import Finding
from memfit.batch.audit.report import Audit, audit
from memfit.batch.audit.units import Meant

__all__ = ["CURES", "Audit", "Finding", "Meant", "audit"]
