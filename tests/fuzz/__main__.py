"""Fuzz the core: ``python -m tests.fuzz SECONDS``; ``make fuzz`` installs what it needs.

Inputs grow by what of ``proxy.core`` they reach.  The last line says how many were tried; the first
one that breaks a rule ends the run, is kept under ``build/fuzz`` and fails it.  A file from there
given instead of the seconds is tried alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["proxy.core"]):
    from tests.fuzz.targets import check

from tests.fuzz.seeds import SEEDS, WORDS

FOLDER = Path("build/fuzz")
LARGEST_INPUT = 2048


def main() -> None:
    """Try inputs until the time is up."""
    asked = sys.argv[1]
    corpus = FOLDER / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(SEEDS):
        (corpus / f"seed-{number}").write_bytes(data)
    words = FOLDER / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
    what = [f"-max_total_time={asked}", str(corpus)] if asked.isdigit() else [asked]
    options = [f"-max_len={LARGEST_INPUT}", f"-dict={words}", f"-artifact_prefix={FOLDER}/"]
    atheris.Setup([sys.argv[0], *options, *what], check)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
