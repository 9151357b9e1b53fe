"""Mutual TLS from the fleet secret.

Node and client derive the same certificate authority from the secret (HKDF-SHA256 → Ed25519) and issue their own
leaf certificates; nothing but the secret travels. The CA certificate is the same bytes everywhere: its serial and
dates are fixed and Ed25519 signatures are deterministic.
"""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skyinfra.protocol.manifest import MIN_SECRET_LENGTH

if TYPE_CHECKING:
    from distributed.security import Security

Role = Literal["scheduler", "worker", "client"]

_NOT_BEFORE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2119, 12, 31, tzinfo=datetime.UTC)
_AUTHORITY = {NameOID.COMMON_NAME: "skyinfra fleet"}


@dataclass(frozen=True)
class Credentials:
    """The credentials of one party of a fleet, as PEM text: CA certificate, own certificate, own private key."""

    ca: str = field(repr=False)
    certificate: str = field(repr=False)
    key: str = field(repr=False)

    @classmethod
    def derive(cls, secret: str, *, role: Role, name: str) -> Credentials:
        """Credentials for *name* (a node, or the client's host) in *role*, from the fleet *secret*.

        Raises ValueError for a secret shorter than 32 characters; the message does not hold it.
        """
        if len(secret) < MIN_SECRET_LENGTH:
            raise ValueError(f"a fleet secret has at least {MIN_SECRET_LENGTH} characters")
        hkdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=b"skyinfra", info=b"skyinfra fleet CA, version 1")
        ca_key = Ed25519PrivateKey.from_private_bytes(hkdf.derive(secret.encode()))
        key = Ed25519PrivateKey.generate()
        own = {NameOID.ORGANIZATIONAL_UNIT_NAME: role, NameOID.COMMON_NAME: name[:64]}
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return cls(_certificate(ca_key, ca_key, _AUTHORITY), _certificate(key, ca_key, own), private.decode())

    def security(self) -> Security:
        """Returns a ``distributed`` Security that refuses every peer without a certificate of this fleet."""
        from distributed.security import Security

        from skyinfra.engine import dask_comms

        dask_comms.install_connections()
        return Security(
            require_encryption=True,
            tls_ca_file=self.ca,
            tls_client_cert=self.certificate,
            tls_client_key=self.key,
            tls_scheduler_cert=self.certificate,
            tls_scheduler_key=self.key,
            tls_worker_cert=self.certificate,
            tls_worker_key=self.key,
            tls_min_version=ssl.TLSVersion.TLSv1_3,
        )


def _certificate(key: Ed25519PrivateKey, ca_key: Ed25519PrivateKey, subject: dict[x509.ObjectIdentifier, str]) -> str:
    """Returns the certificate of *key* as PEM text; that of the authority itself where *key* is its *ca_key*."""
    authority, public = key is ca_key, key.public_key()
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(_AUTHORITY))
        .public_key(public)
        .serial_number(1 if authority else x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    if not authority:
        # Every party of Dask both listens and dials, so each leaf serves both ways.
        ways = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        builder = builder.add_extension(ways, critical=False).add_extension(issuer, critical=False)
    return builder.sign(ca_key, None).public_bytes(serialization.Encoding.PEM).decode()


def _name(parts: dict[x509.ObjectIdentifier, str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in parts.items()])
