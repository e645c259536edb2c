"""Who may call: a check of API keys in front of the endpoints.

The keys are in `api_keys`; limits of bodies and of calls in flight are left to `ingress` and `server`.
"""

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api_keys import ApiKeys
from app.errors import AuthenticationError, reply_for

# What probes and scrapers read has no secrets and costs nothing.
OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
SCHEME = b"bearer "


class KeyGuard:
    """ASGI middleware that lets a request through with a known key in `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        reply = reply_for(AuthenticationError("a valid API key is needed: send Authorization: Bearer KEY"))
        response = Response(reply.body, reply.status, dict(reply.headers), "application/json")
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][: len(SCHEME)].lower() != SCHEME:
            return False
        return self._keys.allows(given[0][len(SCHEME) :].strip())
