"""Fetching the runner: checked by its hash, signed as AWS wants it, and nothing secret in what fails."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from first_boots.boots import PACKAGE, SECRET, FirstBoot, step
from servers.metadata_service import serving

from skyinfra.first_boot.fetch import fetch, signed
from skyinfra.first_boot.programs import Failed

CONTENT = b"a wheel" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ROLE = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "s3cr3t/key+x", "Token": "t0ken//with=="}
NOW = "20260102T030405Z"


class Cloud(ThreadingHTTPServer):
    """A metadata service of version 2, and a bucket that takes requests signed by its role."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.role = "node"
        self.redirect = ""
        # Of the secret, before its connection ends; None for all of it.
        self.sends: int | None = None
        self.sent, self.upgraded = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Cloud

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, b"TOKEN")

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers.items())))
        if self.path.startswith("/latest/"):
            self._metadata()
        elif self.server.redirect:
            self.send_response(307)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
        elif self.path.startswith("/bucket/") and not self._signed():
            self._answer(403, b"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>s3cr3t</StringToSign></Error>")
        elif self.path == "/bucket/secret" and self.server.sends is not None:
            # The connection ends, or goes on without a word, before all that was promised.
            self.send_response(200)
            self.send_header("Content-Length", str(len(SECRET)))
            self.end_headers()
            self.wfile.write(SECRET[: self.server.sends].encode())
            self.wfile.flush()
            self.server.sent.set()
            self.server.upgraded.wait(30)
        elif self.path == "/bucket/secret":
            self._answer(200, SECRET.encode())
        elif self.path == "/empty":
            self._answer(200, b"")
        elif self.path == "/none":
            self._answer(404, b"")
        else:
            self._answer(200, CONTENT)

    def _metadata(self) -> None:
        import json

        if self.headers["X-aws-ec2-metadata-token"] != "TOKEN":
            return self._answer(401, b"")
        roles = "/latest/meta-data/iam/security-credentials/"
        pages = {
            roles: self.server.role,
            f"{roles}node": json.dumps(ROLE),
            "/latest/meta-data/placement/region": "eu-central-1",
            "/latest/meta-data/services/domain": "amazonaws.com",
        }
        page = pages.get(self.path)
        return self._answer(404, b"") if page is None else self._answer(200, page.encode())

    def _signed(self) -> bool:
        request = AWSRequest("GET", f"http://{self.headers['Host']}{self.path}")
        stamp = self.headers["x-amz-date"]
        request.headers["x-amz-content-sha256"] = hashlib.sha256(b"").hexdigest()
        request.context["timestamp"] = stamp
        auth = S3SigV4Auth(
            Credentials(ROLE["AccessKeyId"], ROLE["SecretAccessKey"], ROLE["Token"]), "s3", "eu-central-1"
        )
        request.headers["X-Amz-Date"] = stamp
        request.headers["X-Amz-Security-Token"] = ROLE["Token"]
        wanted = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
        return self.headers["Authorization"].endswith(f"Signature={wanted}")

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with Cloud() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_what_is_fetched_has_the_hash(cloud: Cloud, tmp_path: Path) -> None:
    fetch(f"{cloud.url}/skyinfra.whl", tmp_path / "x.whl", SHA256)
    assert (tmp_path / "x.whl").read_bytes() == CONTENT
    assert "Authorization" not in cloud.seen[0][1]
    with pytest.raises(Failed, match="not the fleet's runner"):
        fetch(f"{cloud.url}/skyinfra.whl", tmp_path / "y.whl", "0" * 64)
    assert [path.name for path in tmp_path.iterdir()] == ["x.whl"]


