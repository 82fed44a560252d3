"""deploy/README.md names what there is."""

from __future__ import annotations

import re

from proxy.settings import Settings
from tests.deploy.tools import DEPLOY, ROOT

# The rules and the dashboard have their own tests.
TEXTS = [
    path.read_text()
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.parent.name not in ("prometheus", "grafana")
]


def test_paths_are_there() -> None:
    """Every path in the text and in its commands is a file or a folder."""
    readme = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"(?<![\w/.])deploy/[\w./-]+", "\n".join(TEXTS)))
    named |= {f"deploy/{path}" for path in re.findall(r"`([\w-]+/[\w./-]*)`", readme)}
    assert "deploy/kubernetes/overlays/sidecar" in named
    made = {"deploy/.env"}
    missing = {path for path in named - made if not (ROOT / path.rstrip("./")).exists()}
    assert not missing


def test_settings_are_settings() -> None:
    """Every LASTWORD_ name that stands in any file of deploy/ is a setting."""
    named = {name for text in TEXTS for name in re.findall(r"LASTWORD_([A-Z_]+[A-Z])\b", text)}
    unknown = named - {name.upper() for name in Settings.model_fields}
    assert not unknown


def test_every_overlay_is_explained() -> None:
    """No overlay without a recipe."""
    readme = (DEPLOY / "README.md").read_text()
    for overlay in (DEPLOY / "kubernetes" / "overlays").iterdir():
        assert f"kubectl apply -k {overlay.relative_to(ROOT)}" in readme
