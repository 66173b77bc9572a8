"""In which order layers are used: what tells FSDP whose weights to fetch next.

A step uses layers in the order of the step before, almost always, so the order seen in one forward
is the forecast for the next, and read backwards it is the forecast for backward. A forecast that
turns out wrong costs a fetch that nobody needed, never a result; where the layers used differ from
the forecast, nothing is forecast. The first forward has none.

A layer recomputed in backward (gradient checkpointing) is at a known place of the order seen, and
recomputation runs forward from there up to the layer that backward has reached, not beyond.
"""


class LayerOrder:
    """Uses of layers, each known by a number, in the forward under way and in the one before."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._reached = 0

    def begin_forward(self) -> None:
        """What was seen becomes what is expected."""
        self._expected, self._seen = self._seen or self._expected, []
        self._reached = 0

    def entered(self, layer: int) -> list[int]:
        """Note a use in forward; the layers expected after it."""
        here = len(self._seen)
        self._seen.append(layer)
        self._reached = len(self._seen)
        if self._expected[here : here + 1] != [layer]:
            return []
        return self._expected[here + 1 : here + 1 + self._ahead]

    def is_last(self, layer: int) -> bool:
        """Whether a use just noted is expected to be the last: backward then begins with it."""
        return self._seen[-1:] == [layer] and self._seen == self._expected

    def came_back(self, layer: int) -> list[int]:
        """Note that backward has reached a layer; the layers that it will reach after it.

        A layer of several parts is reached once for each.
        """
        here: int | None = self._reached
        if self._seen[self._reached : self._reached + 1] != [layer]:
            here = self._last_use(layer, before=self._reached)
        if here is None:
            # Another backward through the same forward, or backward through an earlier one.
            here = self._last_use(layer, before=len(self._seen))
        if here is None:
            return []
        self._reached = here
        return self._seen[max(here - self._ahead, 0) : here][::-1]

    def recomputed(self, layer: int) -> list[int]:
        """The layers expected after one that is recomputed during backward."""
        here = self._last_use(layer, before=self._reached + 1)
        if here is None:
            return []
        return self._seen[here + 1 : min(here + self._ahead, self._reached) + 1]

    def _last_use(self, layer: int, before: int) -> int | None:
        """The place of the last use of a layer before a place."""
        for place in range(min(before, len(self._seen)) - 1, -1, -1):
            if self._seen[place] == layer:
                return place
        return None
