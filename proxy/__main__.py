"""``python -m proxy`` is ``lastword``."""

from proxy.cli import main

if __name__ == "__main__":
    main()
