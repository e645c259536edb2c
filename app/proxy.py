"""What Serve's HTTP proxy says by itself, in the shape of the OpenAI API.

The proxy answers alone while no application is registered, when a request times out, and when the ingress
fails; its own words are plain text. What the application answers passes through untouched.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.error_body import error_body

# Serve calls this function in each proxy; the variable holds its import path.
# Ray Serve's hops without a thread each, and by gRPC: 16 streams of 2 ms steps then keep 0.97 of the core's
# rate where its defaults keep 0.57. Replicas and proxies read them at their start.
QUICK_HOPS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "app.proxy:middlewares"

OWN_PATHS = "/-/"  # Serve's own health and route pages, which its controller and load balancers read
TIMEOUTS = (408, 504)


def middlewares() -> list[Middleware]:
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Rewrites the plain-text errors of the proxy. The application's own errors are JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_PATHS):
            await self._app(scope, receive, send)
            return
        is_rewritten = False

        async def send_shaped(message: Message) -> None:
            nonlocal is_rewritten
            if message["type"] == "http.response.start" and _is_plain_error(message):
                is_rewritten = True
                for part in _reply(message["status"]):
                    await send(part)
            elif not is_rewritten:
                await send(message)

        await self._app(scope, receive, send_shaped)


def _is_plain_error(start: Message) -> bool:
    media_types = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return start["status"] >= 400 and all(value.startswith(b"text/plain") for value in media_types)


def _reply(status: int) -> tuple[Message, Message]:
    """Return the answer in place of the proxy's own of `status`."""
    headers = [(b"content-type", b"application/json")]
    if status in TIMEOUTS:
        body = error_body("the request took longer than this server allows", "server_error", code="timeout")
    elif status in (404, 503):
        # We serve at "/": a path that the proxy itself does not know means that nothing is registered yet.
        status = 503
        headers.append((b"retry-after", b"1"))
        message = "the server is starting or stopping: try again in a moment"
        body = error_body(message, "server_error", code="server_unavailable")
    else:
        message = "the server failed; its log has the reason"
        body = error_body(message, "server_error", code="internal_error")
    headers.append((b"content-length", str(len(body)).encode()))
    return (
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body},
    )
