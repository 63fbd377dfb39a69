"""The audit: a sampler, loader or loop of any project goes in, what each rank really draws comes out.

It runs the target for worlds of several sizes, counts ids and units, and names faults with their cure.
"""

from memfit.audit.finding_codes import CURES
from memfit.audit.findings import AuditFinding
from memfit.audit.report import Audit, audit
from memfit.audit.units import Meant

__all__ = ["CURES", "Audit", "AuditFinding", "Meant", "audit"]
