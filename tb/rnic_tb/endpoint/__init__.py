"""An independent software RoCEv2 endpoint: the peer and the judge of the hardware.

Behaviour comes from the transport rules alone; only frame formats are shared with the hardware (`rnic.wire`).
"""

from .constants import (
    ALL_ACCESS,
    Access,
    AethType,
    Event,
    NakCode,
    QpState,
    QpType,
    WcFlag,
    WcOp,
    WcStatus,
    WrOp,
    ack_timeout_ns,
    syndrome,
)
from .device import Device
from .link import Faults, Link
from .memory import KeyTable, MemoryRegion, MemoryWindow, ProtectionError
from .qp import PeerPolicy, QpAttributes, QueuePair, udp_source_port
from .queues import (
    AddressVector,
    CompletionQueue,
    MwBind,
    PostError,
    QueueFull,
    RecvWr,
    SendWr,
    Sge,
    SharedReceiveQueue,
    WorkCompletion,
)

__all__ = [
    "ALL_ACCESS",
    "Access",
    "AddressVector",
    "AethType",
    "CompletionQueue",
    "Device",
    "Event",
    "Faults",
    "KeyTable",
    "Link",
    "MemoryRegion",
    "MemoryWindow",
    "MwBind",
    "NakCode",
    "PeerPolicy",
    "PostError",
    "ProtectionError",
    "QpAttributes",
    "QpState",
    "QpType",
    "QueueFull",
    "QueuePair",
    "RecvWr",
    "SendWr",
    "Sge",
    "SharedReceiveQueue",
    "WcFlag",
    "WcOp",
    "WcStatus",
    "WorkCompletion",
    "WrOp",
    "ack_timeout_ns",
    "syndrome",
    "udp_source_port",
]
