"""A small hub: the routes of huggingface.co that the real client uses, over HTTP, on this machine."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".parquet",
)  # kept outside git, behind a redirect


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    renamed_to: str | None = None
    tags: dict[str, str] = field(default_factory=dict)  # other revisions → commit

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


class Hub:
    """What the server holds, and what it was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # sha256 → content
        self.requests: list[str] = []
        self.problems: list[str] = []  # what the validation of cards is to find
        self.url = self.store = (
            ""  # of the hub, and of where large files lie: another host, as in reality
        )

    def add(self, name: str, folder: Path | None = None, **about: object) -> Repository:
        files = (
            {}
            if folder is None
            else {path.name: path.read_bytes() for path in folder.iterdir()}
        )
        self.repositories[name] = Repository(files, **about)  # type: ignore[arg-type]
        return self.repositories[name]

    def downloaded(self) -> set[str]:
        """Files whose content was asked for."""
        return {
            line.split("/resolve/")[1].split("/", 1)[1]
            for line in self.requests
            if "GET" in line and "/resolve/" in line
        }


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._read()

        def do_GET(self) -> None:
            self._read()

        def _read(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if match := re.fullmatch(r"/large/(\w+)/(.+)", path):
                self._send(hub.large[match[1]], headers={"ETag": f'"{match[1]}"'})
            elif match := re.fullmatch(
                r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+))?", path
            ):
                self._about(match[1], match[2], match[3])
            elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[3])
            else:
                self._json({"error": "no such route"}, 404)

        def _known(self, name: str, revision: str | None) -> Repository | None:
            repository = hub.repositories.get(name)
            if repository is None or (
                repository.private and "Authorization" not in self.headers
            ):
                self._json({}, 401, {"X-Error-Code": "RepoNotFound"})
                return None
            if revision not in (None, "main", repository.commit, *repository.tags):
                self._json({}, 404, {"X-Error-Code": "RevisionNotFound"})
                return None
            return repository

        def _about(self, name: str, endpoint: str | None, revision: str | None) -> None:
            repository = self._known(name, revision)
            if repository is None:
                return
            if repository.renamed_to:
                address = self.path.replace(name, repository.renamed_to)
                self._json({}, 307, {"Location": address})
                return
            files = repository.files.items()
            if endpoint == "tree":
                listed = [
                    {"type": "file", "path": p, "size": len(c), "oid": _git_id(c)}
                    for p, c in files
                ]
                for entry in listed:
                    if entry["path"].endswith(LARGE):  # type: ignore[attr-defined]
                        content = repository.files[str(entry["path"])]
                        entry["lfs"] = {
                            "oid": _sha256(content),
                            "size": len(content),
                            "pointerSize": 130,
                        }
                self._json(listed)
                return
            siblings = [
                {"rfilename": path, "size": len(content)} for path, content in files
            ]
            self._json(
                {
                    "id": name,
                    "modelId": name,
                    "sha": repository.commit,
                    "siblings": siblings,
                }
            )

        def _file(self, name: str, path: str) -> None:
            repository = hub.repositories[name]
            if repository.gated and "Authorization" not in self.headers:
                self._json({}, 403, {"X-Error-Code": "GatedRepo"})
                return
            content = repository.files[path]
            about = {"X-Repo-Commit": repository.commit}
            if not path.endswith(LARGE):
                self._send(content, headers=about | {"ETag": f'"{_git_id(content)}"'})
                return
            digest = _sha256(content)
            hub.large[digest] = content
            about |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            self._json(
                {}, 302, about | {"Location": f"{hub.store}/large/{digest}/{path}"}
            )

        # -- uploads -----------------------------------------------------------------------------------

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            hub.large[self.path.rsplit("/", 1)[1]] = content
            self._json({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"POST {path}")
            if path == "/api/validate-yaml":
                self._json(
                    {"errors": [{"message": p} for p in hub.problems], "warnings": []},
                    400 if hub.problems else 200,
                )
            elif "Authorization" not in self.headers:
                self._json({"error": "Invalid username or password."}, 401)
            elif path == "/api/repos/create":
                request = json.loads(body)
                name = f"{request['organization']}/{request['name']}"
                exists = name in hub.repositories
                if not exists:
                    hub.add(name, private=request.get("visibility") == "private")
                self._json({"url": f"{hub.url}/{name}"}, 409 if exists else 200)
            elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
                modes = {
                    f["path"]: "lfs" if f["path"].endswith(LARGE) else "regular"
                    for f in json.loads(body)["files"]
                }
                files = [
                    {"path": p, "uploadMode": mode, "shouldIgnore": False}
                    for p, mode in modes.items()
                ]
                self._json({"files": files})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {
                        **entry,
                        "actions": {
                            "upload": {"href": f"{hub.url}/upload/{entry['oid']}"}
                        },
                    }
                    for entry in json.loads(body)["objects"]
                ]
                self._json({"transfer": "basic", "objects": objects})
            elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
                repository = hub.repositories[match[1]]
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        repository.files[value["path"]] = base64.b64decode(
                            value["content"]
                        )
                    elif line["key"] == "lfsFile":
                        repository.files[value["path"]] = hub.large[value["oid"]]
                url = f"{hub.url}/{match[1]}/commit/{repository.commit}"
                self._json({"commitOid": repository.commit, "commitUrl": url})
            else:
                self._json({"error": "no such route"}, 404)

        def _json(
            self, data: object, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            self._send(json.dumps(data).encode(), status, headers)

        def _send(
            self, content: bytes, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {
                "Content-Length": str(len(content)),
                **(headers or {}),
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url, hub.store = (
        f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")
    )
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
