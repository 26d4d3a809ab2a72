"""Timeline of a run's events. Of successive progress and usage events, only the newest of each kind is kept."""

from __future__ import annotations

from swarmtrain import protocol
from swarmtrain.protocol import Event
from swarmtrain.view.dashboard.curves import CurveSet

_REPEATED_KINDS = (protocol.EVENT_PROGRESS, protocol.EVENT_USAGE)


class EventTimeline:
    """Timeline of a run's events, without progress and usage events that a newer one has replaced.

    A run of several days emits about 100,000 events, nearly all of them progress events. The length of the timeline depends only on the
    other events.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add_event(self, event: Event) -> None:
        """Add the next event. A progress or usage event replaces the previous one of its kind if only such events occurred in between."""
        if event.kind in _REPEATED_KINDS:
            for index in range(len(self.events) - 1, max(-1, len(self.events) - 1 - len(_REPEATED_KINDS)), -1):
                kind = self.events[index].kind
                if kind == event.kind:
                    del self.events[index]
                if kind not in _REPEATED_KINDS or kind == event.kind:
                    break
        self.events.append(event)


class EventAccumulator:
    """Accumulates the events of a run as curves and a timeline, for the dashboard."""

    def __init__(self) -> None:
        self.curves, self.timeline = CurveSet(), EventTimeline()

    def add_event(self, event: Event) -> None:
        """Add the next event to the curves and to the timeline."""
        self.curves.add_event(event)
        self.timeline.add_event(event)
