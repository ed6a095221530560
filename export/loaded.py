"""What the command exports, once it is loaded: an attention module or a text encoder. Imports PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from attention_serving.artifact.keys import PrivateKey
from attention_serving.artifact.manifest import Manifest
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.artifact import Progress, write_artifact
from attention_serving.export.encoder import EncoderOptions, describe, encoder_spec, write_encoder
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import ENCODER_TOLERANCES, TOLERANCES, Precision
from attention_serving.export.signature import AttentionModule
from attention_serving.export.spec import ExportSpec, attention_spec
from attention_serving.model.encoder_folder.loading import LoadedEncoder


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where and how an artifact is written."""

    model: ModelId
    repository: Path
    precision: Precision
    tolerance: Tolerance
    replace: bool
    sign_key: PrivateKey | None
    progress: Progress


@dataclass(frozen=True)
class LoadedModule:
    """An attention module.

    Attributes:
        skipped: Names in the checkpoint that are not part of attention.
    """

    part: ClassVar = "attention"
    tolerances: ClassVar[Mapping[Precision, Tolerance]] = TOLERANCES
    module: AttentionModule
    description: str
    skipped: tuple[str, ...] = ()

    @property
    def config(self) -> object:
        """The configuration of the module."""
        return self.module.config

    def spec(self) -> ExportSpec:
        """The export of the module."""
        return attention_spec(self.module)

    def write(self, to: Destination) -> tuple[Path, Manifest]:
        """Writes the artifact; returns its folder and its manifest."""
        return write_artifact(
            self.module,
            to.model,
            to.repository,
            description=self.description,
            precision=to.precision,
            tolerance=to.tolerance,
            replace=to.replace,
            sign_key=to.sign_key,
            progress=to.progress,
        )


@dataclass(frozen=True)
class LoadedText:
    """A text encoder."""

    part: ClassVar = "the encoder"
    tolerances: ClassVar[Mapping[Precision, Tolerance]] = ENCODER_TOLERANCES
    encoder: LoadedEncoder
    options: EncoderOptions

    @property
    def config(self) -> object:
        """The configuration of the encoder."""
        return self.encoder.module.config

    @property
    def description(self) -> str:
        """The encoder in one line."""
        return describe(self.encoder)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names in the folder that are not part of the encoder."""
        return self.encoder.skipped

    def spec(self) -> ExportSpec:
        """The export of the encoder."""
        return encoder_spec(self.encoder, self.options)

    def write(self, to: Destination) -> tuple[Path, Manifest]:
        """Writes the artifact; returns its folder and its manifest."""
        return write_encoder(
            self.encoder,
            to.model,
            to.repository,
            options=self.options,
            precision=to.precision,
            tolerance=to.tolerance,
            replace=to.replace,
            sign_key=to.sign_key,
            progress=to.progress,
        )


Loaded = LoadedModule | LoadedText
