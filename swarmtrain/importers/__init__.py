"""Convert other tools' files into a config, with a report of what could not be mapped.

migration_report    how each key of a source was handled
launch_finder, launch_selection    the command of a script that starts training
launch_command, launch_mapping     its flags, script, variables and prefixes such as srun
shell                              reading shell scripts
scaling, accelerate, deepspeed, sbatch, compose, huggingface    one format each
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from swarmtrain.atomic_file import PUBLIC_MODE, write_files_atomically
from swarmtrain.config.loader import sort_and_limit_problems
from swarmtrain.config.schema.runner_types import list_runner_types
from swarmtrain.config.user_files import UnreadableFileError, describe_os_error
from swarmtrain.config.user_files import read_file_with_limit as read_bytes
from swarmtrain.config.yaml_document import YamlDocument, YamlSyntaxError, describe_value, read_yaml
from swarmtrain.errors import ConfigError, Problem, SwarmtrainError
from swarmtrain.importers import accelerate, compose, deepspeed, huggingface, sbatch, scaling
from swarmtrain.importers.launch_command import is_training_script
from swarmtrain.importers.migration_report import ImportResult, MigrationReport, UnmappedKey, UnmappedReason
from swarmtrain.importers.sbatch import ScriptSettings, parse_script_settings

__all__ = [
    "ImportResult",
    "ImportedConfig",
    "ScriptSettings",
    "SourceFormat",
    "UnmappedKey",
    "UnmappedReason",
    "import_config_file",
    "import_config_text",
    "parse_script_settings",
    "parse_source_format",
    "recognize_foreign_config",
    "write_imported_config",
]

_MAX_BYTES = 1_000_000
_KNOWN_FORMATS_TEXT = (
    "a Scaling config, an accelerate config, a DeepSpeed JSON or hostfile, an sbatch script, a compose file, a model's config.json"
)


class SourceFormat(StrEnum):
    """File formats that can be imported."""

    scaling = "scaling"
    accelerate = "accelerate"
    deepspeed = "deepspeed"
    sbatch = "sbatch"
    compose = "compose"
    huggingface = "huggingface"


@dataclass(frozen=True)
class ImportedConfig:
    """Imported config: the format of the source file, and the result of the import."""

    source: str
    format: SourceFormat
    result: ImportResult

    def to_yaml(self) -> str:
        """Return the imported config as YAML, without values that equal the defaults."""
        header = f"# From {self.source} ({self.format}), by swarmtrain import. All other keys have their defaults.\n"
        values = self.result.values
        body = (
            yaml.dump(_convert_lists_to_tuples(values), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
            if values
            else "{}\n"
        )
        return header + body

    def format_report(self) -> str:
        """Return the unmapped keys as a table, followed by the notes."""
        rows = [("KEY", "LINE", "VALUE", "WHY", "INSTEAD")]
        rows += [
            (unmapped.key, str(unmapped.line or ""), unmapped.value, unmapped.reason.value, unmapped.replacement)
            for unmapped in self.result.unmapped_keys
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows)
        table = ["not in the config:", *(f"  {line}" for line in lines)] if len(rows) > 1 else []
        return "\n".join([*table, *(f"note: {note}" for note in self.result.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the config, unmapped keys and notes as a JSON-compatible dict, for `--json`."""
        unmapped_keys = [
            {
                "key": unmapped.key,
                "line": unmapped.line,
                "value": unmapped.value,
                "reason": unmapped.reason.value,
                "instead": unmapped.replacement,
            }
            for unmapped in self.result.unmapped_keys
        ]
        return {
            "source": self.source,
            "format": self.format.value,
            "config": self.result.values,
            "unmapped": unmapped_keys,
            "notes": list(self.result.notes),
        }


def import_config_file(
    path: Path, *, hostsfile: Path | None = None, source_format: SourceFormat | None = None, settings: ScriptSettings | None = None
) -> ImportedConfig:
    """Return the config imported from the file at `path`, for a run on the hosts in `hostsfile`.

    `source_format` overrides detection by content. `settings` complete a script. Raises ConfigError with all problems of the file, or
    SwarmtrainError if the file cannot be read or has an unknown format.
    """
    text = _read_source_text(path)
    hosts = deepspeed.parse_hostfile(_read_source_text(hostsfile), str(hostsfile)) if hostsfile else ()
    model_folder = str(path.parent) if next(path.parent.glob("*.safetensors"), None) else None
    return import_config_text(text, str(path), hosts=hosts, source_format=source_format, model_folder=model_folder, settings=settings)


