"""Certificates as an operator gets them from an authority, and such as are of no use."""

import datetime
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Certificate:
    """Files in PEM format."""

    file: Path
    key: Path
    authority: Path
    """What callers trust."""


def certificate(folder: Path, *, days: int = 30, password: bytes | None = None) -> Certificate:
    """A certificate for localhost by an authority of its own, which ends so many days from now."""
    folder.mkdir()
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    signer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    authority = (
        _builder(signer, signer, authority_key, 60)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    own = _builder(signer, subject, key, days).add_extension(names, critical=False).sign(authority_key, hashes.SHA256())
    made = Certificate(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    made.file.write_bytes(own.public_bytes(serialization.Encoding.PEM))
    made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    closed = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    made.key.write_bytes(key.private_bytes(pem, kind, closed))
    return made


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(days=60))
        .not_valid_after(NOW + datetime.timedelta(days=days))
    )
