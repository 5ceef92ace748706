"""Keys that sign receipts, as files that a user names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._files import read_input
from phasewise.workflows.errors import WorkflowError

if TYPE_CHECKING:
    from phasewise.serving.engine.receipt_signing import Signer
    from phasewise.serving.engine.receipts import SignReceipt

_MOST_KEY_BYTES = 64 << 10


def signing_key(path: Path) -> SignReceipt:
    """Signs receipts by the private key in a file. WorkflowError, or ReceiptError where there is no key."""
    from phasewise.serving.engine.receipt_signing import signer_of

    return signer_of(_read(path), str(path))


def known_signer(path: Path) -> Signer:
    """The owner of the key in a file, public or private. WorkflowError, or ReceiptError."""
    from phasewise.serving.engine.receipt_signing import Signer

    return Signer(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return read_input(path, _MOST_KEY_BYTES)
    except OSError as error:
        raise WorkflowError(f"{path} cannot be read: {error.strerror or error}") from None
