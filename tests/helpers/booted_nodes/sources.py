"""What a company has between its nodes and their packages: a proxy, TLS of its own authority, a Debian repository."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_CONTROL = "Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: bed <bed@example.com>\nDescription: a test\n"


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    """Serves until the end of the block; the host and port."""
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield "{}:{}".format(*server.server_address[:2])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files(address: str, folder: Path, certificate: Path | None = None) -> ThreadingHTTPServer:
    """Serves *folder*, with TLS where there is a *certificate* (with its key, in one file)."""

    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer((address, 0), Files)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


def proxy(address: str, asked: Callable[[str], object]) -> ThreadingHTTPServer:
    """A proxy for HTTP and, with CONNECT, for HTTPS. *asked*: is told ``METHOD HOST:PORT`` of each request."""

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked(f"CONNECT {self.path}")
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                self.send_response(200)
                self.end_headers()
                _join(self.connection, there)
            self.close_connection = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked(f"GET {url.netloc}")
            connection = http.client.HTTPConnection(url.netloc, timeout=60)
            connection.request("GET", f"{url.path}?{url.query}" if url.query else url.path)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() in ("content-type", "last-modified"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing is logged."""

    return ThreadingHTTPServer((address, 0), Proxy)


def _join(here: socket.socket, there: socket.socket) -> None:
    """What comes from one goes to the other, until one of them ends."""
    other = {here: there, there: here}
    while True:
        for each in select.select([here, there], [], [])[0]:
            try:
                data = each.recv(1 << 16)
                other[each].sendall(data)
            except OSError:
                return
            if not data:
                return


def authority(address: str, file: Path) -> str:
    """A certificate of *address* with its key in *file*, signed by an authority nobody knows; the latter's, in PEM."""
    now = datetime.now(UTC)
    key, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the company's authority")])

    def certificate(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        begin, end = now - timedelta(hours=1), now + timedelta(days=1)
        return x509.CertificateBuilder(issuer, name, public, x509.random_serial_number(), begin, end)

    root = certificate(issuer, key.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "packages")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    leaf = certificate(name, own.public_key()).add_extension(names, False).sign(key, hashes.SHA256())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = own.private_bytes(pem, form, serialization.NoEncryption())
    file.write_bytes(leaf.public_bytes(pem) + private)
    return root.sign(key, hashes.SHA256()).public_bytes(pem).decode()


def debian_repository(folder: Path, name: str) -> None:
    """A repository in *folder* of one package, which brings the program */usr/bin/NAME*."""
    tree = folder / "tree"
    program = tree / "usr/bin" / name
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {name} is here\n")
    program.chmod(0o755)
    control = _CONTROL.format(name=name)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(control)
    file = folder / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", str(tree), str(file)], check=True, capture_output=True)
    content = file.read_bytes()
    index = f"{control}Filename: ./{file.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
    (folder / "Packages").write_text(index)
