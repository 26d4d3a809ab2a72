"""Pipeline of `data tokenize`: several processes build shards, which are merged into token files.

The folder PREFIX.parts contains the finished shards. A shard is published atomically, so after any interruption the same command resumes
the job. The bytes of the output depend only on the source files and the options, not on the number of workers or on interruptions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.tokenize import document_builders, readers, shards, tokenizer_backends
from swarmtrain.trainer.tokenize.progress import ProgressBar
from swarmtrain.trainer.tokenize.readers import FilePart, SourceFile
from swarmtrain.trainer.tokenize.shards import DocumentBuilder, ShardStats
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE, TokenizeOptions
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer
from swarmtrain.trainer.tokenize.worker_pool import WorkerPool

_MIN_SHARD_BYTES, _MAX_SHARDS = 8 << 20, 4096
"""Minimum size of a shard in bytes, and approximate maximum number of shards."""
_READ_BYTES = 1 << 20
_FORMAT_VERSION = 1


def tokenize_source_files(
    options: TokenizeOptions, path_patterns: Sequence[str], *, min_shard_bytes: int = _MIN_SHARD_BYTES
) -> dict[str, Any]:
    """Tokenize the source files that match `path_patterns` into token files as `options` specify. Return the content of PREFIX.meta.json.

    Raises TrainingError if a file cannot be read or written, or if `options` contradict each other.
    """
    prefix = Path(options.prefix)
    tokenizer = tokenizer_backends.open_tokenizer(options.tokenizer)
    builder = document_builders.select_document_builder(options, tokenizer)
    files = readers.find_source_files(path_patterns)
    plan = readers.plan_shards(files, builder.keys, max(min_shard_bytes, sum(file.size for file in files) // _MAX_SHARDS))
    if formats.build_token_file_path(prefix, "bin").exists() and _read_job_identity(prefix) is None:
        raise TrainingError(
            f"{prefix}: token files exist that swarmtrain data tokenize did not write", place=ERROR_PLACE, hint="choose another prefix"
        )
    folder = formats.build_token_file_path(prefix, "parts")
    with _lock_folder(folder):
        identity = _build_job_identity(tokenizer, builder, _hash_source_files(folder, files, options.workers), files)
        if _read_job_identity(prefix) == identity:
            _print_status(f"{prefix} already exists, from the same files and options")
            shutil.rmtree(folder)
            return _read_meta_file(prefix)
        _prepare_job_folder(folder, {**identity, "shards": len(plan)})
        shard_stats = _build_missing_shards(folder, plan, files, builder, options)
        _report_skipped_records(shard_stats, files, options)
        meta = _merge_shards(prefix, folder, shard_stats, builder, identity, tokenizer_identity=tokenizer.identity)
        shutil.rmtree(folder)
    return meta


def _build_missing_shards(
    folder: Path,
    shard_plan: Sequence[Sequence[FilePart]],
    source_files: Sequence[SourceFile],
    builder: DocumentBuilder,
    options: TokenizeOptions,
) -> list[ShardStats]:
    """Build the shards of `shard_plan` that are not finished, in parallel. Return the statistics of all shards."""
    shard_stats = {
        number: finished_stats for number in range(len(shard_plan)) if (finished_stats := shards.read_finished_shard_stats(folder, number))
    }
    stops_on_bad = options.on_bad == "stop"
    if stops_on_bad and (bad_shard := next((each for _, each in sorted(shard_stats.items()) if each.bad_count), None)):
        file_number, position, problem = bad_shard.bad_records[0]
        raise shards.build_invalid_record_error(source_files[file_number], position, problem)
    missing = [number for number in range(len(shard_plan)) if number not in shard_stats]
    sizes = [sum(part.size for part in parts) for parts in shard_plan]
    if shard_stats and missing:
        _print_status(f"resuming: {len(shard_stats)} of {len(shard_plan)} shards are done")
    progress_bar = ProgressBar("tokens", sum(sizes), initial=sum(sizes[number] for number in shard_stats))

    def build_planned_shard(number: int) -> ShardStats:
        return shards.build_shard(folder, number, shard_plan[number], source_files, builder, stop_on_invalid_record=stops_on_bad)

    with _open_worker_pool(min(options.workers, len(missing)), build_planned_shard) as workers:
        for finished in workers.run_tasks(missing):
            if finished is not None:
                number = missing[finished[0]]
                shard_stats[number] = finished[1]
                progress_bar.update(sizes[number], finished[1].tokens)
            progress_bar.print_if_due()
    progress_bar.close()
    return [shard_stats[number] for number in range(len(shard_plan))]


def _hash_source_files(folder: Path, files: Sequence[SourceFile], worker_count: int) -> list[str]:
    """Return the SHA-256 of each source file. Hashes are stored in `folder`; unchanged files are not hashed again."""
    record_path = folder / "hashes.json"
    known_hashes: dict[str, str] = _read_json(record_path) or {}
    missing = [file for file in files if f"{file.name} {file.stamp}" not in known_hashes]
    progress_bar = ProgressBar(
        "", sum(file.size for file in files), initial=sum(file.size for file in files if file not in missing), verb="hashes"
    )
    with _open_worker_pool(min(worker_count, len(missing)), readers.hash_file) as workers:
        for finished in workers.run_tasks([file.name for file in missing]):
            if finished is not None:
                file = missing[finished[0]]
                known_hashes[f"{file.name} {file.stamp}"] = finished[1]
                progress_bar.update(file.size, 0)
                if file.size >= _MIN_SHARD_BYTES:
                    _write_json(record_path, known_hashes)
            progress_bar.print_if_due()
    _write_json(record_path, known_hashes)
    return [known_hashes[f"{file.name} {file.stamp}"] for file in files]


def _build_job_identity(
    tokenizer: BaseTokenizer, builder: DocumentBuilder, source_hashes: Sequence[str], source_files: Sequence[SourceFile]
) -> dict[str, Any]:
    """Return everything that determines the bytes of the output: tokenizer, options and source files."""
    return {
        "version": _FORMAT_VERSION,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "options": builder.identity_options,
        "sources": [
            {"name": file.name, "bytes": file.size, "sha256": sha256} for file, sha256 in zip(source_files, source_hashes, strict=True)
        ],
    }


def _prepare_job_folder(folder: Path, job_identity: dict[str, Any]) -> None:
    """Prepare `folder` for `job_identity`: keep the finished shards if they were built by the same job, else delete them."""
    previous = _read_json(folder / "job.json")
    if previous is not None and previous != job_identity:
        changed = [name for name in job_identity if previous.get(name) != job_identity[name]]
        _print_status(f"starting from scratch: not the same {' and '.join(changed)} as in the interrupted job")
    if previous != job_identity:
        for path in folder.iterdir():
            if path.name not in ("hashes.json", "lock"):
                path.unlink()
        _write_json(folder / "job.json", job_identity)
    for path in folder.glob(".*"):  # temporary files of killed processes
        path.unlink()


def _merge_shards(
    prefix: Path,
    folder: Path,
    shard_stats: Sequence[ShardStats],
    builder: DocumentBuilder,
    job_identity: Mapping[str, Any],
    *,
    tokenizer_identity: str,
) -> dict[str, Any]:
    """Merge the shards into the token files of `prefix`, and return the content of PREFIX.meta.json, which is written last.

    Raises TrainingError if the shards contain no documents.
    """
    documents, tokens = sum(each.documents for each in shard_stats), sum(each.tokens for each in shard_stats)
    if not tokens:
        raise TrainingError(
            "the source files contain no documents", place=ERROR_PLACE, hint="set --key to the field with the text of a record"
        )
    merged_paths = {suffix: folder / f"whole.{suffix}" for suffix in ("bin", "idx", *(["mask.bin"] if builder.has_loss_mask else []))}
    numbers = range(len(shard_stats))
    hashes = {"bin": _concatenate_files(merged_paths["bin"], (folder / f"{number:06}.bin" for number in numbers))}
    if builder.has_loss_mask:
        hashes["mask.bin"] = _concatenate_files(merged_paths["mask.bin"], (folder / f"{number:06}.mask" for number in numbers))
    hashes["idx"] = _write_index_file(merged_paths["idx"], [folder / f"{number:06}.len" for number in numbers])
    meta = {
        "dtype": builder.dtype,
        "index_dtype": "int64",
        "document_count": documents,
        "token_count": tokens,
        **({"loss_mask": True, "loss_tokens": sum(each.loss_tokens for each in shard_stats)} if builder.has_loss_mask else {}),
        "skipped": {"bad": sum(each.bad_count for each in shard_stats), "empty": sum(each.empty_count for each in shard_stats)},
        "skipped_records_sha256": _hash_skipped_records(shard_stats),
        "sha256": hashes,
        "tokenizer_identity": tokenizer_identity,
        "begin_tokens": list(builder.begin_tokens),
        "stop_tokens": list(builder.stop_tokens),
        "prepared": dict(job_identity),
    }
    formats.build_token_file_path(prefix, "meta.json").unlink(missing_ok=True)
    formats.build_token_file_path(prefix, "mask.bin").unlink(missing_ok=True)
    for suffix, path in merged_paths.items():
        path.replace(formats.build_token_file_path(prefix, suffix))
    _write_json(formats.build_token_file_path(prefix, "meta.json"), meta)
    return meta


def _hash_skipped_records(shard_stats: Sequence[ShardStats]) -> str:
    """Return a hash of the indices of all skipped records: token files of pairs must have skipped the same ones."""
    digest, first = hashlib.sha256(), 0
    for stats in shard_stats:
        for record in stats.skipped_records:
            digest.update(f"{first + record} ".encode())
        first += stats.records
    return digest.hexdigest()


def _concatenate_files(output_path: Path, input_paths: Iterator[Path]) -> str:
    """Concatenate the files `input_paths` into `output_path`, and return the SHA-256 of the result."""
    sha256 = hashlib.sha256()
    with output_path.open("wb") as file:
        for part_path in input_paths:
            with part_path.open("rb") as stream:
                for block in iter(partial(stream.read, _READ_BYTES), b""):
                    sha256.update(block)
                    file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def _write_index_file(index_path: Path, length_file_paths: Sequence[Path]) -> str:
    """Write the document index (first token and length of each document) to `index_path`, and return its SHA-256.

    `length_file_paths`: files with the document lengths of each shard.
    """
    sha256, start = hashlib.sha256(), 0
    with index_path.open("wb") as file:
        for part_path in length_file_paths:
            lengths = np.fromfile(part_path, dtype="<i8")
            entries = np.stack([start + np.cumsum(lengths) - lengths, lengths], axis=1).astype("<i8").tobytes()
            start += int(lengths.sum())
            sha256.update(entries)
            file.write(entries)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def _report_skipped_records(shard_stats: Sequence[ShardStats], source_files: Sequence[SourceFile], options: TokenizeOptions) -> None:
    """Print the number of skipped records. If `on_bad` is "skip", also list them."""
    bad_records = [each for stats in shard_stats for each in stats.bad_records]
    if options.on_bad == "skip":
        for file_number, position, problem in bad_records[: shards.MAX_NAMED_BAD_RECORDS]:
            _print_status(f"skipped {readers.format_record_location(source_files[file_number], position)}: {problem}")
    if bad := sum(each.bad_count for each in shard_stats):
        _print_status(f"{bad:,} records were skipped, since they could not be read")
    if empty := sum(each.empty_count for each in shard_stats):
        _print_status(f"{empty:,} records were skipped, since they are empty")


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks `folder` for this process.

    Raises TrainingError if another process has locked the folder, or if it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise TrainingError(
            f"{folder}: is in use by another process", place=ERROR_PLACE, hint="wait for it, or choose another prefix"
        ) from None
    except OSError as error:
        hint = "finished shards are kept; run the same command again to resume"
        raise TrainingError(f"{error.filename or folder}: {describe_os_error(error)}", place=ERROR_PLACE, hint=hint) from None


@contextmanager
def _open_worker_pool(worker_count: int, task_function: Any) -> Iterator[WorkerPool[Any, Any]]:
    workers: WorkerPool[Any, Any] = WorkerPool(worker_count, task_function)
    try:
        yield workers
    finally:
        workers.kill_workers()


def _read_job_identity(prefix: Path) -> Any:
    """Return the identity of the job that wrote the token files of `prefix`; None if `data tokenize` did not write them."""
    return (_read_json(formats.build_token_file_path(prefix, "meta.json")) or {}).get("prepared")


def _read_meta_file(prefix: Path) -> dict[str, Any]:
    return dict(_read_json(formats.build_token_file_path(prefix, "meta.json")))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write_json(path: Path, value: Any) -> None:
    write_text_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _print_status(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
