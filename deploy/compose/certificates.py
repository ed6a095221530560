"""Makes a certificate of a server, which signs itself: `python certificates.py FOLDER NAME…`.

Writes server.key, which user 10001 may read, and server.crt, for 30 days; ca.crt is the same certificate,
which clients trust. A folder that has all three is left as it is. For docker-compose.yml: a deployment has
an authority of its own.
"""

import datetime
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FILES = ("ca.crt", "server.crt", "server.key")
DAYS = 30
USER_ID = 10001


def main() -> None:
    """Writes the files into the folder that the command line names."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    if all((folder / name).exists() for name in FILES):
        return
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = self_signed(key, names).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for name, content in zip(FILES, (certificate, certificate, private), strict=True):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        path.chmod(0o600 if name.endswith(".key") else 0o644)
        if os.geteuid() == 0:
            os.chown(path, USER_ID, USER_ID)


def self_signed(key: ec.EllipticCurvePrivateKey, names: list[str]) -> x509.Certificate:
    """A certificate for DNS names."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )


if __name__ == "__main__":
    main()
