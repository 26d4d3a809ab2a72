"""Options of containers in job scripts: apptainer or singularity, and the container options that pyxis adds to srun and sbatch."""

from __future__ import annotations

import re

from swarmtrain.importers.command_prefixes import CommandPrefix
from swarmtrain.importers.launch_command import map_environment_variable
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, is_secret_name
from swarmtrain.importers.secret_values import is_secret_value
from swarmtrain.importers.shell.unresolved import find_unresolved, is_resolved, show_text
from swarmtrain.importers.slurm_options import SlurmOptions, has_slurm_setting

_APPTAINER = "runner.slurm.apptainer"
_MOUNTS_FIELD = "runner.docker_config.docker_mounts"
PYXIS_PATTERN = re.compile(r"-*(?:no-)?container-.*")
_PYXIS_UNMAPPED: dict[str, tuple[UnmappedReason, str]] = {
    "container-workdir": (UnmappedReason.done_differently, "the script starts in the folder that contains the shipped files"),
    "container-env": (
        UnmappedReason.done_differently,
        "the container has the variables of the job; set others in runner.slurm.apptainer.env",
    ),
    "container-name": (UnmappedReason.no_counterpart, "the container is started from its image on each node"),
    "container-save": (UnmappedReason.no_counterpart, "the image is never changed"),
    "container-mount-home": (UnmappedReason.is_default, "Apptainer mounts the home folder"),
    "no-container-mount-home": (UnmappedReason.no_counterpart, "Apptainer mounts the home folder; set runner.slurm.apptainer.home"),
}


def map_apptainer(report: MigrationReport, key: KeyPath, prefix: CommandPrefix) -> None:
    """Map the options and the image of apptainer or singularity."""
    for option, value in prefix.options:
        if option == "run":
            report.add_note(f"{prefix.program} run starts the runscript of the image, which is assumed to start the wrapped command")
            continue
        _map_apptainer_option(report, (*key, f"{prefix.program} {option}"), option.lstrip("-"), value)
    for image in prefix.operands:
        _map_image(report, (*key, "image"), image, prefix.program)


def map_pyxis_options(report: MigrationReport, key: KeyPath, prefix: CommandPrefix) -> None:
    """Map the container options of srun."""
    for option, value in prefix.options:
        if PYXIS_PATTERN.fullmatch(option):
            _map_pyxis_option(report, (*key, f"{prefix.program} {option}"), option.lstrip("-"), value)


def map_pyxis_sbatch_options(report: MigrationReport, options: SlurmOptions) -> None:
    """Map the container options of sbatch."""
    for name, (source_key, value) in options.values.items():
        if PYXIS_PATTERN.fullmatch(name):
            _map_pyxis_option(report, source_key, name, value)


def convert_pyxis_image(image: str) -> str:
    """Return an image of pyxis, such as nvcr.io#nvidia/pytorch:24.10, in Apptainer's notation.

    A file of enroot is a SquashFS file system, which Apptainer runs as it is.
    """
    if image.startswith(("/", "./", "../", "~")) or image.endswith((".sqsh", ".squashfs")):
        return image
    reference = re.sub(r"^[a-z]+://", "", image).replace("#", "/", 1)
    return f"docker://{reference}"


