"""What a certificate states, in words for the console."""

from collections.abc import Iterator, Mapping

from artifact.certificate import Certificate


def describe(certificate: Certificate) -> Iterator[str]:
    """One line for each part: the artifact, the result, the place, the versions, the key."""
    proof, machine = certificate.proof, certificate.proof.machine
    yield f"{proof.name} version {proof.version}, {proof.precision}, {certificate.files} files"
    yield (
        f"largest difference from eager PyTorch {proof.max_abs_error:.2g} in {proof.cases} cases, "
        f"{proof.max_error_ratio:.2g} of the tolerance "
        f"{proof.tolerance.atol:g} + {proof.tolerance.rtol:g} x |value|"
    )
    yield f"replayed on {machine.provider}, {machine.cpu}, {machine.architecture}, {machine.system}"
    yield f"replayed with {_listed(proof.replayed_with)}"
    yield f"made with {_listed(proof.made_with)}"
    yield f"signed with key {certificate.key}"


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
