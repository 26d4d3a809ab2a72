"""Data source of a cluster's page: polls all launchers at most every POLL_SECONDS, and keeps the data sources of the viewed runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from swarmtrain.errors import AmbiguousRun, SwarmtrainError
from swarmtrain.launchers.base import Launcher
from swarmtrain.view.dashboard.cluster_page import ClusterPage
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.page_data import PageData

POLL_SECONDS = 5.0
"""Minimum seconds between two polls of all launchers, independent of the number of clients."""
_KEY_SECONDS = 15.0
"""Seconds for which a run is looked up on the previous page, without a poll of all launchers."""
_THREADS = 8
_MAX_REMOVED_SOURCES = 16
"""Maximum number of data sources of removed runs that are kept."""


class ClusterBackend(Protocol):
    """What the data source needs of swarmtrain.view.dashboard.cluster_reader.ClusterReader."""

    def read_page(self) -> ClusterPage: ...

    def open_run(self, name_or_id: str) -> RunDataSource: ...

    def find_launcher(self, run_id: str) -> Launcher | None: ...


class ClusterDataSource:
    """Provide the page data of a cluster and the data sources of its runs; thread-safe."""

    title = "all runs"

    def __init__(self, backend: ClusterBackend) -> None:
        self._backend = backend
        self._poll_lock, self._sources_lock = threading.Lock(), threading.Lock()
        self._page: ClusterPage | None = None
        self._connection_error = ""
        self._polled_at = self._answered_at = 0.0
        self._sources: dict[str, RunDataSource] = {}
        """The opened runs by id; those of removed runs by the text with which they were requested."""

    def get_page(self) -> ClusterPage:
        """Return the current page, or, if it cannot be read, the previous one. Raises SwarmtrainError if none could be read so far.

        While one thread waits for a slow manager, all others receive the previous page.
        """
        previous = self._page
        if previous is not None and not self._poll_lock.acquire(blocking=False):
            return previous
        if previous is None:
            self._poll_lock.acquire()
        try:
            if self._page is None or time.monotonic() - self._polled_at > POLL_SECONDS:
                return self._refresh_page(self._page)
            return self._page
        finally:
            self._poll_lock.release()

    def get_page_data(self) -> PageData:
        """Return the current page as a JSON-compatible value. If it is outdated, its field `connection_error` contains the reason."""
        return {**self.get_page().to_page_data(), "connection_error": self._connection_error}

    @property
    def connection_error(self) -> str:
        """Why the last poll failed; empty if it succeeded."""
        return self._connection_error

    def compute_data_age(self) -> float:
        """Return the seconds since the last successful poll."""
        return time.monotonic() - self._answered_at

    def find_run_source(self, key: str) -> RunDataSource:
        """Return the data source of a run by its key on the page, its name or its id, or of a run recorded on this machine.

        Raises RunNotFound, AmbiguousRun.
        """
        run_id = self._find_run_id(key)
        source_key = run_id or key
        with self._sources_lock:
            source = self._sources.get(source_key) if run_id else self._find_open_source(key)
            if source is None:
                source = self._sources[source_key] = self._backend.open_run(source_key)
                self._drop_sources()
        source.use_launcher(self._backend.find_launcher(source.run_id))
        return source

    def load_run_pages(self) -> list[tuple[str, PageData | None]]:
        """Return the key and the page data of each run of the page; None for a run whose data could not be read so far."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="runs") as pool:
            return list(pool.map(self._load_run_page, self.get_page().list_keys()))

    def _find_run_id(self, key: str) -> str | None:
        """Return the id of the run of the page with this name or id; None if it is not on the page. Raises AmbiguousRun."""
        page = self._page if self.compute_data_age() < _KEY_SECONDS else None
        ids = (page and _list_run_ids(page, key)) or _list_run_ids(self.get_page(), key)
        if len(ids) > 1:
            raise AmbiguousRun(f"several runs have this name: {', '.join(ids)}", place=f"run {key}", hint="use the id instead of the name")
        return ids[0] if ids else None

    def _find_open_source(self, key: str) -> RunDataSource | None:
        """Return the data source of a run that is not on the page. While the page is incomplete, the run may exist nevertheless."""
        if self._is_incomplete:
            return next((source for source in reversed(self._sources.values()) if key in (source.run_id, source.run)), None)
        return self._sources.get(key)

    @property
    def _is_incomplete(self) -> bool:
        """Whether runs may be missing on the page, since a launcher did not answer."""
        return bool(self._connection_error or (self._page and self._page.problems))

    def _load_run_page(self, key: str) -> tuple[str, PageData | None]:
        try:
            return key, self.find_run_source(key).get_page_data()
        except SwarmtrainError:
            return key, None

    def _refresh_page(self, previous: ClusterPage | None) -> ClusterPage:
        try:
            self._page = page = self._backend.read_page()
        except SwarmtrainError as error:
            if previous is None:
                raise
            self._connection_error = str(error)
            return previous
        finally:
            self._polled_at = time.monotonic()
        self._connection_error, self._answered_at = "", time.monotonic()
        return page

    def _drop_sources(self) -> None:
        """Forget the oldest data sources of removed runs, beyond the maximum. An incomplete page does not say which runs were removed."""
        if self._is_incomplete:
            return
        for key in list(self._iterate_removed())[:-_MAX_REMOVED_SOURCES]:
            del self._sources[key]

    def _iterate_removed(self) -> Iterator[str]:
        ids = {row.id for row in self._page.runs} if self._page else set()
        return (key for key in self._sources if key not in ids)


def _list_run_ids(page: ClusterPage, key: str) -> list[str]:
    """Return the ids of the runs of `page` with the name `key`, or else with this id."""
    return [row.id for row in page.runs if row.run == key] or [row.id for row in page.runs if row.id == key]
