"""Images and audio of requests: in the request itself, or fetched from hosts that the policy allows.

transformers would read any URL, those of the server's own network too, and any file. Here all become ``data:`` URLs.
"""

from __future__ import annotations

import base64
import binascii
import io
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException as BadAnswer
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException

from .fields import MEDIA_PARTS, refuse
from .policy import Policy

KINDS = {"image_url": "image", "input_image": "image", "input_audio": "audio", "audio_url": "audio"}
HOLDERS = {**{kind: kind for kind in KINDS}, "input_image": "image_url"}
MOST_PIXELS = 64_000_000  # of all images of a request
SECONDS = 10  # to fetch all of them
PORTS = {"http": 80, "https": 443}


def bring_media(body: dict[str, Any], policy: Policy) -> None:
    """Replace URLs of images and audio by their content; an ``HTTPException`` 400 where that is not allowed."""
    room = _Room(policy)
    for part in media_parts(body):
        if part["type"] == "video_url":
            refuse("video_url", "videos are not served: transformers reads them from URLs and files alone")
        kind, holder = KINDS[part["type"]], HOLDERS[part["type"]]
        data = room.take(_bytes_of(_source(part.get(holder), holder), kind, holder, policy, room.end), kind, holder)
        part[holder] = {"url": f"data:{kind}/;base64,{base64.b64encode(data).decode()}"}
        if part["type"] == "input_audio":
            part[holder] = part[holder]["url"]
    assets = body.get("assets") or {}
    for name, asset in assets.items() if isinstance(assets, dict) else [("", None)]:
        if not name or not isinstance(asset, dict):
            refuse("assets", "it is not an object of objects with data_base64, by names that are not empty")
        source = _source(asset.get("data_base64"), "assets")
        data = room.take(_bytes_of(source, "image", "assets", policy, room.end), "image", "assets")
        asset["data_base64"] = f"data:image/;base64,{base64.b64encode(data).decode()}"


def fetches(body: dict[str, Any]) -> bool:
    """Tell whether ``body``, which was not checked yet, has pictures or sounds that are to be fetched."""
    try:
        parts = [part.get(HOLDERS[part["type"]]) for part in media_parts(body) if part["type"] in HOLDERS]
        sources = [_source(source, "") for source in (*parts, *_assets(body))]
    except (AttributeError, TypeError, HTTPException):  # of another type: it will be refused
        return False
    return any(source.lower().startswith(("http:", "https:")) for source in sources)


def _assets(body: dict[str, Any]) -> list[Any]:
    return [asset["data_base64"] for asset in (body.get("assets") or {}).values() if "data_base64" in asset]


class _Room:
    """What the images and sounds of a request may take together; ``end`` is when the last one must be there."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.end = policy, time.monotonic() + SECONDS
        self._bytes = self._pixels = 0

    def take(self, data: bytes, kind: str, name: str) -> bytes:
        """Return ``data`` if there is room for it."""
        self._bytes += len(data)
        self._pixels += _pixels(data, name) if kind == "image" else 0
        if self._bytes > self._policy.max_bytes:
            refuse(name, f"the pictures and sounds of a request may have {self._policy.max_request_mib} MiB in all")
        if self._pixels > MOST_PIXELS:
            refuse(name, f"the pictures of a request may have {MOST_PIXELS} pixels in all; make them smaller")
        return data


def media_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts that transformers would read: of messages, of tool outputs, and without a message."""
    for name in ("messages", "input"):
        for one in body[name] if isinstance(body.get(name), list) else ():
            for parts in ([one], one.get("content"), one.get("output")):
                found = parts if isinstance(parts, list) else ()
                yield from (part for part in found if isinstance(part, dict) and part.get("type") in MEDIA_PARTS)


def _source(value: Any, name: str) -> str:
    if isinstance(value, dict):
        value = value.get("url", value.get("data"))
    if not isinstance(value, str) or not value or not value.isascii():
        refuse(name, "it is not the URL of a picture or sound, or an object with it")
    return value


def _bytes_of(source: str, kind: str, name: str, policy: Policy, end: float) -> bytes:
    if source.lower().startswith(("http:", "https:")):
        return _fetched(_allowed(source, name, policy), name, policy, end)
    if source.startswith("data:"):
        meaning, _, source = source.partition(",")
        if not (meaning.startswith(f"data:{kind}/") and meaning.endswith(";base64")):
            refuse(name, f"a data: URL begins with data:{kind}/KIND;base64,")
    try:
        return base64.b64decode(source, validate=True)
    except binascii.Error:
        refuse(name, "it is neither a data: URL nor base64, and the server reads no files and no other URLs")


def _allowed(source: str, name: str, policy: Policy) -> str:
    """Return ``source`` if the policy allows its host."""
    try:
        url = urlsplit(source)
        host, port = url.hostname or "", url.port or PORTS.get(url.scheme, 0)
    except ValueError:
        host, port = "", 0
    usual = port == PORTS.get(url.scheme) if host else False
    listed = {entry.lower() for entry in policy.media_hosts}
    plain = all("!" <= one <= "~" and one not in "\\@" for one in source)
    if not plain or not (f"{host}:{port}" in listed or (usual and host in listed)):
        refuse(name, f"this server fetches nothing from {host or source[:80]!r} (--media-hosts); send a data: URL")
    return source


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Follow no redirect, because it may lead to any host."""
        return None


def _fetched(url: str, name: str, policy: Policy, end: float) -> bytes:
    found = bytearray()
    if (left := end - time.monotonic()) <= 0:
        refuse(name, f"the pictures and sounds of a request take more than {SECONDS} seconds")
    try:
        with urllib.request.build_opener(_NoRedirect).open(url, timeout=left) as answer:
            while piece := answer.read1(1 << 16):
                found += piece
                if len(found) > policy.max_bytes:
                    refuse(name, f"{url[:80]} is larger than {policy.max_request_mib} MiB")
                if time.monotonic() > end:
                    refuse(name, f"{url[:80]} takes more than {SECONDS} seconds")
    except (OSError, BadAnswer, ValueError) as error:
        refuse(name, f"{url[:80]} cannot be fetched ({error})")
    return bytes(found)


def _pixels(data: bytes, name: str) -> int:
    """Count the pixels of an image from its header alone."""
    try:
        from PIL import Image
    except ImportError:  # without PIL no model reads images
        return 0
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return int(picture.width * picture.height)
    except Exception as error:  # decoders raise anything for damaged and malicious files
        refuse(name, f"it is no picture that can be read ({type(error).__name__})")
