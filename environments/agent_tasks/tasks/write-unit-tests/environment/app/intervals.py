"""Intervals of integers."""


def merge_intervals(intervals):
    """Return the union of intervals as a new list of tuples, sorted and without overlaps.

    An interval is a pair `(start, end)` and contains both ends. Intervals that overlap or touch are
    merged; (1, 3) and (4, 6) touch, since there is no integer between them. The order of the input
    does not matter, and the input is not changed.

    Raises:
        ValueError: an interval has an end before its start.
    """
    for start, end in intervals:
        if end < start:
            raise ValueError(f"the interval ({start}, {end}) ends before it starts")
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
