"""A hub on this machine: as much of its protocol as huggingface_hub needs to create, upload and download models."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "1" * 40
TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: name -> path -> content.

    Attributes:
        private: of each repository.
        requests: method and path of each.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.uploads: dict[str, bytes] = {}  # large files by SHA-256
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self._path()
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            files = self.server.repositories.get(name)
            if files is None:
                return self._missing("RepoNotFound")
            if "/tree/" in path:
                return self._json([_tree_entry(file, content) for file, content in files.items()])
            entries = [{"rfilename": file} for file in files]
            return self._json({"id": name, "sha": COMMIT, "siblings": entries, "private": self.server.private[name]})
        name, _, file = path.strip("/").partition(f"/resolve/{COMMIT}/")
        if not file:
            name, _, file = path.strip("/").partition("/resolve/main/")
        content = self.server.repositories.get(name, {}).get(file)
        if content is None:
            return self._missing("EntryNotFound")
        return self._send(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'someone'}/{given['name']}"
            self.server.repositories.setdefault(name, {})
            self.server.private[name] = given.get("visibility") == "private"
            return self._json({"url": f"{self.server.url}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            places = {given["oid"]: {"upload": {"href": f"{self.server.url}/lfs/{given['oid']}"}} for given in objects}
            found = [{**given, "actions": places[given["oid"]]} for given in objects]
            return self._json({"transfer": "basic", "objects": found})
        name = "/".join(path.split("/")[3:5])
        if name not in self.server.repositories:
            return self._missing("RepoNotFound")
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".onnx")) else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            return self._json({"files": modes})
        if "/commit/" in path:
            self._commit(name, body)
            return self._json({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        return self._json({}, 404)

    def do_PUT(self) -> None:
        self.server.uploads[self._path().rpartition("/")[2]] = self._body()
        self._send(b"", {})

    def _commit(self, name: str, body: bytes) -> None:
        for line in body.splitlines():
            operation = json.loads(line)
            value: dict[str, Any] = operation["value"]
            if operation["key"] == "file":
                self.server.repositories[name][value["path"]] = base64.b64decode(value["content"])
            if operation["key"] == "lfsFile":
                self.server.repositories[name][value["path"]] = self.server.uploads[value["oid"]]

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, tree: Any, status: int = 200) -> None:
        self._send(json.dumps(tree).encode(), {"Content-Type": "application/json"}, status)

    def _missing(self, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code}."}, 404)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def _tree_entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}


@contextmanager
def running_hub(cache: Any, token: str = TOKEN) -> Iterator[Hub]:
    """Start a hub and make it the one that huggingface_hub talks to, with a cache folder for its downloads."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", token)
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
            hub.server_close()
