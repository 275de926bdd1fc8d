"""`python -m tests.first_hour [PAGE ...]`: see `walk`."""

import sys

from tests.first_hour.walk import main

sys.exit(main(sys.argv[1:]))
