"""Options of what is proven: the certificate at load, and the golden vectors in service."""

from pathlib import Path

from pydantic import BaseModel, Field

from attention_serving.server.settings.units import Seconds


class Parity(BaseModel):
    """How the equality of served results and eager PyTorch is watched."""

    canary_seconds: Seconds = Field(
        300.0,
        description="Time in which the golden vectors of every loaded model are replayed once, one at a time"
        " and while no request waits if possible, in seconds, 0 to 1000000. A model that misses its tolerance"
        " is taken out of service. 0 replays them only when a model loads.",
    )
    proof_public_key: Path | None = Field(
        None,
        description="PEM file with one or several Ed25519 public keys. Only models whose certificate of proof"
        " was signed with one of them are loaded.",
    )
