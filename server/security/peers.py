"""The names in a client's certificate, by which rights are given, and what the HTTP process says of clients.

The HTTP process knows no rights. Before it reads a large body, it passes the credentials on to a method of
its own, which answers as the method of the request would before it receives a message. That is not part of
the protocols, is not listed by reflection, and tells callers nothing that the other would not.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

# Metadata of a call that the HTTP process makes: the names in the certificate of its client, as a JSON list
# of texts, and the connection of the client, as ADDRESS:PORT. The server reads them only if the call came
# through its private socket: no other caller can claim them.
FORWARDED, CLIENT = "attention-peer-identities-bin", "attention-client"
# The property of gRPC's authentication context that says what secures a connection, and what it says of those
# through the private socket: see `GrpcServer.bind`.
SECURITY, LOCAL = "transport_security_type", b"local"
# The method that says whether a caller may make a call. Its request is the full name of the method, and after
# a separator the name of the model if there is one.
ACCESS_CHECK, SEPARATOR = "/attention.internal.Access/Check", "\n"
PEM = b"-----BEGIN"
# Certificates whose names are kept: each call of a connection shows the same one.
CACHED = 1024


@lru_cache(CACHED)
def names_in(certificate: bytes) -> tuple[str, ...]:
    """The names in a certificate whose signature has been verified.

    Args:
        certificate: In PEM, as gRPC passes it on, or in DER.

    Returns:
        DNS names, URIs, e-mail addresses and IP addresses of the subject alternative name, in the order of
        the certificate, and then the common name; each once. Empty names and names with characters that
        cannot be printed are left out. Empty if the certificate cannot be read.
    """
    from cryptography import x509  # noqa: PLC0415 - needed with TLS only

    load = x509.load_pem_x509_certificate if certificate.startswith(PEM) else x509.load_der_x509_certificate
    try:
        document = load(certificate)
        extension = document.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        alternative = list(extension.value)
    except x509.ExtensionNotFound:
        alternative = []
    except ValueError:
        return ()
    kinds = x509.DNSName | x509.UniformResourceIdentifier | x509.RFC822Name | x509.IPAddress
    names = [str(name.value) for name in alternative if isinstance(name, kinds)]
    names += [str(name.value) for name in document.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    return tuple(dict.fromkeys(name for name in names if name and name.isprintable()))


def read_claim(
    context: Mapping[str, Sequence[bytes]], metadata: Iterable[tuple[str, str | bytes]], name: str
) -> str | bytes | None:
    """What the HTTP process says about its client; None if the call is from anybody else.

    Args:
        context: gRPC's authentication context of the call.
        metadata: The metadata of the call. It is read only if the call is from the HTTP process.
        name: What is asked for: FORWARDED or CLIENT.
    """
    if LOCAL not in context.get(SECURITY, ()):
        return None
    return next((value for key, value in metadata if key == name), None)
