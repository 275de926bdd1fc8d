#!/bin/bash
cat > /app/test_intervals.py <<'PYTHON'
import unittest

from intervals import merge_intervals

CASES = [
    ([], []),
    ([(5, 5)], [(5, 5)]),
    ([(1, 3), (4, 6)], [(1, 6)]),
    ([(1, 3), (5, 6)], [(1, 3), (5, 6)]),
    ([(1, 9), (2, 4)], [(1, 9)]),
    ([(1, 4), (3, 8)], [(1, 8)]),
    ([(7, 8), (1, 2), (4, 5)], [(1, 2), (4, 5), (7, 8)]),
    ([(-3, -1), (0, 0), (2, 2)], [(-3, 0), (2, 2)]),
]


class MergeTest(unittest.TestCase):
    def test_unions(self):
        for intervals, expected in CASES:
            with self.subTest(intervals=intervals):
                self.assertEqual(merge_intervals(intervals), expected)

    def test_input_is_kept(self):
        intervals = [(7, 8), (1, 2)]
        merge_intervals(intervals)
        self.assertEqual(intervals, [(7, 8), (1, 2)])

    def test_end_before_start(self):
        with self.assertRaises(ValueError):
            merge_intervals([(1, 2), (4, 3)])


if __name__ == "__main__":
    unittest.main()
PYTHON
