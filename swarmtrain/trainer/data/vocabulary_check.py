"""Check before the first step that all tokens are in the vocabulary, instead of failing hours later at a batch with an invalid token.

Each rank scans a part of the files, for at most 5 s. If this is not enough time, the scanned tokens are a uniform sample of the data, and
the other tokens are checked when they are read. Results are recorded in save_dir, so that a restart does not scan again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.atomic_file import PUBLIC_MODE, write_files_atomically
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import DataError, TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.data import shuffle
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_RECORD_NAME = "token-scan.json"
_MAX_SCAN_SECONDS = 5.0
_LOG_AFTER_SECONDS = 2.0
_SCAN_BLOCK_TOKENS = 1 << 20
"""Number of tokens that are scanned at a time."""


@dataclass(frozen=True)
class TokenScan:
    """Result of scanning one token file."""

    size: int
    """Size of the token file in bytes."""
    modified: int
    """Modification time of the file, in nanoseconds since the epoch."""
    scanned_bytes: int = 0
    """Number of scanned bytes."""
    highest_token: int = -1
    """Highest token in the scanned bytes; -1 if nothing was scanned."""

    def merge(self, other: TokenScan) -> TokenScan:
        """Return the combined result of this scan and `other`, a scan of other blocks of the same file."""
        return replace(
            self, scanned_bytes=self.scanned_bytes + other.scanned_bytes, highest_token=max(self.highest_token, other.highest_token)
        )


def can_exceed_vocabulary(dtype: np.dtype[Any], vocab_size: int) -> bool:
    """Return whether values of `dtype` can be outside a vocabulary of `vocab_size` tokens."""
    return dtype.kind == "i" or np.iinfo(dtype).max >= vocab_size


def check_tokens(tokens: Tokens, vocab_size: int, location: str = "", first_position: int | None = None) -> int:
    """Return the highest token id in `tokens`. Raises DataError if a token is outside the vocabulary.

    `location` and `first_position` (position of the first token in its file) are shown in the error message.
    """
    unsigned = tokens.view(tokens.dtype.str.replace("i", "u"))  # negative tokens become high values
    highest = int(unsigned.max())
    if highest < vocab_size:
        return highest
    index = int(unsigned.argmax())
    position_text = "" if first_position is None else f", at position {first_position + index:,}"
    raise DataError(
        f"is {vocab_size}, but the data contains token {int(tokens[index])}{location}{position_text}",
        place="config transformer_architecture.vocab_size",
        hint="set it to at least the highest possible token plus one, or use data of the matching tokenizer",
    )


def check_tokenizer(token_file: MemoryMap, vocab_size: int) -> None:
    """Raise DataError if the tokenizer that is recorded in the metadata of `token_file` has more than `vocab_size` tokens."""
    tokenizer = token_file.meta.get("prepared", {}).get("tokenizer", {})
    if (size := tokenizer.get("vocab_size", 0)) > vocab_size:
        raise DataError(
            f"is {vocab_size}, but {tokenizer['name']}, the tokenizer of {token_file.prefix}, has {size} tokens",
            place="config transformer_architecture.vocab_size",
            hint=f"set transformer_architecture.vocab_size: {size}, or more",
        )


def scan_token_files(runtime: Runtime, files: Sequence[MemoryMap], max_seconds: float = _MAX_SCAN_SECONDS) -> None:
    """Scan `files` for tokens outside the vocabulary, for at most `max_seconds`. Collective: all ranks must call it.

    Files that an earlier scan has recorded are skipped. Raises DataError if a token is outside the vocabulary, TrainingError if a file
    cannot be read.
    """
    vocab_size, save_dir = runtime.config.transformer_architecture.vocab_size, runtime.config.trainer.save_dir
    by_name = {str(file.prefix): file for file in files if can_exceed_vocabulary(file.tokens.dtype, vocab_size)}
    if not by_name:
        return
    record_path = save_dir / _RECORD_NAME if save_dir else None
    unscanned = collectives.run_on_rank_zero(lambda: _list_unscanned_files(by_name, _read_scan_record(record_path), vocab_size))
    if not unscanned:
        return
    start_time = time.monotonic()
    scans_by_rank = collectives.run_on_all_ranks(
        lambda: [asdict(scan) for scan in _scan_assigned_blocks([by_name[name] for name in unscanned], runtime, start_time + max_seconds)]
    )
    if runtime.is_rank_zero:
        scans = {
            name: reduce(TokenScan.merge, (TokenScan(**scan) for scan in file_scans))
            for name, *file_scans in zip(unscanned, *scans_by_rank, strict=True)
        }
        _log_scan_coverage(scans, time.monotonic() - start_time)
        _write_scan_record(record_path, {**_read_scan_record(record_path), **scans})


def _list_unscanned_files(files: Mapping[str, MemoryMap], recorded_scans: Mapping[str, TokenScan], vocab_size: int) -> list[str]:
    """Return the names of the `files` that were modified after their recorded scan, were not scanned, or had an invalid token."""
    return [
        name
        for name, file in files.items()
        if name not in recorded_scans
        or recorded_scans[name].highest_token >= vocab_size
        or replace(recorded_scans[name], scanned_bytes=0, highest_token=-1) != _build_empty_scan(file)
    ]


def _scan_assigned_blocks(token_files: Sequence[MemoryMap], runtime: Runtime, deadline: float) -> list[TokenScan]:
    """Scan this rank's blocks of `token_files` until `deadline`; return the result for each file.

    Blocks are scanned in pseudorandom order, so that the blocks scanned until the deadline are a uniform sample.
    """
    vocab_size = runtime.config.transformer_architecture.vocab_size
    scans = [_build_empty_scan(file) for file in token_files]
    blocks = [(number, start) for number, file in enumerate(token_files) for start in range(0, len(file.tokens), _SCAN_BLOCK_TOKENS)]
    assigned = shuffle.permute_indices(np.arange(runtime.rank, len(blocks), runtime.world_size), len(blocks), key=0).tolist()
    for block, next_block in pairwise([*assigned, None]):
        if time.monotonic() > deadline:
            break
        if next_block is not None:
            number, start = blocks[next_block]
            token_files[number].tokens.prefetch_range(start, min(_SCAN_BLOCK_TOKENS, len(token_files[number].tokens) - start))
        number, start = blocks[block]
        tokens = token_files[number].tokens[start : start + _SCAN_BLOCK_TOKENS]
        highest = check_tokens(tokens, vocab_size, f": {token_files[number].prefix}", start)
        scans[number] = scans[number].merge(TokenScan(0, 0, tokens.nbytes, highest))
    return scans


def _build_empty_scan(token_file: MemoryMap) -> TokenScan:
    try:
        file_stat = token_file.tokens_path.stat()
    except OSError as error:
        raise TrainingError(
            f"{token_file.tokens_path}: {describe_os_error(error)}", place="config data", hint="check that the disk is mounted"
        ) from None
    return TokenScan(file_stat.st_size, file_stat.st_mtime_ns)


def _log_scan_coverage(scans: Mapping[str, TokenScan], elapsed_seconds: float) -> None:
    total_bytes, scanned_bytes = (sum(values) for values in zip(*((scan.size, scan.scanned_bytes) for scan in scans.values()), strict=True))
    if scanned_bytes < total_bytes:
        LOG.info(
            "scanned %.0f %% of the data for tokens outside the vocabulary; the rest is checked as it is read",
            100 * scanned_bytes / total_bytes,
        )
    elif elapsed_seconds > _LOG_AFTER_SECONDS:
        LOG.info("scanned all data for tokens outside the vocabulary: %.1f GB in %.1f s", scanned_bytes / 1e9, elapsed_seconds)


def _read_scan_record(record_path: Path | None) -> dict[str, TokenScan]:
    """Return the recorded scans by file prefix; empty if the record cannot be read, since scanning again is harmless."""
    try:
        return {name: TokenScan(**values) for name, values in json.loads(record_path.read_text()).items()} if record_path else {}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_scan_record(record_path: Path | None, scans: Mapping[str, TokenScan]) -> None:
    if record_path:
        with suppress(OSError):  # a full disk is reported when a checkpoint is saved
            text = json.dumps({name: asdict(scan) for name, scan in scans.items()}, indent=1) + "\n"
            write_files_atomically({record_path: (text.encode(), PUBLIC_MODE)})
