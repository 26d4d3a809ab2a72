"""The whole of `data prepare`: shards are made by several processes, kept as they are done, and put together.

PREFIX.parts holds what is done: a shard is there whole or not at all, so that the same command goes on after any end.
What comes out depends on files and options alone, byte for byte, not on how many made it nor on how often it was interrupted.
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

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.prepare import encoders, shapes, shards, sources
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.prepare.options import PLACE, Options
from swarmtrain.trainer.prepare.progress import Progress
from swarmtrain.trainer.prepare.shards import Facts, Shaper
from swarmtrain.trainer.prepare.sources import Part, Source
from swarmtrain.trainer.prepare.workers import Workers

_SHARD, _MOST = 8 << 20, 4096
"""Bytes of a shard at least, and how many shards there are at most, about."""
_PIECE = 1 << 20
_VERSION = 1


def prepare(options: Options, names: Sequence[str], *, shard: int = _SHARD) -> dict[str, Any]:
    """Write the token files that `options` ask for from the files `names`; return what their meta file says. Raises TrainingError."""
    prefix = Path(options.prefix)
    encoder = encoders.opened(options.tokenizer)
    shaper = shapes.shaper(options, encoder)
    files = sources.found(names)
    plan = sources.shards(files, shaper.keys, max(shard, sum(file.size for file in files) // _MOST))
    if formats.path(prefix, "bin").exists() and _prepared(prefix) is None:
        raise TrainingError(f"{prefix}: there are token files that were not prepared by this", place=PLACE, hint="name another prefix")
    folder = formats.path(prefix, "parts")
    with _locked(folder):
        identity = _identity(encoder, shaper, _hashes(folder, files, options.workers), files)
        if _prepared(prefix) == identity:
            _say(f"{prefix} is there already, of the same files and options")
            shutil.rmtree(folder)
            return _meta(prefix)
        _begin(folder, {**identity, "shards": len(plan)})
        facts = _make(folder, plan, files, shaper, options)
        _tell(facts, files, options)
        meta = _put_together(prefix, folder, facts, shaper, identity)
        shutil.rmtree(folder)
    return meta


def _make(folder: Path, plan: Sequence[Sequence[Part]], files: Sequence[Source], shaper: Shaper, options: Options) -> list[Facts]:
    """Make those shards of `plan` that are not done; return what each came to."""
    facts = {number: known for number in range(len(plan)) if (known := shards.known(folder, number))}
    stop = options.on_bad == "stop"
    if stop and (bad := next((each for _, each in sorted(facts.items()) if each.bad), None)):
        file, at, wrong = bad.told[0]
        raise shards.bad_record(files[file], at, wrong)
    missing = [number for number in range(len(plan)) if number not in facts]
    sizes = [sum(part.size for part in parts) for parts in plan]
    if facts and missing:
        _say(f"goes on: {len(facts)} of {len(plan)} shards are there")
    progress = Progress("tokens", sum(sizes), done=sum(sizes[number] for number in facts))

    def make(number: int) -> Facts:
        return shards.make(folder, number, plan[number], files, shaper, stop=stop)

    with _working(min(options.workers, len(missing)), make) as workers:
        for done in workers.done(missing):
            if done is not None:
                number = missing[done[0]]
                facts[number] = done[1]
                progress.add(sizes[number], done[1].tokens)
            progress.tell()
    progress.end()
    return [facts[number] for number in range(len(plan))]


def _hashes(folder: Path, files: Sequence[Source], count: int) -> list[str]:
    """Return the hash of each file; those of files that have not changed since they were hashed are remembered."""
    record = folder / "hashes.json"
    known: dict[str, str] = _json(record) or {}
    missing = [file for file in files if f"{file.name} {file.stamp}" not in known]
    progress = Progress("", sum(file.size for file in files), done=sum(file.size for file in files if file not in missing), verb="looks at")
    with _working(min(count, len(missing)), sources.digest) as workers:
        for done in workers.done([file.name for file in missing]):
            if done is not None:
                file = missing[done[0]]
                known[f"{file.name} {file.stamp}"] = done[1]
                progress.add(file.size, 0)
                if file.size >= _SHARD:
                    _write(record, known)
            progress.tell()
    _write(record, known)
    return [known[f"{file.name} {file.stamp}"] for file in files]


def _identity(encoder: Encoder, shaper: Shaper, hashes: Sequence[str], files: Sequence[Source]) -> dict[str, Any]:
    """Return what decides every byte that comes out."""
    return {
        "version": _VERSION,
        "tokenizer": {"name": encoder.name, "sha256": encoder.sha256, "vocab_size": encoder.size},
        "options": shaper.told,
        "sources": [{"name": file.name, "bytes": file.size, "sha256": sha256} for file, sha256 in zip(files, hashes, strict=True)],
    }


def _begin(folder: Path, job: dict[str, Any]) -> None:
    """Keep what is done of `job` in `folder`, and nothing of another."""
    before = _json(folder / "job.json")
    if before is not None and before != job:
        changed = [name for name in job if before.get(name) != job[name]]
        _say(f"begins anew: not the same {' and '.join(changed)} as in what was begun")
    if before != job:
        for path in folder.iterdir():
            if path.name not in ("hashes.json", "lock"):
                path.unlink()
        _write(folder / "job.json", job)
    for path in folder.glob(".*"):  # of those that were killed
        path.unlink()


def _put_together(prefix: Path, folder: Path, facts: Sequence[Facts], shaper: Shaper, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files of `prefix`, of which the meta file comes last."""
    documents, tokens = sum(each.documents for each in facts), sum(each.tokens for each in facts)
    if not tokens:
        raise TrainingError("there is not one document in these files", place=PLACE, hint="--key names the text of a record")
    written = {ending: folder / f"whole.{ending}" for ending in ("bin", "idx", *(["mask.bin"] if shaper.masked else []))}
    numbers = range(len(facts))
    hashes = {"bin": _joined(written["bin"], (folder / f"{number:06}.bin" for number in numbers))}
    if shaper.masked:
        hashes["mask.bin"] = _joined(written["mask.bin"], (folder / f"{number:06}.mask" for number in numbers))
    hashes["idx"] = _indexed(written["idx"], [folder / f"{number:06}.len" for number in numbers])
    meta = {
        "dtype": shaper.dtype,
        "index_dtype": "int64",
        "document_count": documents,
        "token_count": tokens,
        **({"loss_mask": True, "counted_tokens": sum(each.counted for each in facts)} if shaper.masked else {}),
        "skipped": {"bad": sum(each.bad for each in facts), "empty": sum(each.empty for each in facts)},
        "sha256": hashes,
        "prepared": dict(identity),
    }
    formats.path(prefix, "meta.json").unlink(missing_ok=True)
    formats.path(prefix, "mask.bin").unlink(missing_ok=True)
    for ending, path in written.items():
        path.replace(formats.path(prefix, ending))
    _write(formats.path(prefix, "meta.json"), meta)
    return meta


