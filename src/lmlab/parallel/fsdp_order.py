"""Execution order of FSDP groups, from which the scheduler predicts what to prefetch.

A step almost always runs layers in the order of the previous step, so the order of one forward
predicts the next, and in reverse it predicts backward. A wrong prediction costs an unneeded gather,
never a wrong result. Once a forward deviates from the prediction, nothing is predicted. The first
forward has no prediction.

A layer recomputed in backward (activation checkpointing) has a known position, and recomputation
runs forward from there up to the layer that backward has reached.
"""


class ExecutionOrder:
    """Uses of groups, by index, in the current forward and in the previous one."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._position = 0

    def begin_forward(self) -> None:
        """The order seen so far becomes the expected one."""
        self._expected, self._seen = self._seen or self._expected, []
        self._position = 0

    def forward(self, group: int) -> list[int]:
        """Record a use in forward; return the groups expected next."""
        here = len(self._seen)
        self._seen.append(group)
        self._position = len(self._seen)
        if self._expected[here : here + 1] != [group]:
            return []
        return self._expected[here + 1 : here + 1 + self._ahead]

    def is_last(self, group: int) -> bool:
        """Whether the latest use is expected to end forward, so that backward begins with it."""
        return self._seen[-1:] == [group] and self._seen == self._expected

    def backward(self, group: int) -> list[int]:
        """Record that backward has reached a group; return the groups expected next.

        A group with several outputs is reached once per output.
        """
        here = self._last_use(group, before=self._position + 1)
        if here is None:
            # A second backward through the same forward, or backward through an earlier one.
            here = self._last_use(group, before=len(self._seen))
        if here is None:
            return []
        self._position = here
        return self._seen[max(here - self._ahead, 0) : here][::-1]

    def recomputed(self, group: int) -> list[int]:
        """The groups expected after one that is recomputed in backward."""
        here = self._last_use(group, before=self._position + 1)
        if here is None:
            return []
        return self._seen[here + 1 : min(here + self._ahead, self._position) + 1]

    def _last_use(self, group: int, before: int) -> int | None:
        uses = [i for i, used in enumerate(self._seen[:before]) if used == group]
        return uses[-1] if uses else None
