"""Makes a private certificate authority and a server's certificate: `python certificates.py FOLDER NAME…`.

Writes ca.crt, server.crt and server.key, which user 10001 may read, for 30 days; the authority's key is not
kept. A folder that has all three is left as it is. For docker-compose.yml: a deployment has an authority of
its own.
"""

import datetime
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FILES = ("ca.crt", "server.crt", "server.key")
DAYS = 30
USER_ID = 10001


def main() -> None:
    """Writes the files into the folder that the command line names."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    if all((folder / name).exists() for name in FILES):
        return
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = certificate("attention demo authority", authority_key, authority_key, None, [])
    server = certificate(names[0], key, authority_key, authority, names)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = (each.public_bytes(serialization.Encoding.PEM) for each in (authority, server))
    for name, content in zip(FILES, (*public, private), strict=True):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        path.chmod(0o600 if name.endswith(".key") else 0o644)
        if os.geteuid() == 0:
            os.chown(path, USER_ID, USER_ID)


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    names: list[str],
) -> x509.Certificate:
    """A certificate; of an authority if it has no issuer, otherwise of a server with these DNS names."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        dns = x509.SubjectAlternativeName([x509.DNSName(each) for each in names])
        builder = builder.add_extension(dns, critical=False)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(usage, critical=False)
    return builder.sign(signer, hashes.SHA256())


if __name__ == "__main__":
    main()
