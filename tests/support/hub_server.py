"""A small server in the place of the Hugging Face hub: the API's model page and files with ranges,
by which every fault of a server can be played.

    with HubServer({"config.json": b"{}", "model.safetensors": data}) as hub:
        hub.point(monkeypatch, tmp_path)      huggingface_hub's endpoint and cache
        hb.open("org/model")
        hub.requests, hub.sent                range requests for weights, bytes of all replies
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = (".safetensors", ".gguf")


SPOILT: dict[str, tuple[int, dict[str, str], bytes | None]] = {
    **{f"status-{n}": (n, {}, b"") for n in (400, 401, 403, 404, 410, 416, 418, 500, 503)},
    "loop": (302, {"Location": ""}, b""), "to-nowhere": (302, {"Location": "http://127.0.0.1:9/x"}, b""),
    "to-no-address": (302, {"Location": "file:///etc/passwd"}, b""), "without-location": (302, {}, b""),
    "without-range": (206, {"Content-Range": ""}, None), "no-numbers": (206, {"Content-Range": "bytes a-b/c"}, None),
    "another-size": (206, {"Content-Range": "bytes 0-65535/65536"}, None),
    "other-unit": (206, {"Content-Range": "rows 0-9/10"}, None),
    "nothing": (206, {}, b""), "page": (200, {}, b"<!DOCTYPE html><html>sign in</html>"),
    "zeros": (206, {}, b"\0"), "ones": (206, {}, b"\xff"), "text": (206, {}, b"<html>"),
}  # fmt: skip
"""Fault -> (status, headers over the right ones, body: None for the right one, in a 206 repeated to
its length).
"""


class HubServer:
    """One repository, org/model, at one commit.

    files      name -> bytes
    fault      how replies with weights are spoilt: "" not at all, "no-ranges" (the whole file with
               status 200), "short" (half of what the headers promise), "drip" (a byte at a time),
               "other-range", "longer", "compressed", "changed" (another ETag each time),
               "hang-up", and what `SPOILT` names: a status, headers and a body instead
    listing    the model page's list of files, where it is not that of `files`
    busy       first replies with weights that have status 429
    status     status of the model page, with `error` in X-Error-Code
    requests   (name, Range header) of each request for weights
    sent       bytes of all bodies
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fault = ""
        self.listing: Any = None
        self.busy = 0
        self.status, self.error = 200, ""
        self.redirects = False
        self.token = ""
        self.requests: list[tuple[str, str]] = []
        self.pages: list[str] = []
        self.authorized: list[tuple[str, bool]] = []
        self.sent = 0
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(len(data) for name, data in self.files.items() if name.endswith(WEIGHTS))

    def point(self, monkeypatch: Any, cache: Path) -> None:
        """huggingface_hub uses this server and an empty cache, without a token, within this test."""
        from huggingface_hub import constants

        from halfbyte.checkpoints.hub import repository

        for name, value in {
            "ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache), "HF_TOKEN_PATH": str(cache / "token"), "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DOWNLOAD_TIMEOUT": 2, "HF_HUB_ETAG_TIMEOUT": 2, "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(repository, "WAIT", 0.01)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _reply(self, status: int, body: bytes, headers: dict[str, str], promised: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if promised is None else promised))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.sent += len(body)
        if self.hub.fault == "drip" and promised is not None:
            for at in range(len(body)):
                self.wfile.write(body[at : at + 1])
                time.sleep(0.02)
        else:
            self.wfile.write(body)
        if promised is not None and promised != len(body):
            self.close_connection = True

    def do_GET(self) -> None:  # the name is http.server's
        try:
            self._answer()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if self.command == "GET":
            hub.authorized.append((path, self.headers.get("authorization") == f"Bearer {hub.token}"))
        if match := re.fullmatch(r"/api/models/org/model(?:/revision/(.+))?", path):
            hub.pages.append(path)
            if hub.status != 200 or (match[1] or "main") not in ("main", COMMIT):
                error = {"X-Error-Code": hub.error if hub.status != 200 else "RevisionNotFound"}
                return self._reply(hub.status if hub.status != 200 else 404, b"{}", error)
            names = [{"rfilename": n, "size": len(d), "blobId": "0"} for n, d in hub.files.items()]
            names = names if hub.listing is None else hub.listing
            return self._reply(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": names}).encode(), {})
        if path == f"/api/models/org/model/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in hub.files.items()]
            return self._reply(200, json.dumps(tree).encode(), {})
        match = re.fullmatch(r"/(?:cdn/)?org/model/resolve/(?:main|" + COMMIT + r")/(.+)", path)
        if path.startswith("/api/"):
            return self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if not match or match[1] not in hub.files:
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        name, data = match[1], hub.files[match[1]]
        tag = hashlib.sha256(data).hexdigest()
        if hub.redirects and name.endswith(WEIGHTS) and not path.startswith("/cdn/"):
            headers = {
                "Location": f"http://localhost:{hub.url.rpartition(':')[2]}/cdn{path}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{tag}"',
                "X-Linked-Size": str(len(data)),
            }
            return self._reply(302, b"", headers)
        return self._file(name, data, tag)

    def _file(self, name: str, data: bytes, tag: str) -> None:
        hub = self.hub
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if not name.endswith(WEIGHTS) or self.command == "HEAD":
            return self._reply(200, data, headers)
        hub.requests.append((name, self.headers.get("range", "")))
        if hub.busy:
            hub.busy -= 1
            return self._reply(429, b"", {"Retry-After": "0"})
        if wanted is None or hub.fault == "no-ranges":
            return self._reply(200, data, headers)
        start, stop = int(wanted[1]), min(len(data), int(wanted[2] or len(data) - 1) + 1)
        part = data[start:stop]
        if hub.fault == "changed":
            headers["ETag"] = f'"{len(hub.requests)}"'
        if hub.fault == "other-range":
            start, stop = start + 1, stop + 1
        if hub.fault == "compressed":
            headers["Content-Encoding"] = "gzip"
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if hub.fault == "hang-up":
            self.close_connection = True
            return None
        if hub.fault in SPOILT:
            status, more, body = SPOILT[hub.fault]
            headers |= {k: v or (self.path if k == "Location" else "") for k, v in more.items()}
            body = part if body is None else body
            repeated = (body * (len(part) // max(1, len(body)) + 1))[: len(part)]
            return self._reply(status, repeated if status == 206 else body, headers)
        if hub.fault == "short":
            return self._reply(206, part[: len(part) // 2], headers, len(part))
        if hub.fault == "longer":
            return self._reply(206, part + bytes(100), headers)
        return self._reply(206, part, headers, len(part) if hub.fault == "drip" else None)
