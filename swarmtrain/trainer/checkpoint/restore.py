"""Restore a model and its optimizer from checkpoints: from the run's save_dir, or from trainer.load_dir."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.compatibility import (
    LOAD_EVERYTHING,
    LoadRules,
    TensorShapes,
    assign_source_checkpoints,
    describe_loaded_tensors,
    diff_configs,
    select_tensors_to_load,
)
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.resume_changes import describe_changes_since_checkpoint
from swarmtrain.trainer.checkpoint.storage import discovery
from swarmtrain.trainer.checkpoint.storage.discovery import CheckpointWithManifest, WarningReporter
from swarmtrain.trainer.checkpoint.storage.tensor_reader import DamagedFiles, FileVerification, load_tensors
from swarmtrain.trainer.checkpoint.training_state import RANK_STATE_PREFIX, TrainingState
from swarmtrain.trainer.runtime import Runtime


def restore_training_state(
    runtime: Runtime,
    checkpoint_manager: CheckpointManager,
    training_state: TrainingState,
    data_fingerprint: str,
    report_warning: WarningReporter,
) -> tuple[Progress, Path | None]:
    """Load the newest valid checkpoint in save_dir into model and optimizer; if there is none, load the checkpoints in trainer.load_dir.

    Collective: all ranks must call it. `data_fingerprint`: fingerprint of the training data. `report_warning` is called
    with a message for each skipped checkpoint, and with a summary of the tensors that are loaded from other runs. If the model has no
    values yet, the tensors that are not loaded get their initial values. Return the progress and the path of the checkpoint; if no
    checkpoint is loaded, an initial Progress and None.

    Raises IncompatibleCheckpoint if the checkpoint belongs to another model or other data, CheckpointError if load_dir has no complete
    checkpoint.
    """
    loader = _CheckpointLoader(runtime, training_state, data_fingerprint, report_warning)

    def load_own_checkpoint(path: Path, manifest: Manifest, verification: FileVerification | None) -> None:
        loader.build_progress(path, manifest, is_from_other_run=False)  # raises IncompatibleCheckpoint before anything changes
        loader.load_training_state([(path, manifest)], loader.build_load_rules_for_resume(path, manifest), [verification])

    # Values that a script has set cannot be restored if the checkpoint turns out to be damaged.
    verify_first = not training_state.model.initial_values.has_missing_values
    if newest := checkpoint_manager.load_newest_checkpoint(load_own_checkpoint, verify_first=verify_first):
        for line in describe_changes_since_checkpoint(newest[1], runtime.config) if runtime.is_rank_zero else ():
            report_warning(f"{newest[0]}: {line}")
        return loader.build_progress(*newest, is_from_other_run=False), newest[0]
    if source := loader.load_source_checkpoints(verify_first=verify_first):
        return loader.build_progress(*source, is_from_other_run=True), source[0]
    training_state.write_missing_values()
    return Progress(), None


@dataclass(frozen=True)
class _CheckpointLoader:
    runtime: Runtime
    training_state: TrainingState
    data_fingerprint: str
    report_warning: WarningReporter

    def load_source_checkpoints(self, *, verify_first: bool) -> CheckpointWithManifest | None:
        """Load the checkpoints in trainer.load_dir. Return path and manifest of the first one; None if load_dir is not set.

        `verify_first`: verify the files before anything changes; else while they are loaded. Raises CheckpointError if a folder has no
        complete checkpoint, IncompatibleCheckpoint if the tensors are not those of this model.
        """
        folders, rules = self.runtime.config.trainer.load_dir, LoadRules.from_config(self.runtime.config.trainer)
        if not folders:
            return None
        unverified = [] if verify_first else [discovery.find_unverified_checkpoint_in_folder(folder) for folder in folders]
        sources = [checkpoint for checkpoint in unverified if checkpoint]
        if len(sources) == len(folders):
            try:
                all_ranks = [range(self.runtime.world_size)]
                self.load_training_state(sources, rules, [FileVerification(manifest.files, all_ranks) for _, manifest in sources])
            except DamagedFiles:
                pass  # the search below reports the damage
            else:
                return sources[0]
        sources = [self._find_source_checkpoint(folder) for folder in folders]
        self.load_training_state(sources, rules, [None] * len(sources))
        return sources[0]

    def _find_source_checkpoint(self, folder: Path) -> CheckpointWithManifest:
        checkpoint = discovery.find_newest_checkpoint_in_folder(self.runtime, folder, self.report_warning)
        if checkpoint is None:
            raise CheckpointError(
                "has no complete checkpoint",
                place=f"config trainer.load_dir {folder}",
                hint="check that it is mounted on this machine, or remove trainer.load_dir to start from scratch",
            )
        return checkpoint

    def build_progress(self, checkpoint_path: Path, manifest: Manifest, *, is_from_other_run: bool) -> Progress:
        if is_from_other_run and not self.runtime.config.trainer.load_context:
            return Progress()
        if manifest.data_fingerprint == self.data_fingerprint:
            return Progress(manifest.step, manifest.consumed_samples, manifest.initial_validation_loss, manifest.validation_loss)
        if is_from_other_run:
            return Progress(manifest.step, 0, None)
        raise IncompatibleCheckpoint(
            f"was trained on different data, or in a different order{self._describe_config_changes(manifest, 'data')}",
            place=str(checkpoint_path),
            hint="choose another trainer.save_dir, or restore the data",
        )

    def build_load_rules_for_resume(self, checkpoint_path: Path, manifest: Manifest) -> LoadRules:
        """Return the load rules for a checkpoint of this run.

        Raises IncompatibleCheckpoint if the number of learners or the times of their exchanges have changed, or if trainer.init_from is not
        the base model of the checkpoint.
        """
        current_config = self.runtime.config.model_dump(mode="json")
        for section, name in (("topology", "learners"), ("diloco", "fragments"), ("diloco", "overlap")):
            current = current_config[section][name]
            saved = manifest.config.get(section, {}).get(name, None if name == "learners" else current)
            if saved != current:
                raise IncompatibleCheckpoint(
                    f"was trained with {section}.{name} {json.dumps(saved)}, but the config has {json.dumps(current)}",
                    place=str(checkpoint_path),
                    hint=f"restore {section}.{name}, or start a new run from it with trainer.load_dir and load_optimizer_states: false",
                )
        if manifest.base_fingerprint is None:
            return LOAD_EVERYTHING
        if manifest.base_fingerprint != self.training_state.model.base_fingerprint:
            reason = "is not set" if self.training_state.model.base_fingerprint is None else "is a different model, or has changed"
            raise IncompatibleCheckpoint(
                f"contains only the trained parameters, and trainer.init_from, which has the rest, {reason}",
                place=str(checkpoint_path),
                hint=f"set trainer.init_from back to its previous value: {manifest.config['trainer']['init_from']}",
            )
        return LoadRules(
            allowed_missing=tuple(f"^{re.escape(name)}$" for name in self.training_state.frozen_parameter_names), should_log=False
        )

    def load_training_state(
        self, source_checkpoints: Sequence[CheckpointWithManifest], rules: LoadRules, verifications: Sequence[FileVerification | None]
    ) -> None:
        """Load the tensors that `rules` select; if the model has no values yet, write the initial values of those that are not loaded.

        `verifications`: the files of each checkpoint that are also verified. Raises DamagedFiles if any is damaged; tensors may have
        changed then. Raises IncompatibleCheckpoint if the tensors are not those of this model.
        """
        tensors = {**self.training_state.collect_all_tensors(), **self.training_state.collect_rank_tensors()}
        place = " and ".join(str(path) for path, _ in source_checkpoints)
        source_of = assign_source_checkpoints([manifest.tensors for _, manifest in source_checkpoints])
        available = {name: tuple(source_checkpoints[number][1].tensors[name]["size"]) for name, number in source_of.items()}
        # torch's planner handles the sharding of each tensor. Tensors of other pipeline stages are not on this rank: gather their shapes.
        shapes = collectives.all_gather_values({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        expected = {name: shape for rank_shapes in shapes for name, shape in rank_shapes.items()}
        names = select_tensors_to_load(
            available, expected, place, rules, self._describe_config_changes(source_checkpoints[0][1], "transformer_architecture")
        )
        names = self._select_rank_tensors(names, available, expected, source_checkpoints[0][1], place)
        if rules.should_log or len(source_checkpoints) > 1:
            self.report_warning(f"{place}: {describe_loaded_tensors(available, expected, names)}")
        for number, ((path, manifest), verification) in enumerate(zip(source_checkpoints, verifications, strict=True)):
            loadable = {name: tensors[name] for name in names if name in tensors and source_of[name] == number}
            load_tensors(loadable, path, manifest, verification)
        self.training_state.write_missing_values(names)

    def _select_rank_tensors(
        self, names: Sequence[str], available: TensorShapes, expected: TensorShapes, manifest: Manifest, place: str
    ) -> list[str]:
        """Return `names`, without the tensors of single ranks unless the checkpoint has those of all ranks, in the current shapes.

        If they are not loaded, reports that the error feedback of gradient compression is reset.
        """
        rank_names = {name for name in expected if name.startswith(RANK_STATE_PREFIX)}
        saved = {name for name in available if name.startswith(RANK_STATE_PREFIX)}
        if rank_names == saved and rank_names <= set(names) and all(available[name] == expected[name] for name in rank_names):
            return list(names)
        self.training_state.model.start_step(manifest.step)
        compressor = self.training_state.model.gradient_compressor
        if saved or (rank_names and compressor is not None and compressor.is_active):
            saved_ranks, ranks = manifest.topology["world_size"], self.runtime.world_size
            if not saved:
                reason = "the checkpoint has none: surviving ranks have written it, or each node has its own disk"
            elif saved_ranks != ranks:
                reason = f"the checkpoint is of {saved_ranks} ranks, and this world has {ranks}"
            else:
                reason = "the config excludes it, or topology has changed"
            self.report_warning(f"{place}: the error feedback of gradient compression is reset: {reason}")
        return [name for name in names if name not in rank_names]

    def _describe_config_changes(self, manifest: Manifest, section: str) -> str:
        """Return a text that lists the values in `section` that differ between the checkpoint's config and the current config.

        The text is empty if no value differs.
        """
        current_config = self.runtime.config.model_dump(mode="json")
        return "".join(f"; {line}" for line in diff_configs(manifest.config.get(section, {}), current_config[section], section))
