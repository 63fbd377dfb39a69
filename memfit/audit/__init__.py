"""The audit: what a sampler, loader or loop really gives to each rank, found by counting."""

from memfit.audit.cures import CURES
from memfit.audit.findings import AuditFinding
from memfit.audit.report import Audit, audit
from memfit.audit.units import Meant

__all__ = ["CURES", "Audit", "AuditFinding", "Meant", "audit"]
