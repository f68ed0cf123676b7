"""Messages that only holders of the launch's key can write (HMAC-SHA256): strangers on the network may read them."""

import hashlib
import hmac
import json
from typing import Any

CHANGED = "The store at MASTER_PORT was changed by another program: start again, on a private network."


def sign(key: bytes, subject: str, text: str) -> str:
    """Return `SIGNATURE text`; the signature holds for this subject alone."""
    return f"{_mac(key, subject, text)} {text}"


def verify(key: bytes, subject: str, signed: str) -> str:
    """Return the text that was signed; raise `ValueError` for any other."""
    mac, _, text = signed.partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(key, subject, text).encode()):
        raise ValueError(f"{subject}: the signature is wrong")
    return text


def _mac(key: bytes, subject: str, text: str) -> str:
    return hmac.new(key, f"{subject}\n{text}".encode(), hashlib.sha256).hexdigest()


class Channel:
    """Messages of one connection, numbered, so that none can be forged, replayed, reordered or sent back.

    Each side has chosen one of the two nonces, so that nothing recorded from another connection is accepted.
    """

    def __init__(self, key: bytes, server_nonce: str, client_nonce: str, serves: bool) -> None:
        self._key = hmac.new(key, f"{server_nonce}\n{client_nonce}".encode(), hashlib.sha256).digest()
        self._subjects = ("server", "client") if serves else ("client", "server")
        self._sent = self._received = 0

    def pack(self, message: Any) -> bytes:
        """Return the line that carries the next message, anything that JSON holds."""
        self._sent += 1
        return sign(self._key, f"{self._subjects[0]} {self._sent}", json.dumps(message)).encode() + b"\n"

    def unpack(self, line: bytes) -> Any:
        """Return the other side's next message; raise `ValueError` for any other line."""
        self._received += 1
        return json.loads(verify(self._key, f"{self._subjects[1]} {self._received}", line.decode().rstrip("\n")))
