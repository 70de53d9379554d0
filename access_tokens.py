"""What the local engine signs: the short-lived tokens of its clients, and URLs that open one file without a key.

    signer = Signer()                                   # a new secret per server
    token = signer.issue_token()                        # a JWT; the SDK sends it in place of the API key
    query = signer.sign_url("/api/v1/signed/x", ends)   # "expires=...&signature=..."
    signer.check_url("/api/v1/signed/x", expires, signature)

The SDK exchanges its API key for a token because only a token tells who its owner is (`RestClient.whoami`). The engine
has one user, whoever holds its key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from typing import Any
from urllib.parse import urlencode

USER_URN = "tml:user:local"
ORGANIZATION = "local"
TOKEN_LIFE_S = 86400.0
# How a JWT begins: '{"' in base64.
TOKEN_PREFIX = "eyJ"
# Tells the SDK (as RFC 6750 has it) that its token, not its key, was refused, so that it fetches a new one.
TOKEN_REFUSED = {"WWW-Authenticate": 'Bearer error="invalid_token"'}


class Signer:
    """Signs with a random secret of its own: what it signed is worth nothing to another server or after a restart."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def issue_token(self) -> str:
        """A JWT that names the engine's one user and is good for `TOKEN_LIFE_S` seconds."""
        now = time.time()
        claims = {"sub": USER_URN, "org_id": ORGANIZATION, "iat": int(now), "exp": int(now + TOKEN_LIFE_S)}
        head = f"{_encode({'alg': 'HS256', 'typ': 'JWT'})}.{_encode(claims)}"
        return f"{head}.{self._sign('token', head)}"

    def check_token(self, token: str) -> bool:
        """True for a token of this signer whose time is not over."""
        head, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("token", head).encode()):
            return False
        claims = head.partition(".")[2]
        return bool(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"] > time.time())

    def sign_url(self, path: str, expires: int) -> str:
        """The query that opens `path` until `expires` (Unix seconds)."""
        return urlencode({"expires": expires, "signature": self._sign("url", path, str(expires))})

    def check_url(self, path: str, expires: str, signature: str) -> bool:
        """True for the parts of a query that `sign_url` made for `path` and whose time is not over."""
        good = hmac.compare_digest(signature.encode(), self._sign("url", path, expires).encode())
        return good and int(expires) > time.time()

    def _sign(self, *parts: str) -> str:
        # Each part with its length, so that no two lists of parts are signed alike.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        digest = hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _encode(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).rstrip(b"=").decode()
