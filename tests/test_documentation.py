"""The documentation is true: its code runs, its links lead somewhere, its formulas name real functions."""

import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", *sorted((DOCS / "howto").glob("*.md"))]
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md"))]
THEORY = sorted((DOCS / "theory").glob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
BLOCK = r"^```{}\n(.*?)^```"


def blocks(page, language):
    return re.findall(
        BLOCK.format(language), page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.usefixtures("calibrated_once")
@pytest.mark.parametrize("guide", GUIDES, ids=name)
def test_code_blocks_run(guide, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": guide.stem}
    for block in blocks(guide, "python"):
        exec(compile(block, str(guide), "exec"), namespace)


@pytest.mark.parametrize("page", [ROOT / "README.zh-CN.md", DOCS / "index.md"], ids=name)
def test_the_code_of_the_readme_is_shown_elsewhere_as_it_is(page):
    assert blocks(page, "python") == blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if target and "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
            if page.is_relative_to(DOCS):  # mkdocs knows nothing outside of docs/
                assert (page.parent / target).resolve().is_relative_to(DOCS), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_into_the_reference_name_something_that_it_documents(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if anchor.startswith("causal_qwen"):
            documented = re.findall(
                r"^::: (\S+)$", (page.parent / target).read_text(encoding="utf-8"), re.MULTILINE
            )
            assert any(anchor.startswith(f"{module}.") for module in documented), anchor
            thing = pkgutil.resolve_name(anchor)
            assert thing.__doc__


@pytest.mark.parametrize("page", [page for page in THEORY if page.stem != "notation"], ids=name)
def test_theory_is_linked_to_functions(page):
    assert "../reference/" in page.read_text(encoding="utf-8")


def commands(page):
    """Each `causal-qwen …` of the shell blocks, without its comment."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("causal-qwen "):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_line_exists(page):
    from causal_qwen.cli import app

    known = typer.main.get_command(app).commands
    for command, *words in commands(page):
        assert command in known, f"{page.name}: causal-qwen {command}"
        options = {option for parameter in known[command].params for option in parameter.opts}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in options, f"{page.name}: causal-qwen {command} {word}"


def test_every_page_of_the_reference_is_complete():
    """Every module with public names that the package exports is on a page of the reference."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    from causal_qwen import _HOMES

    for home in _HOMES:
        module = importlib.import_module(home)
        places = {getattr(getattr(module, one), "__module__", home) for one in _HOMES[home]}
        assert all(f"::: {place}\n" in pages for place in places), home


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "theory" / "law" / "index.html").read_text(encoding="utf-8")
    reference = (tmp_path / "reference" / "law" / "index.html").read_text(encoding="utf-8")
    for anchor in re.findall(r'href="../../reference/law/#([^"]+)"', page):
        assert f'id="{anchor}"' in reference, anchor
    for html in tmp_path.rglob("*.html"):
        text = html.read_text(encoding="utf-8")
        assert "fonts.googleapis" not in text
        assert "<num>" not in text.lower(), html  # our token, taken for a tag
