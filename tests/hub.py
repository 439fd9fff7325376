"""A Hub of one repository on this machine: what uploading a folder and loading a model ask for, and no more."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

SHA = "5" * 40


class Hub(ThreadingHTTPServer):
    """Keep the files of ``repo`` (owner/name) as they were committed; large ones are uploaded beforehand by digest."""

    def __init__(self, repo: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo = repo
        self.created = False
        self.commits: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                self.commits.append(value["summary"])
            elif key == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]


@contextlib.contextmanager
def running(repo: str) -> Iterator[Hub]:
    """Serve ``repo`` while the context lasts."""
    hub = Hub(repo)
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            hub.created = True
            self.say({"url": f"{hub.url}/{hub.repo}"})
        elif path == "/api/validate-yaml":
            self.say({"errors": [], "warnings": []})
        elif path == f"/api/models/{hub.repo}/preupload/main" and hub.created:
            self.say({"files": [_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif path == f"/{hub.repo}.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            to_upload = [one | {"actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}} for one in objects]
            self.say({"transfer": "basic", "objects": to_upload})
        elif path == f"/api/models/{hub.repo}/commit/main":
            hub.commit([json.loads(line) for line in body.splitlines()])
            self.say({"success": True, "commitOid": SHA, "commitUrl": f"{hub.url}/{hub.repo}/commit/{SHA}"})
        else:
            self.say({"error": f"no {path}"}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        right = hashlib.sha256(content).hexdigest() == oid
        if right:
            self.server.objects[oid] = content
        self.say({}, 200 if right else 400)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        prefixes = [f"/{hub.repo}/resolve/{revision}/" for revision in ("main", SHA)]
        name = next((self.path.removeprefix(prefix) for prefix in prefixes if self.path.startswith(prefix)), None)
        if name in hub.files:
            self.send(hub.files[name], 200, {"ETag": f'"{hashlib.sha256(hub.files[name]).hexdigest()}"'})
        elif name is not None:
            self.send(b"", 404, {"X-Error-Code": "EntryNotFound"})
        elif "/resolve/" in self.path:
            self.send(b"", 404, {"X-Error-Code": "RepoNotFound"})
        else:
            self.say({"error": f"no {self.path}"}, 404)

    def say(self, answer: dict[str, Any], status: int = 200) -> None:
        self.send(json.dumps(answer).encode(), status, {"Content-Type": "application/json"})

    def send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content)), "X-Repo-Commit": SHA}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _mode(path: str) -> dict[str, Any]:
    large = path.endswith((".safetensors", ".bin"))
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
