"""Access to a server: API keys, sizes of requests, and endpoints that are closed."""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware

from .policy import Policy

DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
ADMIN = ("/reset", "/load_model")
OPEN = "/health"  # for monitoring, which has no key


def guard(app: FastAPI, policy: Policy) -> None:
    """Close endpoints that are not enabled, and refuse requests without the key or with too large a body."""
    closed = (() if policy.docs else DOCS) + (() if policy.admin else ADMIN)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in closed]
    # Last, so that the CORS middleware runs before it: preflight requests come without a key.
    app.user_middleware.append(Middleware(_Guard, policy=policy))


def error_answer(status: int, message: str, **headers: str) -> JSONResponse:
    """Build an error response for OpenAI's clients (``error``) and those of transformers (``detail``)."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    content = {"error": {"message": message, "type": kind, "code": status}, "detail": message}
    return JSONResponse(content, status, headers)


class _Guard:
    def __init__(self, app: Any, policy: Policy) -> None:
        self.app, self.most = app, policy.max_bytes
        self.key = None if policy.api_key is None else policy.api_key.encode()
        self.large = f"the request is larger than {policy.max_request_mib} MiB (--max-request-mib)"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not self._may_enter(scope):
            refused = error_answer(401, "a key is needed: Authorization: Bearer KEY", **{"WWW-Authenticate": "Bearer"})
            await refused(scope, receive, send)
        else:
            await self.app(scope, self._measured(receive), send)

    def _may_enter(self, scope: Any) -> bool:
        if self.key is None or scope["path"] == OPEN:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        same = hmac.compare_digest(key.strip(), self.key)  # in constant time
        return same and scheme.lower() == b"bearer"

    def _measured(self, receive: Any) -> Any:
        seen = 0

        async def received() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise HTTPException(413, self.large)
            return message

        return received
