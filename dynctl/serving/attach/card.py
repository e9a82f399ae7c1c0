"""The model card of an attached engine, and the files that it names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from dynctl.base.errors import UsageProblem, file_problem
from dynctl.base.files import read_file
from dynctl.tokenization.model_directory import getting_files
from dynctl.wire.dynamo.discovery import CardFile, EndpointId, ModelCard, slug_of
from router_core import Role, Worker

_MAX_FILE_BYTES: Final = 64 * 1024 * 1024
#: Part of the card -> (Dynamo's name of the format, file), the first that exists.
_FILES: Final = {
    "model_info": (("hf_config_json", "config.json"),),
    "tokenizer": (("hf_tokenizer_json", "tokenizer.json"),),
    "prompt_formatter": (("hf_tokenizer_config_json", "tokenizer_config.json"),),
    "chat_template_file": (("hf_chat_template_jinja", "chat_template.jinja"),),
    "gen_config": (("hf_generation_config_json", "generation_config.json"),),
}
_REQUIRED: Final = ("model_info", "tokenizer")
_NEEDS: Final = {Role.PREFILL: (("decode",),), Role.DECODE: (("prefill",),), Role.AGGREGATED: ()}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model directory that a frontend needs; ``parts``: part -> (kind, path)."""

    directory: Path
    parts: Mapping[str, tuple[str, Path]]
    checksums: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def served(self, name: str) -> Path | None:
        """The path of a file by its name, None for others than those of the card."""
        return next((path for _, path in self.parts.values() if path.name == name), None)


def read_model_files(directory: Path) -> ModelFiles:
    """Find the files and their checksums. Raises UsageProblem."""
    parts, checksums = {}, {}
    for part, choices in _FILES.items():
        for kind, name in choices:
            path = directory / name
            try:
                data = read_file(path, _MAX_FILE_BYTES, pipe=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UsageProblem(
                    f"--model-path: cannot read {path}: {file_problem(error)}"
                ) from None
            if len(data) > _MAX_FILE_BYTES:
                raise UsageProblem(
                    f"--model-path: {path} has more bytes than expected: at most "
                    f"{_MAX_FILE_BYTES:,}"
                )
            parts[part] = (kind, path)
            checksums[part] = (f"blake3:{blake3(data).hexdigest()}", len(data))
            break
    missing = [_FILES[part][0][1] for part in _REQUIRED if part not in parts]
    if missing:
        raise UsageProblem(
            f"--model-path {directory}: {', '.join(missing)} is missing",
            "Set the directory of the engine's model: frontends need its tokenizer. "
            + getting_files(directory, missing[0]),
        )
    return ModelFiles(directory, parts, checksums)


@dataclass(frozen=True, slots=True)
class CardOptions:
    """What only users know about a worker. ``served_at``: the URL of the worker's system server,
    empty: the card has the paths of the files. ``bootstrap``: host and port where decode engines
    meet a prefill engine of SGLang."""

    served_at: str = ""
    max_num_seqs: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    taints: tuple[str, ...] = ()
    bootstrap: tuple[str, int] | None = None


def build_card(
    worker: Worker, endpoint: EndpointId, instance_id: int, files: ModelFiles, options: CardOptions
) -> ModelCard:
    """The card to register. ``worker`` is the engine with its reported values and topology."""
    role = worker.role
    plain = worker.runtime_config.to_dict()
    runtime: dict[str, Any] = {
        "context_length": plain.get("context_length"),
        "total_kv_blocks": plain.get("total_kv_blocks"),
        "max_num_seqs": options.max_num_seqs or plain.get("max_num_seqs"),
        "max_num_batched_tokens": plain.get("max_num_batched_tokens"),
        "tool_call_parser": options.tool_call_parser,
        "reasoning_parser": options.reasoning_parser,
        "tool_call_arguments_format": "json_string",
        "structural_tag_mode": "off",
        "structural_tag_scope": "auto",
        "structural_tag_schema": "auto",
        "exclude_tools_when_tool_choice_none": True,
        "data_parallel_start_rank": plain.get("data_parallel_start_rank", 0),
        "data_parallel_size": plain.get("data_parallel_size", 1),
        "enable_local_indexer": worker.kv_events,
        "kv_event_publishing_enabled": worker.kv_events,
        "enable_eagle": plain.get("enable_eagle", False),
    }
    taints = sorted({*plain.get("taints", ()), *options.taints})
    if taints:
        runtime["taints"] = taints
    if options.bootstrap is not None:
        host, port = options.bootstrap
        runtime["disaggregated_endpoint"] = {"bootstrap_host": host, "bootstrap_port": port}
    for name in (
        "topology_domains",
        "kv_transfer_domain",
        "kv_transfer_enforcement",
        "kv_transfer_preferred_weight",
    ):
        if name in plain:
            runtime[name] = plain[name]
    return ModelCard(
        endpoint,
        instance_id,
        worker.model,
        worker.block_size,
        role.value,
        _NEEDS[role],
        "" if role is Role.PREFILL else "Chat | Completions",
        "Tokens",
        str(files.directory),
        worker.runtime_config.context_length,
        {name: value for name, value in runtime.items() if value is not None},
        None,
        _card_files(files, endpoint, worker.model, options.served_at),
    )


def _card_files(
    files: ModelFiles, endpoint: EndpointId, model: str, served_at: str
) -> dict[str, CardFile]:
    at = f"{endpoint.namespace}/{endpoint.component}/{endpoint.name}"
    base = f"{served_at}/v1/metadata/{at}/{slug_of(model)}/_base"
    return {
        part: CardFile(
            f"{base}/{path.name}" if served_at else str(path.resolve()),
            *files.checksums[part],
            kind,
        )
        for part, (kind, path) in files.parts.items()
    }


def other_files(card: ModelCard, others: Iterable[ModelCard]) -> str | None:
    """The difference between a card's tokenizer and that of another worker of its model."""
    own = card.files["tokenizer"].checksum
    for other in others:
        file = other.files.get("tokenizer")
        if other.name != card.name or other.instance_id == card.instance_id or file is None:
            continue
        if file.checksum is not None and file.checksum != own:
            return (
                f"tokenizer.json is {own}, worker {other.instance_id:x} of {card.name} registered "
                f"{file.checksum[:100]}; expected one tokenizer for all workers of a model"
            )
    return None