def recognize_foreign_config(path: Path, problem_paths: Collection[str]) -> SourceFormat | None:
    """Return the format of a file that is not a valid swarmtrain config; None if it may be one with errors.

    `problem_paths` are the key paths of the errors. A config of Scaling is recognized by keys that only Scaling has, since most of its keys
    are also keys of a swarmtrain config.
    """
    try:
        text = _read_source_text(path)
        if _is_shell_script(text, str(path)):
            return SourceFormat.sbatch
        values = _parse_yaml(text, str(path)).values
        source_format = _detect_source_format(values, str(path)) if isinstance(values, dict) else None
    except SwarmtrainError:
        return None
    if source_format is SourceFormat.scaling and scaling.FOREIGN_KEYS.isdisjoint(problem_paths):
        return None
    return source_format


def parse_source_format(name: str | None) -> SourceFormat | None:
    """Return the source format named `name`; None if `name` is None. Raises SwarmtrainError if the format is unknown."""
    if name is not None and name not in list(SourceFormat):
        raise SwarmtrainError(f"{name!r} is not a known format", place="--from", hint=f"available formats: {', '.join(SourceFormat)}")
    return None if name is None else SourceFormat(name)


def import_config_text(
    text: str,
    source_file: str,
    *,
    hosts: tuple[str, ...] = (),
    source_format: SourceFormat | None = None,
    model_folder: str | None = None,
    settings: ScriptSettings | None = None,
) -> ImportedConfig:
    """Return the config imported from `text`, the content of `source_file`.

    `model_folder` is the file's folder if it also contains the model's weights. `settings` complete a script.
    Raises SwarmtrainError and ConfigError as `import_config_file` does.
    """
    if not text.strip():
        raise SwarmtrainError("is empty", place=source_file, hint=f"pass {_KNOWN_FORMATS_TEXT}")
    if source_format is SourceFormat.sbatch or (source_format is None and _is_shell_script(text, source_file)):
        return _import_sbatch_script(text, source_file, hosts, settings)
    if source_format in (None, SourceFormat.deepspeed) and deepspeed.is_hostfile(text):
        report = MigrationReport({})
        deepspeed.map_hosts(report, deepspeed.parse_hostfile(text, source_file), ("hostsfile",))
        return ImportedConfig(source_file, SourceFormat.deepspeed, report.build_import_result(source_file))
    try:
        document = _parse_yaml(text, source_file)
    except ConfigError:
        if source_format is None and is_training_script(text):
            return _import_sbatch_script(text, source_file, hosts, settings)
        raise
    if source_format is None and isinstance(document.values, str) and is_training_script(text):
        return _import_sbatch_script(text, source_file, hosts, settings)
    if not isinstance(document.values, dict):
        raise SwarmtrainError(
            f"is not a known format: it contains {describe_value(document.values)}", place=source_file, hint=f"pass {_KNOWN_FORMATS_TEXT}"
        )
    if not document.values:
        raise SwarmtrainError("is empty", place=source_file, hint=f"pass {_KNOWN_FORMATS_TEXT}")
    source_format = source_format or _detect_source_format(document.values, source_file)
    if settings is not None:
        raise SwarmtrainError(f"{source_file} is a {source_format} file, not a script", place="--set and --launch", hint="omit them")
    report = MigrationReport(document.values, document.lines)
    _map_source_config(report, source_format, source_file, hosts, model_folder)
    return ImportedConfig(source_file, source_format, report.build_import_result(source_file))


def write_imported_config(imported_config: ImportedConfig, path: Path, *, force: bool = False) -> None:
    """Write the imported config to `path`. Raises SwarmtrainError if the file exists (unless `force`) or cannot be written."""
    try:
        if path.exists() and not force:
            raise SwarmtrainError("exists already", place=str(path), hint="use --force to overwrite it")
        write_files_atomically({path: (imported_config.to_yaml().encode(), PUBLIC_MODE)})
    except OSError as error:
        raise SwarmtrainError(f"cannot be written: {describe_os_error(error)}", place=str(path), hint="choose another file") from None


