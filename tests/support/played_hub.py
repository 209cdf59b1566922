"""A Hugging Face Hub on this machine, for its own client: repositories of files, gated, private or broken ones."""

import json
import shutil
import threading
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest

COMMIT = "5" * 40
LOCKED = "GatedRepo"  # as the Hub's own headers have it
HIDDEN = "RepoNotFound"


class PlayedHub:
    """The Hub. repositories: folders by their names; refusals: a status and the Hub's word for it, by names.

    asked: the files that were fetched, as "name file"; calls: of its API
    """

    def __init__(self):
        self.repositories, self.refusals, self.asked, self.calls = {}, {}, [], []
        self.locked = {}  # files of repositories, which are seen and not given
        self.url = ""

    def publish(self, name, folder, *without):
        """A repository of the files of a folder."""
        self.repositories[name] = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in without
        }

    @contextmanager
    def running(self):
        """Answer on a free port while the block runs."""
        hub = self

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                hub.answer(self, with_body=False)

            def do_GET(self):
                hub.answer(self, with_body=True)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, request, *, with_body):
        """Answer a request to the API, or for a file."""
        parts = urlsplit(request.path).path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        name = next(
            (name for name in {*self.repositories, *self.refusals} if parts[: 1 + name.count("/")] == name.split("/")),
            None,
        )
        rest = parts[1 + name.count("/") :] if name else []
        if name is None:
            return self.send(request, 404, b"{}", {"X-Error-Code": HIDDEN})
        if name in self.refusals:
            status, word = self.refusals[name]
            return self.send(request, status, b"{}", {"X-Error-Code": word} if word else {})
        files = self.repositories[name]
        if api:
            self.calls.append(request.path)
            found = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            if rest[:1] == ["tree"]:
                found = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
            return self.send(request, 200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        file = "/".join(rest[2:])  # resolve, revision
        if file in self.locked.get(name, ()):
            return self.send(request, 403, b"{}", {"X-Error-Code": LOCKED})
        if file not in files:
            return self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if with_body:
            self.asked.append(f"{name} {file}")
        headers = {"ETag": f'"{sha256(files[file]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self.send(request, 200, files[file], headers, with_body=with_body)

    def send(self, request, status, body, headers, *, with_body=True):
        """Send an answer."""
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            request.send_header(name, value)
        request.end_headers()
        if with_body and request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub that the client asks, with an empty cache; texts of the environment are as a user has none."""
    constants = huggingface_hub.constants
    with PlayedHub().running() as played:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        point_to(monkeypatch, played.url)
        yield played


def point_to(monkeypatch, url):
    """Have the client ask this address."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def forget(tmp_path):
    """Empty the cache."""
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
