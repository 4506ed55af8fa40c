"""`python -m evoteam`."""

import sys

try:
    from evoteam.cli import main

    main()
except KeyboardInterrupt:  # before any command has begun
    print("evoteam: interrupted", file=sys.stderr)
    sys.exit(130)
