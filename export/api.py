"""`export_module`, the Python interface of the exporter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from artifact.keys import read_private_key
from artifact.manifest import Manifest
from artifact.tolerance import Tolerance
from export.model_id import ModelId
from export.precision import FP32_TOLERANCE, TOLERANCES, Precision

if TYPE_CHECKING:
    from torch import Tensor, nn


def export_module(  # noqa: PLR0913 - a public interface of keywords
    module: "nn.Module",
    example_inputs: "Mapping[str, Tensor] | Sequence[Tensor]",
    dynamic_axes: Mapping[str, Mapping[int, str]],
    *,
    out: Path | str,
    name: str,
    version: int = 1,
    description: str = "",
    output_names: Sequence[str] = ("context_vectors",),
    max_length: int | Mapping[str, int] | None = None,
    precision: Precision = Precision.FP32,
    tolerance: Tolerance | None = None,
    replace: bool = False,
    sign_key: Path | None = None,
) -> tuple[Path, Manifest]:
    """Exports any module with (batch, sequence, ...) inputs, such as a whole transformer encoder.

    The server serves the artifact over both protocols. The typed API carries the first input as the query and
    the first output as the context vectors; the Open Inference Protocol carries all by name.

    A module whose inputs include `attention_mask` (B, T), 1 = attend, is exported with key lengths in its
    place, and the server runs sequences of different lengths together. Without it, only sequences of one
    length run together.

    Exporting the same module again changes nothing and succeeds.

    Args:
        module: Put into evaluation mode. Takes tensors; returns a tensor, or a tuple or mapping of tensors,
            each (batch, sequence, ...) or, for pooled outputs, (batch, ...). The sequences of a batch must
            not depend on each other.
        example_inputs: By parameter name of `forward`, or in its order. float32, int64 or bool. Integer
            inputs are ids: served and tested from 0 to the largest value of the example.
        dynamic_axes: By input name, the symbolic name of each dynamic axis. Axis 0 is "batch", axis 1 the
            sequence; all others are fixed. At most four different sequence axes.
        out: Model repository; made if it does not exist.
        name: Name of the model.
        version: Version of the model, from 1.
        description: One line. Default: the name of the class.
        output_names: Names of the outputs.
        max_length: Largest number of rows of a sequence, for all sequence axes or by axis name, from 2. The
            server refuses longer requests. Default: `max_position_embeddings` or `n_positions` of
            `module.config` if there is one, otherwise no limit.
        precision: Element type of the arithmetic.
        tolerance: Largest accepted difference from eager PyTorch. Default: that of the precision.
        replace: Whether to replace a different artifact of the same name and version.
        sign_key: PEM file with an Ed25519 private key, which signs a certificate of what was proven on this
            machine. Default: the artifact has no certificate.

    Returns:
        The artifact's folder and its manifest.

    Raises:
        ValueError: Inputs, axes, lengths or names do not fit each other or the module.
        ArtifactExistsError: The repository holds another artifact of that name and version, and `replace` is
            false. It is refused before the export begins, unless only the code of the module has changed.
        ExportError: The graph cannot be made.
        ParityError: The graph differs from eager PyTorch by more than its tolerance.
        KeyFileError: `sign_key` is not the file of such a key.
    """
    # PyTorch takes seconds to import; see export/__init__.py.
    from export.artifact import ArtifactWriter, publish  # noqa: PLC0415
    from export.module import ModuleInputs, module_spec  # noqa: PLC0415
    from export.spec import source_digest  # noqa: PLC0415
    from export.target import Target  # noqa: PLC0415

    key = read_private_key(sign_key) if sign_key is not None else None
    target = Target(repository=Path(out), model=ModelId(name, version), replace=replace)
    description = description or type(module).__name__
    accepted = tolerance or TOLERANCES[precision]
    inputs = ModuleInputs.of(module, example_inputs, dynamic_axes, max_length)
    options: dict[str, object] = {
        "inputs": inputs.tensors,
        "outputs": list(output_names),
        "lengths": inputs.max_lengths,
    }
    options |= {"description": description, "precision": precision, "tolerance": accepted}
    source = source_digest(module, options)
    target.check(source)
    spec = module_spec(module, inputs, output_names, tolerance or FP32_TOLERANCE)
    writer = ArtifactWriter(spec, target.model, description, precision, accepted, source)
    return publish(writer, target, key)
