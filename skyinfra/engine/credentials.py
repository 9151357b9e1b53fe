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
        ca_key = _ca_key(secret)
        ca = _ca_certificate(ca_key)
        key = Ed25519PrivateKey.generate()
        leaf = _leaf_certificate(ca_key, ca, key, role=role, name=name)
        return cls(ca=_pem(ca), certificate=_pem(leaf), key=_pem_key(key))

    def security(self) -> Security:
        """A ``distributed`` Security that refuses every peer without a certificate of this fleet."""
        from distributed.security import Security

        from skyinfra.engine import dask_private

        dask_private.install_connector()
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


def _ca_key(secret: str) -> Ed25519PrivateKey:
    hkdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=b"skyinfra", info=b"skyinfra fleet CA, version 1")
    return Ed25519PrivateKey.from_private_bytes(hkdf.derive(secret.encode()))


def _ca_certificate(key: Ed25519PrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "skyinfra fleet")])
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, None)
    )


def _leaf_certificate(
    ca_key: Ed25519PrivateKey, ca: x509.Certificate, key: Ed25519PrivateKey, *, role: Role, name: str
) -> x509.Certificate:
    public = key.public_key()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(NameOID.COMMON_NAME, name[:64]),
        ]
    )
    # Every party of Dask both listens and dials, so each leaf serves both ways.
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ca.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, None)
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
