"""How a rank leaves an exchange."""

from __future__ import annotations

from gear_offline.core.closing import Closing
from gear_offline.distributed.exchange.contract import Ledger
from gear_offline.distributed.exchange.mesh import Mesh
from gear_offline.errors import GearError


class Membership(Closing):
    """A rank's part in an exchange; a context manager that tells the peers of an error."""

    _ledger: Ledger
    _mesh: Mesh

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and not self._ledger.closed:
            self._mesh.abort(f"{type(error).__name__}: {error}")
            if self._ledger.error is None:
                self._ledger.error = GearError("EXCHANGE_CLOSED", "left after an error")
        super().__exit__(kind, error, trace)
