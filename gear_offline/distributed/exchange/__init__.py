"""The exchange: rows of segments that another rank holds, brought into this rank's buffers.

One contract (`distributed.exchange.contract`), two transports: ``collective`` (owners push with
torch.distributed) and ``verbs`` (readers fetch with one-sided RDMA).  `open_exchange` chooses.
Only the collective transport loads torch.
"""

from __future__ import annotations

from gear_offline.distributed.exchange.contract import Destination, Exchange, Piece, Reads, Shelf
from gear_offline.distributed.exchange.opening import open_exchange
from gear_offline.distributed.exchange.rendezvous import FolderRendezvous, Rendezvous

__all__ = [
    "Destination",
    "Exchange",
    "FolderRendezvous",
    "Piece",
    "Reads",
    "Rendezvous",
    "Shelf",
    "open_exchange",
]
