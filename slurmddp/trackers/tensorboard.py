"""TensorBoard: event files in the run folder."""

from collections.abc import Sequence

from slurmddp.trackers.base import Facts, Point, library


class TensorBoard:
    """Writes a new event file per sync. Points of steps that were trained again disappear from view."""

    durable = True

    def __init__(self, facts: Facts, key: str | None) -> None:
        self._events = library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        writer = library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        folder = facts.folder / "tensorboard"
        self.where = self.key = str(folder)
        self._writer = writer.EventFileWriter(str(folder))

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.again:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                self._writer.add_event(self._events.Event(wall_time=point.time, step=point.step, session_log=start))
            values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            event = self._events.Event(
                wall_time=point.time, step=point.step, summary=self._summary.Summary(value=values)
            )
            self._writer.add_event(event)
        self._writer.flush()

    def close(self, state: str | None) -> None:
        self._writer.close()
