"""Every Python block of README and the guides runs, top to bottom; every relative link leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_code_blocks_run(guide, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    namespace = {"__name__": guide.stem}
    for block in blocks:
        exec(compile(block, str(guide), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