def test_from_a_bucket_with_the_role_of_the_instance(cloud: Cloud, tmp_path: Path) -> None:
    fetch("s3://bucket/runner/skyinfra-0.1.0+abc~-py3 é.whl", tmp_path / "x.whl", SHA256)
    assert (tmp_path / "x.whl").read_bytes() == CONTENT
    path, headers = cloud.seen[-1]
    assert path == "/bucket/runner/skyinfra-0.1.0%2Babc~-py3%20%C3%A9.whl"
    assert "eu-central-1/s3/aws4_request" in headers["Authorization"]


def test_a_signed_request_is_not_sent_elsewhere(cloud: Cloud, tmp_path: Path) -> None:
    cloud.redirect = f"{cloud.url}/elsewhere"
    with pytest.raises(Failed, match="HTTP status 307"):
        fetch("s3://bucket/x.whl", tmp_path / "x.whl", SHA256)
    assert not [path for path, _ in cloud.seen if path == "/elsewhere"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("@SKYINFRA_BUCKET@/secret", "no https://, http://, file:// or s3:// address"),
        ("", "no https://, http://, file:// or s3:// address"),
        ("ftp://example.com/x", "no https://, http://, file:// or s3:// address"),
        ("http://127.0.0.1:9/x.whl", "cannot be fetched"),
        ("{cloud}/none", "HTTP status 404"),
    ],
)
def test_what_cannot_be_fetched_says_why(url: str, message: str, cloud: Cloud, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=message):
        fetch(url.replace("{cloud}", cloud.url), tmp_path / "x.whl", SHA256)


