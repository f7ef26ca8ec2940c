"""The YAML of `docker/variants`: how to launch a server and how to read back what it really runs.

`python -m evals.engines.schema` prints the JSON schema that is kept as docker/variants/schema.json.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

Engine = Literal["sglang", "vllm", "service", "other"]
Format = Literal["bf16", "fp8", "nvfp4"]
Launcher = Literal["srun", "ray", "lws", "manual"]


def gpu_list(given: Any) -> Any:
    """`"0-3,6"` or `[0, 1]` as a list of indices."""
    if given is None or isinstance(given, list):
        return given
    found: list[int] = []
    for part in str(given).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError(f"gpus: '{given}' is no list of indices such as 0-3 or 0,2")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


_GPUS = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}, {"type": "null"}],
         "description": "indices: [0, 1] or 0-3"}


class Strict(BaseModel):
    """A wrong key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid")


class Parallel(Strict):
    """How the model is split; sizes are the engine's own."""

    tensor: int = Field(default=1, ge=1, description="tensor parallel size over all nodes")
    expert: int = Field(default=1, ge=1, description="expert parallel size; vLLM derives it: tensor x data, or 1")
    pipeline: int = Field(default=1, ge=1)
    data: int = Field(default=1, ge=1)


class Nodes(Strict):
    """Several machines, started by the engine's own launcher."""

    count: int = Field(ge=2)
    launcher: Launcher
    address: str = Field(description="HOST:PORT of the first node, for the engine's rendezvous")


class Ready(Strict):
    """When the server counts as up."""

    path: str = "/health"
    timeout: float = Field(default=1800, gt=0, description="seconds until the weights must be loaded")


class Source(Strict):
    """Where a kernel's name is found: a field of a JSON answer, by dots, or group 1 of a pattern in the log."""

    url: str | None = Field(default=None, pattern="^/")
    field: str | None = None
    log: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Source:
        if (self.url is None) != (self.field is None) or (self.url is None) == (self.log is None):
            raise ValueError("a source is either url and field, or log")
        if self.log is not None:
            try:
                groups = re.compile(self.log).groups
            except re.error as error:
                raise ValueError(f"'{self.log}' is no regular expression ({error})") from None
            if groups != 1:
                raise ValueError(f"'{self.log}' must have one group: the kernel's name")
        return self


class Attest(Strict):
    """How to read back which kernel runs, beside what is known of the engine."""

    kernel: str | None = Field(default=None, description="name to expect (default: `kernel`)")
    sources: list[Source] = Field(default_factory=list, description="beside the engine's own")
    fallback: list[str] = Field(default_factory=list, description="log patterns that mean: another kernel ran")
    log: str | None = Field(default=None, description="log file of a server that is only reached by URL")
    fields: dict[str, str | int | bool] = Field(default_factory=dict, description="further fields of /server_info")


class Protocol(Strict):
    """What the run is expected to ask; the command line overrides it, and the report says so."""

    endpoint: Literal["completions", "chat"] | None = None
    shots: int | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    concurrency: int | None = Field(default=None, ge=1)


class Facts(Strict):
    """Published facts, with sources; they are shown, not used."""

    bias: str | None = None
    gsm8k: str | None = None
    notes: list[str] = Field(default_factory=list)
    sources: list[str] = Field(default_factory=list)


class ModelFile(Strict):
    """`docker/variants/models/NAME.yaml`: a checkpoint with its protocol and its published facts."""

    path: str = Field(description="folder, or a hub name that the engine resolves")
    format: Format
    served_name: str | None = None
    parallel: Parallel = Parallel()
    max_model_len: int | None = Field(default=None, ge=1)
    protocol: Protocol = Protocol()
    facts: Facts = Facts()


class VariantFile(Strict):
    """`docker/variants/NAME.yaml`: one way to serve a model."""

    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._#:/=,-]*$")]
    about: str = ""
    engine: Engine
    kernel: str | None = Field(default=None, description="MoE kernel: the engine's flag, and what attestation expects")
    formats: list[Format] = Field(default_factory=list, description="weight formats this kernel takes; empty: any")
    model: str | None = Field(default=None, description="folder, hub name, or a file of models/; --model overrides it")
    url: str | None = Field(default=None, description="a server that runs already: nothing is launched")
    image: str | None = Field(default=None, description="container image; without it the command runs here")
    command: list[str] | None = Field(
        default=None, description="instead of the engine's; {model}, {host}, {port} and {python} are filled in")
    args: list[str] = Field(default_factory=list, description="added to the engine's command")
    docker_args: list[str] = Field(default_factory=list, description="added to `docker run`")
    mounts: list[str] = Field(default_factory=list, description="HOST:CONTAINER[:ro], for images")
    env: dict[str, str] = Field(default_factory=dict)
    gpus: Annotated[list[int] | None, BeforeValidator(gpu_list), WithJsonSchema(_GPUS)] = None
    parallel: Parallel | None = Field(default=None, description="default: the model file's")
    nodes: Nodes | None = None
    port: int | None = Field(default=None, ge=1, le=65535, description="default: a free one")
    ready: Ready = Ready()
    attest: Attest = Attest()
    protocol: Protocol = Protocol()
    sequential: bool = Field(default=False, description="never run beside the other arm's server")
    facts: Facts = Facts()

    @field_validator("env", mode="before")
    @classmethod
    def _strings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> VariantFile:
        if self.engine == "other" and not (self.command or self.url):
            raise ValueError("engine: other needs a command or a url")
        if self.engine == "service" and not (self.kernel or self.url):
            raise ValueError("engine: service needs kernel: a variant such as fp8/emulated")
        if self.url and (self.image or self.command):
            raise ValueError("url: a running server is not launched; drop image and command")
        if self.nodes and self.nodes.launcher == "lws" and not self.url:
            raise ValueError("launcher lws: Kubernetes starts the pods; give the leader's url")
        if self.nodes and self.engine not in ("sglang", "vllm"):
            raise ValueError("nodes: only sglang and vllm have a launcher of their own")
        return self


def json_schema() -> str:
    """The JSON schema of both files, for editors."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "moe-parity variant file",
        **VariantFile.model_json_schema(),
    }
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(json_schema(), end="")