def _import_sbatch_script(text: str, source_file: str, hosts: tuple[str, ...], settings: ScriptSettings | None) -> ImportedConfig:
    report = sbatch.parse_sbatch_script(text, source_file, settings)
    if hosts:
        deepspeed.map_hosts(report, hosts, ("hostsfile",))
    return ImportedConfig(source_file, SourceFormat.sbatch, report.build_import_result(source_file))


def _map_source_config(
    report: MigrationReport, source_format: SourceFormat, source_file: str, hosts: tuple[str, ...], model_folder: str | None
) -> None:
    if source_format is SourceFormat.accelerate:
        accelerate.map_accelerate_config(report, hosts)
        return
    if source_format is SourceFormat.deepspeed:
        deepspeed.map_deepspeed_config(report, hosts)
    elif source_format is SourceFormat.scaling:
        scaling.map_scaling_config(report, hosts)
    elif source_format is SourceFormat.huggingface:
        huggingface.map_huggingface_config(report, source_file, model_folder)
    else:
        compose.map_compose_file(report, source_file)
    if hosts:
        deepspeed.map_hosts(report, hosts, ("hostsfile",))


def _detect_source_format(source_values: dict[str, Any], source_file: str) -> SourceFormat:
    keys = {str(key) for key in source_values}
    runner = source_values.get("runner")
    if isinstance(runner, dict) and runner.get("runner_type") in list_runner_types():
        raise SwarmtrainError("is already a swarmtrain config", place=source_file, hint=f"swarmtrain plan {source_file}")
    for source_format, marker_keys in (
        (SourceFormat.compose, {"services"} if isinstance(source_values.get("services"), dict) else set()),
        (SourceFormat.huggingface, huggingface.KEYS),
        (SourceFormat.accelerate, accelerate.KEYS),
        (SourceFormat.deepspeed, deepspeed.KEYS),
        (SourceFormat.scaling, scaling.SECTIONS),
    ):
        if keys & marker_keys:
            return source_format
    raise SwarmtrainError(
        f"is not a known format; its keys are {', '.join(sorted(keys)[:8])}",
        place=source_file,
        hint=f"pass {_KNOWN_FORMATS_TEXT}; select the format with --from",
    )


def _is_shell_script(text: str, source_file: str) -> bool:
    if source_file.endswith((".sh", ".bash", ".sbatch", ".slurm")):
        return True
    return text.startswith("#!") or any(line.lstrip().startswith("#SBATCH") for line in text.splitlines())


def _parse_yaml(text: str, source_file: str) -> YamlDocument:
    try:
        document = read_yaml(text)
    except YamlSyntaxError as error:
        raise ConfigError((Problem("", f"is neither YAML nor JSON: {error}", error.line, error.hint),), source=source_file) from None
    if document.problems:
        raise ConfigError(sort_and_limit_problems(document.problems), source=source_file)
    return document


def _read_source_text(path: Path) -> str:
    try:
        content = read_bytes(path, _MAX_BYTES)
    except UnreadableFileError as error:
        hint = f"ls -l {path} shows its permissions" if error.errno == errno.EACCES else f"pass {_KNOWN_FORMATS_TEXT}"
        raise SwarmtrainError(str(error), place=str(path), hint=hint) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise SwarmtrainError("is not text", place=str(path), hint=f"pass {_KNOWN_FORMATS_TEXT}")
    return text.replace("\r\n", "\n")


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes pairs (tuples) in flow style: [a, b]."""


# The config's parser reads 3e-4 as a number, unlike YAML 1.1. So the dumper must quote a string of this form.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*\.?[\d_]*[eE][-+]?\d+"), list("-+0123456789."))
_Dumper.add_representer(tuple, lambda dumper, pair: dumper.represent_sequence("tag:yaml.org,2002:seq", pair, flow_style=True))


def _convert_lists_to_tuples(value: Any) -> Any:
    """Return `value` with nested lists as tuples, which the YAML dumper writes as pairs."""
    if isinstance(value, dict):
        return {key: _convert_lists_to_tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tuple(item) if isinstance(item, list | tuple) else _convert_lists_to_tuples(item) for item in value]
    return value
