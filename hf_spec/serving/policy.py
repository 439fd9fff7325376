"""Limits of a server: what clients may request, who they are, and how long a shutdown may take."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..settings import is_int

# Limits of stop strings: every token of the vocabulary is compared with each of them.
MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 256  # characters
CHARACTERS_PER_TOKEN = 16  # a text that is longer on average is refused before it is tokenized
DEEPEST_NESTING = 64
ACCEPTANCE = ("none", "summary")  # vLLM has "detailed", too
COUNTS = ("max_prompt_tokens", "max_new_tokens", "max_beams", "max_request_mib")


@dataclass(frozen=True)
class Policy:
    """Limits of a server.

    Args:
        max_prompt_tokens: longest prompt; longer ones are refused.
        max_new_tokens: longest text; it ends there, whatever a request sets.
        max_beams: most beams of a request.
        max_request_mib: largest body of a request, in MiB.
        shutdown_seconds: how long texts may go on when the server is shut down.
        api_key: what clients have to send as ``Authorization: Bearer KEY``, except for ``/health``.
        media_hosts: ``HOST`` or ``HOST:PORT`` from which images and sounds are fetched; none: only what the request
            itself holds, as a ``data:`` URL.
        docs: answer ``/docs``, ``/redoc`` and ``/openapi.json``.
        admin: answer ``/reset`` and ``/load_model``.
        per_request_spec_decode_metrics: "summary" adds acceptance to each answer, "none" does not.
    """

    max_prompt_tokens: int = 16_384
    max_new_tokens: int = 16_384
    max_beams: int = 8
    max_request_mib: int = 16
    shutdown_seconds: int = 5
    api_key: str | None = None
    media_hosts: tuple[str, ...] = ()
    docs: bool = False
    admin: bool = False
    per_request_spec_decode_metrics: str = "none"

    def __post_init__(self) -> None:
        for name in COUNTS:
            if not (is_int(value := getattr(self, name)) and value >= 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not (is_int(self.shutdown_seconds) and self.shutdown_seconds >= 0):
            raise ValueError(f"shutdown_seconds must be a whole number of at least 0, got {self.shutdown_seconds!r}")
        if self.api_key is not None and not is_key(self.api_key):
            raise ValueError("api_key must be a text of visible ASCII characters without spaces, and not empty")
        if isinstance(self.media_hosts, str) or not all(map(is_host, self.media_hosts)):
            raise ValueError(f"media_hosts must be a list of HOST or HOST:PORT, got {self.media_hosts!r}")
        if self.per_request_spec_decode_metrics not in ACCEPTANCE:
            given = self.per_request_spec_decode_metrics
            raise ValueError(f"per_request_spec_decode_metrics must be 'none' or 'summary', got {given!r}")

    @property
    def max_bytes(self) -> int:
        """Return the size of the largest body."""
        return self.max_request_mib << 20


def is_key(value: Any) -> bool:
    """Tell whether a header can carry ``value`` as a key."""
    return isinstance(value, str) and bool(value) and all("!" <= character <= "~" for character in value)


def is_host(value: Any) -> bool:
    """Tell whether ``value`` is ``HOST`` or ``HOST:PORT``."""
    if not isinstance(value, str):
        return False
    name, _, port = value.partition(":")
    named = bool(name) and all(part.replace("-", "").isalnum() and part.isascii() for part in name.split("."))
    return named and (":" not in value or (port.isdecimal() and 0 < int(port) < 1 << 16))


def check_address(host: str, port: int) -> None:
    """Raise a ValueError or an OSError unless a server can listen at ``host`` and ``port``; port 0 is any free one."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port}: a port is a number from 1 to 65535, or 0 for any that is free")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host}: there is no such address on this machine ({error})") from error
    refused = [*filter(None, map(_why_not, found))]
    missing = [error for error in refused if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)]
    if len(missing) == len(found):  # IPv6 may be switched off, if there is IPv4
        raise ValueError(f"--host {host}: this machine has no such address ({missing[0].strerror})")
    if others := [error for error in refused if error not in missing]:
        raise OSError(f"the server cannot listen at {host}, port {port} ({others[0].strerror}); choose another --port")


def _why_not(address: Iterable[Any]) -> OSError | None:
    family, kind, protocol, _, place = address
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(place)
            probe.listen(1)  # on Linux two sockets can bind to a port, but only one can listen
    except OSError as error:
        return error
    return None
