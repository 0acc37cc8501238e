"""``python -m hyperkron`` is the command ``hyperkron``."""

from __future__ import annotations

from hyperkron.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
