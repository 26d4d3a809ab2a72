"""The newest checkpoint that is whole: in one folder, or in those of all nodes, where it then comes to stand in each."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import manifest, stage
from swarmtrain.trainer.checkpoint.exchange import exchange
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.nodes import Nodes
from swarmtrain.trainer.runtime import Runtime

Note = Callable[[str], None]
Found = tuple[Path, Manifest]


def in_one_folder(here: Runtime, folder: Path, note: Note) -> Found | None:
    """Return the newest in `folder`, which all ranks see; `note` is told of those that are passed over. Called by all ranks together."""
    for path, text in agreement.by_first_rank(lambda: _candidates(folder, note)):
        content = Manifest.from_text(text, str(path))
        mine = sorted(content.files)[here.rank :: here.size]
        faults = [fault for _, fault in agreement.gather(_sound(path, content, mine)) if fault]
        if not faults:
            return path, content
        note(f"passed over {path}: {faults[0]}")
    if here.first and any(True for _ in stage.known(folder)):
        note(f"no checkpoint in {folder} is whole: it counts as empty")
    return None


class _Copy(NamedTuple):
    """What is the same of a checkpoint on all nodes that have it."""

    token: int
    step: int
    digest: str


@dataclass(frozen=True)
class Folders:
    """The folders `save_dir` of all `nodes`, which the world `token` has claimed. All methods are called by all ranks together."""

    nodes: Nodes
    save_dir: Path
    token: int
    note: Note

    def newest(self) -> Found | None:
        """Return the newest of which the nodes together have all files, when it stands on each.

        Raises CheckpointError if a node cannot take it.
        """
        known = list(stage.known(self.save_dir))
        here = {_copy(content): (path, content) for path, content in known if isinstance(content, Manifest)}
        torn = [f"{path}: {content.message}" for path, content in known if isinstance(content, CheckpointError)]
        answers = agreement.gather((tuple(here), torn) if self.nodes.keepers else ((), []))
        for rank, (_, messages) in enumerate(answers):
            for message in messages:
                self.note(f"{self._name(rank)} has no use of {message}")
        having = Counter(copy for copies, _ in answers for copy in copies)
        # Of two of the same world and step, the one that most nodes have spares most.
        for copy in sorted(having, key=lambda copy: (copy.token, copy.step, having[copy], copy.digest), reverse=True):
            if found := self._take(copy, here.get(copy)):
                return found
        if any(copies or messages for copies, messages in answers):
            self.note(f"no checkpoint in {self.save_dir} is whole, on all nodes together: it counts as empty")
        return None

    def _take(self, copy: _Copy, mine: Found | None) -> Found | None:
        """Return `copy`, which is `mine` on this node, when it stands on all; None if the nodes together do not have the whole of it."""
        names, path = tuple(sorted(mine[1].files)) if mine else (), stage.path(self.save_dir, copy.step)
        share = names[self.nodes.mates.index(self.nodes.rank) :: len(self.nodes.mates)]
        answers = agreement.gather((names, *(_sound(*mine, share) if mine else ([], None))))
        sound: list[set[str]] = [set() for _ in self.nodes.names]
        for rank, (_, found, fault) in enumerate(answers):
            sound[self.nodes.of[rank]].update(found)
            if fault:
                self.note(f"{self._name(rank)} has a torn {path}: {fault}")
        wanted = {name for names, _, _ in answers for name in names}
        if missing := wanted - set().union(*sound):
            self.note(f"passed over {path} of world {copy.token}: {min(missing)} is whole on no node")
            return None
        if any(each != wanted for each in sound):
            giver = next(self.nodes.of[rank] for rank, (names, _, _) in enumerate(answers) if names)
            agreement.by_every_rank(lambda: self._bring(mine, sound[self.nodes.node], giver))
        return path, manifest.read(path)

    def _bring(self, mine: Found | None, sound: set[str], giver: int) -> None:
        """Bring what is `mine` on node `giver` to the nodes that lack some of it; `sound` is what this one has of it.

        Keepers do; on other ranks there is nothing to do.
        """
        if self.nodes.keepers is None:
            return
        text = agreement.gather(mine[1].to_text() if mine and self.nodes.node == giver else "", self.nodes.keepers)[giver]
        content = Manifest.from_text(text, str(self.save_dir))
        path, whole = stage.path(self.save_dir, content.step), sound == set(content.files)
        # What stands is never written to: a copy that lacks something is made anew beside it, of what is sound of it.
        folder = path if whole else stage.aside(self.save_dir, content.step, self.token)
        self.nodes.together(lambda: None if whole else _begin_anew(path, folder, sound), self.save_dir)
        exchange(folder, {name: content.files[name] for name in sound}, self.nodes, what=path.name)
        self.nodes.together(lambda: None if whole else stage.commit(self.save_dir, folder, content, self.token), self.save_dir)

    def _name(self, rank: int) -> str:
        return self.nodes.names[self.nodes.of[rank]]


def _begin_anew(old: Path, new: Path, sound: set[str]) -> None:
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in sound:
        os.link(old / name, new / name)


def _candidates(folder: Path, note: Note) -> list[tuple[Path, str]]:
    for path, content in stage.known(folder):
        if isinstance(content, CheckpointError):
            note(f"passed over {path}: {content.message}")
    return [(path, content.to_text()) for path, content in stage.newest_first(folder)]


def _copy(content: Manifest) -> _Copy:
    return _Copy(content.token, content.step, content.fingerprint)


def _sound(path: Path, content: Manifest, names: Sequence[str]) -> tuple[list[str], str | None]:
    """Return those of the files `names` that are what the manifest says, and what is wrong with the first other."""
    sound, fault = [], None
    for name in names:
        try:
            manifest.verify(path, content, [name])
            sound.append(name)
        except CheckpointError as error:
            fault = fault or error.message
    return sound, fault
