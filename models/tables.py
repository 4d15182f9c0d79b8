"""Every table in one place: import `metadata` from here, not from a single subject, so that none is missing."""

from models.audits import Audit
from models.base import Table
from models.batches import BatchDuplicate, ImportBatch, ImportSlice
from models.dead_letters import DeadLetter
from models.dispatches import EmailDispatch
from models.offsets import ProcessorOffset
from models.outbox import OutboxEvent
from models.repayments import Payment, PaymentInstallment, Repayment, RepaymentRequestRow

metadata = Table.metadata

__all__ = [
    "Audit",
    "BatchDuplicate",
    "DeadLetter",
    "EmailDispatch",
    "ImportBatch",
    "ImportSlice",
    "OutboxEvent",
    "Payment",
    "PaymentInstallment",
    "ProcessorOffset",
    "Repayment",
    "RepaymentRequestRow",
    "metadata",
]
