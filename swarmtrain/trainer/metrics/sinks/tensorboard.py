"""TensorBoard, behind logger.use_tensorboard: an event file of each world, in the folder `tensorboard`."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks.growing import GrowingFile
from swarmtrain.trainer.metrics.sinks.past import Past
from swarmtrain.trainer.metrics.sinks.texts import Sample, texts
from swarmtrain.trainer.runtime import Runtime


class EventFile:
    """One world's points. Its head tells TensorBoard to forget what earlier worlds' files say of the steps that come now."""

    def __init__(self, here: Runtime, folder: Path, past: Past) -> None:
        """Begin the file. Raises TrainingError if tensorboard is not installed, or the file cannot be written."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            hint = "pip install tensorboard, in the image too"
            raise TrainingError("tensorboard is not installed", place="config logger.use_tensorboard", hint=hint) from None
        self._event, self._value, self._records = Event, Summary, RecordWriter
        self._text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._tensor = TensorProto
        # TensorBoard reads a folder's files in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        begins = Event(wall_time=time.time(), step=past.step, session_log=SessionLog(status=SessionLog.START))
        head = self._record(Event(wall_time=time.time(), file_version="brain.Event:2")) + self._record(begins)
        self._file = GrowingFile(folder / "tensorboard" / name, head)
        for line in past.last:
            self.write(line)

    def write(self, values: dict[str, Any]) -> None:
        """Add the points of a step, or its samples as text. What is neither is left out."""
        points = {name: value for name, value in values.items() if name != "step" and isinstance(value, int | float)}
        added = [self._value.Value(tag=name, simple_value=value) for name, value in points.items()]
        added += [self._said(number, sample) for number, sample in enumerate(texts(values))]
        summary = self._value(value=added)
        self._file.append(self._record(self._event(wall_time=time.time(), step=values["step"], summary=summary)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _said(self, number: int, sample: Sample) -> Any:
        """Return a sample as TensorBoard's text, which is Markdown."""
        text = "\n".join(f"    {line}" for line in f"{sample['prompt']}{sample['text']}".splitlines())
        tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode()])
        return self._value.Value(tag=f"samples/{number}", metadata=self._text, tensor=tensor)

    def _record(self, event: Any) -> bytes:
        text = io.BytesIO()
        self._records(text).write(event.SerializeToString())
        return text.getvalue()
