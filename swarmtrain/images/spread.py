"""An image on every node without a registry: saved from one engine and loaded into the others, all at once.

It goes by its content: the tag that it gets there begins with its id, and a run that names that tag is pinned to the id,
for which Swarm asks no registry (see pin.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from swarmtrain.errors import ImageError, SwarmtrainError
from swarmtrain.images.engine import Say, reason
from swarmtrain.images.pin import by_content
from swarmtrain.images.transfer import megabytes

_AT_ONCE = 8
_PAUSE = 3.0  # seconds between two lines about one node


class Holder(Protocol):
    """The methods of docker-py's low-level client that are used here. They raise OSErrors."""

    def inspect_image(self, image: str) -> dict[str, Any]: ...

    def tag(self, image: str, repository: str, tag: str | None = None) -> bool: ...

    def get_image(self, image: str) -> Iterable[bytes]: ...

    def load_image(self, data: Iterable[bytes]) -> Iterable[dict[str, Any]] | None: ...


Connect = Callable[[str], Holder]
"""Takes an engine's address; raises SwarmtrainError where none answers."""


def spread(source: Holder, image: str, targets: Mapping[str, str], connect: Connect, *, say: Say) -> str:
    """Give `image` of the engine `source` to the engines at `targets`, name to address; return the tag that all have it under.

    Those that have it are left alone. Raises ImageError that names every engine that could not be given it, when the others have it.
    """
    try:
        found = source.inspect_image(image)
    except OSError as error:
        raise ImageError(f"the engine does not have it: {reason(error)}", place=f"image {image}", hint="docker image ls") from None
    content = str(found["Id"])
    tag = by_content(image, content)
    _tag(source, content, tag)
    say(f"{image} is {tag}, {megabytes(int(found['Size']))}")

    def failed(name: str, why: str) -> str:
        return f"{name}: {why}" if name == targets[name] else f"{name} ({targets[name]}): {why}"

    def give(name: str) -> str:
        try:
            _Giving(source, connect(targets[name]), content, tag, lambda line: say(f"{name}: {line}")).go()
        except SwarmtrainError as error:
            return failed(name, f"{error.message} ({error.hint})" if error.hint else error.message)
        except OSError as error:
            return failed(name, reason(error))
        return ""

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spread") as pool:
        failures = [line for line in pool.map(give, targets) if line]
    if failures:
        word = "one engine does" if len(failures) == 1 else f"{len(failures)} engines do"
        hint = "mend that and give the same command again: those that have the image are skipped"
        raise ImageError(f"{word} not have it:\n  " + "\n  ".join(failures), place=f"image {tag}", hint=hint)
    return tag


class _Giving:
    """One engine that is given the image."""

    def __init__(self, source: Holder, target: Holder, content: str, tag: str, say: Say) -> None:
        self._source, self._target, self._content, self._tag, self._say = source, target, content, tag, say
        self._sent = 0

    def go(self) -> None:
        if self._has():
            self._say("has it")
            return
        began = time.monotonic()
        for message in self._target.load_image(self._stream()) or ():
            if "error" in message:
                raise ImageError(str(message["error"]).strip())
        if not self._has():
            raise ImageError("it was loaded, and has another id there: that engine keeps images in another way")
        self._say(f"{megabytes(self._sent)} in {time.monotonic() - began:.0f} s")

    def _has(self) -> bool:
        try:
            self._target.inspect_image(self._content)
        except OSError:
            return False
        _tag(self._target, self._content, self._tag)
        return True

    def _stream(self) -> Iterator[bytes]:
        said = time.monotonic()
        for chunk in self._source.get_image(self._tag):
            self._sent += len(chunk)
            yield chunk
            if time.monotonic() - said > _PAUSE:
                said = time.monotonic()
                self._say(f"{megabytes(self._sent)} so far")


def _tag(engine: Holder, content: str, tag: str) -> None:
    name, _, last = tag.rpartition(":")
    engine.tag(content, name, last)