def test_a_bucket_that_refuses_is_told_by_its_code_alone(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyinfra.first_boot.fetch.signed", lambda *a, **k: {**signed(*a, **k), "Authorization": "x"})
    with pytest.raises(Failed, match="HTTP status 403, SignatureDoesNotMatch") as caught:
        fetch("s3://bucket/x.whl", tmp_path / "x.whl", SHA256)
    assert "s3cr3t" not in str(caught.value) and ROLE["Token"] not in str(caught.value)


def test_no_role_is_told_as_such(cloud: Cloud, tmp_path: Path) -> None:
    cloud.role = "gone"
    with pytest.raises(Failed, match="credentials of the instance's role, and there are none"):
        fetch("s3://bucket/x.whl", tmp_path / "x.whl", SHA256)


@pytest.fixture
def attributes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The attributes of this machine, as Google Cloud's metadata service gives them."""
    with serving() as service:
        monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        yield service.attributes


def test_from_the_own_metadata_of_a_machine_of_google_cloud(attributes: dict[str, str], tmp_path: Path) -> None:
    text = base64.b64encode(CONTENT).decode()
    # More parts than have one digit.
    cut = len(text) // 12 // 4 * 4
    parts = [text[at : at + cut] for at in range(0, len(text), cut)]
    name = "skyinfra-0.1.0+abc-py3-none-any.whl"
    key = "skyinfra-skyinfra-0-1-0-abc-py3-none-any-whl"
    attributes.update({f"{key}-{number}": part for number, part in enumerate(parts)})
    attributes["skyinfra-secret"] = "sécret"
    assert len(parts) > 10
    fetch(f"gce://skyinfra/{name}", tmp_path / "x.whl", SHA256)
    assert (tmp_path / "x.whl").read_bytes() == CONTENT
    fetch("gce://skyinfra/secret", tmp_path / "secret")
    assert (tmp_path / "secret").read_text() == "sécret"
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    del attributes[f"{key}-3"]
    with pytest.raises(Failed, match="not the fleet's runner"):
        fetch(f"gce://skyinfra/{name}", tmp_path / "x.whl", SHA256)
    with pytest.raises(Failed, match=r"the metadata of this machine have no skyinfra-versions-json$"):
        fetch("gce://skyinfra/versions.json", tmp_path / "versions.json")


def boot_of_secret(tmp_path: Path) -> tuple[FirstBoot, Path]:
    """A first boot whose one step fetches the secret; where that goes."""
    boot, file = FirstBoot(tmp_path / "node"), tmp_path / "etc" / "skyinfra" / "secret"
    boot.write(step("file", name="secret", url="s3://bucket/secret", path=str(file)))
    return boot, file


def test_the_secret_is_fetched_once_for_root_alone_and_told_nobody(cloud: Cloud, tmp_path: Path) -> None:
    boot, file = boot_of_secret(tmp_path)
    runs = [boot.run() for _ in range(2)]
    assert [done.returncode for done in runs] == [0, 0]
    assert file.read_text() == SECRET and file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"]
    assert boot.states() == [("secret", state) for state in ("started", "done", "started", "skipped")]
    assert len([path for path, _ in cloud.seen if path == "/bucket/secret"]) == 1
    for text in (boot.log.read_text(), *(done.stdout + done.stderr for done in runs)):
        assert SECRET not in text and ROLE["SecretAccessKey"] not in text and ROLE["Token"] not in text


def test_a_secret_that_is_cut_short_is_none(cloud: Cloud, tmp_path: Path) -> None:
    boot, file = boot_of_secret(tmp_path)
    cloud.sends = 30
    cloud.upgraded.set()
    assert boot.run().returncode == 1
    assert f"it ends after 30 of {len(SECRET)} bytes" in boot.lines()[-1]["error"]
    assert SECRET[:30] not in boot.log.read_text() + boot.failure.read_text() + boot.status.read_text()
    assert not file.exists()
    boot.write(step("file", url=f"{cloud.url}/empty", path=str(file)))
    assert boot.run().returncode == 1 and boot.lines()[-1]["error"] == f"{cloud.url}/empty is empty"


def test_the_power_fails_between_fetching_and_writing_the_secret(cloud: Cloud, tmp_path: Path) -> None:
    boot, file = boot_of_secret(tmp_path)
    cloud.sends = 30
    command = subprocess.Popen(
        boot.command("run"), cwd=PACKAGE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    assert cloud.sent.wait(30)
    # The engine, and the process of the step.
    steps = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    assert len(steps) == 1
    for pid in (command.pid, int(steps[0])):
        os.kill(pid, signal.SIGKILL)
    command.wait()
    cloud.upgraded.set()
    assert not file.exists()
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} <= {0o600}
    # What a disk may hold after that: an empty file, and one with the name that is written first.
    file.touch()
    file.with_name("secret.part").write_text("half of another")
    cloud.sends = None
    assert boot.run().returncode == 0, boot.log.read_text()
    assert file.read_text() == SECRET and file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("path", ["/", "/a/b.whl", "/a%2Bb.whl", "/%C3%A9~"])
@pytest.mark.parametrize("token", [None, ROLE["Token"]])
def test_signatures_are_those_of_botocore(path: str, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://bucket.s3.eu-central-1.amazonaws.com{path}"
    role = {**ROLE, "Token": token or ""}
    headers = signed(url, region="eu-central-1", service="s3", credentials=role, now=NOW)
    request = AWSRequest("GET", url)
    request.context["timestamp"] = NOW
    for name in headers:
        if name.startswith("x-amz"):
            request.headers[name] = headers[name]
    auth = S3SigV4Auth(Credentials(ROLE["AccessKeyId"], ROLE["SecretAccessKey"], token), "s3", "eu-central-1")
    wanted = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    assert headers["Authorization"].endswith(f"Signature={wanted}")
    assert isinstance(auth, SigV4Auth)


def test_the_example_of_the_s3_manual() -> None:
    """AWS's documented GET of an object: its request has a Range header besides, so only the key is compared here."""
    import hmac

    key = b"AWS4wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    for part in ("20130524", "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    text = (
        "AWS4-HMAC-SHA256\n20130524T000000Z\n20130524/us-east-1/s3/aws4_request\n"
        "7344ae5b7ee6c3e7e6b0fe0640412a37625d1fbfff95c48bbb2dc43964946972"
    )
    wanted = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert hmac.new(key, text.encode(), "sha256").hexdigest() == wanted
