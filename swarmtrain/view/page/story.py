"""The events of a run without its curves: what befell it, and of progress and usage the last before each of those."""

from __future__ import annotations

from swarmtrain import wire
from swarmtrain.view.page.curves import Curves
from swarmtrain.wire import Event

_REPEATED = (wire.PROGRESS, wire.USAGE)


class Story:
    """A run of days has a hundred thousand events, nearly all of them progress; what is left here is as long as its troubles."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """Take in the next event; progress and usage take the place of their like if nothing else has happened since."""
        if event.kind in _REPEATED:
            for at in range(len(self.events) - 1, max(-1, len(self.events) - 1 - len(_REPEATED)), -1):
                kind = self.events[at].kind
                if kind == event.kind:
                    del self.events[at]
                if kind not in _REPEATED or kind == event.kind:
                    break
        self.events.append(event)


class Told:
    """All that a run's board has told, as far as a page has a use for it."""

    def __init__(self) -> None:
        self.curves, self.story = Curves(), Story()

    def add(self, event: Event) -> None:
        """Take in the next event."""
        self.curves.add(event)
        self.story.add(event)