def _map_pyxis_option(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    if name == "container-image":
        _map_image(report, source_key, convert_pyxis_image(value), "apptainer")
        report.add_note(
            "pyxis is replaced by Apptainer, which has to be installed on the nodes; set runner.slurm.apptainer.nv if they have GPUs"
        )
    elif name == "container-mounts":
        _add_binds(report, source_key, value)
    else:
        reason, replacement = _PYXIS_UNMAPPED.get(name, (UnmappedReason.no_counterpart, ""))
        report.add_unmapped_key(source_key, reason, replacement, value=show_text(value))


def _map_apptainer_option(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    uses_slurm = has_slurm_setting(report, "apptainer.binds")
    if name in ("B", "bind"):
        _add_binds(report, source_key, value)
    elif name == "env":
        _add_variables(report, source_key, value, uses_slurm=uses_slurm)
    elif name == "nv":
        report.map_key(source_key, f"{_APPTAINER}.nv", True) if uses_slurm else report.mark_keys_handled(source_key)
        report.add_gpu_visibility_setting()
    elif name in ("home", "H") and uses_slurm and is_resolved(value):
        report.map_key(source_key, f"{_APPTAINER}.home", value)
    elif not is_resolved(value):
        report.add_unmapped_key(source_key, UnmappedReason.unknown, _describe_setting(value), value=show_text(value))
    else:
        report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, "", value=value)


def _describe_setting(value: str) -> str:
    names = [part.name for part in find_unresolved(value) if part.name]
    return f"import with {' '.join(f'--set {name}=VALUE' for name in dict.fromkeys(names))}" if names else "write its value"


def _add_binds(report: MigrationReport, source_key: KeyPath, value: str) -> None:
    """Add the mounts in `value`, separated by commas, to the binds of Apptainer or the mounts of Docker."""
    mount = _add_apptainer_bind if has_slurm_setting(report, "apptainer.binds") else _add_docker_mount
    report.mark_keys_handled(source_key)
    for bind in filter(None, value.split(",")):
        bind_key = (*source_key, show_text(bind))
        if is_resolved(bind):
            mount(report, bind_key, bind)
        else:
            report.add_unmapped_key(bind_key, UnmappedReason.unknown, _describe_setting(bind), value=show_text(bind))


def _add_apptainer_bind(report: MigrationReport, bind_key: KeyPath, bind: str) -> None:
    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    if mode and mode not in ("ro", "rw"):
        report.add_unmapped_key(bind_key, UnmappedReason.no_counterpart, f"{mode} is not supported: the mount has the default", value=bind)
        bind = f"{source}:{target}"
    path = f"{_APPTAINER}.binds"
    report.map_key(bind_key, path, [*(report.get_config_value(path) or ()), bind])


def _add_docker_mount(report: MigrationReport, bind_key: KeyPath, bind: str) -> None:
    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/"):
        report.add_unmapped_key(bind_key, UnmappedReason.unknown, _MOUNTS_FIELD, value=bind)
        return
    report.set_config_value(_MOUNTS_FIELD, [*(report.get_config_value(_MOUNTS_FIELD) or ()), (source, target or source)])
    if mode == "ro":
        report.add_unmapped_key(bind_key, UnmappedReason.no_counterpart, "mounts are always writable", value=bind)


def _add_variables(report: MigrationReport, source_key: KeyPath, value: str, *, uses_slurm: bool) -> None:
    """Add the variables in `value`, as A=1,B=2, to those of the container."""
    report.mark_keys_handled(source_key)
    path = f"{_APPTAINER}.env"
    for pair in filter(None, value.split(",")):
        name, equals, text = pair.partition("=")
        variable_key = (*source_key, show_text(name))
        if not equals or not name.isidentifier():
            report.add_unmapped_key(variable_key, UnmappedReason.unknown, "not in the form NAME=value", value=show_text(pair))
        elif not is_resolved(text) and not is_secret_name(name):
            report.add_unmapped_key(variable_key, UnmappedReason.unknown, _describe_setting(text), value=show_text(text))
        elif uses_slurm and not is_secret_name(name) and not is_secret_value(text, report.secrets):
            report.map_key(variable_key, path, {**(report.get_config_value(path) or {}), name: text})
        else:
            map_environment_variable(report, variable_key, name, text)


def _map_image(report: MigrationReport, source_key: KeyPath, image: str, program: str) -> None:
    if has_slurm_setting(report, "apptainer.image"):
        report.map_key(source_key, f"{_APPTAINER}.image", image)
        if program == "singularity":
            report.set_config_value(f"{_APPTAINER}.program", program)
    elif image.startswith("docker://"):
        report.map_key(source_key, "runner.docker_config.docker_container", image.removeprefix("docker://"))
    else:
        replacement = "set runner.docker_config.docker_container to an image in a registry, built with swarmtrain image build"
        report.add_unmapped_key(source_key, UnmappedReason.done_differently, replacement, value=image)
