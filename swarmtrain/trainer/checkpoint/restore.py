"""A model and its optimizer from checkpoints: the run's own, or those of trainer.load_dir."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from swarmtrain.errors import CheckpointError, ForeignCheckpoint
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import Checkpoints, Progress, first_reason, search
from swarmtrain.trainer.checkpoint.fit import EVERYTHING, Rules, differences, listing, names_to_load, owners
from swarmtrain.trainer.checkpoint.held import Trained
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.search import Found
from swarmtrain.trainer.checkpoint.storage import Reader
from swarmtrain.trainer.runtime import Runtime

Note = Callable[[str], None]


def restore(here: Runtime, checkpoints: Checkpoints, trained: Trained, data: str, note: Note) -> tuple[Progress, Path | None]:
    """Load the newest valid checkpoint of save_dir, else of load_dir, into model and optimizer. Called by all ranks together.

    `data` is the training data's fingerprint; `note` is told what is passed over, and what is taken of another run's.
    Return how far it had come and where it is; a fresh Progress and None if there is none and load_dir is not set.
    Raises ForeignCheckpoint if it belongs to another model or other data, CheckpointError if load_dir has none.
    """
    loader = _Loader(here, trained, data, note)
    if own := checkpoints.newest():
        progress = loader.progress(*own, foreign=False)
        loader.load([own], loader.own(*own))
        return progress, own[0]
    sources = [loader.source(folder) for folder in here.config.trainer.load_dir]
    if not sources:
        return Progress(), None
    progress = loader.progress(*sources[0], foreign=True)
    loader.load(sources, Rules.of(here.config.trainer))
    return progress, sources[0][0]


@dataclass(frozen=True)
class _Loader:
    here: Runtime
    trained: Trained
    data: str
    note: Note

    def source(self, folder: Path) -> Found:
        found = search.in_one_folder(self.here, folder, self.note)
        if found is None:
            raise CheckpointError(
                "has no checkpoint that is whole",
                place=f"config trainer.load_dir {folder}",
                hint="is it mounted here? without trainer.load_dir the run begins anew",
            )
        return found

    def progress(self, path: Path, content: Manifest, *, foreign: bool) -> Progress:
        if foreign and not self.here.config.trainer.load_context:
            return Progress()
        if content.data == self.data:
            return Progress(content.step, content.consumed_samples, content.loss_before, content.held_out_loss)
        if foreign:
            return Progress(content.step, 0, None)
        raise ForeignCheckpoint(
            f"was trained on other data, or in another order{self._changes(content, 'data')}",
            place=str(path),
            hint="choose another trainer.save_dir, or bring the data back",
        )

    def own(self, path: Path, content: Manifest) -> Rules:
        """Return the rules for the run's own checkpoint. Raises ForeignCheckpoint if it stands beside another model."""
        if content.base is None:
            return EVERYTHING
        if content.base != self.trained.model.base:
            reason = "is none here" if self.trained.model.base is None else "is another model, or has changed"
            raise ForeignCheckpoint(
                f"has what was trained alone, and trainer.init_from, which has the rest, {reason}",
                place=str(path),
                hint=f"make trainer.init_from what it was: {content.config['trainer']['init_from']}",
            )
        return Rules(may_lack=tuple(f"^{re.escape(name)}$" for name in self.trained.frozen), tells=False)

    def load(self, sources: Sequence[Found], rules: Rules) -> None:
        tensors, place = self.trained.everything(), " and ".join(str(path) for path, _ in sources)
        owner = owners([content.tensors for _, content in sources])
        found = {name: tuple(sources[number][1].tensors[name]["size"]) for name, number in owner.items()}
        # What a rank has of the whole is for torch's planner to say; what stages of a pipeline have together is asked here.
        shapes = agreement.gather({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        wanted = {name: shape for part in shapes for name, shape in part.items()}
        names = names_to_load(found, wanted, place, rules, self._changes(sources[0][1], "transformer_architecture"))
        if rules.tells or len(sources) > 1:
            self.note(f"{place}: {listing(found, wanted, names)}")
        for number, (path, content) in enumerate(sources):
            known = {name: tensors[name] for name in names if name in tensors and owner[name] == number}
            try:
                dcp.load(known, storage_reader=Reader(path, content.tensors))
            except CheckpointException as error:  # a BaseException, so nobody else would catch it
                raise CheckpointError(first_reason(error), place=str(path)) from None

    def _changes(self, content: Manifest, section: str) -> str:
        """Return what differs between the checkpoint's config and this one, side by side."""
        here = self.here.config.model_dump(mode="json")
        return "".join(f"; {line}" for line in differences(content.config.get(section, {}), here[section], section))
