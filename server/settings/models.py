"""Options of the models that are served."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, field_validator

from attention_serving.server.engine.limits import MAX_TOLERANCE, chosen_versions


class Models(BaseModel):
    """Which models are served, and on what."""

    model_repository: Path = Field(description="Folder that contains the artifacts as NAME/VERSION/.")
    provider: Literal["auto", "cpu", "cuda"] = Field(
        "cpu",
        description="Execution provider that runs the graphs: cpu; cuda, which refuses to start where it"
        " cannot be used; auto, which takes cuda where it can be used and logs why not elsewhere.",
    )
    device_memory: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description="Maximum memory of the device for runs, beside the weights of the models, at least 0."
        " 0 sets no limit. Ignored with provider cpu.",
    )
    model_control: Literal["none", "poll", "explicit"] = Field(
        "none",
        description="When models are loaded: none loads all of them at startup; poll also loads, replaces and"
        " unloads them when the repository changes; explicit loads those of load_model, and more on request.",
    )
    repository_poll_seconds: float = Field(
        15.0,
        ge=0.1,
        le=1_000_000,
        allow_inf_nan=False,
        description="How often the repository is looked at with model_control poll, in seconds, 0.1 to"
        " 1000000. A change is applied after two consecutive looks find the same files.",
    )
    load_model: str = Field(
        "",
        description="Models to load at startup with model_control explicit: names with commas between them,"
        " or * for all. Those that were loaded when the last server of the repository ended are added.",
    )
    version_policy: str = Field(
        "all",
        description="Versions of each model that are served: all, latest, latest:N (the N highest) or"
        " specific:V,V.",
    )
    max_tolerance: float = Field(
        MAX_TOLERANCE,
        ge=0,
        allow_inf_nan=False,
        description="Maximum tolerance, relative and absolute, that a model may state for its difference from"
        " eager PyTorch, at least 0. Models with a larger one are refused.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads for runs on the CPU, 0 to 1024. A long run that is alone uses all of them; under"
        " load, each run uses one. 0 uses one thread per available core.",
    )
    latency: Literal["balanced", "lowest"] = Field(
        "balanced",
        description="What idle threads do: balanced lets them sleep; lowest keeps them awake between the"
        " operators of a run, and for a millisecond between requests, which answers a single caller sooner"
        " and uses more processor time.",
    )

    @field_validator("version_policy")
    @classmethod
    def _is_a_policy(cls, value: str) -> str:
        chosen_versions(value, ())
        return value
