"""Files of keys: what openssl writes is read, and everything else is refused by its path."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from attention_serving.artifact.keys import KeyFileError, read_private_key, read_public_keys
from tests.support.keys import new_key, public_pem

OPENSSL = shutil.which("openssl") or "openssl"
# Writes a file's content; takes a folder for files of its own.
Content = Callable[[Path], bytes]


def openssl(*arguments: object) -> bytes:
    return subprocess.run([OPENSSL, *map(str, arguments)], capture_output=True, check=True).stdout


def test_keys_of_openssl_belong_together_and_have_its_id(tmp_path: Path) -> None:
    """As docs/parity.md makes them."""
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    (key,) = read_public_keys(public)
    key.verify_signature(read_private_key(private).sign(b"text"), b"text")
    encoded = openssl("pkey", "-pubin", "-in", public, "-outform", "DER")
    assert key.keyid == hashlib.sha256(encoded).hexdigest()


def test_one_file_holds_several_public_keys_and_notes(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(3)]
    file = tmp_path / "keys.pem"
    file.write_bytes(b"of the first team\n" + b"\r\n".join(map(public_pem, keys)))
    assert [key.keyid for key in read_public_keys(file)] == [key.public_key.keyid for key in keys]


def rsa(folder: Path, *, public: bool) -> bytes:
    file = folder / "rsa.pem"
    openssl("genpkey", "-algorithm", "rsa", "-pkeyopt", "rsa_keygen_bits:2048", "-out", file)
    return openssl("pkey", "-in", file, "-pubout") if public else file.read_bytes()


def encrypted(_: Path) -> bytes:
    return openssl("genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:secret")


Read = Callable[[Path], object]
PUBLIC, PRIVATE = read_public_keys, read_private_key
REFUSED: dict[str, tuple[Read, Content, str]] = {
    "no public key": (PUBLIC, lambda _: b"a key", "contains no public key in PEM format"),
    "private instead": (
        PUBLIC,
        lambda _: new_key().private_bytes,
        "contains a PRIVATE KEY that cannot be read",
    ),
    "public rsa": (
        PUBLIC,
        lambda it: rsa(it, public=True),
        "contains a public key that is not an Ed25519 key",
    ),
    "public instead": (PRIVATE, lambda _: public_pem(new_key()), "is not a private key in PEM"),
    "private rsa": (PRIVATE, lambda it: rsa(it, public=False), "is not an Ed25519 key"),
    "encrypted": (PRIVATE, encrypted, "is encrypted; write it without a password"),
}


@pytest.mark.parametrize(("read", "content", "says"), REFUSED.values(), ids=REFUSED)
def test_other_keys_are_refused_by_path(read: Read, content: Content, says: str, tmp_path: Path) -> None:
    file = tmp_path / "given.pem"
    with pytest.raises(KeyFileError, match=r"given\.pem: cannot be read: No such file"):
        read(file)
    file.write_bytes(content(tmp_path))
    with pytest.raises(KeyFileError, match=f"^{file}: {says}"):
        read(file)
