"""Mutual TLS from the fleet secret."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest
from cryptography import x509

from skyinfra.engine.credentials import Credentials

SECRET = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


def context(credentials: Credentials, purpose: str) -> ssl.SSLContext:
    security = credentials.security()
    made: ssl.SSLContext = (
        security.get_listen_args("scheduler")["ssl_context"]
        if purpose == "listen"
        else security.get_connection_args("client")["ssl_context"]
    )
    return made


def handshake(listener: Credentials, dialler: Credentials) -> bytes:
    """What arrives over a connection between the two. Raises where either refuses the other."""
    left, right = socket.socketpair()
    outcome: list[bytes | OSError] = []

    def listen() -> None:
        try:
            with left, context(listener, "listen").wrap_socket(left, server_side=True) as secure:
                outcome.append(secure.recv(5))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        with right, context(dialler, "dial").wrap_socket(right) as secure:
            secure.sendall(b"hello")
    finally:
        thread.join(30)
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def test_the_authority_is_the_same_bytes_everywhere_and_leaves_are_not() -> None:
    node = Credentials.derive(SECRET, role="worker", name="n1")
    client = Credentials.derive(SECRET, role="client", name="laptop")
    assert node.ca == client.ca
    assert node.certificate != client.certificate
    assert node.key != client.key
    assert node.ca != Credentials.derive(OTHER, role="worker", name="n1").ca


def test_a_leaf_says_who_it_is() -> None:
    leaf = x509.load_pem_x509_certificate(Credentials.derive(SECRET, role="worker", name="n" * 80).certificate.encode())
    assert leaf.subject.rfc4514_string() == f"CN={'n' * 64},OU=worker"


def test_one_secret_connects() -> None:
    scheduler = Credentials.derive(SECRET, role="scheduler", name="n1")
    assert handshake(scheduler, Credentials.derive(SECRET, role="client", name="laptop")) == b"hello"


def test_another_secret_does_not() -> None:
    scheduler = Credentials.derive(SECRET, role="scheduler", name="n1")
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        handshake(scheduler, Credentials.derive(OTHER, role="client", name="laptop"))


def test_a_short_secret_is_refused_and_not_told() -> None:
    with pytest.raises(ValueError, match="at least 32 characters") as caught:
        Credentials.derive("hunter2", role="client", name="laptop")
    assert "hunter2" not in str(caught.value)


def test_keys_are_in_no_representation() -> None:
    credentials = Credentials.derive(SECRET, role="client", name="laptop")
    assert "PRIVATE" not in repr(credentials)
    assert "PRIVATE" not in repr(credentials.security())
