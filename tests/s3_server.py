"""An S3 server in this process, by moto, that fails as it is told."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

DENIED, FULL = "403 Forbidden", "507 Insufficient Storage"
CODES = {DENIED: "AccessDenied", FULL: "InsufficientCapacity"}


class Server:
    """The server. `env` are the variables that lead to it, and `requests` what it was asked, as
    "PUT /bucket/key"."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.fault: Callable[[str], str | None] = lambda request: None
        """Given a request, return the status that it fails with, or None; may also wait."""
        self._moto: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        names = "endpoint_url", "aws_access_key_id", "aws_secret_access_key", "region_name"
        settings: dict[str, Any] = dict(zip(names, self.env.values(), strict=True))
        boto3.client("s3", **settings).create_bucket(Bucket=name)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        self.requests.append(request)
        if status := self.fault(request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Type", "application/xml")])
            code, text = CODES[status], "no more room" if status == FULL else "not yours"
            return [f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()]
        return self._moto(environ, start)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()


def fails(method: str, part: str, status: str) -> Callable[[str], str | None]:
    """Return a fault of requests of a method whose key has a part."""
    return lambda request: status if request.startswith(method) and part in request else None


def waits(method: str, part: str, seconds: float) -> Callable[[str], str | None]:
    """Return a fault that answers such requests late."""

    def wait(request: str) -> None:
        if request.startswith(method) and part in request:
            time.sleep(seconds)

    return wait
