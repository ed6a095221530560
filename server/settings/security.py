"""Options of encryption, and of what is accepted without it."""

from pathlib import Path

from pydantic import BaseModel, Field, ValidationInfo, field_validator


class Security(BaseModel):
    """How connections are encrypted, and which clients may connect."""

    tls_certificate: Path | None = Field(
        None,
        description="PEM file of the server's certificate, and after it those of the authorities between it"
        " and the root. Encrypts gRPC, HTTP and metrics. A renewed file is taken without a restart.",
    )
    tls_key: Path | None = Field(
        None,
        validate_default=True,
        description="PEM file of the private key of tls_certificate, without a passphrase.",
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of authorities. Clients of gRPC, HTTP and metrics must then show a certificate"
        " of one of them (mutual TLS). Needs tls_certificate.",
    )
    insecure: bool = Field(
        default=False,
        description="Accept to listen on a public address without encryption, such as behind a proxy that"
        " encrypts.",
    )

    @field_validator("tls_key")
    @classmethod
    def _completes_the_pair(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        certificate = info.data.get("tls_certificate")
        if value and not certificate:
            raise ValueError("needs tls_certificate too")
        if certificate and not value:
            raise ValueError("is needed with tls_certificate")
        return value

    @field_validator("tls_client_ca")
    @classmethod
    def _needs_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value and not info.data.get("tls_certificate"):
            raise ValueError("needs tls_certificate and tls_key too")
        return value
