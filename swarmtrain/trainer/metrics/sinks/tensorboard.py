"""TensorBoard sink, enabled by logger.use_tensorboard: one event file per world, in the folder `tensorboard`."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks.metrics_lines import GeneratedSample, ResumeHistory, extract_samples
from swarmtrain.trainer.metrics.sinks.record_file import RecordFile
from swarmtrain.trainer.runtime import Runtime


class EventFile:
    """TensorBoard event file of one world. It makes TensorBoard discard later steps that earlier worlds have written to their files."""

    def __init__(self, runtime: Runtime, folder: Path, history: ResumeHistory) -> None:
        """Create the event file in `folder`. Raises TrainingError if tensorboard is not installed, or if the file cannot be written."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            hint = "pip install tensorboard, also in the image"
            raise TrainingError("tensorboard is not installed", place="config logger.use_tensorboard", hint=hint) from None
        self._event_class, self._summary_class, self._record_writer_class = Event, Summary, RecordWriter
        self._text_metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._tensor_class = TensorProto
        # TensorBoard reads the files of a folder in name order.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        session_start = Event(wall_time=time.time(), step=history.step, session_log=SessionLog(status=SessionLog.START))
        header = self._encode_record(Event(wall_time=time.time(), file_version="brain.Event:2")) + self._encode_record(session_start)
        self._file = RecordFile(folder / "tensorboard" / name, header)
        for line in history.last_step_lines:
            self.write_metrics(line)

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Write the numbers of a metrics line as scalars, and its generated samples as text. Other values are ignored."""
        points = {name: value for name, value in metrics_line.items() if name != "step" and isinstance(value, int | float)}
        summary_values = [self._summary_class.Value(tag=name, simple_value=value) for name, value in points.items()]
        summary_values += [self._build_text_summary(number, sample) for number, sample in enumerate(extract_samples(metrics_line))]
        summary = self._summary_class(value=summary_values)
        self._file.append_bytes(self._encode_record(self._event_class(wall_time=time.time(), step=metrics_line["step"], summary=summary)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _build_text_summary(self, sample_index: int, sample: GeneratedSample) -> Any:
        """Return a generated sample as a TensorBoard text summary, in Markdown."""
        text = "\n".join(f"    {line}" for line in f"{sample['prompt']}{sample['text']}".splitlines())
        tensor = self._tensor_class(dtype="DT_STRING", string_val=[text.encode()])
        return self._summary_class.Value(tag=f"samples/{sample_index}", metadata=self._text_metadata, tensor=tensor)

    def _encode_record(self, event: Any) -> bytes:
        buffer = io.BytesIO()
        self._record_writer_class(buffer).write(event.SerializeToString())
        return buffer.getvalue()