def _joined(path: Path, pieces: Iterator[Path]) -> str:
    """Write the contents of `pieces` one after the other; return the hash of all."""
    sha256 = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as opened:
                for content in iter(partial(opened.read, _PIECE), b""):
                    sha256.update(content)
                    file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def _indexed(path: Path, pieces: Sequence[Path]) -> str:
    """Write first token and length of each document, whose lengths are in `pieces`; return the hash of it."""
    sha256, start = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            lengths = np.fromfile(piece, dtype="<i8")
            content = np.stack([start + np.cumsum(lengths) - lengths, lengths], axis=1).astype("<i8").tobytes()
            start += int(lengths.sum())
            sha256.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def _tell(facts: Sequence[Facts], files: Sequence[Source], options: Options) -> None:
    """Say what was left out."""
    told = [each for fact in facts for each in fact.told]
    if options.on_bad == "skip":
        for file, at, wrong in told[: shards.TOLD]:
            _say(f"skipped {sources.place(files[file], at)}: {wrong}")
    if bad := sum(each.bad for each in facts):
        _say(f"{bad:,} records were skipped, since they could not be read")
    if empty := sum(each.empty for each in facts):
        _say(f"{empty:,} records were skipped, since they are empty")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Have `folder` for this process alone. Raises TrainingError if another has it, or it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise TrainingError(
            f"{folder}: another process is at work there", place=PLACE, hint="wait for it, or name another prefix"
        ) from None
    except OSError as error:
        hint = "what is done stays; the same command goes on from here"
        raise TrainingError(f"{error.filename or folder}: {reason(error)}", place=PLACE, hint=hint) from None


@contextmanager
def _working(count: int, do: Any) -> Iterator[Workers[Any, Any]]:
    workers: Workers[Any, Any] = Workers(count, do)
    try:
        yield workers
    finally:
        workers.end()


def _prepared(prefix: Path) -> Any:
    """Return what decided the files of `prefix`, if they were written by this."""
    return (_json(formats.path(prefix, "meta.json")) or {}).get("prepared")


def _meta(prefix: Path) -> dict[str, Any]:
    return dict(_json(formats.path(prefix, "meta.json")))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    aside.replace(path)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
